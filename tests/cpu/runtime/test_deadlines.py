"""Deadlines that stand still at times, in virtual time: they pass after their seconds of the other times, no sooner and no later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.types import Prompt, Trajectory
from tests.cpu.rollout.test_failed_samples import request, row


@given(
    begin=st.integers(0, 20),
    timeout=st.integers(1, 30),
    phases=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 50)), max_size=4),
)
@example(begin=3, timeout=5, phases=[(2, 10)])  # begun while time stands still
def test_a_deadline_passes_after_its_seconds_without_those_of_outages(
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
            loop.call_at(now + go, deadlines.suspend)
            loop.call_at(now + go + 0.25, deadlines.suspend)
            now += go + still
            loop.call_at(now, deadlines.resume)
        await asyncio.sleep(begin + 0.5)
        with pytest.raises(TimeoutError):
            async with deadlines.within(timeout + 0.25):
                await asyncio.Event().wait()
        return loop.time()

    assert run_in_virtual_time(main()) == (counted[4 * timeout] + 1) / 4


def test_an_expired_deadline_stays_expired() -> None:
    async def main() -> None:
        deadlines = Deadlines()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                deadlines.suspend()
                deadlines.resume()

        with pytest.raises(TimeoutError):
            async with deadlines.within(1.0):
                await work()

    run_in_virtual_time(main())


def test_a_block_that_ends_in_time_is_not_affected_by_later_outages() -> None:
    async def main() -> None:
        deadlines = Deadlines()
        async with deadlines.within(1.0):
            await asyncio.sleep(0.5)
        deadlines.suspend()
        deadlines.resume()
        await asyncio.sleep(10.0)

    run_in_virtual_time(main())


def test_a_deadline_suspended_for_two_reasons_counts_again_when_both_are_gone() -> None:
    async def main() -> float:
        deadlines, loop = Deadlines(), asyncio.get_running_loop()
        deadlines.suspend("no engine")
        deadlines.suspend("others compute")
        loop.call_at(5.0, deadlines.resume, "no engine")
        loop.call_at(8.0, deadlines.resume, "others compute")
        with pytest.raises(TimeoutError):
            async with deadlines.within(2.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run_in_virtual_time(main()) == pytest.approx(10.0)


class OneTurnSession:
    """Stands in for an endpoint's session in which the policy was asked once: logic alone, no HTTP."""

    base_url, api_key, model, max_model_len = "http://127.0.0.1/v1", "key", "policy", 1024

    async def status(self) -> dict[str, Any]:
        return {
            "state": "open",
            "messages": [],
            "message_turns": [],
            "last_text": "",
            "num_turns": 1,
            "was_cut_short": False,
        }

    async def finish(self, reward: float, *, metrics: dict[str, float], **how: Any) -> tuple[Trajectory, ...]:
        return (replace(row(reward=reward), metrics=metrics),)


class OneTurnPool:
    @asynccontextmanager
    async def session(self, **settings: Any) -> AsyncIterator[OneTurnSession]:
        yield OneTurnSession()

    async def close(self) -> None: ...


class RewardSource:
    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        return EpisodeReward(reward=1.0)


class AgentOf:
    """A harness that takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def run(self, task: AgentTask) -> AgentResult:
        await asyncio.sleep(self.seconds)
        return AgentResult()


@pytest.mark.parametrize(("seconds", "ended_at", "is_timeout"), [(104.0, 104.0, 0.0), (1000.0, 105.0, 1.0)])
def test_an_agent_that_waits_for_an_engine_uses_up_none_of_its_time(
    seconds: float, ended_at: float, is_timeout: float
) -> None:
    """There is none for a hundred seconds; it may take five of the others."""

    async def main() -> tuple[float, Trajectory]:
        deadlines, loop = Deadlines(), asyncio.get_running_loop()
        loop.call_at(1.0, deadlines.suspend)
        loop.call_at(101.0, deadlines.resume)
        generator = AgentGenerator(
            OneTurnPool(), AgentOf(seconds), RewardSource(), agent_timeout_s=5.0, deadlines=deadlines
        )
        (trajectory,) = await generator.generate(request(1, is_evaluation=True))
        return loop.time(), trajectory

    ended, trajectory = run_in_virtual_time(main())
    assert (ended, trajectory.metrics["agent/timeouts"]) == (ended_at, is_timeout)
