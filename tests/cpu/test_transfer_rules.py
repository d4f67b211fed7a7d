"""Which way weights may take to engines, by the devices of a configuration."""

import pytest

from skyrl_async.config.schema import (
    Config,
    Device,
    EngineConfig,
    PlacementConfig,
    TrainingConfig,
    WeightSyncConfig,
    WeightTransfer,
)
from skyrl_async.config.transfer_rules import broadcast_backend, transfer_reaches_the_engines
from skyrl_async.errors import ConfigError

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
        (SHARED, Device.cuda, Device.cuda, r"where policy and generate share devices \(placement.groups\)"),
        (HALVES, Device.cuda, Device.cuda, "where placement.num_gpus_per_engine is 0.5, so that devices are shared"),
    ],
)
def test_nccl_is_refused_where_it_cannot_be_and_auto_broadcasts_by_gloo_there(
    placement: PlacementConfig, engines: Device, workers: Device, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"weight_sync.transfer must be auto, shm or gloo {reason}.*, got nccl"):
        transfer_reaches_the_engines(config_of(WeightTransfer.nccl, placement, engines=engines, workers=workers))
    for transfer in (WeightTransfer.auto, WeightTransfer.gloo, WeightTransfer.shm):
        config = config_of(transfer, placement, engines=engines, workers=workers)
        transfer_reaches_the_engines(config)
        assert broadcast_backend(config) == "gloo"


def test_devices_of_their_own_are_broadcast_to_by_nccl_unless_gloo_is_asked_for() -> None:
    for transfer, backend in (
        (WeightTransfer.auto, "nccl"),
        (WeightTransfer.nccl, "nccl"),
        (WeightTransfer.gloo, "gloo"),
    ):
        config = config_of(transfer, APART)
        transfer_reaches_the_engines(config)
        assert broadcast_backend(config) == backend
