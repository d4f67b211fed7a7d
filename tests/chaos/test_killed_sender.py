"""Rank 0 of the policy is killed between two broadcasts and in one: real workers, receivers in processes, real signals."""

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_async.errors import EngineDeadError, PublishError
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from skyrl_async.training.workers.recovering import RecoveringPolicy
from skyrl_async.types import WeightUpdate
from skyrl_async.weight_sync.broadcast import WeightBroadcast
from skyrl_async.weights.transfer_group import GLOO, GroupPlace
from tests.engine_checks import make_policy
from tests.transfer_checks import Receiver

pytestmark = pytest.mark.slow


class ReceivingEngine(ModelledEngine):
    """Nothing but its end of a broadcast is real."""

    def __init__(self, name: str) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 1)
        self.receiver = Receiver()
        self.received = b""

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        rank = init_info.pop("rank")
        await asyncio.to_thread(self.receiver.connect, GroupPlace(**init_info), rank)

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        self.receiver.begin(Path(update.path))
        try:
            own = await asyncio.to_thread(self.receiver.answer)
        except RuntimeError as error:
            raise PublishError(f"{self.name}: {error}") from error
        self.received = await asyncio.to_thread(Path(own).read_bytes)


async def lose(engine: object, death: EngineDeadError) -> None:
    raise death


async def test_new_workers_send_the_file_that_dead_ones_wrote(ray_session: None, tmp_path: Path) -> None:
    settings = TrainingSettings(policy_path=str(make_policy(tmp_path / "policy", seed=0, is_tied=False)))
    started: list[PolicyWorkers] = []

    async def start() -> PolicyWorkers:
        started.append(await PolicyWorkers.start(settings, num_workers=1))
        return started[-1]

    async def kill() -> None:
        pid = await ray.get_actor(started[-1].names[0]).__ray_call__.remote(lambda rank: os.getpid())
        os.kill(pid, signal.SIGKILL)

    policy = await RecoveringPolicy(start, max_restarts=2, directory=tmp_path / "recovery").started()
    engines = [ReceivingEngine(f"engine-{i}") for i in range(2)]
    broadcast = WeightBroadcast(
        policy=policy, backend=GLOO, must_receive=lambda engine: True, bucket_bytes=1000, timeout_s=10.0
    )
    for version in range(3):
        await policy.gather_weights(version)
        update = await policy.send_weights(version, tmp_path / str(version), 1 << 20)
        if version == 1:
            await kill()
        async with asyncio.TaskGroup() as tasks:
            if version == 2:
                engines[1].receiver.stop()
            tasks.create_task(broadcast.deliver(list(engines), update, lose))
            if version == 2:
                await kill()
                engines[1].receiver.go_on()
        content = await asyncio.to_thread(Path(update.path).read_bytes)
        assert [engine.received == content for engine in engines] == [True, True]
    assert policy.num_restarts in (1, 2), "all may be on its way when rank 0 dies"
    for engine in engines:
        engine.receiver.end()
    await policy.close()
