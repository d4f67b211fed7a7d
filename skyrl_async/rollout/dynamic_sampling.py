"""Which finished groups have something to teach, and when so few have that the run must stop: DAPO's dynamic sampling.

    a finished group ──its rewards differ──> training
                     └──they do not──> filtered: counted, its prompt closed for this epoch, its place given to the next prompt

DAPO (arXiv 2503.14476), section 3.2, equation 11 trains a group only where ``0 < |{correct answers}| < G``: without a difference
there is no advantage, and a mini-batch of such groups is smaller than it looks. Rewards are the environment's, before any shaping:
whether all answers are right does not depend on their lengths.

Flows in: rows of finished groups. Flows out: why one has no signal; the error that ends the run. No I/O, and no knowledge of ledger,
admissions or training.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from skyrl_async.errors import GenerationError
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Trajectory

_MAX_REWARDS_NAMED = 3


class NoSignal(StrEnum):
    """Why the rewards of a group teach nothing."""

    ALL_ZERO = "all_zero"
    ALL_ONE = "all_one"
    CONSTANT = "constant"
    """All the same, neither 0 nor 1."""
    TOO_FEW = "too_few"
    """Fewer than two samples are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """Which groups have a signal, and how many may lack one."""

    max_in_a_row: int = 0
    """So many groups without a signal, one after the other, end the run; 0: never."""
    tolerance: float = 0.0
    """Rewards that differ by no more are equal, >= 0."""


class SignalFilter:
    """Tells groups with a signal from those without, and watches that there are some."""

    def __init__(self, settings: SignalSettings) -> None:
        self._max_in_a_row = settings.max_in_a_row
        self._tolerance = settings.tolerance
        self._num_kept = 0
        self._num_filtered = 0
        self._in_a_row: Counter[str] = Counter()
        self._last_uid = ""

    def judge(self, uid: str, trajectories: Sequence[Trajectory]) -> NoSignal | None:
        """Count a finished group; why it is not to be trained, or None where it is."""
        rewards = [sample.reward for sample in live_samples_of(trajectories)]
        reason = self._reason(rewards)
        if reason is None:
            self._num_kept += 1
            self._in_a_row.clear()
            return None
        self._num_filtered += 1
        self._last_uid = uid
        self._in_a_row["fewer than two trained samples" if reason is NoSignal.TOO_FEW else f"{rewards[0]:.4g}"] += 1
        return reason

    @property
    def in_a_row(self) -> dict[str, int]:
        """Groups without a signal since the last one with one, by what they had."""
        return dict(self._in_a_row)

    def restore(self, in_a_row: Mapping[str, int]) -> None:
        """Go on counting from those of a checkpoint."""
        self._in_a_row = Counter(in_a_row)

    def raise_if_too_many(self) -> None:
        """Raise ``GenerationError`` when too many groups in a row had no signal."""
        num_in_a_row = self._in_a_row.total()
        if self._max_in_a_row and num_in_a_row >= self._max_in_a_row:
            raise self._error(
                f"{num_in_a_row} groups in a row had no difference in reward, which is all that "
                f"trainer.fully_async.max_filtered_in_a_row={self._max_in_a_row} allows"
            )

    def raise_for_no_group_at_all(self) -> None:
        """Raise ``GenerationError``: the data has ended without a group that could be trained."""
        raise self._error("the data ended, and no group had a difference in reward: there is nothing to train")

    def _reason(self, rewards: Sequence[float]) -> NoSignal | None:
        if len(rewards) < 2:
            return NoSignal.TOO_FEW
        is_finite = all(map(math.isfinite, rewards))  # others go to the estimator, which refuses them by name
        if not is_finite or max(rewards) - min(rewards) > self._tolerance:
            return None
        for value, reason in ((0.0, NoSignal.ALL_ZERO), (1.0, NoSignal.ALL_ONE)):
            if abs(rewards[0] - value) <= self._tolerance:
                return reason
        return NoSignal.CONSTANT

    def _error(self, found: str) -> GenerationError:
        seen = ", ".join(f"{num} x {what}" for what, num in self._in_a_row.most_common(_MAX_REWARDS_NAMED))
        return GenerationError(
            f"{found}. Rewards of their samples: {seen or 'unknown, from before the run was resumed'}; the last prompt was "
            f"{self._last_uid or 'unknown'}; of all groups of this process {self._num_kept} had a difference and {self._num_filtered} "
            "had none. Where all answers are wrong, check the reward, or take easier prompts or a stronger policy; where all are right, "
            "take harder prompts. More samples (generator.n_samples_per_prompt) or a higher generator.sampling.temperature find rarer "
            "differences; trainer.fully_async.sample_full_batch=false trains without asking for any"
        )
