"""Deadlines that stand still at times, in virtual time: they pass after their seconds of the other times, no sooner and no later."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_async.rollout.deadlines import Deadlines
from skyrl_async.simulator.clock import run_in_virtual_time


@given(
    begin=st.integers(0, 20),
    timeout=st.integers(1, 30),
    phases=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 50)), max_size=4),
)
@example(begin=3, timeout=5, phases=[(2, 10)])  # begun while time stands still
def test_a_deadline_passes_after_its_seconds_of_the_time_that_passes(
    begin: int, timeout: int, phases: list[tuple[int, int]]
) -> None:
    """``phases`` are seconds that pass and seconds that do not, in turns; in the end time passes. It begins in the middle of a second."""
    passing = [is_passing for go, still in phases for is_passing in [True] * 4 * go + [False] * 4 * still]
    passing += [True] * 400
    counted = [quarter for quarter in range(4 * begin + 2, len(passing)) if passing[quarter]]

    async def main() -> float:
        deadlines, loop = Deadlines(), asyncio.get_running_loop()
        now = 0.0
        for go, still in phases:
            loop.call_at(now + go, deadlines.stand_still)
            loop.call_at(now + go + 0.25, deadlines.stand_still)
            now += go + still
            loop.call_at(now, deadlines.go_on)
        await asyncio.sleep(begin + 0.5)
        with pytest.raises(TimeoutError):
            async with deadlines.within(timeout + 0.25):
                await asyncio.Event().wait()
        return loop.time()

    assert run_in_virtual_time(main()) == (counted[4 * timeout] + 1) / 4


def test_a_deadline_that_has_passed_stays_passed() -> None:
    async def main() -> None:
        deadlines = Deadlines()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                deadlines.stand_still()
                deadlines.go_on()

        with pytest.raises(TimeoutError):
            async with deadlines.within(1.0):
                await work()

    run_in_virtual_time(main())


def test_what_ends_in_time_is_not_disturbed_by_what_comes_later() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        async with deadlines.within(1.0):
            await asyncio.sleep(0.5)
        deadlines.stand_still()
        deadlines.go_on()
        await asyncio.sleep(10.0)

    run_in_virtual_time(main())


def test_with_two_reasons_to_stand_still_time_passes_when_both_are_gone() -> None:
    async def main() -> float:
        deadlines, loop = Deadlines(), asyncio.get_running_loop()
        deadlines.stand_still("no engine")
        deadlines.stand_still("others compute")
        loop.call_at(5.0, deadlines.go_on, "no engine")
        loop.call_at(8.0, deadlines.go_on, "others compute")
        with pytest.raises(TimeoutError):
            async with deadlines.within(2.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run_in_virtual_time(main()) == pytest.approx(10.0)
