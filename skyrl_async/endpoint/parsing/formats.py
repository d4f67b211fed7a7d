"""How models write tool calls and reasoning, as far as it must be known before vLLM's parser has the whole text.

Flows in: a chat template's text, or a parser's name. Flows out: which parser reads such answers, and where in a text calls may
begin. Does not know parsers' code.
"""

from dataclasses import dataclass

_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write tool calls."""

    parsers: tuple[str, ...]
    """vLLM's names for what reads it; ``auto`` takes the first."""
    marks: tuple[str, ...]
    """A template that holds all of these speaks it."""
    starts: tuple[str, ...]
    """Every call begins with one of these; none begins inside another."""
    end: str | None = None
    """Ends every call, where vLLM's parser would also take one that was cut for whole."""


TOOL_FORMATS = (
    ToolFormat(
        parsers=("qwen3_coder", "qwen3_xml"),
        marks=("<tool_call>", "<function="),
        starts=("<tool_call>", "<function="),
        end="</function>",
    ),
    ToolFormat(
        parsers=("glm45", "glm47"), marks=("<tool_call>", "<arg_key>"), starts=("<tool_call>",), end="</tool_call>"
    ),
    ToolFormat(parsers=("hermes", "qwen3_json"), marks=("<tool_call>",), starts=("<tool_call>",)),
    ToolFormat(parsers=("llama3_json", "llama4_json"), marks=("<|python_tag|>",), starts=("<|python_tag|>", "{")),
    ToolFormat(parsers=("llama3_json",), marks=("Environment: ipython",), starts=("<|python_tag|>", "{")),
    ToolFormat(parsers=("mistral",), marks=("[TOOL_CALLS]",), starts=("[TOOL_CALLS]",), end="}"),
    ToolFormat(parsers=("deepseek_v3",), marks=(_DEEPSEEK_CALLS, "```json"), starts=(_DEEPSEEK_CALLS,)),
    ToolFormat(parsers=("deepseek_v31",), marks=(_DEEPSEEK_CALLS,), starts=(_DEEPSEEK_CALLS,)),
    ToolFormat(
        parsers=("kimi_k2",),
        marks=("<|tool_calls_section_begin|>",),
        starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        end="<|tool_call_end|>",
    ),
    ToolFormat(
        parsers=("minimax_m2",), marks=("<minimax:tool_call>",), starts=("<minimax:tool_call>",), end="</invoke>"
    ),
    ToolFormat(parsers=("seed_oss",), marks=("<seed:tool_call>",), starts=("<seed:tool_call>",), end="</function>"),
)
"""The first whose marks a template holds is its format."""

REASONING_PARSERS = (("<seed:think>", "seed_oss"), ("[THINK]", "mistral"), ("<think>", "qwen3"))
"""A mark in the template and vLLM's name for what reads such reasoning; the first that is found."""

UNKNOWN = ToolFormat(parsers=(), marks=(), starts=("",))
"""Calls may begin anywhere: nothing is certain before the end."""


def tool_parser_for(template: str) -> str | None:
    """vLLM's tool parser for what a chat template teaches; None where it teaches no tool calls that are known here."""
    return next((f.parsers[0] for f in TOOL_FORMATS if all(mark in template for mark in f.marks)), None)


def reasoning_parser_for(template: str) -> str | None:
    """vLLM's reasoning parser for a chat template; None for one without reasoning."""
    return next((parser for mark, parser in REASONING_PARSERS if mark in template), None)


def format_of(parser: str | None) -> ToolFormat:
    """What one of vLLM's tool parsers reads; ``UNKNOWN`` for one that is not listed here."""
    return next((f for f in TOOL_FORMATS if parser in f.parsers), UNKNOWN)
