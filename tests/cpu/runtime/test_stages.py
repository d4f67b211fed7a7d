"""Stages and the channels between them: legal moves only, nothing lost or doubled, back-pressure, errors with their cause."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.errors import ChannelClosedError, StageError
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.runtime.stages import Channel, Lane, Stage, StageState, run_stage
from skyrl_async.simulator.clock import run_in_virtual_time

LEGAL = {
    (StageState.IDLE, StageState.WAITING_FOR_INPUT),
    (StageState.WAITING_FOR_INPUT, StageState.PROCESSING),
    (StageState.PROCESSING, StageState.PROCESSING),
    (StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT),
    (StageState.PROCESSING, StageState.WAITING_FOR_INPUT),
    (StageState.WAITING_FOR_OUTPUT, StageState.WAITING_FOR_INPUT),
    (StageState.WAITING_FOR_OUTPUT, StageState.PROCESSING),
}
MOVES: dict[StageState, Callable[[Lane], None]] = {
    StageState.WAITING_FOR_INPUT: lambda lane: lane.wait_for_input(),
    StageState.PROCESSING: lambda lane: lane.process("item"),
    StageState.WAITING_FOR_OUTPUT: lambda lane: lane.wait_for_output(),
}


class AnyMoves(RuleBasedStateMachine):
    """Lanes of one stage moved at random, beside a plain model of where each may be."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.left: list[tuple[StageState, float]] = []
        self.stage = Stage("any", lambda: self.now, lambda name, state, item, begin, end: self.note(state, begin, end))
        self.lanes: list[tuple[Lane, list[StageState]]] = []
        self.end: StageState | None = None
        self.cause: Exception | None = None
        self.num_through = 0

    def note(self, state: StageState, begin: float, end: float) -> None:
        self.left.append((state, end - begin))

    @rule(seconds=st.integers(1, 9))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.end is None and len(self.lanes) < 4)
    @rule()
    def a_lane_opens(self) -> None:
        self.lanes.append((Lane(self.stage), [StageState.IDLE]))

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 3), to=st.sampled_from(list(MOVES)))
    def a_lane_moves(self, which: int, to: StageState) -> None:
        lane, where = self.lanes[which % len(self.lanes)]
        if (where[0], to) in LEGAL and self.end is StageState.DONE:
            with pytest.raises(StageError, match="any is done: it takes no further item"):
                MOVES[to](lane)
        elif (where[0], to) in LEGAL:
            MOVES[to](lane)
            has_item = where[0] in (StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT)
            self.num_through += has_item and to is StageState.WAITING_FOR_INPUT
            where[0] = to
        else:
            with pytest.raises(StageError, match=f"cannot go from '{where[0].value}' to '{to.value}'"):
                MOVES[to](lane)

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 3))
    def an_item_waits_for_devices(self, which: int) -> None:
        lane, where = self.lanes[which % len(self.lanes)]
        if self.end is StageState.DONE:
            with pytest.raises(StageError, match="any is done: it takes no further item"):
                lane.wait_for_input("item")
            return
        lane.wait_for_input("item")  # from anywhere: the one before is through, or another is taken
        self.num_through += where[0] in (StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT)
        where[0] = StageState.WAITING_FOR_INPUT

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 3))
    def a_lane_ends(self, which: int) -> None:
        lane, _ = self.lanes.pop(which % len(self.lanes))
        lane.leave()
        lane.leave()

    @rule()
    def it_is_to_be_done(self) -> None:
        if self.end is None and any(
            where[0] in (StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT) or lane.item
            for lane, where in self.lanes
        ):
            with pytest.raises(StageError, match="cannot be done"):
                self.stage.finish()
        else:
            self.stage.finish()
            self.end = self.end or StageState.DONE

    @rule()
    def it_fails(self) -> None:
        error = RuntimeError("cause")
        self.stage.fail(error)
        if self.end is None:
            self.end, self.cause = StageState.ERROR, error

    @invariant()
    def it_says_where_it_is(self) -> None:
        found = {where[0] for _, where in self.lanes}
        order = (StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT, StageState.WAITING_FOR_INPUT)
        busiest = next((state for state in order if state in found), None)
        is_untouched = not self.left and self.stage.state is StageState.IDLE
        assert self.stage.state is (self.end or busiest or StageState.WAITING_FOR_INPUT) or is_untouched
        assert self.stage.cause is self.cause

    @invariant()
    def every_second_is_in_one_state(self) -> None:
        statistics = self.stage.statistics()
        assert sum(seconds for name, seconds in statistics.items() if name.endswith("_seconds")) == self.now
        assert sum(seconds for _, seconds in self.left) + self.stage.status().seconds == self.now

    @invariant()
    def every_item_that_is_through_is_counted_once(self) -> None:
        assert self.stage.statistics()["items"] == self.num_through


