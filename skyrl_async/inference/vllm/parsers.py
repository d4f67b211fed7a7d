"""vLLM's parsers of tool calls and reasoning, without vLLM's server.

Parsers become plain functions of a whole text, which raise whatever vLLM's parser raises. vLLM is imported when the first parser is loaded,
which takes 4 s once per process.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_async.chat import Tool
from skyrl_async.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCalls:
    """The result of a tool parser."""

    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON text) of each call."""
    content: str
    """The text around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMToolParser:
    """A loaded parser of tool calls."""

    name: str
    """vLLM's name of the parser."""
    extract: Callable[[str, Sequence[Tool]], FoundCalls]
    wants_special_tokens: bool
    """Whether the parser needs text with special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMReasoningParser:
    """A loaded parser of reasoning."""

    name: str
    """vLLM's name of the parser."""
    extract: Callable[[str], tuple[str, str]]
    """Reasoning and content of an answer, which begins in reasoning if the parser knows such answers."""
    start: str | None
    """Opens a block of reasoning; None if the parser does not say."""
    end: str | None
    """Closes a block of reasoning; None if the parser does not say."""


def load_tool_parser(name: str, tokenizer: "PreTrainedTokenizerFast") -> VLLMToolParser:
    """vLLM's tool parser ``name``; ``ConfigError`` if vLLM has none, or it cannot read this tokenizer's text."""
    parser_class, request_class = _imported("tool_call_parser", name)

    def extract(text: str, tools: Sequence[Tool]) -> FoundCalls:
        request = request_class(messages=[], tools=list(tools))
        parser = parser_class(tokenizer, request.tools)
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True
        found = parser.extract_tool_calls(text, request)
        calls = tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
        return FoundCalls(calls=calls if found.tools_called else (), content=found.content or "")

    tools = [{"type": "function", "function": {"name": _PROBE, "parameters": {"type": "object", "properties": {}}}}]
    with _usable("tool_call_parser", name):
        extract(_PROBE, tools)
        request = request_class(messages=[], tools=tools)
        adjusted = parser_class(tokenizer, request.tools).adjust_request(request)
    return VLLMToolParser(name=name, extract=extract, wants_special_tokens=not adjusted.skip_special_tokens)


def load_reasoning_parser(name: str, tokenizer: "PreTrainedTokenizerFast") -> VLLMReasoningParser:
    """vLLM's reasoning parser ``name``; ``ConfigError`` if vLLM has none, or it cannot read this tokenizer's text."""
    parser_class, request_class = _imported("reasoning_parser", name)

    def extract(text: str) -> tuple[str, str]:
        reasoning, content = parser_class(tokenizer).extract_reasoning(text, request_class(messages=[]))
        return reasoning or "", content or ""

    with _usable("reasoning_parser", name):
        extract(_PROBE)
        parser = parser_class(tokenizer)
    return VLLMReasoningParser(
        name=name, extract=extract, start=parser.reasoning_start_str, end=parser.reasoning_end_str
    )


def _imported(field: str, name: str) -> tuple[Any, Any]:
    """vLLM's class of the parser, and its class of chat requests. Its warnings and its log lines about malformed answers are silenced."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for logger in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"server.{field} must be none where vLLM is not installed, got {name!r}: {error}"
            ) from error
        is_of_tools = field == "tool_call_parser"
        known = (ToolParserManager if is_of_tools else ReasoningParserManager).list_registered()
        if name not in known:
            raise ConfigError(f"server.{field} must be auto, none or one of {', '.join(known)}; got {name!r}")
        with _usable(field, name):
            get = ToolParserManager.get_tool_parser if is_of_tools else ReasoningParserManager.get_reasoning_parser
            return get(name), ChatCompletionRequest


@contextmanager
def _usable(field: str, name: str) -> Iterator[None]:
    """Turn whatever vLLM's parser raises in the block into a ``ConfigError``."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"server.{field} must name a parser that can read this tokenizer's text, got {name!r}, which cannot: {error}; "
            "set it to none, or to another parser"
        ) from error
