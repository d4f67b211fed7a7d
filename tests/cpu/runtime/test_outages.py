"""Outages are no failures of rollouts: what they cut off is sent or played again, and nothing of it is counted. In virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skyrl_async.config.schema.generator import GeneratorConfig, OnFailedSamples
from skyrl_async.errors import GenerationError, NoEngineError, OutageError
from skyrl_async.inference.pool import EnginePool
from skyrl_async.rollout.failed_samples import RolloutResult
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.outages import Deadlines, Outages, Resending
from skyrl_async.simulator.clock import run_in_virtual_time
from tests.cpu.inference.test_engine_pool import engine
from tests.cpu.rollout.test_failed_samples import FAIL, HANG, Scripted, request, rewards

Schedule = Callable[[Outages], None]


def outage(begin: float, end: float) -> Schedule:
    def schedule(outages: Outages) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(begin, outages.begin, "front end 0")
        loop.call_at(end, outages.end, "front end 0")

    return schedule


def play(
    generator: Scripted,
    schedule: Schedule,
    *,
    policy: OnFailedSamples = OnFailedSamples.fill,
    max_retries: int = 0,
    timeout_s: float = 100.0,
) -> RolloutResult:
    async def main() -> RolloutResult:
        deadlines = Deadlines()
        schedule(deadlines.outages)
        retrier = RolloutRetrier(
            generator,
            GeneratorConfig(
                max_retries=max_retries, rollout_timeout_s=timeout_s, retry_backoff_s=0, on_failed_samples=policy
            ),
            deadlines,
        )
        try:
            return await retrier.run_rollout(request())
        finally:
            assert retrier.num_retries <= max_retries

    return run_in_virtual_time(main())


@pytest.mark.parametrize("policy", OnFailedSamples)
def test_a_sample_that_fails_in_an_outage_is_generated_again_after_it_without_using_a_retry(
    policy: OnFailedSamples,
) -> None:
    generator = Scripted({0: [FAIL]})
    assert rewards(play(generator, outage(0.5, 50.0), policy=policy)) == [0, 1, 2, 3]
    assert generator.asked == [(0, 1, 2, 3), (0,)]
    assert generator.times == [0.0, 50.0]


def test_a_sample_that_fails_because_of_an_outage_that_has_ended_uses_no_retry_either() -> None:
    """A session that went with its front end is missed when another one serves."""
    generator = Scripted({0: [FAIL]})
    assert rewards(play(generator, outage(0.25, 0.5))) == [0, 1, 2, 3]
    assert generator.times == [0.0, 4.0]


def test_a_sample_that_hangs_after_an_outage_misses_its_deadline_later_by_the_outage() -> None:
    generator = Scripted({0: [HANG]})
    assert rewards(play(generator, outage(5.0, 1000.0))) == [0, 1, 2, 3]
    assert generator.times == [0.0, 1095.0]


@pytest.mark.parametrize(("script", "begin"), [([FAIL, FAIL], 0.5), ([FAIL], 10.0)])
def test_a_failure_without_an_outage_uses_a_retry(script: list[str], begin: float) -> None:
    with pytest.raises(ValueError, match="sample 0 broke"):
        play(Scripted({0: script}), outage(begin, 50.0))


def test_an_outage_that_is_given_up_ends_the_rollout_with_its_error() -> None:
    def schedule(outages: Outages) -> None:
        outages.begin("no engine")
        asyncio.get_running_loop().call_at(50.0, outages.give_up, "no engine", "every restart is used up")

    with pytest.raises(NoEngineError, match="every restart is used up"):
        play(Scripted({0: [FAIL] * 9}), schedule)


def send_until(answered_at: float, times: list[float]) -> Callable[[], Awaitable[str]]:
    async def send() -> str:
        now = asyncio.get_running_loop().time()
        times.append(now)
        if now < answered_at:
            raise OutageError("connection refused")
        return "answer"

    return send


def test_a_request_that_an_outage_left_unanswered_is_sent_again_after_it() -> None:
    times: list[float] = []

    async def main() -> str:
        outages = Outages()
        outage(0.1, 600.0)(outages)
        return await Resending(outages, 900.0).until_answered(send_until(600.0, times))

    assert run_in_virtual_time(main()) == "answer"
    assert times == [0.0, 600.0]


def test_without_a_known_outage_a_request_is_sent_again_until_its_time_is_up() -> None:
    times: list[float] = []

    async def main() -> str:
        return await Resending(Outages(), 900.0).until_answered(send_until(1e9, times))

    with pytest.raises(OutageError, match="connection refused"):
        run_in_virtual_time(main())
    assert 0.25 <= times[1] <= 0.5 and 2.5 <= times[9] - times[8] <= 5.0
    assert 900.0 <= times[-1] <= 905.0


def test_only_outage_errors_are_sent_again_and_only_with_a_timeout() -> None:
    async def refuse() -> str:
        raise GenerationError("wrong key")

    times: list[float] = []
    with pytest.raises(GenerationError, match="wrong key"):
        run_in_virtual_time(Resending(Outages(), 900.0).until_answered(refuse))
    with pytest.raises(OutageError):
        run_in_virtual_time(Resending(Outages(), 0.0).until_answered(send_until(1e9, times)))
    assert times == [0.0]


def test_a_pool_without_engines_is_an_outage_until_one_joins_or_it_gives_up() -> None:
    async def main() -> float:
        pool, loop = EnginePool([engine("engine-0")], wait_s=None), asyncio.get_running_loop()
        outages = pool.deadlines.outages
        await outages.wait_until_over()
        pool.drop(pool.engines[0], "killed")
        loop.call_at(30.0, pool.follow, [engine("engine-1")])
        async with pool.deadlines.within(1.0):
            await outages.wait_until_over()
        assert outages.met_since(0) and not outages.met_since(1)
        pool.drop(pool.engines[0], "killed")
        loop.call_at(90.0, pool.give_up, "none will come")
        with pytest.raises(NoEngineError, match="none will come"):
            await outages.wait_until_over()
        pool.follow([engine("engine-2")])
        await outages.wait_until_over()
        return loop.time()

    assert run_in_virtual_time(main()) == 90.0
