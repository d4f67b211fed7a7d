"""The group buffer and the router, under Hypothesis and in virtual time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.errors import NoEngineError, StateError
from skyrl_async.inference.router import Router
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.simulator.clock import VirtualTimeLoop, run_in_virtual_time
from skyrl_async.types import Group


def group(index: int) -> Group:
    return Group(uid=f"u{index}", admission_index=index, scheduled_version=0, trajectories=())


@given(order=st.permutations(range(8)))
def test_groups_come_out_in_the_order_of_admission(order: list[int]) -> None:
    async def main() -> list[int]:
        buffer = GroupBuffer(8)
        for index in order:
            buffer.put(group(index))
        return [(await buffer.get(lambda g: True)).admission_index for _ in order]

    assert run_in_virtual_time(main()) == list(range(8))


def test_a_group_is_held_back_until_the_rule_lets_it_go_and_the_wait_is_counted() -> None:
    async def main() -> tuple[int, float]:
        buffer, allowed = GroupBuffer(8), set()
        buffer.put(group(3))

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
            buffer.put(group(0))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put_later())
            await buffer.get(lambda g: True)
        return buffer.held_seconds

    assert run_in_virtual_time(main()) == 0.0


def test_a_closed_buffer_gives_out_what_it_holds_and_then_none() -> None:
    async def main() -> list[int | None]:
        buffer = GroupBuffer(8)
        buffer.put(group(0))
        buffer.close()
        first, second = await buffer.get(lambda g: False), await buffer.get(lambda g: False)
        return [first.admission_index, second]

    assert run_in_virtual_time(main()) == [0, None]


def test_a_cancelled_consumer_loses_no_group() -> None:
    async def main() -> int:
        buffer = GroupBuffer(8)
        consumer = asyncio.ensure_future(buffer.get(lambda g: True))
        await asyncio.sleep(0)
        buffer.put(group(0))
        consumer.cancel()
        await asyncio.wait([consumer])
        return len(buffer)

    assert run_in_virtual_time(main()) == 1


def test_more_groups_than_credits_and_groups_after_the_end_are_broken_invariants() -> None:
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
        self.buffer.put(group(index))

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


class RouterMachine(RuleBasedStateMachine):
    """Requests, sessions and deaths in any order: loads add up, sessions stay until they end, and ties go where the fewest stay."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(("e0", "e1", "e2"), max_sessions=4, max_idle_s=10.0)
        self.open: list[str] = []
        self.homes: dict[str, tuple[str, float]] = {}
        """Engine and last use of a session, the least recently used first."""
        self.now = 0.0

    @property
    def awake(self) -> dict[str, str]:
        return {session: name for session, (name, used) in self.homes.items() if self.now - used <= 10.0}

    @precondition(lambda self: self.router.engine_names)
    @rule(session=st.sampled_from([None, *"stuvwx"]))
    def start(self, session: str | None) -> None:
        fullness = {
            name: (self.router.num_running(name), list(self.awake.values()).count(name))
            for name in self.router.engine_names
        }
        name = self.router.start(session, now=self.now)
        if session in self.awake:
            assert name == self.awake[session]
        else:
            assert fullness[name] == min(fullness.values())
        if session is not None:
            others = {one: home for one, home in self.homes.items() if one in self.awake and one != session}
            self.homes = dict([*others.items(), (session, (name, self.now))][-4:])
        self.open.append(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.router.end(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @rule(session=st.sampled_from("stuvwx"))
    def end_session(self, session: str) -> None:
        self.router.end_session(session)
        self.homes.pop(session, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(["e0", "e1", "e2", "e3"]))
    def add(self, name: str) -> None:
        """A name is free when no engine has it, and every request of the one that had it has ended."""
        is_free = name not in self.router.engine_names and name not in self.open
        assert self.router.is_free(name) == is_free
        if is_free:
            self.router.add(name)
        else:
            with pytest.raises(StateError, match=f"the name {name} is taken"):
                self.router.add(name)

    @rule(name=st.sampled_from(["e0", "e1", "e2", "e3"]))
    def remove(self, name: str) -> None:
        """Requests on the dead engine end later, as they notice; a namesake started anew knows nothing of its sessions."""
        self.router.remove(name)
        self.homes = {session: home for session, home in self.homes.items() if home[0] != name}

    @invariant()
    def loads_add_up(self) -> None:
        for name in self.router.engine_names:
            assert self.router.num_running(name) == self.open.count(name)
        assert len(self.awake) <= self.router.statistics()["routed_sessions"] <= 4


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(stateful_step_count=50)


def test_without_engines_a_request_is_refused_by_name() -> None:
    router = Router(("e0",))
    router.remove("e0")
    with pytest.raises(NoEngineError, match="no inference engine is left"):
        router.start()
