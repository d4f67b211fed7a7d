"""How one completion is read: as plain text, for reasoning and tool calls, or as a call that a grammar forced.

Does not know prompts, tokens or sampling.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from skyrl_async.chat import Tool
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.parsing.answers import AnswerParts, make_tool_call
from skyrl_async.types import StructuredOutput

_ANY_OBJECT = {"type": "object", "properties": {}}
"""The parameters of a function that names none."""


class OutputParser(Protocol):
    """Reads one completion, whole or in blocks: ``push`` each block, then ``finish``. All parts joined say the same for any blocks."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must spell special tokens."""

    def push(self, text: str) -> AnswerParts:
        """What a further block makes certain."""

    def finish(self) -> AnswerParts:
        """What was held back."""


def forced_call(tools: Sequence[Tool] | None, tool_choice: str) -> StructuredOutput | None:
    """The grammar under which an answer is a call; None if ``tool_choice`` demands none.

    Under the name of a function the answer is its arguments. Under ``required`` it is a list, not empty, of ``{"name", "parameters"}``,
    as in vLLM. Raises ``ValueError`` for tools of which no schema can be made.
    """
    if not _is_forced(tools, tool_choice):
        return None
    functions = [tool["function"] for tool in tools or ()]
    named = [(function["name"], function.get("parameters") or _ANY_OBJECT) for function in functions]
    if tool_choice == "required":
        schema = _schema_of_calls(named)
    else:
        schema = next(parameters for name, parameters in named if name == tool_choice)
    return StructuredOutput(json_schema=json.dumps(schema))


def output_parser_of(
    parser: AnswerParser, *, tools: Sequence[Tool] | None, tool_choice: str, is_chat: bool, starts_in_reasoning: bool
) -> OutputParser:
    """The parser for one choice of a request.

    Args:
        tool_choice: ``auto``, ``none``, ``required`` or the name of one of ``tools``.
        is_chat: False for a raw prompt, whose completion is text and nothing else.
        starts_in_reasoning: the prompt has opened a block of reasoning.
    """
    if not is_chat:
        return _Plain()
    if _is_forced(tools, tool_choice):
        return _Forced(tools or (), tool_choice)
    return parser.stream(tools=tools if tool_choice != "none" else None, starts_in_reasoning=starts_in_reasoning)


def _is_forced(tools: Sequence[Tool] | None, tool_choice: str) -> bool:
    return bool(tools) and tool_choice not in ("auto", "none")


class _Plain:
    """Text is content."""

    keeps_special_tokens = False

    def push(self, text: str) -> AnswerParts:
        return AnswerParts(content=text)

    def finish(self) -> AnswerParts:
        return AnswerParts()


class _Forced:
    """The whole text is the arguments of a call, or a list of calls; where it was cut, it is content as it was written."""

    keeps_special_tokens = False

    def __init__(self, tools: Sequence[Tool], tool_choice: str) -> None:
        self._known = {tool["function"]["name"] for tool in tools}
        self._choice = tool_choice
        self._text = ""

    def push(self, text: str) -> AnswerParts:
        self._text += text
        return AnswerParts()

    def finish(self) -> AnswerParts:
        try:
            named = self._named_arguments(json.loads(self._text))
        except (ValueError, RecursionError, TypeError, KeyError):
            named = []
        calls = tuple(make_tool_call(name, arguments) for name, arguments in named if name in self._known)
        if not calls or len(calls) < len(named):
            return AnswerParts(content=self._text)
        return AnswerParts(tool_calls=calls)

    def _named_arguments(self, spelled: Any) -> list[tuple[str, str]]:
        if self._choice == "required":
            return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in spelled]
        return [(self._choice, self._text.strip())] if isinstance(spelled, dict) else []


def _schema_of_calls(named: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The schema of a list of calls; definitions that the parameters refer to move to the top, where references find them."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, parameters in named:
        found = parameters.get("$defs") or {}
        if not isinstance(found, dict):
            raise ValueError(f"$defs of a tool's parameters must be an object, got {type(found).__name__}")
        for key, definition in found.items():
            if definitions.setdefault(key, definition) != definition:
                raise ValueError(f"tools must agree on the definition of {key!r} in their $defs, got two")
        own = {key: value for key, value in parameters.items() if key != "$defs"}
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": own}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | ({"$defs": definitions} if definitions else {})
