"""Splits the text of an answer into content, reasoning and tool calls, with vLLM's parsers.

No text is refused: a text that no parser understands is content. Does not know prompts, sampling or HTTP.

``auto`` chooses vLLM's parsers by marks in the chat template (``TOOL_FORMATS``, ``REASONING_PARSERS``). Reasoning stands at the beginning
of an answer, between the marks that vLLM's parser names; a tool call begins with a mark of its format. So a stream passes on certain text
at once: only text after the beginning of a call waits for vLLM's parser of whole texts. Line breaks around reasoning belong to its marks.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyrl_async.chat import Tool
from skyrl_async.columns import TokenIds
from skyrl_async.endpoint.parsing.answers import AnswerParts, AnswerStream, Marks, make_tool_call
from skyrl_async.errors import ConfigError
from skyrl_async.inference.vllm.parsers import (
    FoundCalls,
    VLLMReasoningParser,
    VLLMToolParser,
    load_reasoning_parser,
    load_tool_parser,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write tool calls."""

    parsers: tuple[str, ...]
    """vLLM's names of its parsers; ``auto`` takes the first."""
    marks: tuple[str, ...]
    """A template that holds all of these uses this format."""
    starts: tuple[str, ...] = ()
    """Every call begins with one of these, or if there are none with one of ``marks``; none begins inside another."""
    end: str | None = None
    """Ends every call; set if vLLM's parser accepts calls that were cut short."""
    begin: str | None = None
    """Begins every call; set if vLLM's parser passes over calls that were cut short."""

    @property
    def call_starts(self) -> tuple[str, ...]:
        """The texts with which calls begin."""
        return self.starts or self.marks


TOOL_FORMATS = (
    ToolFormat(parsers=("qwen3_coder", "qwen3_xml"), marks=("<tool_call>", "<function="), end="</function>"),
    ToolFormat(
        parsers=("glm45", "glm47"), marks=("<tool_call>", "<arg_key>"), starts=("<tool_call>",), end="</tool_call>"
    ),
    ToolFormat(parsers=("hermes", "qwen3_json"), marks=("<tool_call>",)),
    ToolFormat(parsers=("llama3_json", "llama4_json"), marks=("<|python_tag|>",), starts=("<|python_tag|>", "{")),
    ToolFormat(parsers=("llama3_json",), marks=("Environment: ipython",), starts=("<|python_tag|>", "{")),
    ToolFormat(parsers=("mistral",), marks=("[TOOL_CALLS]",), end="}"),
    ToolFormat(
        parsers=("deepseek_v3",),
        marks=(_DEEPSEEK_CALLS, "```json"),
        starts=(_DEEPSEEK_CALLS,),
        begin=_DEEPSEEK_CALL,
    ),
    ToolFormat(parsers=("deepseek_v31",), marks=(_DEEPSEEK_CALLS,), begin=_DEEPSEEK_CALL),
    ToolFormat(
        parsers=("kimi_k2",),
        marks=("<|tool_calls_section_begin|>",),
        starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        end="<|tool_call_end|>",
    ),
    ToolFormat(parsers=("minimax_m2",), marks=("<minimax:tool_call>",), end="</invoke>", begin="<invoke"),
    ToolFormat(parsers=("seed_oss",), marks=("<seed:tool_call>",), end="</function>"),
)
"""A template's format is the first whose marks it holds."""

REASONING_PARSERS = (("<seed:think>", "seed_oss"), ("[THINK]", "mistral"), ("<think>", "qwen3"))
"""(mark in the template, vLLM's name of its parser); the first that is found counts."""

UNKNOWN = ToolFormat(parsers=(), marks=(), starts=("",))
"""Calls may begin anywhere: nothing is certain before the end."""


def tool_parser_for(template: str) -> str | None:
    """vLLM's tool parser for a chat template; None if its format is not among ``TOOL_FORMATS``."""
    return next((f.parsers[0] for f in TOOL_FORMATS if all(mark in template for mark in f.marks)), None)


def reasoning_parser_for(template: str) -> str | None:
    """vLLM's reasoning parser for a chat template; None without reasoning."""
    return next((parser for mark, parser in REASONING_PARSERS if mark in template), None)


def format_of(parser: str | None) -> ToolFormat:
    """The format that one of vLLM's tool parsers reads; ``UNKNOWN`` if it is not listed."""
    return next((f for f in TOOL_FORMATS if parser in f.parsers), UNKNOWN)


logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_LAST_TOKENS = 32
"""Where a prompt opens reasoning, it does so within so many tokens of its end."""


