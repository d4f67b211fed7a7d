"""What holding the staleness bound cost: for whom the trainer waited, and at which bound it would have waited less.

Flows in: one entry per wait that the bound caused. Flows out: seconds per uid, a bound that would have cost less, a sentence. Goes
through checkpoints as plain dictionaries.

A group waited for was trained at staleness s, after the trainer had been held back for w seconds in that step. With steps of t
seconds (the mean of this run's, the waiting left out) it would otherwise have been trained ceil(w / t) versions later: it needed a
bound of s + ceil(w / t). The bound that would have cost less is the smallest that 90 % of the waited seconds needed at most. It is
an estimate: with a larger bound more groups would have been in flight, each a little slower.
"""

import math
from dataclasses import dataclass, field

_COVERED_SHARE = 0.9
_NUM_UIDS_KEPT = 200
_NUM_UIDS_NAMED = 3


@dataclass(slots=True)
class BoundCost:
    """The waits of a run."""

    seconds_by_uid: dict[str, float] = field(default_factory=dict)
    """Charged to the group whose arrival ended the wait; those that cost most."""
    seconds_by_bound: dict[str, float] = field(default_factory=dict)
    """Bound that the group needed, as text (keys of JSON) -> seconds waited."""

    def add(self, uid: str, *, seconds: float, needed_bound: int) -> None:
        """One wait."""
        self.seconds_by_uid[uid] = self.seconds_by_uid.get(uid, 0.0) + seconds
        if len(self.seconds_by_uid) > 2 * _NUM_UIDS_KEPT:
            self.seconds_by_uid = dict(self.costliest(_NUM_UIDS_KEPT))
        key = str(needed_bound)
        self.seconds_by_bound[key] = self.seconds_by_bound.get(key, 0.0) + seconds

    @property
    def seconds(self) -> float:
        """Waited in all."""
        return math.fsum(self.seconds_by_bound.values())

    def costliest(self, num: int = _NUM_UIDS_NAMED) -> list[tuple[str, float]]:
        """(uid, seconds) of those waited for longest."""
        return sorted(self.seconds_by_uid.items(), key=lambda item: -item[1])[:num]

    def cheaper_bound(self) -> int | None:
        """The smallest bound at which 90 % of the waited seconds would not have been waited; None when none was."""
        waited, total = 0.0, self.seconds
        for bound in sorted(int(key) for key in self.seconds_by_bound):
            waited += self.seconds_by_bound[str(bound)]
            if waited >= _COVERED_SHARE * total:
                return bound
        return None

    def sentence(self, max_staleness_steps: int, training_seconds: float) -> str:
        """All of it in words."""
        bound = self.cheaper_bound()
        if bound is None:
            return f"trainer.max_staleness_steps={max_staleness_steps} cost no waiting"
        share = self.seconds / training_seconds if training_seconds else 0.0
        named = ", ".join(f"{uid} ({seconds:.1f} s)" for uid, seconds in self.costliest())
        return (
            f"trainer.max_staleness_steps={max_staleness_steps} cost {self.seconds:.1f} s of waiting ({share:.0%} of training), "
            f"most for {named}; at {max(bound, max_staleness_steps + 1)} about 90 % of it would not have been waited"
        )


def needed_bound(staleness: int, held_seconds: float, free_step_seconds: float) -> int:
    """The bound at which a group would not have been late; see the module.

    Args:
        staleness: at which it was trained.
        held_seconds: that the trainer was held back in the step until the group came.
        free_step_seconds: mean duration of a step without such waiting.
    """
    return staleness + math.ceil(held_seconds / max(free_step_seconds, 1e-9))
