"""Heartbeats in virtual time: who is silent for too long is dead, and nobody else."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.runtime.heartbeat import Heartbeat, Ping, Silence, listening, until_silent
from skyrl_async.simulator.clock import run_in_virtual_time

HEARTBEAT = Heartbeat(interval_s=5.0, timeout_s=20.0)


def delayed(*delays: float) -> tuple[Ping, list[float]]:
    """A ping that is answered after the first of the delays, then the second, ..., and then at once; and when it was asked."""
    left, asked = list(delays), []

    async def ping() -> None:
        asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(left.pop(0) if left else 0.0)

    return ping, asked


class GoneError(Exception):
    """Somebody is dead."""


async def work_for(seconds: float, **pings: Ping) -> str:
    """What became of work of that length, and when."""
    loop = asyncio.get_running_loop()
    try:
        async with listening(pings, HEARTBEAT, GoneError):
            await asyncio.sleep(seconds)
    except (GoneError, OSError) as error:
        return f"{error} at {loop.time():g}"
    finally:
        assert len(asyncio.all_tasks()) == 1
    return f"done at {loop.time():g}"


def test_a_process_that_is_silent_for_too_long_ends_the_work_and_is_named() -> None:
    lively, asked = delayed(3.0, 19.0)
    assert run_in_virtual_time(work_for(1000.0, a=lively, b=delayed(0.0, 1e9)[0])) == "b at 30"
    assert asked == [5.0, 13.0]


def test_no_process_is_pinged_after_the_work_has_ended() -> None:
    silent, asked = delayed(1e9)
    assert run_in_virtual_time(work_for(24.9, a=silent)) == "done at 24.9"
    assert asked == [5.0]


def test_an_error_of_a_ping_is_raised_unchanged() -> None:
    async def ping() -> None:
        raise OSError("gone")

    assert run_in_virtual_time(work_for(1000.0, a=ping)) == "gone at 5"


def test_an_error_of_the_work_is_raised_unchanged() -> None:
    async def main() -> None:
        async with listening({"a": delayed(1e9)[0]}, HEARTBEAT, GoneError):
            await asyncio.sleep(10.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_in_virtual_time(main())


def ticks(heartbeat: Heartbeat, times: Sequence[float]) -> Callable[[], list[bool]]:
    silence = Silence(heartbeat, 0.0)
    return lambda: [silence.tick(now) for now in times]


def test_time_in_which_this_process_was_stopped_does_not_count_as_silence() -> None:
    """The process that asks was stopped for a quarter of an hour."""
    assert ticks(HEARTBEAT, [5.0, 905.0, 910.0, 915.0])() == [False, False, False, True]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_silence_means_death_no_earlier_than_the_timeout(gaps: list[float]) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    for now, is_dead in zip(times, ticks(HEARTBEAT, times)(), strict=True):
        assert not is_dead or now >= HEARTBEAT.timeout_s * (1 - 1e-9)


def test_each_answer_and_each_interval_without_one_is_reported() -> None:
    async def main() -> None:
        reported: list[str] = []
        now = asyncio.get_running_loop().time
        ping, asked = delayed(7.0, 0.0, 1e9)
        await until_silent(
            ping,
            HEARTBEAT,
            on_answer=lambda: reported.append(f"answer at {now():g}"),
            on_missed=lambda: reported.append(f"none at {now():g}"),
        )
        assert asked == [5.0, 17.0, 22.0]
        missed = [f"none at {at}" for at in (27, 32, 37, 42)]
        assert reported == ["none at 10", "answer at 12", "answer at 17", *missed]

    run_in_virtual_time(main())