@dataclass(eq=False)
class AnswerParser:
    """Takes the answers of one model apart; made by ``of``, shared by all requests."""

    tokenizer: "PreTrainedTokenizerFast"
    """The model's."""
    tools: VLLMToolParser | None = None
    """None: every call is content."""
    reasoning: VLLMReasoningParser | None = None
    """None: there is no reasoning."""

    def __post_init__(self) -> None:
        self._format = format_of(self.tools.name if self.tools else None)
        self._marks = _marks(self.reasoning, self._format.call_starts)
        self._logged: set[str] = set()
        self.keeps_special_tokens = self._needs_special_tokens()
        """Whether the parsers need a text that spells special tokens."""

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        tool_call_parser: str | None = "auto",
        reasoning_parser: str | None = "auto",
    ) -> "AnswerParser":
        """The parser for a tokenizer's model.

        Args:
            tool_call_parser: vLLM's name; ``auto`` goes by the chat template; None or ``none`` parses nothing.
            reasoning_parser: likewise.

        Raises:
            ConfigError: vLLM has no parser of that name, or it cannot read this tokenizer's text.
        """
        template = tokenizer.chat_template or ""
        text = template if isinstance(template, str) else "\n".join(template.values())
        tools = _load(load_tool_parser, tool_call_parser, tool_parser_for(text), tokenizer)
        reasoning = _load(load_reasoning_parser, reasoning_parser, reasoning_parser_for(text), tokenizer)
        return cls(tokenizer, tools, reasoning)

    def starts_in_reasoning(self, prompt_token_ids: TokenIds) -> bool:
        """Whether a prompt ends in an open block of reasoning, in which its answer begins."""
        start = self.reasoning.start if self.reasoning else None
        if not start:
            return False
        end = self.tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:].tolist(), clean_up_tokenization_spaces=False)
        return str(end).rstrip().endswith(start)

    def stream(self, *, tools: Sequence[Tool] | None, starts_in_reasoning: bool = False) -> AnswerStream:
        """Splits one answer while it grows, or at once. Never raises: text that cannot be parsed is content.

        Args:
            tools: the request's; without any, a call is content.
            starts_in_reasoning: the prompt has opened a block of reasoning.
        """
        offered = tuple(tools or ())
        return AnswerStream(
            self._marks if offered and self.tools else self._marks.without_calls(),
            read_calls=lambda text: self._read_calls(text, offered),
            read_reasoning=self._read_reasoning if self.reasoning and not self._marks.reasoning else None,
            starts_in_reasoning=starts_in_reasoning,
            keeps_special_tokens=self.keeps_special_tokens,
        )

    def _read_calls(self, text: str, tools: Sequence[Tool]) -> AnswerParts | None:
        """The calls in a text that begins with one, and the content around them; None if it holds no whole call."""
        assert self.tools is not None
        try:
            found = self.tools.extract(text, tools)
            if not found.calls or not _are_whole(found, text, self._format):
                self._log_once(logging.INFO, self.tools.name, "it found no whole call")
                return None
        except Exception as error:  # a model may write anything
            self._log_once(logging.WARNING, self.tools.name, f"{type(error).__name__}: {error}")
            return None
        calls = tuple(make_tool_call(name, arguments) for name, arguments in found.calls)
        return AnswerParts(content=found.content, tool_calls=calls)

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        """Reasoning and content of a whole text."""
        assert self.reasoning is not None
        try:
            reasoning, content = self.reasoning.extract(text)
        except Exception as error:  # a model may write anything
            self._log_once(logging.WARNING, self.reasoning.name, f"{type(error).__name__}: {error}")
            return "", text
        return (reasoning, content) if reasoning or content else ("", text)

    def _log_once(self, level: int, name: str, reason: str) -> None:
        kind = f"{name} {reason.partition(':')[0]}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.log(level, "an answer is passed on as it was written: parser %s, %.200s (logged once)", name, reason)

    def _needs_special_tokens(self) -> bool:
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token.content) for token in added if token.special}
        marks = {self.reasoning.start, self.reasoning.end} if self.reasoning else set()
        if self.tools and not self._format.parsers:
            return bool(special & marks) or self.tools.wants_special_tokens
        if self.tools:
            marks |= {*self._format.call_starts, self._format.end}
        return bool(special & marks)


def _load(
    load: Callable[[str, "PreTrainedTokenizerFast"], T],
    name: str | None,
    for_template: str | None,
    tokenizer: "PreTrainedTokenizerFast",
) -> T | None:
    if name is None or name == "none":
        return None
    if name != "auto":
        return load(name, tokenizer)
    try:
        return load(for_template, tokenizer) if for_template else None
    except ConfigError as error:
        logger.warning("answers are not parsed as the chat template suggests: %s", error)
        return None


def _marks(reasoning: VLLMReasoningParser | None, call_starts: tuple[str, ...]) -> Marks:
    """The marks at which answers are split. Reasoning's are used only if splitting there equals vLLM's parser."""
    if reasoning is None or not reasoning.start or not reasoning.end:
        return Marks(calls=call_starts)
    if reasoning.extract(f"{reasoning.start}a{reasoning.end}b") != ("a", "b"):
        return Marks(calls=call_starts)
    ending = tuple(start for start in call_starts if reasoning.extract(f"a{start}b") == ("a", f"{start}b"))
    return Marks(reasoning=(reasoning.start, reasoning.end), calls=call_starts, calls_ending_reasoning=ending)


def _are_whole(found: FoundCalls, text: str, written: ToolFormat) -> bool:
    """Whether every call that the text begins was found, and has a name, arguments that are JSON, and its end.

    Raises ``ValueError`` for arguments that are no JSON.
    """
    for name, arguments in found.calls:
        if not name.strip():
            return False
        json.loads(arguments)
    num_found = len(found.calls)
    if written.begin is not None and text.count(written.begin) > num_found:
        return False
    return written.end is None or text.count(written.end) >= num_found
