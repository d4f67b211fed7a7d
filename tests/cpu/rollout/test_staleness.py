"""The staleness manager: the capacity rule, driven by hand and by Hypothesis, in virtual time."""

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyrl_async.errors import StateError
from skyrl_async.rollout.staleness import Admission, _AsyncStalenessManager
from skyrl_async.simulator.clock import run_in_virtual_time


def drive(coroutine):
    """Run an ``async def`` that contains no ``await``."""
    with pytest.raises(StopIteration) as result:
        coroutine.send(None)
    return result.value.value


class Admissions(RuleBasedStateMachine):
    """Groups are admitted and end in any order; the trainer takes the oldest finished one that it may."""

    def __init__(self) -> None:
        super().__init__()
        self.set_up(batch=3, bound=2)

    def set_up(self, *, batch: int, bound: int, window: int = 1, steps: int = 1) -> None:
        self.batch, self.bound, self.window, self.steps, self.most = batch, bound, window, steps, 7
        self.manager = self.new_manager()
        self.held = bound + self.manager.window_steps
        self.running: list[Admission] = []
        self.finished: list[Admission] = []
        self.trained: list[Admission] = []
        self.num_free = self.batch

    def new_manager(self) -> _AsyncStalenessManager:
        return _AsyncStalenessManager(
            self.most, self.batch, self.bound, window_groups=self.window, steps_per_version=self.steps
        )

    def may_train(self, admission: Admission) -> bool:
        return self.manager.may_train(admission.scheduled_version, self.num_free)

    @precondition(lambda self: self.manager.capacity > 0)
    @rule()
    def admit(self) -> None:
        self.running.append(drive(self.manager.acquire_submission_slot()))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        admission = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        drive(self.manager.on_rollout_accepted(admission))
        self.finished.append(admission)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        admission = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        drive(self.manager.on_rollout_rejected(admission))

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        admission = self.finished.pop(data.draw(st.integers(0, len(self.finished) - 1)))
        drive(self.manager.on_rollout_filtered(admission))

    @precondition(lambda self: self.finished)
    @rule()
    def train_the_oldest_if_it_may(self) -> None:
        oldest = min(self.finished, key=lambda a: a.index)
        if not self.may_train(oldest):
            assert any(a.index < oldest.index for a in self.running), "nothing would ever let it go"
            return
        assert self.manager.last_version - oldest.scheduled_version <= self.held
        drive(self.manager.on_rollout_trained(oldest.index))
        self.finished.remove(oldest)
        self.trained.append(oldest)
        self.num_free -= 1
        if self.num_free == 0:
            self.num_free = self.batch
            drive(self.manager.notify_capacity_change(self.manager.served_version + self.steps))

    @rule()
    def resume(self) -> None:
        """From a checkpoint: the groups that the step has taken are finished ones again."""
        num_taken = self.batch - self.num_free
        self.finished += self.trained[len(self.trained) - num_taken :]
        del self.trained[len(self.trained) - num_taken :]
        self.num_free = self.batch
        before, self.manager = self.manager, self.new_manager()
        restored = drive(
            self.manager.load_state_from_checkpoint(
                before.served_version, before.next_index, self.finished, running=self.running
            )
        )
        assert len(restored) == len(self.finished) + len(self.running), "one of this run's own groups is lost"

    @invariant()
    def the_rule_holds(self) -> None:
        accepted = len(self.finished) + len(self.trained)
        assert len(self.running) <= self.most
        num_batches = (self.bound + self.manager.served_version + 1) // self.steps
        assert accepted + len(self.running) <= num_batches * self.batch
        opened = [a.scheduled_version for a in self.running + self.finished]
        assert all(self.manager.last_version - v <= self.held for v in opened)
        assert self.manager.num_accepted == accepted
        drive(self.manager.validate_state_at_epoch_end(len(self.trained)))

    @invariant()
    def admission_indices_follow_the_versions(self) -> None:
        opened = sorted(self.running + self.finished, key=lambda a: a.index)
        assert [a.scheduled_version for a in opened] == sorted(a.scheduled_version for a in opened)


class CapacityRule(Admissions):
    """Under the policy ``wait`` no group ever gets older than the bound."""

    @invariant()
    def what_is_kept_up_with_each_change_equals_what_a_look_at_every_open_group_finds(self) -> None:
        opened = self.running + self.finished
        assert self.manager.first_open_index() == min((a.index for a in opened), default=None)
        num_of_version = Counter(a.scheduled_version for a in opened)
        for scheduled in range(self.manager.served_version + 1):
            for num_free in range(1, self.batch + 1):
                is_place_left = all(
                    sum(n for v, n in num_of_version.items() if v <= due)
                    < num_free + (due + self.bound - self.manager.served_version) * self.batch
                    for due in num_of_version
                    if due < scheduled
                )
                assert self.manager.may_train(scheduled, num_free) == is_place_left