TestAnyMoves = pytest.mark.slow(AnyMoves.TestCase)


@given(
    num_items=st.integers(0, 12),
    bounds=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    seconds=st.lists(st.floats(0, 5), min_size=4, max_size=4),
    failing=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 11)),
)
def test_every_item_goes_through_once_in_order_or_the_first_error_ends_everything(
    num_items: int, bounds: list[int], seconds: list[float], failing: tuple[int, int] | None
) -> None:
    num_stages = len(bounds) - 1
    failure = RuntimeError("this one")

    async def main() -> tuple[list[int], list[Stage], list[BaseException]]:
        loop = asyncio.get_running_loop()
        channels = [Channel[int](bound) for bound in bounds]
        stages = [Stage(f"stage {i}", loop.time) for i in range(num_stages)]
        taken: list[int] = []
        errors: list[BaseException] = []

        async def run(i: int) -> None:
            async def work(item: int) -> int:
                await asyncio.sleep(seconds[i])
                if failing == (i, item):
                    raise failure
                return item

            await run_stage(stages[i], channels[i], work, channels[i + 1].put)
            channels[i + 1].close()

        async def feed() -> None:
            for item in range(num_items):
                await channels[0].put(item)
                assert len(channels[0]) <= bounds[0]
            channels[0].close()

        async def take() -> None:
            async for item in channels[-1]:
                await asyncio.sleep(seconds[-1])
                taken.append(item)
                channels[-1].item_done()

        try:
            async with asyncio.TaskGroup() as tasks:
                for coroutine in (feed(), take(), *(run(i) for i in range(num_stages))):
                    tasks.create_task(coroutine)
        except* RuntimeError as failures:
            errors += failures.exceptions
        return taken, stages, errors

    taken, stages, errors = run_in_virtual_time(main())
    is_reached = failing is not None and failing[0] < num_stages and failing[1] < num_items
    if is_reached:
        assert errors == [failure]
        assert stages[failing[0]].cause is failure and stages[failing[0]].state is StageState.ERROR
        assert taken == list(range(len(taken))) and len(taken) <= failing[1]
    else:
        assert not errors and taken == list(range(num_items))
        assert {stage.state for stage in stages} == {StageState.DONE}
        assert all(stage.statistics()["items"] == num_items for stage in stages)


def test_a_full_channel_blocks_its_producer_and_the_stage_shows_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inputs, outputs = Channel[int](9), Channel[int](1)
        stage = Stage("fast", loop.time)
        for item in range(4):
            inputs.put_nowait(item)
        inputs.close()

        async def work(item: int) -> int:
            return item

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_stage(stage, inputs, work, outputs.put, name_of=lambda item: f"item {item}"))
            await asyncio.sleep(7)
            status = stage.status()
            assert (status.state, status.item, status.seconds) == (StageState.WAITING_FOR_OUTPUT, "item 1", 7.0)
            assert str(status) == "fast: waiting for output item 1 (7.0 s)"
            assert len(outputs) == 1 and len(inputs) == 2
            for expected in range(4):
                assert await outputs.get() == expected

    run_in_virtual_time(main())


def test_a_lease_serves_the_items_that_have_arrived_and_ends_although_others_come() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inputs, group, stage = Channel[int](99), DeviceGroup(["logp", "policy"]), Stage("logp", loop.time)
        done: list[int] = []

        async def work(item: int) -> int:
            assert group.statistics().holder == "logp"
            inputs.put_nowait(item + 10)
            await asyncio.sleep(1.0)
            return item

        async def output(item: int) -> None:
            done.append(item)

        for item in range(3):
            inputs.put_nowait(item)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                run_stage(stage, inputs, work, output, lease_devices=lambda: group.lease("logp"), name_of=str)
            )
            await asyncio.sleep(0.5)
            async with group.lease("policy"):
                assert done == [0, 1, 2, 10] and loop.time() == 4.0
                assert (stage.status().state, stage.status().item) == (StageState.WAITING_FOR_INPUT, "11")
                await asyncio.sleep(1.0)
            async with group.lease("policy"):
                assert done == [0, 1, 2, 10, 11, 12, 20, 21] and loop.time() == 9.0
                assert stage.statistics()["processing_seconds"] == 8.0
                assert stage.statistics()["items"] == len(done)
            running.cancel()

    run_in_virtual_time(main())


