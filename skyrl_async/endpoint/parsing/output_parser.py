"""How the text of one completion is read: plainly, for reasoning and tool calls, or as a call that a grammar forced.

Flows in: text, whole or in blocks. Flows out: content, reasoning and tool calls; whole and joined blocks say the same. Does not
know prompts, tokens or sampling.
"""

from collections.abc import Sequence
from typing import Protocol

from skyrl_async.chat import Tool
from skyrl_async.endpoint.parsing.answers import AnswerDelta, ParsedAnswer, forced_tool_schema, parse_forced
from skyrl_async.endpoint.parsing.parsing import AnswerParser
from skyrl_async.types import StructuredOutput


class OutputParser(Protocol):
    """Reads one completion: ``whole`` once, or ``push`` for each block and ``finish``."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must spell special tokens."""
        ...

    def whole(self, text: str) -> ParsedAnswer:
        """The answer in a whole text."""
        ...

    def push(self, text: str) -> AnswerDelta:
        """What a further block makes certain."""
        ...

    def finish(self) -> AnswerDelta:
        """What was held back."""
        ...


def forced_call(tools: Sequence[Tool] | None, tool_choice: str) -> StructuredOutput | None:
    """What sampling must obey so that the answer is a call; None where ``tool_choice`` demands none.

    Raises ``ValueError`` for tools of which no schema can be made.
    """
    if not _is_forced(tools, tool_choice):
        return None
    return StructuredOutput(json_schema=forced_tool_schema(tools or (), _named(tool_choice)))


def output_parser_of(
    parser: AnswerParser,
    *,
    tools: Sequence[Tool] | None,
    tool_choice: str,
    is_chat: bool,
    starts_in_reasoning: bool,
) -> OutputParser:
    """The reading for one choice of a request.

    Args:
        tool_choice: ``auto``, ``none``, ``required`` or the name of one of ``tools``.
        is_chat: a raw prompt's completion is text and nothing else.
        starts_in_reasoning: the prompt has opened a block of reasoning.
    """
    if not is_chat:
        return _Plain()
    if _is_forced(tools, tool_choice):
        return _Forced(tools or (), _named(tool_choice))
    offered = tools if tool_choice != "none" else None
    return _Parsed(parser, offered, starts_in_reasoning)


def _is_forced(tools: Sequence[Tool] | None, tool_choice: str) -> bool:
    return bool(tools) and tool_choice not in ("auto", "none")


def _named(tool_choice: str) -> str | None:
    return None if tool_choice == "required" else tool_choice


class _Plain:
    """Text is content."""

    keeps_special_tokens = False

    def whole(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(content=text, reasoning=None, tool_calls=())

    def push(self, text: str) -> AnswerDelta:
        return AnswerDelta(content=text)

    def finish(self) -> AnswerDelta:
        return AnswerDelta()


class _Parsed:
    """Reasoning and tool calls are found by the model's parsers."""

    def __init__(self, parser: AnswerParser, tools: Sequence[Tool] | None, starts_in_reasoning: bool) -> None:
        self._parser = parser
        self._tools = tools
        self._starts_in_reasoning = starts_in_reasoning
        self._stream = parser.stream(tools=tools, starts_in_reasoning=starts_in_reasoning)

    @property
    def keeps_special_tokens(self) -> bool:
        return self._parser.keeps_special_tokens

    def whole(self, text: str) -> ParsedAnswer:
        return self._parser.parse(text, tools=self._tools, starts_in_reasoning=self._starts_in_reasoning)

    def push(self, text: str) -> AnswerDelta:
        return self._stream.push(text)

    def finish(self) -> AnswerDelta:
        return self._stream.finish()


class _Forced:
    """The whole text is the arguments of a call, or a list of calls."""

    keeps_special_tokens = False

    def __init__(self, tools: Sequence[Tool], name: str | None) -> None:
        self._tools = tools
        self._name = name
        self._text = ""

    def whole(self, text: str) -> ParsedAnswer:
        return parse_forced(text, self._tools, self._name)

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        return AnswerDelta()

    def finish(self) -> AnswerDelta:
        parsed = self.whole(self._text)
        return AnswerDelta(content=parsed.content or "", reasoning=parsed.reasoning or "", tool_calls=parsed.tool_calls)
