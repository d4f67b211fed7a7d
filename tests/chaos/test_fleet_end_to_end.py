"""Real engines, vLLM on CPU in Ray actors: one killed and one stopped under load, one killed in the midst of its load of weights."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.ray import RayEngine, start_ray_engines
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.chaos.halting import HALT
from tests.engine_checks import PROMPTS, make_policy, make_request, make_update, wait_for_blocks
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_MODEL_LEN = 2048
"""Answers of some 5 s: a loop that gets no processor for half a second still acts in their midst."""
GREEDY = SamplingParams(max_tokens=MAX_MODEL_LEN - 50, temperature=0.0, ignore_eos=True)
ENGINES = EngineConfig(
    heartbeat_interval_s=1.0, heartbeat_timeout_s=15.0, max_restarts=3, restart_backoff_s=0.1, no_engine_timeout_s=300.0
)
HALTING = {"worker_extension_cls": "tests.chaos.halting.HaltingExtension"}


class OfFiles(ModelledPolicy):
    """Its versions are policies on disk, each sent in one file."""

    def __init__(self, versions: dict[int, Path]) -> None:
        super().__init__()
        self._versions = versions

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        directory.parent.mkdir(exist_ok=True)
        return make_update(self._versions[version], directory, version)


class Running:
    def __init__(self, client: InferenceEngineClient, publisher: WeightPublisher, fleet: Fleet) -> None:
        self.client, self.publisher, self.fleet = client, publisher, fleet
        self.changed = asyncio.Event()

    async def answers(self) -> list[tuple[int, ...]]:
        """Greedy answers to twelve requests at once."""
        async with asyncio.TaskGroup() as tasks:
            prompts = PROMPTS * 2
            played = [tasks.create_task(self.client.generate_tokens(prompt, GREEDY)) for prompt in prompts]
        return [task.result().token_ids.tolist() for task in played]

    async def until_answering(self, engine: RayEngine) -> None:
        """Return in the midst of the answers: all of their requests were sent, and ``engine`` has sampled since.

        It waits for one block only: on a busy machine the wait for eight took longer than the answers. Until all are sent it waits for
        nothing of the engine's: the answers might end first, and it would never return.
        """
        while self.client.statistics()["running_requests"] < 2 * len(PROMPTS):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await wait_for_blocks(engine, 1)

    async def until_serving(self, name: str) -> RayEngine:
        async with asyncio.timeout(300):
            while True:
                for engine in self.client.engines:
                    if engine.name == name and isinstance(engine, RayEngine):
                        return engine
                self.changed.clear()
                await self.changed.wait()

    async def follow(self, engines: object) -> None:
        """As a front end it hears of changes."""
        self.changed.set()


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    policy_dir = make_policy(tmp_path / "policy", seed=0, is_tied=False, max_model_len=MAX_MODEL_LEN)

    async def start(*names: str) -> list[RayEngine]:
        configs = [VLLMEngineConfig(name=name, policy_dir=str(policy_dir)) for name in names]
        return await start_ray_engines(configs, log_dir=tmp_path / "logs")

    async def start_one(name: str) -> InferenceEngine:
        return (await start(name))[0]

    engines = await start("engine-0", "engine-1")
    client = InferenceEngineClient(engines, max_model_len=MAX_MODEL_LEN, carries_tokens=True, engine_wait_s=None)
    publisher = WeightPublisher(
        client=client,
        policy=OfFiles(dict.fromkeys((1, 2, 3), policy_dir)),
        directory=tmp_path / "buckets",
        bucket_bytes=1,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, asyncio.get_running_loop().time),
    )
    run = Running(client, publisher, Fleet(client, start=start_one, config=ENGINES, say=print))
    run.fleet = Fleet(client, start=start_one, config=ENGINES, say=print, front_ends=[run])
    async with run.fleet.supervising():
        yield run
    publisher.close()


@pytest.mark.usefixtures("ray_of_forks")
async def test_a_killed_and_a_stopped_engine_cost_no_token_and_come_back_on_the_current_version(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.publisher.publish(1)
        undisturbed = await run.answers()
        assert {len(answer) for answer in undisturbed} == {GREEDY.max_tokens}

        killed, stopped = run.client.engines
        assert isinstance(killed, RayEngine) and isinstance(stopped, RayEngine)
        processes = [psutil.Process((await engine.statistics())["process_id"]) for engine in (killed, stopped)]
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(run.answers())
            await run.until_answering(killed)
            processes[0].send_signal(signal.SIGKILL)
        assert answering.result() == undisturbed
        assert (await run.publisher.publish(2)).num_bytes > 0, "a publish goes on without the one that boots"

        restarted = await run.until_serving("engine-0.1")
        assert (await restarted.version(), await restarted.checksum()) == (2, await stopped.checksum())

        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(run.answers())
            await run.until_answering(stopped)
            processes[1].send_signal(signal.SIGSTOP)
        assert answering.result() == undisturbed
        await run.publisher.publish(3)
        again = await run.until_serving("engine-1.1")
        assert (await again.version(), await again.checksum()) == (3, await restarted.checksum())
        assert await run.answers() == undisturbed
        assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]

        counts = run.client.statistics()
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(run.answers())
            await run.until_answering(restarted)
            await run.fleet.remove_engine("engine-0.1")
            assert not answering.done()
        assert answering.result() == undisturbed
        now = run.client.statistics()
        continued = now["aborts_total"] - counts["aborts_total"]
        assert 0 < continued <= 6, "its requests went on in the other; some may have ended before"
        assert now["engine_failures_total"] == counts["engine_failures_total"] == 2
        assert now["abandoned_tokens_total"] == 0


@pytest.mark.usefixtures("ray_of_forks")
async def test_contract_6_an_engine_killed_with_half_of_a_version_loaded_serves_nobody_and_costs_no_answer(
    tmp_path: Path,
) -> None:
    first, second = (
        make_policy(tmp_path / f"policy-{seed}", seed=seed, is_tied=False, max_model_len=MAX_MODEL_LEN)
        for seed in (0, 1)
    )
    configs = [
        VLLMEngineConfig(name=f"engine-{i}", policy_dir=str(first), extra_args=extra)
        for i, extra in enumerate([HALTING, {}])
    ]
    victim, other = await start_ray_engines(configs, log_dir=tmp_path / "logs")
    client = InferenceEngineClient([victim, other], max_model_len=MAX_MODEL_LEN, carries_tokens=True)
    publisher = WeightPublisher(
        client=client,
        policy=OfFiles({1: first, 2: second}),
        directory=tmp_path / "buckets",
        bucket_bytes=1,
        load_bucket_bytes=1,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, asyncio.get_running_loop().time),
    )
    await publisher.publish(1)
    of_the_first = await other.checksum()
    assert await victim.checksum() == of_the_first
    core = psutil.Process((await victim.statistics())["core_process_id"])

    os.mkfifo(tmp_path / "buckets" / HALT)
    async with asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(client.generate_tokens(prompt, GREEDY)) for prompt in PROMPTS * 2]
        await wait_for_blocks(victim, 8)
        publishing = tasks.create_task(publisher.publish(2))
        said = await asyncio.to_thread((tmp_path / "buckets" / HALT).read_text)
        assert said == "one bucket is loaded" and not publishing.done()
        core.kill()
    assert publishing.result().version == 2
    assert client.engines == (other,) and client.statistics()["engine_failures_total"] == 1
    assert await other.version() == 2 and await other.checksum() != of_the_first
    for answer in (task.result() for task in answering):
        assert len(answer.token_ids) == GREEDY.max_tokens
        assert list(answer.versions) == sorted(answer.versions) and set(answer.versions) <= {1, 2}
    with pytest.raises(EngineDeadError):
        await victim.generate(make_request("late"))
    publisher.close()
    await other.close()
