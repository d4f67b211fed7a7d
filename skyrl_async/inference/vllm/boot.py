"""How a vLLM engine is started: its configuration, its environment, and a core process that never outlives this one.

vLLM is imported only after the environment that it reads at import is set. Requests and weight updates are unknown here.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkContext, ForkProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_async.inference.policy_files import has_tokenizer, num_weight_bytes, read_config
from skyrl_async.inference.vllm.load_counter import reporting_cores

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER_EXTENSION = "skyrl_async.inference.vllm.weight_transfer.WorkerExtension"
_SAME_IN_VLLM = (
    *("dtype", "tensor_parallel_size", "max_model_len", "max_num_seqs", "gpu_memory_utilization"),
    *("enforce_eager", "enable_prefix_caching", "trust_remote_code"),
)
"""Settings with the same name and meaning in vLLM's ``AsyncEngineArgs``."""
_PR_SET_PDEATHSIG = 1
_NUMA_NODES = Path("/sys/devices/system/node")
_CORE_END_S = 5.0
"""Longest wait for an ended core's exit code."""
_cores: list[BaseProcess] = []
"""Core processes of the engine that this process booted last."""
_HASHED_PER_SECOND = 128 << 20
"""Bytes per second that any core hashes: a tenth of the measured rate."""
_CACHED_PER_SLOT = 4
"""Sequences of full length for which a small model's cache on CPU has room, per sequence that may run: one, and three for prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMEngineConfig:
    """All settings of an engine; plain values, so that it can be sent to another process."""

    name: str
    """Unique among the run's engines."""
    policy_dir: str
    """Hugging Face directory: config, safetensors, and a tokenizer, without which no grammar can constrain an answer."""
    dtype: str = "float32"
    """Dtype of the served weights: ``float32``, ``bfloat16`` or ``float16``."""
    device: str = "cpu"
    """``cpu`` or ``cuda``, as vLLM's build supports."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None takes the model's own."""
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.85
    cpu_kv_cache_gb: int = 1
    """KV cache on CPU, GiB at most; less where four times all that can run needs less."""
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    stream_interval: int = 10
    """Tokens per block of a stream."""
    trust_remote_code: bool = False
    call_timeout_s: float = 60.0
    """Deadline of a control call; an engine that misses it counts as dead."""
    adapter_targets: tuple[str, ...] = ()
    """Names, or their ends, of the layers with adapters; empty: all linear ones. Other layers save the computation."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """More of vLLM's ``AsyncEngineArgs``."""
    version: int = 0
    """Policy version of the weights in ``policy_dir``."""
    adapter_rank: int = 0
    """Rank of the adapters in updates, computed beside the weights in ``policy_dir``; 0: updates hold all weights."""
    seed: int = 0
    """Seed of the run; each engine's own seed is made of this and its name."""

    @property
    def checksum_timeout_s(self) -> float:
        """Deadline of a checksum: each worker copies its weights to the host and hashes them on one core."""
        return self.call_timeout_s + num_weight_bytes(self.policy_dir) / self.tensor_parallel_size / _HASHED_PER_SECOND