class Window(Admissions):
    """Under the policy ``window`` no group ever gets older than S + ceil((W - 1) / mini-batch)."""

    @initialize(batch=st.integers(1, 3), bound=st.integers(0, 2), data=st.data())
    def any_window(self, batch: int, bound: int, data: st.DataObject) -> None:
        self.set_up(batch=batch, bound=bound, window=data.draw(st.integers(1, batch * (bound + 1))))
        assert self.held == (bound and bound + math.ceil((self.window - 1) / batch))

    def may_train(self, admission: Admission) -> bool:
        is_allowed = self.manager.is_in_window(admission.index)
        oldest = min(a.index for a in self.running + self.finished)
        assert is_allowed == (self.bound == 0 or admission.index - oldest < self.window)
        return is_allowed


class Batches(Admissions):
    """A batch takes several optimizer steps under one version; no group is older than the bound at the last of them."""

    @initialize(batch=st.integers(1, 3), steps=st.integers(2, 4), data=st.data())
    def any_batch(self, batch: int, steps: int, data: st.DataObject) -> None:
        self.set_up(batch=batch, bound=data.draw(st.integers(steps - 1, 3 * steps)), steps=steps)


TestBatches = pytest.mark.slow(Batches.TestCase)
TestBatches.settings = settings(stateful_step_count=60)
TestCapacityRule = pytest.mark.slow(CapacityRule.TestCase)
TestCapacityRule.settings = settings(stateful_step_count=60)
TestWindow = pytest.mark.slow(Window.TestCase)
TestWindow.settings = settings(stateful_step_count=60)


def overtake(manager: _AsyncStalenessManager, queue: list[Admission]) -> list[Admission]:
    """Train all that may be, finished ones in ``queue`` and those admitted meanwhile, as if what runs never ended; returns them."""
    trained: list[Admission] = []
    while True:
        while manager.capacity:
            queue.append(drive(manager.acquire_submission_slot()))
            drive(manager.on_rollout_accepted(queue[-1]))
        if not queue or not manager.is_in_window(queue[0].index):
            return trained
        trained.append(queue.pop(0))
        drive(manager.on_rollout_trained(trained[-1].index))
        if len(trained) % manager.mini_batch_size == 0:
            drive(manager.notify_capacity_change(manager.trained_version + 1))


@given(batch=st.integers(1, 4), bound=st.integers(1, 3), data=st.data())
def test_a_straggler_is_overtaken_until_it_is_as_old_as_the_window_allows_and_stays_in_a_checkpoint(
    batch: int, bound: int, data: st.DataObject
) -> None:
    most = batch * (bound + 1)
    window = data.draw(st.integers(1, most))
    manager = _AsyncStalenessManager(most, batch, bound, window_groups=window)
    *queue, straggler = (drive(manager.acquire_submission_slot()) for _ in range(most))
    for admission in queue:
        drive(manager.on_rollout_accepted(admission))
    trained = overtake(manager, queue)
    assert len(trained) == most - 1 + window - 1
    version, held = manager.trained_version, bound + math.ceil((window - 1) / batch)
    assert version - straggler.scheduled_version == held
    finished = trained[version * batch :] + queue
    again = _AsyncStalenessManager(most, batch, bound, window_groups=window)
    loading = again.load_state_from_checkpoint(version, manager.next_index, finished, running=[straggler])
    assert len(drive(loading)) == len(finished) + 1
    overtake(again, finished)
    assert again.trained_version - straggler.scheduled_version == held


@given(
    ages=st.lists(st.integers(0, 6), min_size=1, max_size=16),
    batch=st.integers(1, 4),
    bound=st.integers(0, 3),
    gap=st.integers(0, 3),
    window=st.integers(0, 15),
    which=st.integers(0, 15),
)
@example(ages=[0] * 6, batch=2, bound=1, gap=0, window=1, which=0)
def test_a_restored_straggler_gets_no_older_than_the_window_of_the_new_run_allows(
    ages: list[int], batch: int, bound: int, gap: int, window: int, which: int
) -> None:
    """``gap``: indices between two open groups, of groups that were trained before."""
    opened = [
        Admission(index=i * (gap + 1), scheduled_version=6 - age) for i, age in enumerate(sorted(ages, reverse=True))
    ]
    running = opened[which % len(opened)]
    finished = [admission for admission in opened if admission is not running]
    manager = _AsyncStalenessManager(100, batch, bound, window_groups=1 + window % (batch * (bound + 1)))
    next_index = opened[-1].index + 1
    restored = drive(manager.load_state_from_checkpoint(6, next_index, finished, running=[running]))
    assert len(restored) <= batch * (bound + 1)
    if running in restored:
        overtake(manager, [admission for admission in restored if admission is not running])
        assert manager.trained_version - running.scheduled_version <= bound + manager.window_steps


