"""What one thing costs another that goes on beside it.

Flows in: work, piece by piece, and how long something else has gone on so far. Flows out: the throughput with it over the throughput
without. Does not know what either is.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OverlapThroughput:
    """Tokens per second beside the other, over those without; the tokens of a piece of work are spread evenly over its own seconds.

    Seconds are all that pass, waiting included: most of what the other takes away is waited for. What is waited for with and without it
    alike is a part of what a token costs, wherever that part is computed. Only what no token costs is to be left out. A piece that waits
    before it is worked on has tokens on the wrong side where the other begins or ends meanwhile: of that one piece, and either way.

    Args:
        other_seconds: for how long the other has gone on so far, by the clock of the event loop.
    """

    def __init__(self, other_seconds: Callable[[], float]) -> None:
        self._other_seconds = other_seconds
        self._tokens_beside = self._tokens_alone = 0.0
        self._seconds_beside = self._seconds_alone = 0.0
        self._lap_began: tuple[float, float] | None = None

    @contextmanager
    def piece(self, tokens: float) -> Iterator[None]:
        """Count tokens that are worked on in the block."""
        began = self._now()
        yield
        alone, beside = self._since(began)
        share = beside / (alone + beside) if alone + beside else 0.0
        self._tokens_beside += share * tokens
        self._tokens_alone += (1 - share) * tokens

    def lap(self, *, left_out_s: float = 0.0) -> None:
        """Count the time since the last call, without so many seconds of it; the first call begins."""
        if self._lap_began is not None:
            alone, beside = self._since(self._lap_began)
            counted = max(0.0, 1 - left_out_s / (alone + beside)) if left_out_s else 1.0
            self._seconds_alone += counted * alone
            self._seconds_beside += counted * beside
        self._lap_began = self._now()

    @property
    def ratio(self) -> float | None:
        """Throughput beside over throughput alone; None while one of them is unknown."""
        if not (self._tokens_alone and self._seconds_alone and self._seconds_beside):
            return None
        return (self._tokens_beside / self._seconds_beside) / (self._tokens_alone / self._seconds_alone)

    def _now(self) -> tuple[float, float]:
        return asyncio.get_running_loop().time(), self._other_seconds()

    def _since(self, began: tuple[float, float]) -> tuple[float, float]:
        """(seconds alone, seconds beside)."""
        (now, other), (began_at, other_before) = self._now(), began
        beside = min(now - began_at, other - other_before)
        return now - began_at - beside, beside
