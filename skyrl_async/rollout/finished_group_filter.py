"""Passes finished groups to training, and filters the ones without a learning signal: DAPO's dynamic sampling.

    a finished group ──its rewards differ──> training
                     └──they do not──> filtered: counted, its prompt closed for this epoch, another prompt admitted for it

DAPO (arXiv 2503.14476), section 3.2, equation 11 trains a group only where ``0 < |{correct answers}| < G``: without a difference
there is no advantage, and a mini-batch of such groups is smaller than it looks. Rewards are the environment's, before any shaping:
whether all answers are right does not depend on their lengths.

Finished groups come from generation or a checkpoint; those with a signal go into the buffer. Does not know how groups are generated or
trained.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_async.algorithms.reward_shaping import mask_overlong
from skyrl_async.config.schema.run import Config
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.errors import GenerationError
from skyrl_async.record.ended import EndedGroup, Outcome, RecordsSamples
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.group_state import admission_of
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Group, Trajectory

_MAX_REWARDS_NAMED = 3


class NoSignal(StrEnum):
    """Why a group has no learning signal."""

    ALL_ZERO = "all_zero"
    ALL_ONE = "all_one"
    CONSTANT = "constant"
    """All rewards are equal, neither 0 nor 1."""
    TOO_FEW = "too_few"
    """Fewer than two samples can be trained."""


def no_signal(trajectories: Sequence[Trajectory], tolerance: float) -> NoSignal | None:
    """Why a group has no learning signal; None if it has one. Rewards that differ by no more than ``tolerance`` are equal."""
    rewards = [sample.reward for sample in live_samples_of(trajectories)]
    if len(rewards) < 2:
        return NoSignal.TOO_FEW
    is_finite = all(map(math.isfinite, rewards))  # others go to the estimator, which refuses them by name
    if not is_finite or max(rewards) - min(rewards) > tolerance:
        return None
    named = {NoSignal.ALL_ZERO: 0.0, NoSignal.ALL_ONE: 1.0}
    near = (reason for reason, value in named.items() if abs(rewards[0] - value) <= tolerance)
    return next(near, NoSignal.CONSTANT)


@dataclass(eq=False)
class FinishedGroupFilter:
    """Decides on each group as soon as it is finished, and stops a run that gets too few groups with a signal."""

    dataloader: _AsyncDataloader
    """Records filtered prompts."""
    staleness: _AsyncStalenessManager
    """Admits other groups for the filtered ones."""
    buffer: GroupBuffer
    """Receives the other groups."""
    config: Config
    """Says whether groups are filtered, and whether samples that a length limit cut are masked before the decision."""
    record: RecordsSamples
    """Takes filtered groups."""
    _num_kept: int = field(default=0, init=False)
    _last_uid: str = field(default="unknown", init=False)
    _in_a_row: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self._filters = self.config.trainer.fully_async.sample_full_batch
        self.counts = {"filtered_groups": 0, "filtered_tokens": 0} | {f"filtered/{reason}": 0 for reason in NoSignal}
        """Filtered groups and tokens so far, and groups by reason."""

    async def put(self, group: Group) -> None:
        """Pass on or filter a group that the ledger and the staleness manager record as finished. Never waits.

        Raises ``GenerationError`` if too many in a row are filtered.
        """
        num_tokens = group.num_sampled_tokens
        if self.config.generator.apply_overlong_filtering:
            group = mask_overlong(group)
        tolerance = self.config.trainer.algorithm.zero_variance_filter_tol
        if not self._filters or (reason := no_signal(group.trajectories, tolerance)) is None:
            self._num_kept += 1
            self._in_a_row.clear()
            self.buffer.put(group)
            return
        await self.dataloader.mark_filtered_uids([(group.epoch, group.uid)])
        await self.staleness.on_rollout_filtered(admission_of(group))
        self.buffer.notify()
        step = self.staleness.last_version + 1
        self.record.add(EndedGroup(group=group, outcome=Outcome.FILTERED, step=step, reason=reason))
        self.counts["filtered_groups"] += 1
        self.counts[f"filtered/{reason}"] += 1
        self.counts["filtered_tokens"] += num_tokens
        self._last_uid = group.uid
        rewards = "fewer than two trained samples"
        if reason is not NoSignal.TOO_FEW:
            rewards = f"{live_samples_of(group.trajectories)[0].reward:.4g}"
        self._in_a_row[rewards] += 1
        most, num_in_a_row = self.config.trainer.max_filtered_in_a_row, self._in_a_row.total()
        if most and num_in_a_row >= most:
            raise self._error(
                f"{num_in_a_row} groups in a row had no difference in reward, which is all that "
                f"trainer.fully_async.max_filtered_in_a_row={most} allows"
            )

    @property
    def filtered_in_a_row(self) -> dict[str, int]:
        """Rewards (or the reason) -> groups filtered in a row, for checkpoints; empty if the last group was kept."""
        return dict(self._in_a_row)

    def restore(self, filtered_in_a_row: Mapping[str, int]) -> None:
        """Continue the counts of a checkpoint, after its finished groups were put."""
        if self._filters:
            self._in_a_row = Counter(filtered_in_a_row)

    def raise_if_nothing_is_left(self) -> None:
        """After the end of the data, raise ``GenerationError`` if every group was filtered, before a resume or since."""
        is_any_filtered = self.dataloader.statistics()["filtered_total"] > 0
        if self._filters and is_any_filtered and not self.staleness.num_accepted:
            raise self._error("the data ended, and no group had a difference in reward: there is nothing to train")

    def _error(self, found: str) -> GenerationError:
        seen = ", ".join(f"{num} x {what}" for what, num in self._in_a_row.most_common(_MAX_REWARDS_NAMED))
        return GenerationError(
            f"{found}. Rewards of their samples: {seen or 'unknown, from before the run was resumed'}; the last prompt was "
            f"{self._last_uid}; of all groups of this process {self._num_kept} had a difference and "
            f"{self.counts['filtered_groups']} had none. Where all answers are wrong, check the reward, or take easier prompts or a "
            "stronger policy; where all are right, take harder prompts. More samples (generator.n_samples_per_prompt) or a higher "
            "generator.sampling.temperature find rarer differences; trainer.fully_async.sample_full_batch=false trains without asking "
            "for any"
        )
