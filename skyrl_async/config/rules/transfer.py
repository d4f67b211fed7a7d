"""How published weights reach the engines, and whether that way exists here. The machine of each engine is not known yet."""

from skyrl_async.config.rules.devices import engine_device, training_device
from skyrl_async.config.schema.run import Config, Device, EngineBackend, WeightTransfer
from skyrl_async.errors import ConfigError

BROADCASTS = (WeightTransfer.gloo, WeightTransfer.nccl)
"""To every engine, wherever it is."""


def transfer_reaches_the_engines(config: Config) -> None:
    """A rule of ``config.rules``."""
    transfer = config.weight_sync.transfer
    if transfer in (WeightTransfer.auto, WeightTransfer.shm):
        return
    if config.engine.backend is EngineBackend.deterministic:
        raise ConfigError(
            f"weight_sync.transfer must be auto or shm with engine.backend=deterministic, got {transfer.name}: that engine is in "
            "the trainer's own process, and maps what is published"
        )
    if transfer is WeightTransfer.nccl and (why_not := _why_not_nccl(config)):
        raise ConfigError(f"weight_sync.transfer must be auto, shm or gloo where {why_not}, got nccl")
    if transfer is WeightTransfer.ipc and (why_not := _why_not_ipc(config)):
        raise ConfigError(f"weight_sync.transfer must be auto, shm, gloo or nccl where {why_not}, got ipc")


def broadcast_backend(config: Config) -> str:
    """``nccl`` or ``gloo``: what engines that receive a broadcast do it by; ``auto`` takes NCCL where that is possible."""
    if config.weight_sync.transfer in BROADCASTS:
        return config.weight_sync.transfer.name
    return "gloo" if _why_not_nccl(config) else "nccl"


def _why_not_nccl(config: Config) -> str:
    """A reason; empty where there is none."""
    if why_not := _why_not_cuda(config, "NCCL connects CUDA devices"):
        return why_not
    if _groups_are_shared(config):
        return "policy and generate share devices (placement.groups): NCCL takes each device once"
    for key, share in _shares(config).items():
        if share is not None and share < 1:
            return f"{key} is {share:g}, so that devices are shared: NCCL takes each device once"
    return ""


def _why_not_ipc(config: Config) -> str:
    if why_not := _why_not_cuda(config, "CUDA IPC is for memory of CUDA devices"):
        return why_not
    if config.policy.lora.served_rank:
        return "policy.lora.publish is adapter: adapters alone are small, and vLLM loads them from their files"
    if devices_are_shared(config):
        return ""
    return (
        f"no engine shares a device with a policy worker (placement.groups, or {' and '.join(_shares(config))} below 1)"
    )


def devices_are_shared(config: Config) -> bool:
    """Whether an engine may be on a device that a policy worker uses."""
    return _groups_are_shared(config) or all(share is not None and share < 1 for share in _shares(config).values())


def _why_not_cuda(config: Config, reason: str) -> str:
    devices = {
        "engine.device": engine_device(config.engine),
        "training.device": training_device(config.training),
    }
    return next(
        (f"{key} is {device.name}: {reason}" for key, device in devices.items() if device is not Device.cuda), ""
    )


def _groups_are_shared(config: Config) -> bool:
    return any({"policy", "generate"} <= set(group) for group in config.placement.groups or [])


def _shares(config: Config) -> dict[str, float | None]:
    keys = ("num_gpus_per_engine", "num_gpus_per_worker")
    return {f"placement.{key}": getattr(config.placement, key) for key in keys}
