"""What an answer holds, and how a growing one is split at the marks of reasoning and of tool calls.

Each block returns what has become certain; joined, the parts say the same for any blocks. Does not know wire formats, nor the formats of
tool calls.

    opening ──mark, or the prompt's──> reasoning ──mark, or a call's──> content ──a call's mark──> calls
       └────────────────anything else────────────────────────────────────^
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from uuid import uuid4

from skyrl_async.inference.text import num_held_back
from skyrl_async.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """What an answer says: one block of a stream, or the whole."""

    content: str = ""
    reasoning: str = ""
    """Without its marks."""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def joined(cls, parts: "Sequence[AnswerParts]") -> "AnswerParts":
        return cls(
            content="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
        )

    def __add__(self, later: "AnswerParts") -> "AnswerParts":
        return AnswerParts.joined([self, later])


def make_tool_call(name: str, arguments: str) -> ToolCall:
    """A call with an id of its own."""
    return ToolCall(id=f"call_{uuid4().hex[:24]}", name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Texts at which answers are split."""

    reasoning: tuple[str, str] | None = None
    """The opening and the closing mark."""
    calls: tuple[str, ...] = ()
    """Beginnings of a tool call; an empty string if it may begin anywhere."""
    calls_ending_reasoning: tuple[str, ...] = ()
    """Beginnings of a tool call that close reasoning too."""

    def without_calls(self) -> "Marks":
        """The marks for a request without tools."""
        return replace(self, calls=(), calls_ending_reasoning=())


class _Phase(StrEnum):
    WHOLE = "whole"
    """Nothing is certain before the end."""
    OPENING = "opening"
    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


@dataclass(eq=False)
class AnswerStream:
    """One answer as it grows."""

    marks: Marks
    """Where it is split."""
    _: KW_ONLY
    read_calls: Callable[[str], AnswerParts | None]
    """Reads a text that begins with a call; returns None if the text holds no call."""
    read_reasoning: Callable[[str], tuple[str, str]] | None = None
    """Splits a whole text into reasoning and content, for a model whose marks do not suffice."""
    starts_in_reasoning: bool = False
    """The prompt has opened a block of reasoning."""
    keeps_special_tokens: bool = False
    """Whether the text must spell special tokens."""
    _pending: str = field(default="", init=False)
    _dropped_space: str = field(default="", init=False)
    """White space that is dropped until the phase's first words."""
    _space: str = field(default="", init=False)
    """White space before the first call, which is content only if there is no call."""
    _has_content: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._phase = _Phase.OPENING if self.marks.reasoning else _Phase.CONTENT
        if self.read_reasoning is not None:
            self._phase = _Phase.WHOLE

    def push(self, text: str) -> AnswerParts:
        """Add a block; returns what has become certain."""
        self._pending += text
        delta = AnswerParts()
        before = None
        while before is not self._phase:
            before = self._phase
            delta += self._advance()
        return delta

    def finish(self) -> AnswerParts:
        """End the answer; returns what was held back."""
        delta = AnswerParts()
        if self._phase is _Phase.WHOLE and self.read_reasoning is not None:
            reasoning, self._pending = self.read_reasoning(self._pending)
            self._phase = _Phase.CONTENT
            delta = AnswerParts(reasoning=reasoning) + self.push("")
        if self._phase is _Phase.REASONING or (self._phase is _Phase.OPENING and self.starts_in_reasoning):
            return delta + AnswerParts(reasoning=self._pending.lstrip(self._dropped_space).rstrip("\n"))
        found = self.read_calls(self._pending) if self._phase is _Phase.CALLS else None
        if found is None:
            return delta + AnswerParts(content=self._space + self._pending)
        words = self._space + found.content
        return delta + replace(found, content=words if words.strip() else "")

    def _advance(self) -> AnswerParts:
        if self._phase is _Phase.OPENING:
            self._advance_opening()
        elif self._phase is _Phase.REASONING:
            return self._advance_reasoning()
        elif self._phase is _Phase.CONTENT:
            return self._advance_content()
        return AnswerParts()

    def _advance_opening(self) -> None:
        """Find whether the answer opens reasoning itself; a model may do so although its prompt already has."""
        assert self.marks.reasoning is not None
        start, _ = self.marks.reasoning
        text = self._pending.lstrip()
        if text.startswith(start):
            self._pending = text.removeprefix(start)
        elif start.startswith(text):
            return
        elif not self.starts_in_reasoning:
            self._phase = _Phase.CONTENT
            return
        self._phase = _Phase.REASONING
        self._dropped_space = "\n"

    def _advance_reasoning(self) -> AnswerParts:
        assert self.marks.reasoning is not None
        _, end = self.marks.reasoning
        marks = (end, *self.marks.calls_ending_reasoning)
        text = self._pending.lstrip(self._dropped_space)
        position = _first(text, marks)
        certain = text[: len(text) - num_held_back(text, marks) if position is None else position].rstrip("\n")
        if position is None:
            self._pending = text[len(certain) :]
            self._dropped_space = "" if certain else self._dropped_space
        else:
            self._pending = text[position:].removeprefix(end)
            self._dropped_space = "\n"
            self._phase = _Phase.CONTENT
        return AnswerParts(reasoning=certain)

    def _advance_content(self) -> AnswerParts:
        text = self._pending.lstrip(self._dropped_space)
        position = _first(text, self.marks.calls)
        num_certain = len(text) - num_held_back(text, self.marks.calls) if position is None else position
        certain = text[:num_certain]
        is_space = not self._has_content and not certain.strip()
        if position is not None:
            self._phase = _Phase.CALLS
            self._space = certain if is_space else ""
        elif is_space:
            self._pending = text
            return AnswerParts()
        self._pending = text[num_certain:]
        if is_space:
            return AnswerParts()
        self._has_content = True
        self._dropped_space = ""
        return AnswerParts(content=certain)


def _first(text: str, marks: tuple[str, ...]) -> int | None:
    """Position of the first of ``marks`` in a text."""
    return min((position for mark in marks if (position := text.find(mark)) >= 0), default=None)
