"""Two nodes of a Ray cluster, which one machine plays here: who maps what is published, who is sent it, and who is refused."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_async.composition.processes import Processes
from skyrl_async.composition.publishing import make_broadcast
from skyrl_async.composition.ray_cluster import ActorResources
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.endpoint.server.front_ends import endpoint_processes
from skyrl_async.errors import ConfigError, EngineStartError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.ray import RayEngine, is_on_this_machine, start_ray_engines
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from skyrl_async.types import PauseMode, SamplingParams
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.cpu.endpoint.test_server_process import settings
from tests.engine_checks import MAX_MODEL_LEN, make_policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """One node, on which this process is."""
    import ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(cluster: Cluster) -> AsyncIterator[list[str]]:
    """Two nodes; this process is on the first."""
    other = cluster.add_node(num_cpus=2)
    yield [cluster.head_node.node_id, other.node_id]
    cluster.remove_node(other)


async def start(policy_dir: Path, name: str, node: str, root: Path) -> RayEngine:
    (engine,) = await start_ray_engines(
        [VLLMEngineConfig(name=name, policy_dir=str(policy_dir))],
        scheduling_strategies=[NodeAffinitySchedulingStrategy(node, soft=False)],
        log_dir=root / "logs",
    )
    return engine


class Ready:
    """The policy's files, there already."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def trained(self) -> Path:
        return self._directory


class Elsewhere:
    """Devices that are reserved on another node."""

    def __init__(self, node: str) -> None:
        self._node = node

    def resources(self, stage: str) -> ActorResources:
        strategies = (NodeAffinitySchedulingStrategy(self._node, soft=False),)
        return ActorResources(num_cpus=1.0, num_gpus=0.0, strategies=strategies)


async def test_workers_that_load_what_is_published_are_on_the_trainer_s_node_or_refused_at_the_start(
    nodes: list[str], tmp_path: Path
) -> None:
    policy_dir = make_policy(tmp_path / "policy", seed=0, is_tied=False)
    files = Ready(policy_dir)

    def asking_for(num_workers: int) -> Config:
        return from_overrides(
            "trainer.algorithm.policy_loss_type=decoupled_ppo",
            f"training.num_logp_workers={num_workers}",
            "training.device=cpu",
        )

    async with contextlib.AsyncExitStack() as stack:
        elsewhere = Processes(asking_for(1), files, policy_dir, tmp_path, stack, Elsewhere(nodes[1]))
        with pytest.raises(ExceptionGroup) as refused:
            await elsewhere.logprob_workers({})
        failure = first_failure(refused.value)
        expected = (
            r"logp-worker-0-.* must run on the trainer's machine, .* training.num_logp_workers .*placement.groups"
        )
        assert isinstance(failure, ConfigError) and re.match(expected, str(failure))
        parts = await Processes(asking_for(2), files, policy_dir, tmp_path, stack, None).logprob_workers({})
        assert parts.old is not None


async def test_engines_that_map_what_is_published_are_put_on_the_trainer_s_node_or_refused_before_they_boot(
    nodes: list[str], tmp_path: Path
) -> None:
    policy_dir = make_policy(tmp_path / "policy", seed=0, is_tied=False)
    config = from_overrides("weight_sync.transfer=shm", "engine.device=cpu", "training.device=cpu")
    async with contextlib.AsyncExitStack() as stack:
        elsewhere = Processes(config, Ready(policy_dir), policy_dir, tmp_path, stack, Elsewhere(nodes[1]))
        elsewhere._served = policy_dir
        with pytest.raises(EngineStartError, match="got shm: engine-0 could not map what is published here"):
            await elsewhere._start_vllm(["engine-0"], {})
        assert not (tmp_path / "logs" / "engine-0.log").read_text()
        anywhere = Processes(config, Ready(policy_dir), policy_dir, tmp_path, stack, None)
        anywhere._served = policy_dir
        for engine in await anywhere._start_vllm([f"engine-{i}" for i in range(1, 4)], {}):
            stack.push_async_callback(engine.close)
            assert is_on_this_machine(engine)


