"""Rules about ``training.backend=deepspeed``, and a user's own DeepSpeed JSON, which may say what our keys do not.

What is trained is decided by our keys and never by the JSON: batch sizes, accumulation, optimizer, schedule, clipping, precision. A JSON
that says otherwise is refused; one that says the same, or ``auto``, is fine.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.training import DeepSpeedConfig, TrainingBackendName
from skyrl_async.errors import ConfigError

_AUTO = "auto"
_SERVED = "the weights that are trained are those that are served"
_IN_FLOAT32 = "gradients are reduced in float32"
_OF_THE_STEP = "torch's AdamW steps all of the state, at the step"
_INSTEAD = {
    "trainer.policy_mini_batch_size and generator.n_samples_per_prompt make the batch": "train_batch_size",
    "training.micro_batch_tokens makes micro-batches": "train_micro_batch_size_per_gpu",
    "gradients are accumulated until a mini-batch is in": "gradient_accumulation_steps managed_gradient_accumulation",
    "training.lr, adam_beta1, adam_beta2 and weight_decay make AdamW": "optimizer",
    "training.lr_schedule and num_warmup_steps make the schedule": "scheduler",
    "training.mixed_precision computes in bfloat16 over float32 weights": "fp16 bf16 amp torch_autocast",
    "gradients are accumulated in float32": "data_types",
    "gradients are sums over the ranks": "prescale_gradients gradient_predivide_factor",
    "the trainer chooses what is trained": "data_efficiency curriculum_learning",
    _SERVED: "compression_training weight_quantization",
    "the number of ranks is training.num_workers": "elasticity",
    "engine.backend generates": "hybrid_engine",
    "ranks share the data, not the layers": "tensor_parallel pipeline sequence_parallel_size expert_parallel",
    "torch's AdamW steps offloaded state, so that nothing has to be compiled": "zero_force_ds_cpu_optimizer",
    "training.activation_checkpointing recomputes activations, by transformers' means": "activation_checkpointing",
}
"""What is in the place of keys that a JSON must not set."""
_OURS = {key: instead for instead, keys in _INSTEAD.items() for key in keys.split()}
_OURS_IN_ZERO = {
    "zero_quantized_gradients": _IN_FLOAT32,
    "zero_quantized_weights": _SERVED,
    "zero_quantized_nontrainable_weights": _SERVED,
    "zenflow": _OF_THE_STEP,
    "mics_shard_size": "DeepSpeed has no MiCS any more; zero_hpz_partition_size keeps copies of the weights on fewer ranks",
    "mics_hierarchical_params_gather": "DeepSpeed has no MiCS any more",
    "cpu_offload": "training.deepspeed.offload_optimizer does so",
    "cpu_offload_param": "training.deepspeed.offload_param does so",
    "cpu_offload_use_pin_memory": "pin_memory of offload_optimizer and offload_param does so",
}
"""The same of its section ``zero_optimization``."""


def rules(config: Config) -> Iterator[str]:
    """Nothing is set that does nothing; DeepSpeed is installed, and has something to offload from."""
    training, ours = config.training, config.training.deepspeed
    if training.backend is not TrainingBackendName.deepspeed:
        for field in fields(DeepSpeedConfig):
            if (value := getattr(ours, field.name)) != field.default:
                asked = f"training.deepspeed.{field.name}={value}"
                yield f"training.backend must be deepspeed with {asked}, got {training.backend.name}"
        return
    if importlib.util.find_spec("deepspeed") is None:
        yield "training.backend must be fsdp where DeepSpeed is not installed (it is on Linux), got deepspeed"
    if training.cpu_offload:
        yield (
            "training.cpu_offload must be false with training.backend=deepspeed, got true: it is FSDP's; set "
            "training.deepspeed.offload_optimizer=true, and with zero_stage=3 training.deepspeed.offload_param=true"
        )
    zero = (read_user_config(ours, max_grad_norm=training.max_grad_norm) or {}).get("zero_optimization", {})
    if training_device(training) is not Device.cpu:
        return
    reason = "with training.device=cpu: there is no device to offload from"
    for key in ("offload_optimizer", "offload_param"):
        if getattr(ours, key):
            yield f"training.deepspeed.{key} must be false {reason}, got true"
        if key in zero:
            yield (
                f'training.deepspeed.config must not set zero_optimization.{key}.device to "{zero[key]["device"]}" {reason}; take it out, '
                'or set it to "none"'
            )


def read_user_config(config: DeepSpeedConfig, *, max_grad_norm: float) -> dict[str, Any] | None:
    """The JSON without what is ours; None where there is none.

    Raises ``ConfigError`` where it cannot be read or contradicts ours, with the key, the value and what to change.
    """
    if config.config is None:
        return None
    path = Path(config.config).expanduser()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"training.deepspeed.config must be a JSON file, got {config.config!r}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"training.deepspeed.config must hold an object, got {type(content).__name__} in {path}")
    single = {
        "gradient_clipping": (max_grad_norm, f"training.max_grad_norm is {max_grad_norm:g}"),
        "communication_data_type": ("fp32", _IN_FLOAT32),
        "gradient_allreduce_op": (
            "mean",
            "every loss is multiplied by the number of ranks, so that their mean is the sum",
        ),
        "zero_allow_untested_optimizer": (True, "torch's AdamW steps"),
    }
    kept = _without_ours(content, "", _OURS, single)
    if "zero_optimization" in kept:
        kept["zero_optimization"] = _zero_section(kept["zero_optimization"], config)
    return kept


def _without_ours(
    section: Any, name: str, ours: Mapping[str, str], single: Mapping[str, tuple[Any, str]]
) -> dict[str, Any]:
    """The keys of a section that say what ours do not.

    Args:
        section: an object, or else refused.
        name: where it is; empty for all of the file.
        ours: key that must be off -> why.
        single: key -> the one value that it may have, and why.
    """
    _require(isinstance(section, dict), name, section, "it is an object")
    kept = {}
    for key, value in section.items():
        path = f"{name}.{key}" if name else key
        if key in ours:
            _require(value in (_AUTO, None) or _is_off(value), path, value, ours[key])
        elif key in single:
            allowed, reason = single[key]
            _require(value in (_AUTO, allowed), path, value, reason)
        elif value != _AUTO:
            kept[key] = value
    return kept


def _zero_section(zero: Any, config: DeepSpeedConfig) -> dict[str, Any]:
    stage = config.zero_stage
    single = {
        "compute_grad_norm": (True, "a step whose gradient is not finite is refused by its norm"),
        "stage": (stage, f"training.deepspeed.zero_stage is {stage}"),
    }
    if stage != 2:
        reason = "gradients accumulated until a mini-batch is in overlap with communication at stage 2 only"
        single["overlap_comm"] = (False, reason)
    kept = _without_ours(zero, "zero_optimization", _OURS_IN_ZERO, single)
    for part, least_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        if part in kept:
            section = _offload_section(part, kept.pop(part), config, least_stage)
            kept |= {part: section} if section else {}
    return kept


def _offload_section(part: str, section: Any, config: DeepSpeedConfig, least_stage: int) -> dict[str, Any]:
    """Empty where it has nothing offloaded."""
    name, section = f"zero_optimization.{part}", {} if section is None else section
    kept = _without_ours(section, name, {}, {"ratio": (1, _OF_THE_STEP), "super_offload": (False, _OF_THE_STEP)})
    device, reason = kept.get("device", "none"), f"it needs training.deepspeed.zero_stage >= {least_stage}"
    _require(device == "none" or config.zero_stage >= least_stage, f"{name}.device", device, reason)
    is_asked = getattr(config, part)
    _require(device != "none" or not is_asked, f"{name}.device", device, f"training.deepspeed.{part} is true")
    return {} if device == "none" else kept


def _require(is_fine: bool, key: str, value: Any, reason: str) -> None:
    if not is_fine:
        raise ConfigError(
            f'training.deepspeed.config must not set {key} to {json.dumps(value)}: {reason}; take it out, or set it to "auto"'
        )


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, dict) and value.get("enabled") is False)