def _set_environment(config: VLLMEngineConfig) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if config.device == "cpu":
        # The core runs the model itself: an executor process of its own would busy-wait on a second core.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=str(config.cpu_kv_cache_gb))
        if config.enforce_eager:
            # vLLM's sampler would be compiled all the same, in each core at its first answer: seconds, 20 on a machine's first run.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if config.tensor_parallel_size > len(list(_NUMA_NODES.glob("node[0-9]*"))):
            # vLLM binds the threads of each worker to a NUMA node of its own, and does not boot where there are too few.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif config.dtype == "float32":
        # FlashAttention takes 16-bit dtypes only, and Triton's attention would multiply with 10 bits of mantissa (tf32), unlike layers
        # and training: log-probs would differ by more than rounding.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def boot(config: VLLMEngineConfig) -> "AsyncLLM":
    """Start vLLM. Blocks until the core is up, and leaves vLLM's environment variables set."""
    _set_environment(config)
    with warnings.catch_warnings():
        # vLLM and what it imports warn of their own deprecations; a forked core inherits the filter.
        warnings.simplefilter("ignore")
        with _without_garbage_collection():
            from vllm.v1.engine.async_llm import AsyncLLM

            if config.device == "cpu":
                _register_architectures(config)
            vllm_config = _vllm_config(config)
        _cores.clear()
        with _core_processes("fork" if config.device == "cpu" else "spawn"), reporting_cores():
            return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage during imports, which saves a seventh of the time, and never look through the imported objects later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _register_architectures(config: VLLMEngineConfig) -> None:
    """Import the model's class in this process: on a machine's first run vLLM would inspect it in another, for 8 s."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in read_config(config.policy_dir).get("architectures", []):
        if (known := ModelRegistry.models.get(architecture)) is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _vllm_config(config: VLLMEngineConfig) -> "VllmConfig":
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm_config = AsyncEngineArgs(**(_arguments(config) | config.extra_args)).create_engine_config()
    if config.device == "cpu" and vllm_config.cache_config.num_gpu_blocks_override is None:
        vllm_config.cache_config.num_gpu_blocks_override = _useful_blocks(vllm_config, config.cpu_kv_cache_gb << 30)
    return vllm_config


def _arguments(config: VLLMEngineConfig) -> dict[str, Any]:
    """vLLM's ``AsyncEngineArgs`` without ``extra_args``."""
    arguments: dict[str, Any] = {
        "model": config.policy_dir,
        **{name: getattr(config, name) for name in _SAME_IN_VLLM},
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "scheduling_policy": "priority",
        # Equal seeds would make engines draw the same answers to the same prompts: a group of copies.
        "seed": zlib.crc32(f"{config.seed}/{config.name}".encode()) >> 1,
        "skip_tokenizer_init": not has_tokenizer(config.policy_dir),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER_EXTENSION,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,  # which nobody logs: each step says what was computed in it
    }
    if config.adapter_rank:
        from skyrl_async.inference.vllm.adapter import adapted_modules, supported_rank

        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": supported_rank(config.adapter_rank),
            "lora_target_modules": adapted_modules(config.policy_dir, config.adapter_targets),
        }
    return arguments


def _useful_blocks(vllm_config: "VllmConfig", max_bytes: int) -> int | None:
    """Blocks of the cache that a small model can use, or None: the core writes zeros into all of it, a second for a GiB."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    block_size = vllm_config.cache_config.block_size
    blocks_per_sequence = -(-model.max_model_len // block_size)
    num_blocks = _CACHED_PER_SLOT * vllm_config.scheduler_config.max_num_seqs * blocks_per_sequence
    heads = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    block_bytes = 2 * block_size * heads * model.get_head_size() * model.dtype.itemsize  # keys and values
    return num_blocks if num_blocks * block_bytes < max_bytes else None


def is_core_killed(error: Exception) -> bool:
    """Whether the last boot failed with ``error`` because its core was killed, such as for lack of memory: the next boot may succeed.

    vLLM also kills cores after other failures. Only its message says that this core ended first.
    """
    if "Engine core initialization failed" not in str(error):
        return False
    for core in _cores:
        core.join(_CORE_END_S)
    return any(core.exitcode == -signal.SIGKILL for core in _cores)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        raise SystemExit("the engine's process ended before its core started")


class _BoundProcess(BaseProcess):
    """A core, which is bound to the life of the thread that starts it."""

    def start(self) -> None:
        super().start()
        _cores.append(self)

    def run(self) -> None:
        # Collecting a parent's garbage in a fork would block: a process group would wait for threads that a fork does not copy.
        gc.freeze()
        _die_with_parent()
        super().run()


class _BoundForkProcess(_BoundProcess, ForkProcess):
    pass


class _BoundSpawnProcess(_BoundProcess, SpawnProcess):
    pass


class _BoundForkContext(ForkContext):
    Process = _BoundForkProcess


class _BoundSpawnContext(SpawnContext):
    Process = _BoundSpawnProcess


@contextlib.contextmanager
def _core_processes(method: str) -> Iterator[None]:
    """In this block vLLM starts cores by ``fork`` or ``spawn``, bound to the life of the calling thread.

    A forked core inherits imported modules and boots in half the time; vLLM itself would not fork inside a Ray actor. ``fork`` is for CPU
    only.
    """
    from vllm.v1.engine import utils

    bound = _BoundForkContext() if method == "fork" else _BoundSpawnContext()
    original = utils.get_mp_context
    utils.get_mp_context = lambda: bound
    try:
        yield
    finally:
        utils.get_mp_context = original
