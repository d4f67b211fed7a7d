"""What the plan's engines and trainer do that others do not: prefill, places, a shared machine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import token_ids
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.generation import OpenCalls, call_until_end, generate_once
from skyrl_async.inference.prefix_index import BLOCK_TOKENS
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KnownGroup, ModelledEngine, ModelledGenerator, ModelledPolicy
from skyrl_async.simulator.shared_machine import ENGINE_CORES, TRAINING_CORES, SharedMachine, slowdown
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    PauseMode,
    Prompt,
    SamplingParams,
    Trajectory,
    WeightUpdate,
)

TOKENS = 100


def engine(**settings: object) -> ModelledEngine:
    """100 tokens in one second, however many requests there are."""
    given: dict[str, object] = {"tokens_per_second": 100.0, "half_speed_requests": 1e12, **settings}
    return ModelledEngine("engine-0", num_tokens_of=lambda prompt, seed: TOKENS, **given)  # type: ignore[arg-type]


def request(number: int, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=token_ids([number]),
        sampling=SamplingParams(max_tokens=1000),
        priority=priority,
    )


async def ends(engine: ModelledEngine, requests: Sequence[EngineRequest]) -> list[float]:
    """When each of them is complete."""

    async def end_of(one: EngineRequest) -> float:
        await engine.generate(one)
        return round(asyncio.get_running_loop().time(), 6)

    return await asyncio.gather(*map(end_of, requests))


def test_a_prefill_holds_up_every_request_of_its_engine() -> None:
    requests = [request(i) for i in range(3)]
    assert run_in_virtual_time(ends(engine(prefill_seconds=0.5), requests)) == [2.5, 2.5, 2.5]


def test_a_request_that_is_continued_is_prefilled_again_and_one_that_is_gone_is_not() -> None:
    async def main() -> float:
        one = engine(prefill_seconds=0.5)
        first = asyncio.create_task(one.generate(request(0)))
        await asyncio.sleep(0.25)
        await one.pause(PauseMode.ABORT)
        assert not len((await first).token_ids)
        await one.resume()
        await one.generate(request(1))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(0.25 + 0.5 + 1.0)


def test_requests_that_are_aborted_while_they_wait_are_not_prefilled() -> None:
    async def continued(one: ModelledEngine, number: int) -> float:
        for attempt in range(2):
            await one.generate(request(10 * attempt + number, priority=number))
        return round(asyncio.get_running_loop().time(), 6)

    async def main() -> list[float]:
        one = engine(prefill_seconds=0.25, max_num_seqs=2)
        ended = asyncio.gather(*(continued(one, number) for number in range(6)))
        await asyncio.sleep(0.25)
        await one.pause(PauseMode.ABORT)
        await asyncio.sleep(0.25)
        await one.resume()
        return await ended

    # Two at a time, which take 0.25 s each before the 1 s of both.
    assert run_in_virtual_time(main()) == [2.0, 2.0, 3.5, 3.5, 5.0, 5.0]


@given(
    arrivals=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    pauses=st.lists(st.integers(1, 400), max_size=4, unique=True),
    eviction=st.integers(0, 500),
    streams=st.booleans(),
    settings=st.fixed_dictionaries(
        {
            "max_num_seqs": st.sampled_from([None, 1, 2]),
            "half_speed_requests": st.sampled_from([2.0, 1e12]),
            "prefill_seconds": st.sampled_from([0.0, 0.25]),
            "prefill_tokens_per_second": st.sampled_from([np.inf, 512.0]),
            "cache_tokens": st.sampled_from([None, 700]),
        }
    ),
)
def test_an_engine_that_continues_by_itself_does_as_one_whose_actor_continues(
    arrivals: list[int], pauses: list[int], eviction: int, streams: bool, settings: dict[str, object]
) -> None:
    """``generation.call_until_end`` is what actors of real engines run. Times are hundredths of a second, no two the same."""

    async def main(continues_aborted: bool) -> list[tuple[float, EngineOutput]]:
        one = engine(continues_aborted=continues_aborted, load_seconds=0.001, block_tokens=30, **settings)
        clock, calls = asyncio.get_running_loop().time, OpenCalls()

        async def ended(number: int, centiseconds: int) -> tuple[float, EngineOutput]:
            await asyncio.sleep(centiseconds / 100 + number * 1e-4)
            asked = replace(request(number), prompt_token_ids=token_ids(np.full(300, number, np.int32)))
            call = one.stream if streams else lambda rest: generate_once(one, rest)
            with calls.tracking(asked) as state:
                may_continue = lambda: not calls.is_evicted(asked.request_id)  # noqa: E731
                async for _ in call_until_end(asked, state, call, may_continue):
                    pass
            return clock(), state.output()

        async def publish() -> None:
            for version, centiseconds in enumerate(sorted(pauses), 1):
                await asyncio.sleep(centiseconds / 100 + 5e-5 - clock())
                await one.pause(PauseMode.ABORT)
                await one.load_weights(WeightUpdate(version=version, path="", manifest={}, num_bytes=0))
                await one.resume()

        async def evict() -> None:
            await asyncio.sleep(eviction / 100 + 7e-5)
            calls.evict({"r0"})
            await one.evict({"r0", *(f"r0.{i}" for i in range(9))})

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            tasks.create_task(evict())
            asked = [tasks.create_task(ended(number, arrival)) for number, arrival in enumerate(arrivals)]
        return [task.result() for task in asked]

    (ends, outputs), (actor_ends, actor_outputs) = (
        zip(*run_in_virtual_time(main(one)), strict=True) for one in (True, False)
    )
    assert ends == pytest.approx(actor_ends, abs=1e-4)
    assert outputs == actor_outputs


def test_the_tokens_so_far_of_a_request_say_how_often_it_was_aborted() -> None:
    async def main() -> EngineOutput:
        one = engine(continues_aborted=True)
        running = asyncio.create_task(one.generate(request(0)))
        for _ in range(2):
            await asyncio.sleep(0.25)
            await one.pause(PauseMode.ABORT)
            await one.resume()
        so_far = (await one.partial_outputs(["r0"]))["r0"]
        assert (await running).num_aborts == 2
        return so_far

    so_far = run_in_virtual_time(main())
    assert (len(so_far.token_ids), so_far.finish_reason, so_far.num_aborts) == (50, None, 2)


def test_requests_without_a_place_wait_and_the_oldest_gets_the_next_one() -> None:
    requests = [request(0, priority=5), request(1, priority=9), request(2, priority=7)]
    assert run_in_virtual_time(ends(engine(max_num_seqs=1), requests)) == [1.0, 3.0, 2.0]


def test_a_request_that_is_ended_while_it_waits_has_no_tokens_and_frees_no_place() -> None:
    async def main() -> tuple[int, list[float]]:
        one = engine(max_num_seqs=1)
        running = asyncio.create_task(ends(one, [request(0)]))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(one.generate(request(1)))
        await asyncio.sleep(0.5)
        await one.evict(["r1"])
        output = await waiting
        return len(output.token_ids), [*await running, *await ends(one, [request(2)])]

    assert run_in_virtual_time(main()) == (0, [1.0, 2.0])


@pytest.mark.parametrize(
    ("num_cores", "engine_end", "training_end"), [(8, 1.0, 1.0), (1, ENGINE_CORES + 1.2, ENGINE_CORES + 1.2)]
)
def test_trainer_and_engine_of_one_machine_take_each_other_s_cores(
    num_cores: int, engine_end: float, training_end: float
) -> None:
    row = Trajectory(
        prompt_token_ids=token_ids([1]),
        response_token_ids=token_ids(range(TOKENS)),
        loss_mask=np.ones(TOKENS, np.bool_),
        logprobs=np.zeros(TOKENS, np.float32),
        versions=None,  # type: ignore[arg-type]
        reward=0.0,
    )

    async def main() -> tuple[float, float]:
        machine = SharedMachine(num_cores)
        one = engine(machine=machine)
        policy = ModelledPolicy(seconds_per_token=0.01, machine=machine)

        async def train() -> float:
            await asyncio.sleep(0)  # the engine begins
            await policy.forward_backward([row], [1.0], 0)
            return asyncio.get_running_loop().time()

        training = asyncio.create_task(train())
        return (await ends(one, [request(0)]))[0], await training

    assert run_in_virtual_time(main()) == pytest.approx((engine_end, training_end))


def test_a_prefill_is_as_slow_as_the_rest_on_a_machine_that_is_shared() -> None:
    one = engine(machine=SharedMachine(1), prefill_seconds=0.5)
    assert run_in_virtual_time(ends(one, [request(0)])) == pytest.approx([1.5 * slowdown(ENGINE_CORES, 1)])


def test_computations_that_find_cores_do_not_slow_each_other_down() -> None:
    assert slowdown(TRAINING_CORES + ENGINE_CORES, 8) == 1
    assert slowdown(0, 1) == 1
    assert slowdown(TRAINING_CORES + 2 * ENGINE_CORES, 2) > slowdown(TRAINING_CORES + ENGINE_CORES, 2) > 1


def test_what_is_cached_of_a_prompt_is_prefilled_again_only_after_a_weight_update() -> None:
    prompt = replace(request(0), prompt_token_ids=token_ids(np.zeros(2 * BLOCK_TOKENS, np.int32)))

    async def main() -> list[float]:
        one = engine(prefill_tokens_per_second=float(BLOCK_TOKENS))
        clock, found = asyncio.get_running_loop().time, list[float]()
        for version in (None, None, 1):
            began = clock()
            if version is not None:
                await one.pause(PauseMode.KEEP)
                await one.load_weights(WeightUpdate(version=version, path="", manifest={}, num_bytes=0))
                await one.resume()
            await one.generate(prompt)
            found.append(round(clock() - began, 6))
        load = await one.ping()
        assert (load.num_prompt_tokens, load.num_cached_tokens) == (6 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
        return found

    assert run_in_virtual_time(main()) == [3.0, 1.0, 3.0]


def test_an_update_in_the_middle_of_a_prefill_begins_it_anew() -> None:
    prompt = replace(request(0), prompt_token_ids=token_ids(np.zeros(2 * BLOCK_TOKENS, np.int32)))

    async def main() -> float:
        one = engine(prefill_tokens_per_second=float(BLOCK_TOKENS))
        generating = asyncio.create_task(one.generate(prompt))
        await asyncio.sleep(1.0)
        await one.pause(PauseMode.KEEP)
        await one.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0))
        await one.resume()
        await generating
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(1.0 + 2.0 + 1.0)


def test_a_call_gets_a_token_with_each_chunk_of_another_ones_prompt_and_none_before_its_own() -> None:
    prompts = [replace(request(i), prompt_token_ids=token_ids(np.full(512, i, np.int32))) for i in range(2)]
    one = engine(prefill_tokens_per_second=256.0, prefill_chunk_tokens=32)
    # 2 s for each prompt: the first call has 16 tokens when the second prompt is computed.
    assert run_in_virtual_time(ends(one, prompts)) == pytest.approx([4.0 + (TOKENS - 16) / 100, 4.0 + TOKENS / 100])


def test_a_request_waits_until_the_cache_has_room_for_its_prompt() -> None:
    prompts = [replace(request(i), prompt_token_ids=token_ids(np.full(600, i, np.int32))) for i in range(3)]

    async def main() -> list[float]:
        one = engine(cache_tokens=1200)
        ended = asyncio.gather(ends(one, prompts))
        await asyncio.sleep(0.5)
        load = await one.ping()
        assert (load.num_waiting, load.cache_use) == (1, 1.0)
        return (await ended)[0]

    assert run_in_virtual_time(main()) == [1.0, 1.0, 2.0]


def test_a_stream_whose_reader_takes_its_time_holds_up_no_other_call() -> None:
    async def main() -> float:
        served = engine(block_tokens=50)

        async def read_slowly() -> None:
            async for _ in served.stream(request(0)):
                await asyncio.sleep(10.0)

        reading = asyncio.create_task(read_slowly())
        (end,) = await ends(served, [request(1)])
        await reading
        return end

    assert run_in_virtual_time(main()) == pytest.approx(1.0)


def test_a_prompt_that_is_generated_again_has_answers_of_about_the_same_median_and_seldom_the_same_longest_one() -> (
    None
):
    usual = [(20 + number,) * 3 + (TOKENS if number % 8 == 0 else 20,) for number in range(64)]
    groups = [KnownGroup(samples=tuple(((n, 0.0),) for n in lengths)) for lengths in usual]
    generator = ModelledGenerator(InferenceEngineClient([engine()], max_model_len=1000), groups)

    async def lengths(uid: str, seed: int) -> list[int]:
        request = GroupRequest(
            prompt=Prompt(uid=uid, messages=(), env_class=""),
            num_samples=4,
            sampling=SamplingParams(max_tokens=TOKENS),
            seed=seed,
        )
        return sorted(len(row.response_token_ids) for row in await generator.generate(request))

    async def main() -> list[list[list[int]]]:
        return [[await lengths(f"prompt {number}", seed) for seed in range(20)] for number in range(5)]

    for of_prompt in run_in_virtual_time(main()):
        medians = [found[1] for found in of_prompt]
        assert 1 <= max(medians) - min(medians) < 8
        assert 0 < sum(found[-1] == TOKENS for found in of_prompt) < 10