def test_waiters_are_admitted_first_come_first_served() -> None:
    async def main() -> list[int]:
        manager = _AsyncStalenessManager(4, 1, 0)
        order: list[int] = []

        async def wait(number: int) -> None:
            admission = await manager.acquire_submission_slot()
            order.append(number)
            await manager.on_rollout_rejected(admission)

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(wait(number))
        return order

    assert run_in_virtual_time(main()) == [0, 1, 2, 3, 4]


def test_a_waiter_that_is_cancelled_as_it_is_admitted_does_not_hold_up_who_waits_for_the_last() -> None:
    async def main() -> None:
        manager = _AsyncStalenessManager(max_concurrent_generation_groups=1, mini_batch_size=1, max_staleness_steps=0)
        admission = await manager.acquire_submission_slot()
        waiting = asyncio.create_task(manager.acquire_submission_slot())
        await asyncio.sleep(0)
        drained = asyncio.create_task(manager.drained())
        await asyncio.sleep(0)
        await manager.on_rollout_rejected(admission)
        waiting.cancel()
        await asyncio.wait_for(drained, 1.0)

    run_in_virtual_time(main())


def test_a_cancelled_waiter_lets_the_next_one_be_admitted() -> None:
    async def main() -> int:
        manager = _AsyncStalenessManager(1, 1, 0)
        first = await manager.acquire_submission_slot()
        second = asyncio.ensure_future(manager.acquire_submission_slot())
        third = asyncio.ensure_future(manager.acquire_submission_slot())
        await asyncio.sleep(0)
        await manager.on_rollout_rejected(first)
        second.cancel()
        admission = await third
        assert second.cancelled() or (await asyncio.gather(second, return_exceptions=True))
        return admission.index

    assert run_in_virtual_time(main()) == 1


@given(is_cancelled=st.lists(st.booleans(), min_size=1, max_size=8), num_waking=st.integers(0, 3))
def test_after_any_cancellation_the_other_waiters_are_admitted_in_order(
    is_cancelled: list[bool], num_waking: int
) -> None:
    async def main() -> list[int]:
        manager = _AsyncStalenessManager(1, 1, 0)
        held = await manager.acquire_submission_slot()
        order: list[int] = []

        async def wait(number: int) -> None:
            admission = await manager.acquire_submission_slot()
            order.append(number)
            await manager.on_rollout_rejected(admission)

        waiting = [asyncio.ensure_future(wait(number)) for number in range(len(is_cancelled))]
        for _ in range(num_waking):
            await asyncio.sleep(0)
        await manager.on_rollout_rejected(held)
        for task, is_victim in zip(waiting, is_cancelled, strict=True):
            if is_victim:
                task.cancel()
        await asyncio.wait(waiting)
        assert manager.capacity == 1 and manager.num_running == 0
        assert [task.cancelled() for task in waiting] == [n not in order for n in range(len(waiting))]
        assert {n for n, is_victim in enumerate(is_cancelled) if not is_victim} <= set(order)
        return order

    order = run_in_virtual_time(main())
    assert order == sorted(order)


def test_a_place_is_kept_for_groups_that_become_due_together_in_a_later_step() -> None:
    manager = _AsyncStalenessManager(3, 1, 2)
    first, second, third = (drive(manager.acquire_submission_slot()) for _ in range(3))
    drive(manager.on_rollout_accepted(second))
    assert manager.may_train(second.scheduled_version, 1)
    drive(manager.on_rollout_trained(second.index))
    drive(manager.notify_capacity_change(1))
    fourth = drive(manager.acquire_submission_slot())
    drive(manager.on_rollout_accepted(fourth))
    assert not manager.may_train(fourth.scheduled_version, 1), "steps 1 and 2 belong to the first and the third"
    drive(manager.on_rollout_rejected(third))
    assert manager.may_train(fourth.scheduled_version, 1)
    assert manager.may_train(first.scheduled_version, 1)


def test_no_waiter_overtakes_one_that_was_admitted_and_has_not_run_yet() -> None:
    async def main() -> tuple[bool, int]:
        manager = _AsyncStalenessManager(1, 1, 0)
        first = await manager.acquire_submission_slot()
        early = asyncio.ensure_future(manager.acquire_submission_slot())
        await asyncio.sleep(0)
        await manager.on_rollout_rejected(first)
        late = manager.acquire_submission_slot()
        late.send(None)  # waits, or raises StopIteration
        late.close()
        return early.done(), (await early).index

    assert run_in_virtual_time(main()) == (False, 1)


