"""When failed rollouts are too many for the run to go on.

Flows in: what became of each group. Flows out: the error that ends the run. No I/O: does not know what a group is.
"""

import math
from collections import deque

from skyrl_async.errors import GenerationError

_WINDOW = 100
_MIN_GROUPS_BEFORE_STOP = 10


class FailureWatch:
    """Whether so many of the last 100 groups failed that the run has to stop; one that lost samples counts by their share."""

    def __init__(self, max_failed_fraction: float) -> None:
        self._limit = max_failed_fraction
        self._lost_shares: deque[float] = deque(maxlen=_WINDOW)
        self._last: tuple[str, Exception] | None = None

    def count_success(self) -> None:
        """A group lost none of its samples."""
        self._lost_shares.append(0.0)

    def count_failure(self, uid: str, error: Exception, *, share: float = 1.0) -> None:
        """This share of a group's samples failed, of all of them by default."""
        self._lost_shares.append(share)
        self._last = uid, error

    def raise_if_too_many(self, *, has_ended: bool = False) -> None:
        """Raise ``GenerationError`` with the last failure.

        Before 10 groups have ended, those to come count as successes, unless none will come. That no group at all was
        generated is an error whatever the limit.
        """
        num_failed, num_recent = math.fsum(self._lost_shares), len(self._lost_shares)
        num_counted = num_recent if has_ended else max(num_recent, _MIN_GROUPS_BEFORE_STOP)
        is_fine = num_failed <= self._limit * num_counted and not (has_ended and num_failed == num_recent)
        if self._last is None or is_fine:
            return
        uid, error = self._last
        raise GenerationError(
            f"{num_failed:.4g} of the last {num_recent} groups failed, more than generator.max_failed_fraction={self._limit:g}; "
            f"the last one ({uid}): {type(error).__name__}: {error}"
        ) from error
