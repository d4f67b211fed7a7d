"""Which way weights may take to engines, by the devices of a configuration."""

import pytest

from skyrl_async.config.rules.placement import broadcast_backend, transfer_rules
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.policy import LoraConfig, LoraPublish
from skyrl_async.config.schema.run import Config, PlacementConfig, WeightSyncConfig, WeightTransfer
from skyrl_async.config.schema.training import TrainingConfig

SHARED = PlacementConfig(groups=[["policy", "generate"]], devices=[2])
APART = PlacementConfig(groups=[["policy"], ["generate"]], devices=[1, 1])
HALVES = PlacementConfig(num_gpus_per_engine=0.5, num_gpus_per_worker=0.5)


def config_of(
    transfer: WeightTransfer,
    placement: PlacementConfig,
    *,
    engines: Device = Device.cuda,
    workers: Device = Device.cuda,
) -> Config:
    return Config(
        engine=EngineConfig(device=engines),
        training=TrainingConfig(device=workers),
        placement=placement,
        weight_sync=WeightSyncConfig(transfer=transfer),
    )


@pytest.mark.parametrize(
    ("placement", "engines", "workers", "reason"),
    [
        (APART, Device.cpu, Device.cuda, "where engine.device is cpu: NCCL connects CUDA devices"),
        (APART, Device.cuda, Device.cpu, "where training.device is cpu: NCCL connects CUDA devices"),
        (SHARED, Device.cuda, Device.cuda, "where policy and generate share devices (placement.groups)"),
        (HALVES, Device.cuda, Device.cuda, "where placement.num_gpus_per_engine is 0.5, so that devices are shared"),
    ],
)
def test_nccl_is_refused_where_it_cannot_be_and_auto_broadcasts_by_gloo_there(
    placement: PlacementConfig, engines: Device, workers: Device, reason: str
) -> None:
    (mistake,) = transfer_rules(config_of(WeightTransfer.nccl, placement, engines=engines, workers=workers))
    assert mistake.startswith(f"weight_sync.transfer must be auto, shm or gloo {reason}") and ", got nccl" in mistake
    for transfer in (WeightTransfer.auto, WeightTransfer.gloo, WeightTransfer.shm):
        config = config_of(transfer, placement, engines=engines, workers=workers)
        assert not list(transfer_rules(config))
        assert broadcast_backend(config) == "gloo"


def test_engines_on_devices_of_their_own_receive_by_nccl_unless_gloo_is_asked_for() -> None:
    for transfer, backend in (
        (WeightTransfer.auto, "nccl"),
        (WeightTransfer.nccl, "nccl"),
        (WeightTransfer.gloo, "gloo"),
    ):
        config = config_of(transfer, APART)
        assert not list(transfer_rules(config))
        assert broadcast_backend(config) == backend


@pytest.mark.parametrize(
    ("placement", "engines", "workers", "reason"),
    [
        (SHARED, Device.cpu, Device.cuda, "where engine.device is cpu: CUDA IPC is for memory of CUDA devices"),
        (SHARED, Device.cuda, Device.cpu, "where training.device is cpu: CUDA IPC is for memory of CUDA devices"),
        (APART, Device.cuda, Device.cuda, "where no engine shares a device with a policy worker"),
        (
            PlacementConfig(num_gpus_per_engine=0.5),
            Device.cuda,
            Device.cuda,
            "where no engine shares a device with a policy worker",
        ),
    ],
)
def test_ipc_is_refused_where_nothing_can_be_shared(
    placement: PlacementConfig, engines: Device, workers: Device, reason: str
) -> None:
    config = config_of(WeightTransfer.ipc, placement, engines=engines, workers=workers)
    (mistake,) = transfer_rules(config)
    assert f"must be auto, shm, gloo or nccl {reason}" in mistake and ", got ipc" in mistake


def test_ipc_is_refused_for_adapters_alone() -> None:
    config = config_of(WeightTransfer.ipc, SHARED)
    config.policy.lora = LoraConfig(rank=8, publish=LoraPublish.adapter)
    (mistake,) = transfer_rules(config)
    assert "where policy.lora.publish is adapter: " in mistake and ", got ipc" in mistake


@pytest.mark.parametrize("placement", [SHARED, HALVES])
def test_ipc_is_for_shared_devices_and_engines_elsewhere_are_broadcast_to_by_gloo(placement: PlacementConfig) -> None:
    config = config_of(WeightTransfer.ipc, placement)
    assert not list(transfer_rules(config))
    assert broadcast_backend(config) == "gloo"
