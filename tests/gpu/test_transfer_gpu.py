"""The transfer checks of tests/cpu over NCCL: rank 0 on the first device, each receiver on one of its own."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skyrl_async.errors import WeightsTransferError
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.weight_sync.broadcast import WeightBroadcast
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_async.weights.transfer_group import NCCL, WeightSender
from tests.engine_checks import config_on_gpu, make_policy, make_update, publish
from tests.patience import PATIENCE_S
from tests.transfer_checks import Receiver, assert_what_is_sent_arrives, form_group, mixed_tensors, published

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes each once"),
]
SHORT_S = 10.0
"""A timeout that is meant to pass."""


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(torch.device("cuda", 0))
    yield sender
    sender.close()


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    """As many as there are devices for, two at most."""
    receivers = [Receiver(f"cuda:{i}") for i in range(1, min(3, torch.cuda.device_count()))]
    yield receivers
    for receiver in receivers:
        receiver.end()


def test_every_receiver_holds_the_very_bytes_in_the_dtypes_they_had_whatever_the_bucket(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    form_group(sender, receivers, backend=NCCL)
    assert_what_is_sent_arrives(sender, receivers, tmp_path)


def test_a_receiver_killed_in_the_middle_fails_the_sender_within_the_timeout_and_another_group_works(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    path = published(tmp_path, mixed_tensors())
    form_group(sender, receivers, backend=NCCL, timeout_s=SHORT_S)
    *survivors, victim = receivers
    for receiver in survivors:
        receiver.begin(path)
    victim.begin_and_get(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WeightsTransferError):
        sender.send(path, 1000)
    for receiver in survivors:
        with pytest.raises(RuntimeError):
            receiver.answer()
    assert time.monotonic() - started < PATIENCE_S
    fresh = Receiver(f"cuda:{len(receivers)}")
    receivers.append(fresh)
    form_group(sender, [*survivors, fresh], backend=NCCL)
    for receiver in (*survivors, fresh):
        receiver.begin(path)
    sender.send(path, 1000)
    assert Path(fresh.answer()).read_bytes() == path.read_bytes()


async def test_weights_that_are_broadcast_are_those_that_are_mapped(
    tmp_path: Path, publisher_of: Callable[..., WeightPublisher]
) -> None:
    import ray

    from skyrl_async.inference.engines.ray import start_ray_engines
    from skyrl_async.training.workers.policy_workers import PolicyWorkers

    old, new = (make_policy(tmp_path / str(seed), seed=seed, is_tied=False) for seed in (0, 1))
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    try:
        policy = await PolicyWorkers.start(
            TrainingSettings(policy_path=str(new), device="cuda"), num_workers=1, num_gpus_per_worker=1.0
        )
        config = config_on_gpu("engine-0", old, dtype="float32")
        (engine,) = await start_ray_engines([config], num_gpus=1.0, log_dir=tmp_path / "logs")
        broadcast = WeightBroadcast(
            policy=policy, backend=NCCL, must_receive=lambda _: True, bucket_bytes=100_000, timeout_s=PATIENCE_S
        )
        checksums = []
        for version, way in ((1, None), (3, broadcast)):
            publisher = publisher_of(policy, engine, str(version), broadcast=way)
            await publisher.publish(version)
            checksums.append(await publisher.verifier.verify_checksums(version))
            await publish(engine, make_update(old, tmp_path, version + 1))
        assert checksums[0] == checksums[1] != await engine.checksum()
        await engine.close()
        await policy.close()
    finally:
        ray.shutdown()
