"""Leases on shared devices: the queue by Hypothesis, its tasks in virtual time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.errors import StateError
from skyrl_async.runtime.device_leases import DeviceGroup, DeviceLease, LeaseQueue, QueuedLease, groups_by_member
from skyrl_async.simulator.clock import run_in_virtual_time

MEMBERS = ("policy", "ref", "generate")


class AQueue(RuleBasedStateMachine):
    """Entering and leaving in any order keeps it first come, first served, and no second is lost or counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = LeaseQueue(MEMBERS), 0.0
        self.leases: list[QueuedLease] = []
        self.num_held = self.num_entered = 0
        self.held = self.waited = 0.0

    @rule(member=st.sampled_from(MEMBERS))
    def enter(self, member: str) -> None:
        self.leases.append(self.queue.enter(member, self.now))
        self.num_entered += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.queue.leave(lease, self.now)
        with pytest.raises(StateError, match="has left the queue already"):
            self.queue.leave(lease, self.now)

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.held += seconds * bool(self.leases)
        self.waited += seconds * max(0, len(self.leases) - 1)

    @invariant()
    def the_first_in_the_queue_holds_and_the_others_follow_in_the_order_they_came(self) -> None:
        assert ([self.queue.holder] if self.queue.holder else []) + list(self.queue.waiting) == self.leases

    @invariant()
    def seconds_add_up(self) -> None:
        found = self.queue.statistics(self.now)
        assert sum(found.seconds_held.values()) == self.held
        assert sum(found.seconds_waited.values()) == self.waited
        assert sum(found.num_leases.values()) <= self.num_entered
        assert found.waiting == tuple(lease.member for lease in self.leases[1:])
        assert found.holder == (self.leases[0].member if self.leases else None)


TestAQueue = AQueue.TestCase
TestAQueue.settings = settings(stateful_step_count=40)


@given(
    visits=st.lists(
        st.tuples(
            st.sampled_from(MEMBERS),
            st.integers(0, 5),  # asks at
            st.integers(0, 3),  # holds for
            st.none() | st.integers(0, 12),  # is cancelled at
            st.booleans(),  # fails
        ),
        max_size=8,
    )
)
def test_one_member_holds_the_devices_at_a_time_in_the_order_of_requests_despite_cancellations_and_failures(
    visits: list[tuple[str, int, int, int | None, bool]],
) -> None:
    async def main() -> None:
        group, asked, begun = DeviceGroup(MEMBERS), [], []
        is_held = False

        async def visit(number: int, member: str, at: int, seconds: int, fails: bool) -> None:
            nonlocal is_held
            await asyncio.sleep(at)
            asked.append(number)
            async with group.lease(member):
                assert not is_held
                is_held = True
                begun.append(number)
                try:
                    await asyncio.sleep(seconds)
                    if fails:
                        raise RuntimeError("a holder died")
                finally:
                    is_held = False

        loop = asyncio.get_running_loop()
        tasks = []
        for number, (member, at, seconds, cancelled_at, fails) in enumerate(visits):
            tasks.append(loop.create_task(visit(number, member, at, seconds, fails)))
            if cancelled_at is not None:
                loop.call_at(float(cancelled_at), tasks[-1].cancel)
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled() or isinstance(task.exception(), RuntimeError | None)
        assert begun == [number for number in asked if number in begun]
        assert all(task.cancelled() for number, task in enumerate(tasks) if number not in begun)
        left = group.statistics()
        assert (left.holder, left.waiting) == (None, ())

    run_in_virtual_time(main())


@pytest.mark.parametrize("num_ticks", range(12))
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_cancellation_at_any_await_keeps_no_lease_and_gives_none_away(victim: int, num_ticks: int) -> None:
    async def main() -> None:
        group, served = DeviceGroup(MEMBERS), []

        async def visit(member: str) -> None:
            async with group.lease(member):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                served.append(member)

        tasks = [asyncio.get_running_loop().create_task(visit(member)) for member in MEMBERS]
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        tasks[victim].cancel()
        await asyncio.wait(tasks)
        assert served == [m for m, task in zip(MEMBERS, tasks, strict=True) if not task.cancelled()]
        assert set(MEMBERS) - set(served) <= {MEMBERS[victim]}
        async with asyncio.timeout(1), group.lease("ref"):
            pass

    run_in_virtual_time(main())


def test_statistics_name_the_holder_and_count_seconds_held_and_waited() -> None:
    async def main() -> None:
        group = DeviceGroup(MEMBERS)

        async def take() -> None:
            async with group.lease("ref"):
                await asyncio.sleep(2)

        async with asyncio.TaskGroup() as tasks:
            async with group.lease("policy"):
                tasks.create_task(take())
                await asyncio.sleep(5)
                assert group.statistics().waiting == ("ref",)
            await asyncio.sleep(0)
            assert group.statistics().holder == "ref"
        found = group.statistics()
        assert found.seconds_held == {"policy": 5, "ref": 2, "generate": 0}
        assert found.seconds_waited == {"policy": 0, "ref": 5, "generate": 0}
        assert found.num_leases == {"policy": 1, "ref": 1, "generate": 0}
        assert found.holder is None

    run_in_virtual_time(main())


def test_groups_overlap_each_other() -> None:
    async def main() -> float:
        group_of = groups_by_member([["policy", "logp"], ["ref"], ["generate"]])
        assert group_of["policy"] is group_of["logp"] is not group_of["ref"]

        async def work(stage: str) -> None:
            async with group_of[stage].lease(stage):
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            for stage in group_of:
                tasks.create_task(work(stage))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 2.0


def test_a_lease_inside_another_of_the_same_task_is_refused() -> None:
    async def main() -> None:
        group = DeviceGroup(MEMBERS)
        async with group.lease("policy"):
            with pytest.raises(StateError, match="ref asks for a lease inside of one of policy, of the same task"):
                async with group.lease("ref"):
                    pytest.fail("had a lease")
            assert group.statistics().holder == "policy"
        assert group.statistics().holder is None

    run_in_virtual_time(main())


def test_a_member_of_another_group_is_refused() -> None:
    async def main() -> None:
        group = DeviceGroup(MEMBERS)
        with pytest.raises(StateError, match="expected one of policy, ref, generate, .* got 'reward'"):
            async with group.lease("reward"):
                pytest.fail("had a lease")
        assert group.statistics().holder is None

    run_in_virtual_time(main())


def test_a_lease_lasts_over_several_calls_until_it_is_released() -> None:
    async def main() -> None:
        group = DeviceGroup(MEMBERS)
        lease = DeviceLease(group, "policy")
        assert not lease.is_held
        await lease.acquire()
        await lease.acquire()
        async with group.lease_unless_held("policy"):
            assert group.statistics().num_leases["policy"] == 1
        other = asyncio.ensure_future(group.wanted())
        waiting = asyncio.ensure_future(DeviceLease(group, "ref").acquire())
        await other
        assert lease.is_held and not waiting.done()
        lease.release()
        lease.release()
        await waiting
        assert group.statistics().holder == "ref" and not lease.is_held
        taking = asyncio.ensure_future(lease.acquire())
        await group.wanted()
        taking.cancel()
        await asyncio.wait([taking])
        assert group.statistics().waiting == () and not lease.is_held

    run_in_virtual_time(main())


def test_a_lease_without_a_group_is_always_held() -> None:
    async def main() -> None:
        lease = DeviceLease()
        assert lease.is_held
        await lease.acquire()
        lease.release()

    run_in_virtual_time(main())
