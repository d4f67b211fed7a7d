"""The keys of ``training.deepspeed``, and a user's own DeepSpeed JSON, which may say what ours do not.

What is trained is decided by our keys and never by the JSON: batch sizes, accumulation, optimizer, schedule, clipping, precision. A JSON
that says otherwise is refused; one that says the same, or ``auto``, is fine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_async.config.fields import doc, require
from skyrl_async.errors import ConfigError

_AUTO = "auto"
_BFLOAT16 = "training.mixed_precision computes in bfloat16 over float32 weights"
_WHAT_IS_TRAINED = "the trainer chooses what is trained"
_SHARED_DATA = "ranks share the data, not the layers"
_OURS = {
    "train_batch_size": "trainer.policy_mini_batch_size and generator.n_samples_per_prompt make the batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch_tokens makes micro-batches",
    "gradient_accumulation_steps": "gradients are accumulated until a mini-batch is in",
    "managed_gradient_accumulation": "gradients are accumulated until a mini-batch is in",
    "optimizer": "training.lr, adam_beta1, adam_beta2 and weight_decay make AdamW",
    "scheduler": "training.lr_schedule and num_warmup_steps make the schedule",
    "fp16": _BFLOAT16,
    "bf16": _BFLOAT16,
    "amp": _BFLOAT16,
    "torch_autocast": _BFLOAT16,
    "data_types": "gradients are accumulated in float32",
    "prescale_gradients": "gradients are sums over the ranks",
    "gradient_predivide_factor": "gradients are sums over the ranks",
    "data_efficiency": _WHAT_IS_TRAINED,
    "curriculum_learning": _WHAT_IS_TRAINED,
    "compression_training": "the weights that are trained are those that are served",
    "elasticity": "the number of ranks is training.num_workers",
    "hybrid_engine": "engine.backend generates",
    "tensor_parallel": _SHARED_DATA,
    "pipeline": _SHARED_DATA,
    "sequence_parallel_size": _SHARED_DATA,
    "zero_force_ds_cpu_optimizer": "torch's AdamW steps offloaded state, so that nothing has to be compiled",
    "activation_checkpointing": "training.activation_checkpointing recomputes activations, by transformers' means",
}
"""Keys that a JSON must not set, and what is in their place."""


@dataclass
class DeepSpeedConfig:
    zero_stage: int = doc(
        2, "What ZeRO shards over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."
    )
    offload_optimizer: bool = doc(
        False, "Keep the optimizer's state, and step, in the host's memory; zero_stage >= 1, on cuda."
    )
    offload_param: bool = doc(False, "Keep weights in the host's memory until they are used; zero_stage 3, on cuda.")
    config: str | None = doc(
        None,
        "JSON in DeepSpeed's format with further settings, such as bucket sizes. Batch sizes, accumulation, optimizer, schedule, clipping "
        "and precision are ours: a file that sets them to other values is refused.",
    )

    def __post_init__(self) -> None:
        stage = self.zero_stage
        require(0 <= stage <= 3, "training.deepspeed.zero_stage", "0, 1, 2 or 3", stage)
        for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
            if getattr(self, key):
                require(stage >= least, "training.deepspeed.zero_stage", f">= {least} with {key}=true", stage)


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
    settled = {
        "gradient_clipping": (max_grad_norm, f"training.max_grad_norm is {max_grad_norm:g}"),
        "communication_data_type": ("fp32", "gradients are reduced in float32"),
        "zero_allow_untested_optimizer": (True, "torch's AdamW steps"),
    }
    kept = {}
    for key, value in content.items():
        if key in _OURS:
            _require(value == _AUTO or _is_off(value), key, value, _OURS[key])
        elif key in settled:
            ours, reason = settled[key]
            _require(value in (_AUTO, ours), key, value, reason)
        else:
            kept[key] = value
    if "zero_optimization" in kept:
        kept["zero_optimization"] = _zero_section(kept["zero_optimization"], config.zero_stage)
    return kept


def _zero_section(zero: Any, zero_stage: int) -> dict[str, Any]:
    """The section without what is left to us."""
    name = "zero_optimization"
    _require(isinstance(zero, dict), name, zero, "it is an object")
    kept = {key: value for key, value in zero.items() if value != _AUTO}
    stage = kept.pop("stage", zero_stage)
    _require(stage == zero_stage, f"{name}.stage", stage, f"training.deepspeed.zero_stage is {zero_stage}")
    overlap = kept.get("overlap_comm", False)
    reason = "gradients accumulated until a mini-batch is in overlap with communication at stage 2 only"
    _require(not overlap or zero_stage == 2, f"{name}.overlap_comm", overlap, reason)
    for part, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = kept[part].get("device", "none") if isinstance(kept.get(part), dict) else "none"
        reason = f"it needs training.deepspeed.zero_stage >= {least}"
        _require(device == "none" or zero_stage >= least, f"{name}.{part}.device", device, reason)
    return kept


def _require(is_fine: bool, key: str, value: Any, reason: str) -> None:
    if not is_fine:
        raise ConfigError(
            f'training.deepspeed.config must not set {key} to {json.dumps(value)}: {reason}; take it out, or set it to "auto"'
        )


def _is_off(value: Any) -> bool:
    return value is False or (isinstance(value, dict) and value.get("enabled") is False)