async def test_front_ends_are_on_the_trainer_s_node(nodes: list[str], tmp_path: Path) -> None:
    import ray

    async with endpoint_processes(settings(tmp_path, num_front_ends=4), []) as front_ends:
        asking = [
            one.actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()) for one in front_ends
        ]
        assert {await node for node in asking} == {nodes[0]}


async def test_an_engine_on_another_node_is_sent_what_the_others_map_also_when_it_is_started_anew(
    nodes: list[str], tmp_path: Path
) -> None:
    old, new = (make_policy(tmp_path / str(seed), seed=seed, is_tied=False) for seed in (0, 1))
    async with contextlib.AsyncExitStack() as stack:
        policy = await PolicyWorkers.start(
            TrainingSettings(policy_path=str(new)),
            num_workers=1,
            scheduling_strategies=[NodeAffinitySchedulingStrategy(nodes[0], soft=False)],
        )
        stack.push_async_callback(policy.close)
        engines = [await start(old, f"engine-{i}", node, tmp_path) for i, node in enumerate(nodes)]
        for engine in engines:
            stack.push_async_callback(engine.close)
        assert [is_on_this_machine(engine) for engine in engines] == [True, False]
        client = InferenceEngineClient(engines, max_model_len=MAX_MODEL_LEN)
        broadcast = make_broadcast(Config(), policy)
        assert broadcast is not None
        publisher = WeightPublisher(
            client=client,
            policy=policy,
            directory=tmp_path / "published",
            bucket_bytes=1 << 20,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, time.monotonic),
            broadcast=broadcast,
        )
        for version in (1, 2):
            await publisher.publish(version)
        checksum = await publisher.verifier.verify_checksums(2)
        psutil.Process((await engines[1].statistics())["core_process_id"]).kill()
        anew = await start(old, "engine-1.1", nodes[1], tmp_path)
        stack.push_async_callback(anew.close)
        await client.add_engine(anew)
        assert (await anew.version(), await anew.checksum()) == (2, checksum)
        await publisher.publish(3)
        assert [engine.name for engine in client.engines] == ["engine-0", "engine-1.1"]
        assert await publisher.verifier.verify_checksums(3) == checksum
        publisher.close()


async def test_a_machine_that_joins_takes_an_engine_and_one_that_leaves_loses_no_request(
    cluster: Cluster, tmp_path: Path
) -> None:
    policy_dir = make_policy(tmp_path / "policy", seed=0, is_tied=False)

    async def start_anywhere(name: str) -> RayEngine:
        (engine,) = await start_ray_engines(
            [VLLMEngineConfig(name=name, policy_dir=str(policy_dir))], num_cpus=2.0, log_dir=tmp_path / "logs"
        )
        return engine

    client = InferenceEngineClient([await start_anywhere("engine-0")], max_model_len=MAX_MODEL_LEN, engine_wait_s=None)
    fleet = Fleet(client, start=start_anywhere, config=EngineConfig(max_restarts=0), say=lambda line: None)
    async with fleet.supervising():
        adding = asyncio.create_task(fleet.add_engine())
        other = cluster.add_node(num_cpus=2)  # the first machine is full
        assert await adding == "engine-1"
        joined = next(engine for engine in client.engines if engine.name == "engine-1")
        assert isinstance(joined, RayEngine) and joined.node_id == other.node_id
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        answers = [asyncio.create_task(client.generate_tokens([5, 6, 7], sampling)) for _ in range(8)]
        async with asyncio.timeout(60):
            while not client.pool.statistics()["min_running_requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
        cluster.remove_node(other, allow_graceful=False)
        found = await asyncio.gather(*answers)
        assert [len(one.token_ids) for one in found] == [400] * 8
        assert any(one.engines == ("engine-1", "engine-0") for one in found)
        assert [engine.name for engine in client.engines] == ["engine-0"]
