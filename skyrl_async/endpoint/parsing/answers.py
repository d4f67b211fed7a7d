"""What an answer holds: content, reasoning and tool calls; and answers that a grammar forced to be calls.

Flows in: a text that obeys ``forced_tool_schema``. Flows out: values without wire format. Does not know models' formats.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from skyrl_async.chat import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    """Unique; made here, not by the model."""
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """A whole answer."""

    content: str | None
    """None only where there are tool calls and no words."""
    reasoning: str | None
    """Without its marks; None without any."""
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one block of a stream adds to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: "AnswerDelta") -> "AnswerDelta":
        return AnswerDelta(
            content=self.content + later.content,
            reasoning=self.reasoning + later.reasoning,
            tool_calls=self.tool_calls + later.tool_calls,
        )

    def as_whole(self) -> ParsedAnswer:
        """The answer that this is all of."""
        return ParsedAnswer(
            content=self.content or (None if self.tool_calls else ""),
            reasoning=self.reasoning or None,
            tool_calls=self.tool_calls,
        )


def make_tool_call(name: str, arguments: str) -> ToolCall:
    """A call with an id of its own."""
    return ToolCall(id=f"call_{uuid4().hex[:24]}", name=name, arguments=arguments)


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


def parse_forced(text: str, tools: Sequence[Tool], name: str | None) -> ParsedAnswer:
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
        return ParsedAnswer(content=text, reasoning=None, tool_calls=())
    return ParsedAnswer(content=None, reasoning=None, tool_calls=calls)


def _function(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return dict(tool["function"])
    names = ", ".join(tool["function"]["name"] for tool in tools) or "no function at all"
    raise ValueError(f"tool_choice must name a function of tools, which hold {names}; got {name!r}")


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
