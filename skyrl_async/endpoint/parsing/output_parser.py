"""How one completion is read: as plain text, for reasoning and tool calls, or as a call that a grammar forced.

Does not know prompts, tokens or sampling.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from skyrl_async.chat import Tool
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.parsing.answers import AnswerDelta, make_tool_call
from skyrl_async.types import StructuredOutput


class OutputParser(Protocol):
    """Reads one completion, whole or in blocks: ``push`` each block, then ``finish``. All parts joined say the same for any blocks."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must spell special tokens."""
        ...

    def push(self, text: str) -> AnswerDelta:
        """What a further block makes certain."""
        ...

    def finish(self) -> AnswerDelta:
        """What was held back."""
        ...


def forced_call(tools: Sequence[Tool] | None, tool_choice: str) -> StructuredOutput | None:
    """The grammar under which an answer is a call; None if ``tool_choice`` demands none.

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
    """The parser for one choice of a request.

    Args:
        tool_choice: ``auto``, ``none``, ``required`` or the name of one of ``tools``.
        is_chat: False for a raw prompt, whose completion is text and nothing else.
        starts_in_reasoning: the prompt has opened a block of reasoning.
    """
    if not is_chat:
        return _Plain()
    if _is_forced(tools, tool_choice):
        return _Forced(tools or (), _named(tool_choice))
    return parser.stream(tools=tools if tool_choice != "none" else None, starts_in_reasoning=starts_in_reasoning)


def _is_forced(tools: Sequence[Tool] | None, tool_choice: str) -> bool:
    return bool(tools) and tool_choice not in ("auto", "none")


def _named(tool_choice: str) -> str | None:
    return None if tool_choice == "required" else tool_choice


class _Plain:
    """Text is content."""

    keeps_special_tokens = False

    def push(self, text: str) -> AnswerDelta:
        return AnswerDelta(content=text)

    def finish(self) -> AnswerDelta:
        return AnswerDelta()


class _Forced:
    """The whole text is the arguments of a call, or a list of calls."""

    keeps_special_tokens = False

    def __init__(self, tools: Sequence[Tool], name: str | None) -> None:
        self._tools = tools
        self._name = name
        self._text = ""

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        return AnswerDelta()

    def finish(self) -> AnswerDelta:
        return parse_forced(self._text, self._tools, self._name)


def forced_tool_schema(tools: Sequence[Tool], name: str | None) -> str:
    """The JSON schema, as JSON text, of an answer that must call.

    Args:
        tools: in OpenAI's chat form.
        name: the one function to call: the answer is its arguments. None: the answer is a list, not empty, of
            ``{"name", "parameters"}``, as vLLM has it for ``tool_choice: required``.

    Raises:
        ValueError: no tool is named so, or there is none at all.
    """
    if name is not None:
        return json.dumps(_parameters(_function(tools, name)))
    if not tools:
        raise ValueError("tools must hold at least one function where tool_choice demands a call, got none")
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool["function"]))
        found = parameters.pop("$defs", None) or {}
        if not isinstance(found, dict):
            raise ValueError(f"$defs of a tool's parameters must be an object, got {type(found).__name__}")
        for key, definition in found.items():
            if definitions.setdefault(key, definition) != definition:
                raise ValueError(f"tools must agree on the definition of {key!r} in their $defs, got two")
        properties = {"name": {"type": "string", "enum": [tool["function"]["name"]]}, "parameters": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return json.dumps(schema | ({"$defs": definitions} if definitions else {}))


def parse_forced(text: str, tools: Sequence[Tool], name: str | None) -> AnswerDelta:
    """The calls in an answer sampled under ``forced_tool_schema(tools, name)``.

    One that was cut is content, as it was written. Never raises.
    """
    try:
        spelled = json.loads(text)
        if name is not None:
            named = [(name, text.strip())] if isinstance(spelled, dict) else []
        else:
            named = [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in spelled]
    except (ValueError, RecursionError, TypeError, KeyError):
        named = []
    known = {tool["function"]["name"] for tool in tools}
    calls = tuple(make_tool_call(called, arguments) for called, arguments in named if called in known)
    if not calls or len(calls) < len(named):
        return AnswerDelta(content=text)
    return AnswerDelta(tool_calls=calls)


def _function(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return dict(tool["function"])
    names = ", ".join(tool["function"]["name"] for tool in tools) or "no function at all"
    raise ValueError(f"tool_choice must name a function of tools, which hold {names}; got {name!r}")


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
