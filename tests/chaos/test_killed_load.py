"""An engine that is killed in the midst of its load: real processes, real weights, a real signal."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.ray import start_ray_engines
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.chaos.halting import HALT
from tests.chaos.test_fleet_end_to_end import NoText
from tests.engine_checks import MAX_MODEL_LEN, PROMPTS, make_policy, make_request, make_update, wait_for_blocks

GREEDY = SamplingParams(max_tokens=MAX_MODEL_LEN - 50, temperature=0.0, ignore_eos=True)
HALTING = {"worker_extension_cls": "tests.chaos.halting.HaltingExtension"}


class OfFiles(ModelledPolicy):
    """Its versions are policies on disk, each sent in one file."""

    def __init__(self, versions: dict[int, Path]) -> None:
        super().__init__()
        self.versions = versions

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        return sent(self.versions[version], directory, version)


def sent(policy_dir: Path, directory: Path, version: int) -> WeightUpdate:
    directory.parent.mkdir(exist_ok=True)
    return make_update(policy_dir, directory, version)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_session")
async def test_contract_6_an_engine_killed_with_half_of_a_version_loaded_serves_nobody_and_costs_no_answer(
    tmp_path: Path,
) -> None:
    first, second = (make_policy(tmp_path / f"policy-{seed}", seed=seed, is_tied=False) for seed in (0, 1))
    configs = [
        VLLMEngineConfig(name=f"engine-{i}", policy_dir=str(first), extra_args=extra)
        for i, extra in enumerate([HALTING, {}])
    ]
    victim, other = await start_ray_engines(configs, log_dir=tmp_path / "logs")
    client = InferenceEngineClient(
        [victim, other], tokenizer=NoText(), max_model_len=MAX_MODEL_LEN, carries_tokens=True
    )
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
