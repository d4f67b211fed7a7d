"""Engines that join, leave, die and freeze under a client, in virtual time: no answer is lost, none is sampled twice without need."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.errors import EngineDeadError, InferenceError, NoEngineError, PublishError, StateError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.generation import joined
from skyrl_async.inference.prefix_index import BLOCK_TOKENS, prefixes_of
from skyrl_async.inference.protocol import EngineLoad, InferenceEngine, Iterations
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.types import Completion, EngineOutput, EngineRequest, PauseMode, SamplingParams, WeightUpdate

ANSWER = [i % 100 for i in range(200)]
SAMPLING = SamplingParams(max_tokens=2000)
"""More than a block of tokens, so that engines send blocks."""


class BlockByBlock(ModelledEngine):
    """Samples whole answers as streams too, which a test can watch in one place."""

    async def generate(self, request: EngineRequest) -> EngineOutput:
        return joined([block async for block in self.stream(request)])


class Counting(BlockByBlock):
    """Counts the tokens that it samples, and what is asked of it while it is not resumable."""

    def __init__(self, name: str) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 200)
        self.num_sampled = 0

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        async for block in super().stream(request):
            self.num_sampled += len(block.token_ids)
            yield block


def engine(name: str) -> FaultyEngine:
    return FaultyEngine(Counting(name))


def num_sampled(*engines: FaultyEngine) -> int:
    counted = [one._engine for one in engines]
    return sum(one.num_sampled for one in counted if isinstance(one, Counting))


def client_of(*engines: InferenceEngine, wait_s: float | None = 0.0, carries: bool = True) -> InferenceEngineClient:
    return InferenceEngineClient(engines, max_model_len=10_000, carries_tokens=carries, engine_wait_s=wait_s)


def test_an_engines_speed_is_that_of_this_clients_calls_and_of_calls_elsewhere_since_the_last_time() -> None:
    async def main() -> None:
        client = client_of(engine("a"), engine("b"))
        await client.generate_tokens((1, 2), SAMPLING)
        client.pool.count_call("b", 300, 100.0)
        client.pool.count_call("gone", 1, 1.0)
        client.pool.measure_speeds()
        assert client.pool.speeds["b"] == pytest.approx(3.0) and client.pool.speeds["a"] == pytest.approx(
            100.0, rel=0.05
        )
        answer = asyncio.create_task(client.generate_tokens((1, 2), SAMPLING))  # in blocks
        await asyncio.sleep(1.0)
        client.pool.measure_speeds()
        assert client.pool.speeds == {}
        await answer
        client.pool.measure_speeds()
        assert client.pool.speeds == {"a": pytest.approx(100.0, rel=0.05)}

    run_in_virtual_time(main())


async def after(seconds: float, *calls: object) -> None:
    await asyncio.sleep(seconds)
    for call in calls:
        assert callable(call)
        outcome = call()
        if asyncio.iscoroutine(outcome):
            await outcome


async def answers(
    client: InferenceEngineClient, num: int, during: AsyncIterator[None] | None = None
) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(client.generate_tokens((1,), SAMPLING)) for i in range(num)]
    return [task.result() for task in played]


def test_a_frozen_engine_that_is_dropped_gives_its_requests_and_their_tokens_to_another() -> None:
    async def main() -> None:
        first, second = engine("e0"), engine("e1")
        client = client_of(first, second)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(1.0, first.freeze))
            tasks.create_task(after(9.0, lambda: client.drop_engine(first, EngineDeadError("no heartbeat"))))
            played = await answers(client, 4)
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * 4
        statistics = client.statistics()
        assert (statistics["engines"], statistics["engine_failures_total"], statistics["running_requests"]) == (1, 1, 0)
        assert num_sampled(first) >= 2 * 80
        assert num_sampled(second) <= 4 * 200 - 2 * 80, "what the frozen engine had delivered is not sampled again"

    run_in_virtual_time(main())


@pytest.mark.parametrize("carries", [False, True])
def test_an_engine_that_is_removed_hands_its_requests_back_with_their_tokens(carries: bool) -> None:
    async def main() -> None:
        first, second = engine("e0"), engine("e1")
        client = client_of(first, second, carries=carries)
        removed: list[InferenceEngine] = []

        async def remove() -> None:
            await asyncio.sleep(1.0)
            removed.append(await client.remove_engine("e0"))
            assert asyncio.get_running_loop().time() < 1.5

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(remove())
            played = await answers(client, 6)
        assert removed == [first]
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * 6
        assert num_sampled(first, second) == 6 * 200, "no token was sampled twice"
        statistics = client.statistics()
        assert statistics["engine_failures_total"] == 0 and statistics["aborts_total"] == 3
        assert statistics["abandoned_tokens_total"] == 0
        await client.add_engine(first)
        assert [one.name for one in client.engines] == ["e1", "e0"]

    run_in_virtual_time(main())


def test_an_engine_that_does_not_hand_its_requests_back_in_time_loses_them() -> None:
    async def main() -> None:
        first, second = engine("e0"), engine("e1")
        client = client_of(first, second)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(1.0, first.freeze, lambda: client.remove_engine("e0", timeout_s=5.0)))
            played = await answers(client, 4)
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * 4
        assert asyncio.get_running_loop().time() < 10
        assert client.statistics()["engine_failures_total"] == 0

    run_in_virtual_time(main())


def test_conversations_that_begin_one_by_one_on_idle_engines_share_them_and_stay_until_the_weights_change() -> None:
    async def main() -> None:
        engines = [engine(f"e{i}") for i in range(4)]
        client = client_of(*engines)

        async def turns(conversation: int, num: int) -> set[str]:
            prompt = np.full(2 * BLOCK_TOKENS, conversation, np.int32)
            found = set[str]()
            for _ in range(num):
                completion = await client.generate_tokens(prompt, SAMPLING)
                found |= {*completion.engines}
                prompt = np.concatenate([prompt, completion.token_ids])
                await asyncio.sleep(100)
            return found

        homes = [await turns(i, 1) for i in range(8)]
        assert [num_sampled(one) for one in engines] == [2 * 200] * 4
        assert [await turns(i, 5) for i in reversed(range(8))] == homes[::-1]
        assert [num_sampled(one) for one in engines] == [2 * 6 * 200] * 4
        client.pool.rearrange()  # as a weight update does
        assert client.pool._placement.caches.longest(prefixes_of(np.zeros(2 * BLOCK_TOKENS, np.int32))) == (0, ())

    run_in_virtual_time(main())


def test_tokens_of_a_new_version_tell_a_client_that_nothing_is_cached_any_more() -> None:
    async def main() -> None:
        first = engine("e0")
        client = client_of(first)
        prompts = [np.full(BLOCK_TOKENS, i, np.int32) for i in range(3)]
        for prompt in prompts[:2]:
            await client.generate_tokens(prompt, SAMPLING)
        await first.pause(PauseMode.KEEP)
        await first.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0))
        await first.resume()
        await client.generate_tokens(prompts[2], SAMPLING)
        cached = [client.pool._placement.caches.longest(prefixes_of(prompt))[0] for prompt in prompts]
        assert (cached, client.policy_version) == ([0, 0, BLOCK_TOKENS], 1)

    run_in_virtual_time(main())


def test_engines_say_how_full_their_caches_are_and_how_much_of_prompts_was_in_them() -> None:
    async def main() -> None:
        first, second = engine("a"), engine("b")
        client = client_of(first, second)
        assert "engines/prefix_hit_frac" not in client.pool.load_statistics()
        client.pool.report_load("a", EngineLoad(num_prompt_tokens=900, num_cached_tokens=500, num_preemptions=2))
        client.pool.report_load("gone", EngineLoad(num_prompt_tokens=1))
        client.pool.report_load(
            "a",
            EngineLoad(num_prompt_tokens=1000, num_cached_tokens=560, num_preemptions=3, cache_use=0.5, num_waiting=4),
        )
        decode = Iterations(num=4, seconds=0.1, num_requests=40)
        prefill = Iterations(num=2, seconds=0.1, num_requests=21, num_prefills=3, num_prefill_tokens=300)
        of_b = EngineLoad(num_prompt_tokens=100, num_cached_tokens=40, decode=decode, prefill=prefill)
        client.pool.report_load("b", of_b)
        assert client.pool.load_statistics() == {
            "engines/cache_use": 0.25,
            "engines/preemptions": 3.0,
            "engines/waiting_requests": 4.0,
            "engines/prefix_hit_frac": 0.5,
            "engines/decode_iteration_seconds": 0.025,
            "engines/decode_iteration_requests": 10.0,
            "engines/prefill_iteration_seconds": 0.05,
            "engines/prefill_iteration_requests": 10.5,
            "engines/prefill_iteration_prompts": 1.5,
            "engines/prefill_iteration_tokens": 150.0,
        }

    run_in_virtual_time(main())


def test_the_only_engine_and_an_unknown_one_cannot_be_removed() -> None:
    async def main() -> None:
        client = client_of(engine("e0"))
        with pytest.raises(InferenceError, match="e0 is the only engine; add another one"):
            await client.remove_engine("e0")
        with pytest.raises(InferenceError, match="there is no engine 'e7' to remove; there are e0"):
            await client.remove_engine("e7")
        with pytest.raises(StateError, match="the name e0 is taken"):
            await client.add_engine(engine("e0"))

    run_in_virtual_time(main())


def test_requests_wait_for_an_engine_where_one_may_come_and_go_on_in_it_with_their_tokens() -> None:
    async def main() -> None:
        first, second = engine("e0"), engine("e1")
        client = client_of(first, wait_s=None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(1.0, first.kill))
            tasks.create_task(after(500.0, lambda: client.add_engine(second)))
            played = await answers(client, 3)
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * 3
        seconds = asyncio.get_running_loop().time()
        assert seconds > 500
        assert [completion.engine_seconds for completion in played] == pytest.approx([seconds] * 3, rel=0.01)
        assert num_sampled(first, second) <= 3 * (200 + 16)

    run_in_virtual_time(main())


def test_who_waits_for_an_engine_is_told_when_none_will_come_and_who_comes_later_too() -> None:
    async def main() -> None:
        client = client_of(wait_s=None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(70.0, lambda: client.pool.give_up("none will come")))
            with pytest.raises(NoEngineError, match="none will come"):
                await client.generate_tokens((1,), SAMPLING)
        assert asyncio.get_running_loop().time() == 70.0
        with pytest.raises(NoEngineError, match="none will come"):
            await client.generate_tokens((1,), SAMPLING)
        await client.add_engine(engine("e0"))
        assert (await client.generate_tokens((1,), SAMPLING)).token_ids.tolist() == ANSWER

    run_in_virtual_time(main())


def test_a_request_is_held_without_engines_for_as_long_as_it_was_said_and_no_longer() -> None:
    async def main() -> None:
        client = client_of(wait_s=30.0)
        with pytest.raises(NoEngineError, match="has been there for 30 s; try again"):
            await client.generate_tokens((1,), SAMPLING)
        assert asyncio.get_running_loop().time() == 30.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await client.generate_tokens((1,), SAMPLING)
        assert client.statistics()["running_requests"] == 0

    run_in_virtual_time(main())


def test_an_engine_that_is_not_admitted_takes_no_request() -> None:
    async def main() -> None:
        client = client_of(engine("e0"))

        @asynccontextmanager
        async def refuse(joining: InferenceEngine) -> AsyncIterator[None]:
            raise PublishError(f"{joining.name} holds other weights")
            yield

        client.pool.admission = refuse
        with pytest.raises(PublishError, match="e1 holds other weights"):
            await client.add_engine(engine("e1"))
        assert [one.name for one in client.engines] == ["e0"]

    run_in_virtual_time(main())


def test_a_client_that_follows_another_s_engines_drops_none_of_its_calls() -> None:
    async def main() -> None:
        engines = [engine(f"e{i}") for i in range(3)]
        client = client_of(*engines[:2], wait_s=60.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(0.5, lambda: client.pool.follow(engines[1:])))
            tasks.create_task(after(1.0, engines[1].kill))
            tasks.create_task(after(1.5, lambda: client.pool.follow([engines[2]])))
            played = await answers(client, 6)
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * 6
        assert [one.name for one in client.engines] == ["e2"]
        assert num_sampled(engines[0]) == 3 * 200, "what was in the engine that is no longer named ended there"
        client.pool.follow([engines[2], engines[0]])
        assert [one.name for one in client.engines] == ["e2", "e0"]

    run_in_virtual_time(main())


events = st.lists(
    st.tuples(st.floats(0.01, 4.0), st.sampled_from(["kill", "freeze", "remove", "add"]), st.integers(0, 3)), max_size=8
)


@given(events=events, num_requests=st.integers(1, 6), streams=st.booleans())
def test_whatever_engines_do_every_answer_is_whole_and_nothing_is_left_open(
    events: list[tuple[float, str, int]], num_requests: int, streams: bool
) -> None:
    async def main() -> None:
        engines = {f"e{i}": engine(f"e{i}") for i in range(4)}
        client = client_of(*(engines[name] for name in ("e0", "e1")), wait_s=None, carries=streams)

        async def happen(at: float, what: str, index: int) -> None:
            await asyncio.sleep(at)
            name = f"e{index}"
            if what == "kill":
                engines[name].kill()
            elif what == "freeze":
                engines[name].freeze()
                await asyncio.sleep(1.0)
                client.drop_engine(engines[name], EngineDeadError("no heartbeat"))
            elif what == "remove" and engines[name] in client.engines:
                await client.remove_engine(name, timeout_s=3.0)
            elif (
                what == "add"
                and name not in client.pool._leaving
                and engines[name] not in client.engines
                and not engines[name].is_frozen
            ):
                await client.add_engine(engines[name])

        async with asyncio.TaskGroup() as tasks:
            for event in events:
                tasks.create_task(happen(*event))
            tasks.create_task(after(30.0, lambda: client.add_engine(engine("last"))))
            played = await answers(client, num_requests)
        assert [completion.token_ids.tolist() for completion in played] == [ANSWER] * num_requests
        assert client.statistics()["running_requests"] == 0
        assert client.pool._leaving == {}
        assert set(client.pool._slots) == {one.name for one in client.engines}

    run_in_virtual_time(main())
