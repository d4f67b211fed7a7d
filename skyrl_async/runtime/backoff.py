"""How long to wait before something that failed is tried again."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before a failed rollout is tried again: twice as long each time, jittered so that not all come at once."""

    base_s: float
    """Before the first retry; 0 never waits."""
    max_s: float
    """Never more than this."""

    def seconds(self, num_retries: int, seed: int) -> float:
        """Before the retry after ``num_retries`` others: between half of the wait and all of it, by the seed."""
        longest = min(self.max_s, self.base_s * 2.0 ** min(num_retries, 64))
        return longest * random.Random(f"{seed}-{num_retries}").uniform(0.5, 1.0)


NO_BACKOFF = Backoff(base_s=0.0, max_s=0.0)
