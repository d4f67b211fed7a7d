"""The group buffer, under Hypothesis and in virtual time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.errors import StateError
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.simulator.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_async.types import Group


def group(index: int) -> Group:
    return Group(uid=f"u{index}", admission_index=index, scheduled_version=0, trajectories=())


async def put(buffer: GroupBuffer, index: int) -> None:
    """A group that is prepared at once."""
    buffer.put(group(index))
    await buffer.put_prepared(await buffer.finished.get())


@given(order=st.permutations(range(8)))
def test_groups_come_out_in_the_order_of_admission(order: list[int]) -> None:
    async def main() -> list[int]:
        buffer = GroupBuffer(8)
        for index in order:
            await put(buffer, index)
        return [(await buffer.get(lambda g: True)).admission_index for _ in order]

    assert run_in_virtual_time(main()) == list(range(8))


def test_a_group_is_held_back_until_the_rule_lets_it_go_and_the_wait_is_counted() -> None:
    async def main() -> tuple[int, float]:
        buffer, allowed = GroupBuffer(8), set()
        await put(buffer, 3)

        async def allow_later() -> None:
            await asyncio.sleep(5)
            allowed.add(3)
            buffer.notify()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(allow_later())
            taken = await buffer.get(lambda g: g.admission_index in allowed)
        return taken.admission_index, buffer.held_seconds

    assert run_in_virtual_time(main()) == (3, 5.0)


def test_waiting_for_a_group_that_is_not_there_costs_no_held_seconds() -> None:
    async def main() -> float:
        buffer = GroupBuffer(8)

        async def put_later() -> None:
            await asyncio.sleep(5)
            await put(buffer, 0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put_later())
            await buffer.get(lambda g: True)
        return buffer.held_seconds

    assert run_in_virtual_time(main()) == 0.0


def test_a_closed_buffer_gives_out_what_it_holds_and_then_none() -> None:
    async def main() -> list[int | None]:
        buffer = GroupBuffer(8)
        await put(buffer, 0)
        buffer.close()
        first, second = await buffer.get(lambda g: False), await buffer.get(lambda g: False)
        return [first.admission_index, second]

    assert run_in_virtual_time(main()) == [0, None]


def test_a_cancelled_consumer_loses_no_group() -> None:
    async def main() -> int:
        buffer = GroupBuffer(8)
        consumer = asyncio.ensure_future(buffer.get(lambda g: True))
        await asyncio.sleep(0)
        await put(buffer, 0)
        consumer.cancel()
        await asyncio.wait([consumer])
        return len(buffer)

    assert run_in_virtual_time(main()) == 1


def test_more_groups_than_were_admitted_and_groups_after_the_end_are_broken_invariants() -> None:
    buffer = GroupBuffer(1)
    buffer.put(group(0))
    with pytest.raises(StateError, match="staleness manager admits"):
        buffer.put(group(1))
    buffer.close()
    with pytest.raises(StateError, match="closed"):
        buffer.put(group(1))


class BufferMachine(RuleBasedStateMachine):
    """One consumer, any producers, cancellations and a rule that changes: every group comes out once, in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.buffer = GroupBuffer(6)
        self.allowed = 0
        self.is_closed = False
        self.held: set[int] = set()
        self.unused = set(range(40))
        self.taken: list[int | None] = []
        self.consumer: asyncio.Task[None] | None = None

    def run_until_blocked(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    async def consume(self) -> None:
        group = await self.buffer.get(lambda g: g.admission_index < self.allowed)
        self.taken.append(None if group is None else group.admission_index)

    @precondition(lambda self: self.consumer is None)
    @rule()
    def get(self) -> None:
        self.consumer = self.loop.create_task(self.consume())

    @precondition(lambda self: self.consumer is not None)
    @rule()
    def cancel(self) -> None:
        assert self.consumer is not None
        self.consumer.cancel()
        self.settle()

    @precondition(lambda self: not self.is_closed and len(self.held) < 6 and self.unused)
    @rule(data=st.data(), does_consumer_run_first=st.booleans())
    def put(self, data: st.DataObject, does_consumer_run_first: bool) -> None:
        if does_consumer_run_first:
            self.settle()
        index = data.draw(st.sampled_from(sorted(self.unused)))
        self.unused.remove(index)
        self.held.add(index)
        with pytest.raises(StopIteration):  # it never waits
            put(self.buffer, index).send(None)

    @rule(by=st.integers(1, 20))
    def allow(self, by: int) -> None:
        self.allowed += by
        self.buffer.notify()

    @rule()
    def close(self) -> None:
        self.is_closed = True
        self.buffer.close()

    @rule()
    def settle(self) -> None:
        """Let the consumer run: it has what it may have, or waits rightly."""
        num_before = len(self.taken)
        self.run_until_blocked()
        for index in self.taken[num_before:]:
            assert index == min(self.held, default=None)
            if index is None:
                assert self.is_closed
            else:
                assert index < self.allowed or self.is_closed
                self.held.remove(index)
        if self.consumer is not None and not self.consumer.done():
            assert not self.is_closed
            assert not self.held or min(self.held) >= self.allowed
        else:
            self.consumer = None

    @invariant()
    def nothing_is_lost(self) -> None:
        self.settle()
        assert [g.admission_index for g in self.buffer.snapshot()] == sorted(self.held)
        assert len(self.buffer) == len(self.held)

    def teardown(self) -> None:
        if self.consumer is not None:
            self.consumer.cancel()
            self.run_until_blocked()
        self.loop.close()


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(stateful_step_count=40)
