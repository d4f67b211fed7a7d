"""Whether devices hold a model: its weights, what training keeps beside them, and the KV cache where its size is known.

Activations come on top: what is refused here cannot be, and what is not refused may still run out of memory.
"""

from dataclasses import dataclass

from skyrl_async.config.rules.device_plan import Unit
from skyrl_async.config.rules.placement import check_sharing, sharing_stages
from skyrl_async.config.schema.fields import DType
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.training import TrainingBackendName
from skyrl_async.errors import ConfigError

_WEIGHTS, _GRADIENTS, _ADAM = 4, 4, 8
"""Bytes per trained parameter, all float32 or, in mixed precision, as many (ZeRO, arXiv 1910.02054, section 3.1)."""
_SERVED_BYTES = {DType.float32: 4, DType.bfloat16: 2}
_UNSHARDED = {0: _WEIGHTS + _GRADIENTS + _ADAM, 1: _WEIGHTS + _GRADIENTS, 2: _WEIGHTS, 3: 0}
"""ZeRO stage -> bytes per parameter that every rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is known of a model and of the devices."""

    parameters: float = 0.0
    """Parameters of the model; 0: unknown, and nothing is checked."""
    device_gb: float = 0.0
    """Memory of a device, in GB; 0: unknown, and nothing is checked."""
    is_one_machine: bool = False
    """Whether it is that of the machine, which trainer and engines share."""
    kv_bytes_per_token: float = 0.0
    """Size of the KV cache; 0: unknown."""
    prompt_tokens: float = 0.0
    """Tokens of a prompt."""
    longest_tokens: float = 0.0
    """Tokens of the longest sample's replies."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """GB of a model; what is kept in the host's memory does not count."""

    served: float
    """Weights in an engine."""
    sharded: float
    """What the workers of training share between them."""
    unsharded: float
    """What each of them holds."""


def check_devices(memory: Memory, config: Config, lengths: float = 1.0) -> None:
    """Raise ``ConfigError`` if no devices of this kind can be shared as ``config`` wants, or if they cannot hold the model, where replies
    are ``lengths`` times as long."""
    check_sharing(config, Unit.cpu_slot if memory.is_one_machine else Unit.gpu)
    if not (memory.parameters and memory.device_gb):
        return
    sizes = _sizes(memory, config)
    if memory.is_one_machine:
        _check_machine(memory, config, sizes)
    else:
        _check_engine(memory, config, sizes, lengths)
        _check_training(memory, config, sizes)


def running_requests(memory: Memory, config: Config, tokens_per_request: float) -> int:
    """Requests that an engine runs at a time: ``engine.max_num_seqs``, or as many of these as its KV cache holds."""
    if not (memory.kv_bytes_per_token and memory.parameters and memory.device_gb):
        return config.engine.max_num_seqs
    devices = config.engine.tensor_parallel_size * config.engine.gpu_memory_utilization * memory.device_gb
    cache = 1e9 * (devices - _sizes(memory, config).served)
    return max(1, min(config.engine.max_num_seqs, int(cache / memory.kv_bytes_per_token / tokens_per_request)))


def _check_engine(memory: Memory, config: Config, sizes: _Sizes, lengths: float) -> None:
    engine = config.engine
    cache = memory.kv_bytes_per_token * (memory.prompt_tokens + memory.longest_tokens * lengths) / 1e9
    longest = f" and the KV cache of the longest sample ({cache:.3g} GB)" if cache else ""
    needed, most = sizes.served + cache, engine.gpu_memory_utilization * memory.device_gb
    if needed > most * engine.tensor_parallel_size:
        raise ConfigError(
            f"engine.tensor_parallel_size must be >= {-(-needed // most):.0f}, got {engine.tensor_parallel_size}: the weights in "
            f"an engine{longest} take {needed:.0f} GB, and a device has {most:.3g} GB for them"
        )


def _check_training(memory: Memory, config: Config, sizes: _Sizes) -> None:
    device, training = memory.device_gb, config.training
    if sizes.unsharded >= device:
        raise ConfigError(
            f"training.deepspeed.zero_stage must be 3, got {training.deepspeed.zero_stage}: every worker holds {sizes.unsharded:.0f} GB "
            f"that lower stages do not shard, and a device has {device:.3g} GB"
        )
    of_worker = sizes.sharded / training.num_workers + sizes.unsharded
    if of_worker > device:
        raise ConfigError(
            f"training.num_workers must be >= {-(-sizes.sharded // (device - sizes.unsharded)):.0f}, got {training.num_workers}: weights, "
            f"gradients and Adam's state take {training.num_workers * of_worker:.0f} GB, and a device has {device:.3g} GB for them"
        )
    of_both = of_worker + sizes.served / config.engine.tensor_parallel_size
    if of_both > device and any({"policy", "generate"} <= set(stages) for stages in sharing_stages(config)):
        raise ConfigError(
            f"policy and generate must not share devices (placement.groups): they take {of_both:.0f} GB of each, and it has "
            f"{device:.3g} GB"
        )


def _check_machine(memory: Memory, config: Config, sizes: _Sizes) -> None:
    num_engines, training = config.engine.num_engines, sizes.sharded + config.training.num_workers * sizes.unsharded
    if training + num_engines * sizes.served > memory.device_gb:
        raise ConfigError(
            f"engine.num_engines must be <= {max(0, memory.device_gb - training) // sizes.served:.0f}, got {num_engines}: training takes "
            f"{training:.3g} GB and the weights in each engine {sizes.served:.3g} GB, and the machine has {memory.device_gb:.3g} GB"
        )


def _sizes(memory: Memory, config: Config) -> _Sizes:
    training, served = config.training, _SERVED_BYTES[config.policy.dtype]
    is_deepspeed = training.backend is TrainingBackendName.deepspeed
    if config.policy.lora.is_on:
        sharded, unsharded = served, 0  # at least: adapters are small
    elif training.cpu_offload or (is_deepspeed and training.deepspeed.offload_optimizer):
        sharded, unsharded = 0, 0
    else:
        unsharded = _UNSHARDED[training.deepspeed.zero_stage] if is_deepspeed else 0
        sharded = _WEIGHTS + _GRADIENTS + _ADAM - unsharded
    return _Sizes(*(memory.parameters * num / 1e9 for num in (served, sharded, unsharded)))
