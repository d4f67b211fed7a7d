"""Which way published weights take to engines, and whether it exists here.

Flows in: a ``Config``. Flows out: the backend of broadcasts, or ``ConfigError``. Where each engine runs is not known here.
"""

from skyrl_async.config.devices import engine_device, training_device
from skyrl_async.config.schema import Config, Device, EngineBackend, WeightTransfer
from skyrl_async.errors import ConfigError

_BROADCASTS = (WeightTransfer.gloo, WeightTransfer.nccl)


def transfer_reaches_the_engines(config: Config) -> None:
    """A rule of ``config.rules``."""
    transfer = config.weight_sync.transfer
    if transfer not in _BROADCASTS:
        return
    if config.engine.backend is EngineBackend.deterministic:
        raise ConfigError(
            f"weight_sync.transfer must be auto or shm with engine.backend=deterministic, got {transfer.name}: that engine is in "
            "the trainer's own process, and maps what is published"
        )
    if transfer is WeightTransfer.nccl and (why_not := _why_not_nccl(config)):
        raise ConfigError(f"weight_sync.transfer must be auto, shm or gloo where {why_not}, got nccl")


def broadcast_backend(config: Config) -> str:
    """``nccl`` or ``gloo``: what engines that receive a broadcast do it by; ``auto`` takes NCCL where that is possible."""
    if config.weight_sync.transfer in _BROADCASTS:
        return config.weight_sync.transfer.name
    return "gloo" if _why_not_nccl(config) else "nccl"


def _why_not_nccl(config: Config) -> str:
    """A reason; empty where there is none."""
    devices = {
        "engine.device": engine_device(config.engine),
        "training.device": training_device(config.training),
    }
    for key, device in devices.items():
        if device is not Device.cuda:
            return f"{key} is {device.name}: NCCL connects CUDA devices"
    placement = config.placement
    if any({"policy", "generate"} <= set(group) for group in placement.groups or []):
        return "policy and generate share devices (placement.groups): NCCL takes each device once"
    for key in ("num_gpus_per_engine", "num_gpus_per_worker"):
        if (share := getattr(placement, key)) is not None and share < 1:
            return f"placement.{key} is {share:g}, so that devices are shared: NCCL takes each device once"
    return ""