@given(
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    batches=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    version=st.integers(0, 5),
    ages=st.lists(st.integers(0, 5), max_size=16),
    are_running=st.lists(st.booleans(), min_size=16, max_size=16),
    holds_bound=st.booleans(),
)
def test_groups_restored_from_a_checkpoint_fit_the_capacity_and_the_bound(
    bounds: tuple[int, int],
    batches: tuple[int, int],
    version: int,
    ages: list[int],
    are_running: list[bool],
    holds_bound: bool,
) -> None:
    (old_bound, bound), (old_batch, batch) = bounds, batches
    versions = sorted(max(0, version - min(age, old_bound)) for age in ages[: old_batch * (old_bound + 1)])
    groups = [Admission(index=i, scheduled_version=v) for i, v in enumerate(versions)]
    finished = [group for group in groups if not are_running[group.index]]
    running = [group for group in groups if are_running[group.index]]
    manager = _AsyncStalenessManager(100, batch, bound)
    resumed = drive(
        manager.load_state_from_checkpoint(version, 100, finished, running=running, holds_bound=holds_bound)
    )
    assert manager.num_running == sum(are_running[admission.index] for admission in resumed)
    assert list(resumed) == sorted(resumed, key=lambda a: a.index)
    assert manager.capacity + len(resumed) == (bound + 1) * batch
    admitted = [drive(manager.acquire_submission_slot()) for _ in range(manager.capacity)]
    assert all(admission.index >= 100 for admission in admitted)
    if holds_bound:
        for place, admission in enumerate(resumed):
            assert version + place // batch - admission.scheduled_version <= bound
        num_free = batch
        for admission in resumed:
            assert manager.may_train(admission.scheduled_version, num_free)
            if are_running[admission.index]:
                drive(manager.on_rollout_accepted(admission))
            drive(manager.on_rollout_trained(admission.index))
            num_free -= 1
            if num_free == 0:
                num_free = batch
                drive(manager.notify_capacity_change(manager.served_version + 1))


def test_no_more_groups_are_admitted_than_the_run_needs() -> None:
    manager = _AsyncStalenessManager(100, 4, 10, max_groups=6)
    for _ in range(6):
        drive(manager.acquire_submission_slot())
    assert manager.capacity == 0


def test_a_version_that_skips_a_step_is_refused() -> None:
    manager = _AsyncStalenessManager(1, 1, 0)
    with pytest.raises(StateError, match="version 2 cannot follow 0"):
        drive_error(manager.notify_capacity_change(2))


def drive_error(coroutine) -> None:
    coroutine.send(None)


def test_a_group_cannot_end_twice() -> None:
    manager = _AsyncStalenessManager(1, 1, 0)
    admission = drive(manager.acquire_submission_slot())
    drive(manager.on_rollout_accepted(admission))
    with pytest.raises(StateError, match="not running"):
        drive_error(manager.on_rollout_accepted(admission))


def test_while_the_trainer_is_busy_finished_groups_keep_their_place() -> None:
    manager = _AsyncStalenessManager(3, 2, 4, limits_buffered_groups=True)
    admissions = [drive(manager.acquire_submission_slot()) for _ in range(3)]
    drive(manager.notify_trainer_waiting(False))
    drive(manager.on_rollout_accepted(admissions[0]))
    assert manager.capacity == 0
    drive(manager.on_rollout_trained(admissions[0].index))
    assert manager.capacity == 1


def test_while_the_trainer_waits_finished_groups_make_room() -> None:
    manager = _AsyncStalenessManager(3, 2, 4, limits_buffered_groups=True)
    admissions = [drive(manager.acquire_submission_slot()) for _ in range(3)]
    drive(manager.notify_trainer_waiting(False))
    drive(manager.on_rollout_accepted(admissions[0]))
    drive(manager.notify_trainer_waiting(True))
    assert manager.capacity == 1


def test_more_running_groups_than_workers_are_resumed_and_none_admitted_until_enough_have_ended() -> None:
    manager = _AsyncStalenessManager(2, 4, 1)
    running = [Admission(index=i, scheduled_version=3) for i in range(3)]
    assert drive(manager.load_state_from_checkpoint(3, 9, running=running)) == tuple(running)
    for admission in running[:2]:
        assert manager.capacity == 0
        drive(manager.on_rollout_accepted(admission))
    assert manager.capacity == 1 and manager.first_open_index() == 0
