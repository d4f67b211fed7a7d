"""A thousand groups in flight and ten thousand prompts in line: what a group costs does not grow with how many there are.

Costs are counted (turns of the event loop, function calls, bytes), never timed. The real trainer, workers, dataloader, manager, buffer
and publisher run in virtual time. A thousand requests at once then go through Ray to one real vLLM.
"""

import asyncio
import cProfile
import gc
import multiprocessing
import pstats
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.ray import RayEngine, start_ray_engines
from skyrl_async.inference.vllm.engine import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import Completion, FinishReason, PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.cpu.rollout.simulated_load import TimedGenerator, bytes_held, simulate
from tests.engine_checks import MAX_MODEL_LEN, PROMPTS, make_policy, make_update
from tests.patience import PATIENCE_S

MAX_CALLBACKS_PER_GROUP = 16.0
MAX_BYTES_KEPT_PER_GROUP = 48
MAX_BYTES_PER_GROUP = 700
"""Of the peak. One finished group takes more than a thousand; the log of a step, which the simulator keeps, 470 per group."""
NUM_REQUESTS = 1000
NUM_HELD = 4300


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Without Python's garbage collector, which looks at everything alive again and again; counts are the same."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.slow
def test_a_thousand_workers_and_their_prompts_cost_no_more_wake_ups_per_group_than_ten(no_collections: None) -> None:
    per_group = {}
    for num_workers in (10, 1_000):
        num_groups, num_prompts = 3 * num_workers, 10 * num_workers
        run = simulate(num_workers, num_groups, num_prompts=num_prompts, generator_over=TimedGenerator)
        per_group[num_workers] = run.num_callbacks / num_groups
        prompts = run.simulation.dataloader.statistics()
        assert prompts["trained_total"] == num_groups
        assert prompts["new"] == num_prompts - num_groups and prompts["running"] == prompts["finished"] == 0
    assert per_group[1_000] <= min(per_group[10], MAX_CALLBACKS_PER_GROUP)


@pytest.mark.slow
def test_what_is_computed_for_a_group_does_not_grow_with_the_groups_in_flight(no_collections: None) -> None:
    def calls_per_group(num_workers: int) -> float:
        with cProfile.Profile() as profile:
            simulate(num_workers, 4 * num_workers)
        return pstats.Stats(profile).total_calls / (4 * num_workers)

    calls_per_group(10)  # what is imported and compiled once
    assert calls_per_group(300) <= 1.1 * calls_per_group(30)


@pytest.mark.slow
def test_a_run_of_twice_the_steps_holds_no_more_memory() -> None:
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn")
    ) as alone:  # threads of other tests hold memory too
        alone.submit(bytes_held, 40).result()  # what is imported and cached once
        most, held = alone.submit(bytes_held, 400).result()  # in shorter runs the peak still grows by itself
        most_of_twice, held_of_twice = alone.submit(bytes_held, 800).result()
    assert held_of_twice - held < 400 * MAX_BYTES_KEPT_PER_GROUP
    assert most_of_twice - most < 400 * MAX_BYTES_PER_GROUP


class SavedPolicy(ModelledPolicy):
    """Publishes the same weights at every version."""

    def __init__(self, policy_dir: Path) -> None:
        super().__init__()
        self._policy_dir = policy_dir

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        directory.mkdir(parents=True)  # noqa: ASYNC240
        return make_update(self._policy_dir, directory, version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One engine in a Ray actor, under the client and the publisher."""

    engine: RayEngine
    client: InferenceEngineClient
    publisher: WeightPublisher

    async def ask(self, number: int, max_tokens: int) -> Completion:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return await self.client.generate_tokens(PROMPTS[number % len(PROMPTS)], sampling, priority=number)

    async def num_left(self) -> tuple[float, int, int]:
        """Requests that the router, the actor and the engine still know."""
        registered = await self.engine._actor.__ray_call__.remote(lambda actor: len(actor._calls._states))
        in_engine = (await self.engine.statistics())["num_requests"]
        return self.client.statistics()["running_requests"], registered, in_engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    root = tmp_path_factory.mktemp("overload")
    policy_dir = make_policy(root / "policy", seed=0, is_tied=False)
    (engine,) = await start_ray_engines([VLLMEngineConfig(name="e", policy_dir=str(policy_dir))], log_dir=root)
    client = InferenceEngineClient([engine], max_model_len=MAX_MODEL_LEN)
    publisher = WeightPublisher(
        client=client,
        policy=SavedPolicy(policy_dir),
        directory=root / "buckets",
        bucket_bytes=1,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, lambda: 0.0),
    )
    yield Serving(engine=engine, client=client, publisher=publisher)
    await engine.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_thousand_requests_at_once_are_all_answered_exactly_across_two_publishes(serving: Serving) -> None:
    # The last ten are long: they are open when a busy machine gets to the second publish.
    lengths = [4 + number % 13 if number < NUM_REQUESTS - 10 else 400 for number in range(NUM_REQUESTS)]
    whole = {number: (await serving.ask(number, max(lengths))).token_ids.tolist() for number in range(len(PROMPTS))}
    num_answered, publishes_at = 0, (NUM_REQUESTS // 10, NUM_REQUESTS // 2)
    reached = {count: asyncio.Event() for count in publishes_at}

    async def ask(number: int) -> Completion:
        nonlocal num_answered
        completion = await serving.ask(number, lengths[number])
        num_answered += 1
        if num_answered in reached:
            reached[num_answered].set()
        return completion

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(number), name=f"request-{number}") for number in range(NUM_REQUESTS)]
        for version, count in enumerate(publishes_at, 1):
            await reached[count].wait()
            await serving.engine.pause(
                PauseMode.KEEP
            )  # it would answer the rest while a slow machine makes the version
            assert num_answered < NUM_REQUESTS, "the publish came too late to meet a request"
            await serving.publisher.publish(version)
    for number, task in enumerate(asking):
        completion = task.result()
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids.tolist() == whole[number % len(PROMPTS)][: lengths[number]]
        assert len(completion.logprobs) == len(completion.versions) == lengths[number]
        assert list(completion.versions) == sorted(completion.versions)
    assert {version for task in asking for version in task.result().versions.distinct} == {0, 1, 2}
    assert sum(task.result().num_aborts for task in asking) > 0
    assert await serving.num_left() == (0, 0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_paused_engine_that_holds_four_thousand_requests_resumes_and_those_given_up_leave_nothing_behind(
    serving: Serving,
) -> None:
    await serving.engine.pause(PauseMode.ABORT)
    asking = [
        asyncio.create_task(serving.ask(number, MAX_MODEL_LEN - 20), name=f"request-{number}")
        for number in range(NUM_HELD)
    ]
    await asyncio.sleep(0)
    await serving.engine.resume()
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    async with asyncio.timeout(PATIENCE_S):
        while any(await serving.num_left()):
            continue
    assert len((await serving.ask(0, 8)).token_ids) == 8
    assert asyncio.all_tasks() == {asyncio.current_task()}
