"""Admission of groups, the groups that the current step must wait for, and the treatment of groups older than the bound.

Accounting without I/O: requests for admission, ended rollouts and policy versions in, admissions out. Every transition is an ``async def``
without an ``await`` (SkyRL's verbs are coroutines), hence atomic under cancellation; only ``acquire_submission_slot`` and ``drained``
wait.

The trainer acts on the decisions of a ``StalenessPolicy``, one for each value of ``trainer.staleness_policy``:

    wait      hold a group back while older ones need its place in the step: none passes the bound, the trainer waits
    window    hold a group back unless it is among the W oldest admitted from the oldest open one on; the bound grows by the window
    mask      train groups at once, and mask tokens sampled under too old a version
    resample  train groups at once; abort a group that can no longer be trained in time, and requeue its prompt
    allow     train groups at once, and count the old ones
"""

import asyncio
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skyrl_async.errors import StateError
from skyrl_async.runtime.tasks import Changes
from skyrl_async.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The right to generate one group."""

    index: int
    """Position in the order of admission, over the whole run."""
    scheduled_version: int
    """Policy version at admission."""


@dataclass(eq=False)
class _AsyncStalenessManager:
    """Admits groups by the capacity rule (AReaL, section 5.1; SkyRL).

    At the step being worked on (1-based: completed steps + 1), ``accepted + running <= (max_staleness_steps + step) *
    mini_batch_size`` and ``running <= max_concurrent_generation_groups``, where accepted counts every group finished so far and not
    filtered, the trained ones included. A group admitted at version v is then among the first ``(max_staleness_steps + v + 1) *
    mini_batch_size``, so a trainer that asks ``may_train`` never exceeds the bound S = ``max_staleness_steps``.

    A trainer that asks ``is_in_window`` instead (windowed FIFO: MiniMax, arXiv 2605.26494, section 6.2.4) never exceeds ``S +
    window_steps``, with W = ``window_groups`` and mini-batches of P:

        A group g admitted at version v has at most (S + v + 1) P - 1 groups before it. A younger one is trained before g only with an
        index less than W above that of the oldest open group, hence above g's: that is W - 1 groups at most. So at most
        (S + v + 1) P + W - 2 groups are trained before g, and g's step begins at version v + S + floor((P + W - 2) / P) at most, which
        is v + S + ceil((W - 1) / P).

    For S >= 1 some order of arrival reaches it. At S = 0 the P groups admitted at a version are those of its step: any order keeps 0.
    """

    max_concurrent_generation_groups: int
    """Groups in flight at once, >= 1."""
    mini_batch_size: int
    """Groups that are trained between two versions, >= 1: those of an optimizer step, or of a batch of several."""
    max_staleness_steps: int
    """The bound, >= ``steps_per_version - 1``."""
    max_groups: int | None = None
    """Groups admitted in all; None: no limit."""
    limits_buffered_groups: bool = field(default=False, kw_only=True)
    """While the trainer is busy, finished groups count as in flight until they are trained: a group that is generated before the trainer
    can take it only ages. While the trainer waits, they do not count.
    """
    admits_whole_batches: bool = field(default=False, kw_only=True)
    """Admit each mini-batch at once, after the last group of the previous one has ended."""
    steps_per_version: int = field(default=1, kw_only=True)
    """Optimizer steps between two versions, >= 1. A group is last trained at the last of them, so that the bound lets ``(S + 1) //
    steps_per_version - 1`` batches be ahead of the one that is trained.
    """
    window_groups: int = field(default=1, kw_only=True)
    """Admission indices in the window, that of the oldest open group included, >= 1; 1 unless the policy is ``window``."""

    served_version: int = field(default=0, init=False)
    """Policy version that every engine serves: groups are admitted at it."""
    trained_version: int = field(default=0, init=False)
    """Completed optimizer steps: groups are trained at this version."""
    next_index: int = field(default=0, init=False)
    """Index of the next admission: the number of groups admitted so far."""
    _num_trained: int = field(default=0, init=False)
    _is_trainer_waiting: bool = field(default=True, init=False)
    _open: OrderedDict[int, Admission] = field(default_factory=OrderedDict, init=False)
    """Admission index -> group that is neither trained nor dropped, in order of admission."""
    _running: set[int] = field(default_factory=set, init=False)
    """Admission indices of the open groups that are not finished."""
    _num_open_of: Counter[int] = field(default_factory=Counter, init=False)
    """Scheduled version -> open groups, so that ``may_train`` takes no longer with ten thousand groups."""
    _num_waiting: int = field(default=0, init=False)
    _first_in_line: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _changes: Changes = field(default_factory=Changes, init=False)

    @property
    def num_running(self) -> int:
        """Groups admitted and not finished."""
        return len(self._running)

    @property
    def num_accepted(self) -> int:
        """Groups finished so far and not filtered, the trained ones included."""
        return self._num_trained + len(self._open) - len(self._running)

    @property
    def window_steps(self) -> int:
        """Optimizer steps by which the window raises the bound (formula: class docstring)."""
        num_batches = -(-(self.window_groups - 1) // self.mini_batch_size) if self._max_batches_ahead else 0
        return num_batches * self.steps_per_version

    @property
    def _max_batches_ahead(self) -> int:
        """The bound in batches."""
        return (self.max_staleness_steps + 1) // self.steps_per_version - 1

    @property
    def last_version(self) -> int:
        """Version at the last optimizer step of the batch that is trained: to it staleness is counted."""
        return self.trained_version + self.steps_per_version - 1

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        limit = (self._max_batches_ahead + self.served_version // self.steps_per_version + 1) * self.mini_batch_size
        if self.max_groups is not None:
            limit = min(limit, self.max_groups)
        num_admitted = self._num_trained + len(self._open)
        num_left = limit - num_admitted
        if self.admits_whole_batches and self._running and num_admitted % self.mini_batch_size == 0:
            return 0
        is_ahead = self.limits_buffered_groups and not self._is_trainer_waiting
        num_in_flight = len(self._open if is_ahead else self._running)
        return max(0, min(num_left, self.max_concurrent_generation_groups - num_in_flight))

    async def acquire_submission_slot(self) -> Admission:
        """Wait until the rule admits one more group, and admit it; first come, first served.

        Unblocked by a group that ends, or a new version. Cancellation leaves nothing behind.
        """
        self._num_waiting += 1
        try:
            async with self._first_in_line:
                await self._changes.until(lambda: self.capacity > 0)
                admission = Admission(index=self.next_index, scheduled_version=self.served_version)
                self.next_index += 1
                self._running.add(admission.index)
                self._open_group(admission)
                return admission
        finally:
            self._num_waiting -= 1
            self._changes.notify()

    async def on_rollout_accepted(self, admission: Admission) -> None:
        """The group is finished and can be trained."""
        self._take_running(admission)
        self._changes.notify()

    async def on_rollout_rejected(self, admission: Admission) -> None:
        """The group failed or was dropped: another one may be admitted for it."""
        self._take_running(admission)
        self._close(admission.index)
        self._changes.notify()

    async def on_rollout_filtered(self, admission: Admission) -> None:
        """The finished group will not be trained: another one may be admitted for it."""
        self._take_finished(admission.index)
        self._changes.notify()

    async def on_rollout_trained(self, index: int) -> None:
        """The finished group with this admission index was trained."""
        self._take_finished(index)
        self._num_trained += 1
        self._changes.notify()

    async def notify_trainer_waiting(self, is_waiting: bool) -> None:
        """Whether the trainer lacks a group that it may train."""
        self._is_trainer_waiting = is_waiting
        self._changes.notify()

    async def notify_step(self, version: int) -> None:
        """Optimizer step ``version`` is completed, the last of its batch. Raises ``StateError`` unless it follows the one before."""
        if version != self.trained_version + self.steps_per_version:
            raise StateError(
                f"optimizer step {version} cannot follow {self.trained_version}: steps are counted by {self.steps_per_version}"
            )
        self.trained_version = version

    async def notify_capacity_change(self, version: int) -> None:
        """Every engine serves ``version``: the next one, or a later one up to the completed steps. Raises ``StateError`` otherwise."""
        if not self.served_version < version <= max(self.served_version + self.steps_per_version, self.trained_version):
            raise StateError(
                f"policy version {version} cannot follow {self.served_version}: versions count optimizer steps"
            )
        self.served_version = version
        self.trained_version = max(version, self.trained_version)
        self._changes.notify()

    def limit_groups(self, num_groups: int) -> None:
        """Admit groups while fewer than this are in flight, >= 1, in place of ``max_concurrent_generation_groups``."""
        self.max_concurrent_generation_groups = num_groups
        self._changes.notify()

    async def drained(self) -> None:
        """Wait until no group is running and none is about to be admitted. Unblocked by groups that end.

        With ``admits_whole_batches``, a mini-batch is complete then.
        """
        await self._changes.until(lambda: not self._running and not (self._num_waiting and self.capacity))

    def may_train(self, scheduled_version: int, num_free: int) -> bool:
        """Whether a group admitted at ``scheduled_version`` may take one of the ``num_free`` places in this step.

        It may not if the open groups admitted before it need every place until they pass the bound: groups admitted at versions up
        to v have to be trained by step v + max_staleness_steps (earliest deadline first). Looking at this step alone is not enough:
        a whole mini-batch can become due at once, and each place lost before is then a group past the bound. This step is the one
        after ``trained_version``.
        """
        num_before = 0
        for version in sorted(v for v in self._num_open_of if v < scheduled_version):
            num_before += self._num_open_of[version]
            batches_left = (version - self.trained_version) // self.steps_per_version + self._max_batches_ahead
            if num_before >= num_free + batches_left * self.mini_batch_size:
                return False
        return True

    def is_in_window(self, index: int) -> bool:
        """Whether the open group with this admission index is in the window.

        The window begins at the oldest open group, and moves when that is trained or dropped; groups taken from its middle do not
        move it. With a bound of 0 it has every group: all are of one step.
        """
        return not self._max_batches_ahead or index < next(iter(self._open)) + self.window_groups

    def first_open_index(self) -> int | None:
        """The smallest admission index that is neither trained nor dropped."""
        return next(iter(self._open), None)

    async def load_state_from_checkpoint(
        self,
        version: int,
        next_index: int,
        finished: Sequence[Admission] = (),
        *,
        running: Sequence[Admission] = (),
        holds_bound: bool = True,
    ) -> tuple[Admission, ...]:
        """Continue after ``version`` steps, which count as whole batches of the size given here.

        The next admission gets ``next_index``. Returns the restored groups among ``finished`` (not yet trained) and ``running``, oldest
        admitted first. All are restored, unless the checkpoint had another mini-batch size or bound and they exceed this run's
        capacity, or (``holds_bound``) would pass the bound before they are trained. The caller generates the others again. More
        running groups than ``max_concurrent_generation_groups`` are restored, too; admission waits until enough have ended. Raises
        ``StateError`` on a manager that was used.
        """
        if self.next_index or self.served_version:
            raise StateError("a staleness manager takes a checkpoint's state only before its first admission")
        self.served_version = self.trained_version = version
        self._num_trained = version // self.steps_per_version * self.mini_batch_size
        self.next_index = next_index
        restored: list[Admission] = []
        opened = sorted((*finished, *running), key=lambda a: a.index)
        for place, admission in enumerate(opened):
            num_overtaking = 0
            if self.window_steps:
                end = admission.index + self.window_groups
                num_overtaking = bisect_left(opened, end, key=lambda a: a.index) - place - 1 + max(0, end - next_index)
            num_batches = (len(restored) + num_overtaking) // self.mini_batch_size
            latest = self.last_version + num_batches * self.steps_per_version
            staleness = latest - admission.scheduled_version if holds_bound else 0
            has_place = len(restored) < (self._max_batches_ahead + 1) * self.mini_batch_size
            if has_place and staleness <= self.max_staleness_steps + self.window_steps:
                restored.append(admission)
                self._open_group(admission)
        self._running = self._open.keys() & {admission.index for admission in running}
        return tuple(restored)

    async def validate_state_at_epoch_end(self, num_trained_groups: int) -> None:
        """Raise ``StateError`` unless this many groups were trained. For SkyRL's callers."""
        if self._num_trained != num_trained_groups:
            raise StateError(f"expected {num_trained_groups} trained groups, got {self._num_trained}")

    def _open_group(self, admission: Admission) -> None:
        self._open[admission.index] = admission
        self._num_open_of[admission.scheduled_version] += 1

    def _close(self, index: int) -> None:
        version = self._open.pop(index).scheduled_version
        self._num_open_of[version] -= 1
        if not self._num_open_of[version]:
            del self._num_open_of[version]

    def _take_running(self, admission: Admission) -> None:
        if admission.index not in self._running:
            raise StateError(f"group {admission.index} is not running: it ended before, or was never admitted")
        self._running.remove(admission.index)

    def _take_finished(self, index: int) -> None:
        if index not in self._open or index in self._running:
            raise StateError(f"group {index} is not finished, or was trained before")
        self._close(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """One treatment of groups older than the bound."""

    name: str
    holds_back: bool = False
    """A finished group waits while groups admitted before it may need its place in the step."""
    has_window: bool = False
    """With ``holds_back``: a finished group waits only while it is outside the window."""
    masks: bool = False
    """Tokens older than the bound are masked from the loss."""
    drops_groups: bool = False
    """Groups past the bound are dropped, and their prompts requeued."""

    @property
    def bounds_groups(self) -> bool:
        """Whether no group past the bound is ever trained."""
        return self.holds_back or self.drops_groups

    def may_train(self, group: Group, staleness: _AsyncStalenessManager, num_free: int) -> bool:
        """Whether a finished group may take one of the ``num_free`` places in the step."""
        if self.has_window:
            return staleness.is_in_window(group.admission_index)
        return not self.holds_back or staleness.may_train(group.scheduled_version, num_free)

    def is_dropped(self, scheduled_version: int, staleness: _AsyncStalenessManager) -> bool:
        """Whether to drop an open group admitted at ``scheduled_version``, because it is past the bound."""
        return self.drops_groups and staleness.last_version - scheduled_version > staleness.max_staleness_steps

    def masked_group(self, group: Group, version: int, max_staleness_steps: int) -> Group:
        """The group as it is trained at ``version``; with ``masks``, its tokens past the bound are masked.

        Masked tokens keep their place, log-probs and versions, as context of the tokens after them. Rewards, hence advantages, are
        of whole trajectories; importance ratios of whole rows exclude the masked tokens.
        """
        oldest = version - max_staleness_steps
        if not self.masks or all(min(t.versions.distinct, default=oldest) >= oldest for t in group.trajectories):
            return group
        return replace(group, trajectories=tuple(_masked(t, oldest) for t in group.trajectories))


def _masked(trajectory: Trajectory, oldest: int) -> Trajectory:
    """The trajectory without the tokens sampled before version ``oldest``."""
    return replace(trajectory, loss_mask=trajectory.loss_mask & (np.asarray(trajectory.versions) >= oldest))


STALENESS_POLICIES = {
    policy.name: policy
    for policy in (
        StalenessPolicy(name="wait", holds_back=True),
        StalenessPolicy(name="window", holds_back=True, has_window=True),
        StalenessPolicy(name="mask", masks=True),
        StalenessPolicy(name="resample", drops_groups=True),
        StalenessPolicy(name="allow"),
    )
}
"""The values of ``trainer.staleness_policy``."""