def test_a_stage_with_many_items_shows_the_one_in_work_for_the_longest() -> None:
    now = [0.0]
    stage = Stage("generate", lambda: now[0])
    with stage.lane() as first, stage.lane() as second:
        first.wait_for_input()
        second.wait_for_input()
        first.process("p1")
        now[0] = 3.0
        second.process("p2")
        now[0] = 5.0
        assert str(stage.status()) == "generate: processing p1 and 1 more (5.0 s)"
        first.wait_for_input()
        assert str(stage.status()) == "generate: processing p2 (0.0 s)"
    assert stage.state is StageState.WAITING_FOR_INPUT
    stage.finish()
    assert stage.state is StageState.DONE
    with pytest.raises(StageError, match="takes no further item"), stage.lane():
        pass


def test_work_that_is_not_an_item_is_shown_and_not_counted() -> None:
    stage = Stage("train", lambda: 0.0)
    with stage.lane() as lane:
        lane.wait_for_input()
        lane.process("p1")
        lane.wait_for_input()
        lane.process("step 1", is_counted=False)
        lane.wait_for_output()
        assert str(stage.status()) == "train: waiting for output step 1 (0.0 s)"
        lane.process("step 1", is_counted=False)
        lane.wait_for_input()
    assert stage.statistics()["items"] == 1


def test_an_item_that_waits_for_devices_is_shown_and_counted_once_it_is_through() -> None:
    now = [0.0]
    stage = Stage("logp", lambda: now[0])
    with stage.lane() as lane:
        lane.wait_for_input()
        lane.wait_for_input("p1")
        now[0] = 3.0
        assert str(stage.status()) == "logp: waiting for input p1 (3.0 s)"
        lane.process("p1")
        lane.wait_for_input("p2")
        assert str(stage.status()) == "logp: waiting for input p2 (0.0 s)"
    assert stage.statistics()["items"] == 1 and stage.statistics()["processing_seconds"] == 0.0


def test_an_error_in_a_lane_fails_the_stage_and_a_cancellation_does_not() -> None:
    stage = Stage("reward", lambda: 0.0)

    def work_on(item: str, error: BaseException) -> None:
        with stage.lane() as lane:
            lane.wait_for_input()
            lane.process(item)
            raise error

    with pytest.raises(asyncio.CancelledError):
        work_on("p6", asyncio.CancelledError())
    assert stage.cause is None
    cause = ValueError("no number")
    with pytest.raises(ValueError, match="no number"):
        work_on("p7", cause)
    assert stage.cause is cause
    assert stage.status().item == "p7"
    stage.finish()
    assert stage.state is StageState.ERROR


@given(data=st.data(), bound=st.integers(1, 3))
def test_a_channel_loses_no_item_and_gives_none_twice_whoever_is_cancelled(data: st.DataObject, bound: int) -> None:
    async def main() -> None:
        channel = Channel[int](bound)
        put: list[int] = []

        async def producer(item: int) -> None:
            await channel.put(item)
            put.append(item)

        producers = [asyncio.ensure_future(producer(item)) for item in range(6)]
        await asyncio.sleep(1)
        cancelled = data.draw(st.sets(st.integers(bound, 5)))
        taken: list[int] = []
        for item in range(6 - len(cancelled)):
            if item == 1:  # some while room is being made for them
                for which in cancelled:
                    producers[which].cancel()
            taken.append(await channel.get())
            channel.item_done()
            if item == 0 and data.draw(st.booleans()):
                await asyncio.sleep(1)
            if not len(channel) and len(taken) == len(put):
                await asyncio.sleep(1)
        await asyncio.sleep(1)
        while len(channel):
            taken.append(await channel.get())
            channel.item_done()
        assert taken == put
        assert set(range(6)) - cancelled <= set(put)
        await channel.join()

    run_in_virtual_time(main())


def test_a_closed_channel_gives_what_it_holds_and_takes_nothing() -> None:
    async def main() -> None:
        channel = Channel[int](2)
        channel.put_nowait(1)
        channel.put_nowait(2)
        with pytest.raises(StageError, match="holds 2 items, which is all that it may"):
            channel.put_nowait(3)
        waiting = asyncio.ensure_future(channel.put(3))
        await asyncio.sleep(1)
        channel.close()
        with pytest.raises(ChannelClosedError):
            await waiting
        assert [item async for item in channel] == [1, 2]
        with pytest.raises(ChannelClosedError, match="closed and empty"):
            await channel.get()

    run_in_virtual_time(main())


def test_joining_waits_for_items_that_were_taken_and_are_not_done() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channel = Channel[int](1)

        async def consume() -> None:
            async for _ in channel:
                await asyncio.sleep(5)
                channel.item_done()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            await channel.put(1)
            await channel.put(2)
            await channel.join()
            assert loop.time() == 10
            channel.close()

    run_in_virtual_time(main())
