"""Splits a growing answer at the marks of reasoning and of tool calls.

Flows in: blocks of text. Flows out: what each makes certain; whatever the blocks, joined they say the same. Does not know who
reads tool calls, nor in which format.

    opening ──mark, or the prompt's──> reasoning ──mark, or a call's──> content ──a call's mark──> calls
       └────────────────anything else────────────────────────────────────^
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from skyrl_async.endpoint.parsing.answers import AnswerDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Where answers are split."""

    reasoning: tuple[str, str] | None = None
    """What opens and what closes it."""
    calls: tuple[str, ...] = ()
    """Beginnings of a tool call; the empty string where it may begin anywhere."""
    calls_ending_reasoning: tuple[str, ...] = ()
    """Those that close reasoning too."""

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


class AnswerStream:
    """One answer as it grows.

    Args:
        marks: where it is split.
        read_calls: reads a text that begins with a call; None from it says that the text holds no call.
        read_reasoning: takes reasoning and content out of a whole text, for a model whose marks do not say it.
        starts_in_reasoning: the prompt has opened a block of reasoning.
        keeps_special_tokens: whether the text must spell special tokens.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        read_calls: Callable[[str], AnswerDelta | None],
        read_reasoning: Callable[[str], tuple[str, str]] | None = None,
        starts_in_reasoning: bool = False,
        keeps_special_tokens: bool = False,
    ) -> None:
        self.keeps_special_tokens = keeps_special_tokens
        self._marks = marks
        self._read_calls = read_calls
        self._read_reasoning = read_reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._pending = ""
        self._glue = ""
        """White space to drop until the phase's first words."""
        self._space = ""
        """White space before the first call, which is content only if there is no call."""
        self._has_spoken = False
        self._phase = _Phase.OPENING if marks.reasoning else _Phase.CONTENT
        if read_reasoning is not None:
            self._phase = _Phase.WHOLE

    def push(self, text: str) -> AnswerDelta:
        """What a further block makes certain."""
        self._pending += text
        delta = AnswerDelta()
        before = None
        while before is not self._phase:
            before = self._phase
            delta += self._advance()
        return delta

    def finish(self) -> AnswerDelta:
        """What was held back. The answer ends here."""
        delta = AnswerDelta()
        if self._phase is _Phase.WHOLE and self._read_reasoning is not None:
            reasoning, self._pending = self._read_reasoning(self._pending)
            self._phase = _Phase.CONTENT
            delta = AnswerDelta(reasoning=reasoning) + self.push("")
        if self._phase is _Phase.REASONING or (self._phase is _Phase.OPENING and self._starts_in_reasoning):
            return delta + AnswerDelta(reasoning=self._pending.lstrip(self._glue).rstrip("\n"))
        found = self._read_calls(self._pending) if self._phase is _Phase.CALLS else None
        if found is None:
            return delta + AnswerDelta(content=self._space + self._pending)
        words = self._space + found.content
        return delta + replace(found, content=words if words.strip() else "")

    def _advance(self) -> AnswerDelta:
        if self._phase is _Phase.OPENING:
            self._open()
        elif self._phase is _Phase.REASONING:
            return self._reason()
        elif self._phase is _Phase.CONTENT:
            return self._sample_turn()
        return AnswerDelta()

    def _open(self) -> None:
        """Find whether the answer opens reasoning itself; a model may do so although its prompt has."""
        assert self._marks.reasoning is not None
        start, _ = self._marks.reasoning
        text = self._pending.lstrip()
        if text.startswith(start):
            self._pending = text.removeprefix(start)
        elif start.startswith(text):
            return
        elif not self._starts_in_reasoning:
            self._phase = _Phase.CONTENT
            return
        self._phase = _Phase.REASONING
        self._glue = "\n"

    def _reason(self) -> AnswerDelta:
        assert self._marks.reasoning is not None
        _, end = self._marks.reasoning
        marks = (end, *self._marks.calls_ending_reasoning)
        text = self._pending.lstrip(self._glue)
        position = _first(text, marks)
        certain = text[: len(text) - _num_held_back(text, marks) if position is None else position].rstrip("\n")
        if position is None:
            self._pending = text[len(certain) :]
            self._glue = "" if certain else self._glue
        else:
            self._pending = text[position:].removeprefix(end)
            self._glue = "\n"
            self._phase = _Phase.CONTENT
        return AnswerDelta(reasoning=certain)

    def _sample_turn(self) -> AnswerDelta:
        text = self._pending.lstrip(self._glue)
        position = _first(text, self._marks.calls)
        num_certain = len(text) - _num_held_back(text, self._marks.calls) if position is None else position
        certain = text[:num_certain]
        is_space = not self._has_spoken and not certain.strip()
        if position is not None:
            self._phase = _Phase.CALLS
            self._space = certain if is_space else ""
        elif is_space:
            self._pending = text
            return AnswerDelta()
        self._pending = text[num_certain:]
        if is_space:
            return AnswerDelta()
        self._has_spoken = True
        self._glue = ""
        return AnswerDelta(content=certain)


def _first(text: str, marks: tuple[str, ...]) -> int | None:
    """Where the first of ``marks`` begins in a text."""
    return min((position for mark in marks if (position := text.find(mark)) >= 0), default=None)


def _num_held_back(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that may be the beginning of one of ``marks``."""
    longest = 0
    for mark in marks:
        lengths = range(min(len(mark) - 1, len(text)), longest, -1)
        longest = next((length for length in lengths if text.endswith(mark[:length])), longest)
    return longest
