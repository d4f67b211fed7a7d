"""Turns the tokens of a completion into text, whole or in blocks, and finds where a stop string ends it.

A stop string may begin in one engine call and end in another, so engines do not look for them: only here are all tokens in one place.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from skyrl_async.columns import TokenIds
from skyrl_async.errors import InferenceError
from skyrl_async.types import SamplingParams

_REPLACEMENT = "�"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turns ids into text."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str:
        """Text of ``token_ids``."""


class CompletionText:
    """The text of a growing completion.

    Args:
        tokenizer: decodes ids; None: there is no text, and must be no stop string.
        sampling: ``stop`` strings, the first of which to be complete ends the text, however it is cut into blocks; ``min_tokens``, within
            whose text they are ignored; ``includes_stop`` and ``skip_special_tokens``. Stop strings cannot match skipped tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in sampling.stop if s)
        if tokenizer is None and self._stop:
            raise InferenceError("this client was made without a tokenizer: it cannot look for stop strings")
        self._skip_special_tokens = sampling.skip_special_tokens
        self.includes_stop = sampling.includes_stop
        self._min_tokens = sampling.min_tokens
        self._min_end: int | None = None if self._min_tokens else 0
        """Characters in the text of ``min_tokens`` tokens; None before there are that many."""
        self._token_ids = array("i")
        """int32, four bytes per token."""
        self._text = ""
        self._num_text_tokens = 0
        self._window_start = 0
        self._num_emitted = 0
        self._is_stopped = False

    def push(self, token_ids: TokenIds) -> int | None:
        """Add tokens. Returns how many are kept in all if a stop string ended the text, else None."""
        if self._tokenizer is None:
            return None
        self._token_ids.frombytes(token_ids.tobytes())
        if not self._stop:
            return None  # decoded when the text is asked for
        searched_from = max(0, len(self._text) - max((len(s) for s in self._stop), default=0))
        num_known, window, num_before = self._num_text_tokens, self._window_start, len(self._text)
        unfinished = self._extend_text()
        if self._min_end is None:
            if len(self._token_ids) < self._min_tokens:
                return None
            self._min_end = self._num_characters(self._min_tokens)
        stop_end = self._cut_at_stop(self._text + unfinished, searched_from)
        if stop_end is None:
            return None
        self._is_stopped = True
        num_before -= self._num_characters(num_known, window)

        def num_characters(num_tokens: int) -> int:
            return num_before + self._num_characters(num_tokens, window)

        # The fewest tokens whose text reaches the stop string's end, which is in the new ones: text only grows with tokens.
        possible = range(num_known + 1, len(self._token_ids))
        return num_known + 1 + bisect_left(possible, stop_end, key=num_characters)

    def take(self) -> str:
        """New final text: complete characters that cannot be the beginning of a stop string."""
        if not self._stop:
            self._extend_text()
        end = len(self._text) - num_held_back(self._text, self._stop)
        block = self._text[self._num_emitted : end] if end > self._num_emitted else ""
        self._num_emitted += len(block)
        return block

    def finish(self) -> tuple[str, str]:
        """The whole text, and the part that ``take`` has not returned. Incomplete characters become U+FFFD."""
        if not self._is_stopped:
            self._text = self._decode(self._token_ids)
        return self._text, self._text[self._num_emitted :]

    def _decode(self, token_ids: "array[int]") -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _extend_text(self) -> str:
        """Decode from a window that begins at a character boundary, so that a long completion costs linear time.

        Returns text that ends in an incomplete character, and is decoded again with the next tokens.
        """
        before = self._decode(self._token_ids[self._window_start : self._num_text_tokens])
        new = self._decode(self._token_ids[self._window_start :])[len(before) :]
        if not new or new.endswith(_REPLACEMENT):
            return new.rstrip(_REPLACEMENT)
        self._text += new
        self._window_start = self._num_text_tokens
        self._num_text_tokens = len(self._token_ids)
        return ""

    def _num_characters(self, num_tokens: int, start: int = 0) -> int:
        """Complete characters in the text of the first tokens, from token ``start`` on."""
        return len(self._decode(self._token_ids[start:num_tokens]).rstrip(_REPLACEMENT))

    def _cut_at_stop(self, text: str, searched_from: int) -> int | None:
        """End of the stop string in ``text`` that is complete first, where the text ends then; None: there is none."""
        min_end = self._min_end or 0
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := text.find(stop, max(searched_from, min_end - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        self._text = text[: end if self.includes_stop else start]
        return end


def num_held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of a text that may begin one of ``marks``, such as stop strings."""
    longest = 0
    for mark in marks:
        lengths = range(min(len(mark) - 1, len(text)), longest, -1)
        longest = next((length for length in lengths if text.endswith(mark[:length])), longest)
    return longest
