"""Measures how much one activity slows down another that runs at the same time, such as validation beside training."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OverlapThroughput:
    """Tokens per second while the other activity runs, over tokens per second while it does not.

    The tokens of a piece of work are spread evenly over the piece's seconds. All seconds count, waiting included, because the other
    activity costs time mostly by making work wait. Only time that no token causes should be left out. If the other activity begins or
    ends while a piece waits, some tokens of that one piece are counted on the wrong side.

    Args:
        other_seconds: seconds for which the other activity has run so far, by the clock of the event loop.
    """

    def __init__(self, other_seconds: Callable[[], float]) -> None:
        self._other_seconds = other_seconds
        self._tokens_beside = self._tokens_alone = 0.0
        self._seconds_beside = self._seconds_alone = 0.0
        self._lap_began: tuple[float, float] | None = None

    @contextmanager
    def piece(self, tokens: float) -> Iterator[None]:
        """Count tokens that are processed in the block."""
        began = self._now()
        yield
        alone, beside = self._since(began)
        share = beside / (alone + beside) if alone + beside else 0.0
        self._tokens_beside += share * tokens
        self._tokens_alone += (1 - share) * tokens

    def lap(self, *, left_out_s: float = 0.0) -> None:
        """Count the time since the last call, without ``left_out_s`` of it. The first call starts the clock."""
        if self._lap_began is not None:
            alone, beside = self._since(self._lap_began)
            counted = max(0.0, 1 - left_out_s / (alone + beside)) if left_out_s else 1.0
            self._seconds_alone += counted * alone
            self._seconds_beside += counted * beside
        self._lap_began = self._now()

    @property
    def ratio(self) -> float | None:
        """Throughput beside the other activity over throughput alone; None while one of them is unknown."""
        if not (self._tokens_alone and self._seconds_alone and self._seconds_beside):
            return None
        return (self._tokens_beside / self._seconds_beside) / (self._tokens_alone / self._seconds_alone)

    def _now(self) -> tuple[float, float]:
        return asyncio.get_running_loop().time(), self._other_seconds()

    def _since(self, began: tuple[float, float]) -> tuple[float, float]:
        """Return (seconds alone, seconds beside the other activity)."""
        (now, other), (began_at, other_before) = self._now(), began
        beside = min(now - began_at, other - other_before)
        return now - began_at - beside, beside
