"""Rules about adapters that are published alone: what has to fit them elsewhere in the config.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``.
"""

from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.run import Config, Device, DType, EngineBackend
from skyrl_async.errors import ConfigError


def adapters_can_be_served(config: Config) -> None:
    """Engines compute adapters of this rank; workers that recompute log-probs take whole weights."""
    rank = config.policy.lora.served_rank
    if not rank:
        return
    is_on_gpus = config.engine.backend is EngineBackend.vllm and engine_device(config.engine) is Device.cuda
    if is_on_gpus and config.policy.dtype is DType.float32:
        raise ConfigError(
            "policy.dtype must be bfloat16 with policy.lora.publish=adapter on GPUs, got float32: vLLM's kernels for adapters take 16 "
            "bits; set policy.dtype=bfloat16, or policy.lora.publish=merged"
        )
    if config.training.num_logp_workers:
        raise ConfigError(
            "policy.lora.publish must be merged with training.num_logp_workers > 0, got adapter: those workers load whole weights; set "
            "training.num_logp_workers=0 to have the policy workers recompute log-probs"
        )
    engine_arguments = config.engine.extra_args
    if not engine_arguments.get("enable_lora", True):
        raise ConfigError(
            "engine.extra_args.enable_lora must not be false with policy.lora.publish=adapter; leave it out, or set "
            "policy.lora.publish=merged"
        )
    largest = engine_arguments.get("max_lora_rank", rank)
    if largest < rank:
        raise ConfigError(
            f"engine.extra_args.max_lora_rank must be >= policy.lora.rank ({rank}) with policy.lora.publish=adapter, got {largest}; "
            "leave it out: engines make room for the rank"
        )
