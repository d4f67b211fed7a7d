"""What one thing costs another that goes on beside it.

Flows in: for each step, its tokens, its seconds, and how many of those something else was going on. Flows out: the throughput with it
over the throughput without. Does not know what either is.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class OverlapThroughput:
    """With a step's tokens spread evenly over its seconds: tokens per second beside the other, over those without."""

    tokens_beside: float = 0.0
    seconds_beside: float = 0.0
    tokens_alone: float = 0.0
    seconds_alone: float = 0.0

    def add(self, tokens: float, seconds: float, seconds_beside: float) -> None:
        """Count a step; ``seconds_beside`` of its ``seconds`` overlapped the other."""
        share = min(1.0, seconds_beside / seconds) if seconds else 0.0
        self.tokens_beside += share * tokens
        self.seconds_beside += share * seconds
        self.tokens_alone += (1 - share) * tokens
        self.seconds_alone += (1 - share) * seconds

    @property
    def ratio(self) -> float | None:
        """Throughput beside over throughput alone; None while one of them is unknown."""
        if not self.tokens_alone or not self.seconds_beside:
            return None
        return (self.tokens_beside / self.seconds_beside) / (self.tokens_alone / self.seconds_alone)
