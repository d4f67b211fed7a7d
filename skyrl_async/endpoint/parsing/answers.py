"""What an answer holds: content, reasoning and tool calls, without any wire format."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4


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

    @classmethod
    def joined(cls, parts: "Sequence[AnswerDelta]") -> "AnswerDelta":
        return cls(
            content="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
        )

    def __add__(self, later: "AnswerDelta") -> "AnswerDelta":
        return AnswerDelta.joined([self, later])

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
