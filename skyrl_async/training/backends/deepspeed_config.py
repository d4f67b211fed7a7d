"""What a DeepSpeed engine is made with: settings in, its configuration as a dictionary out. Knows neither torch nor DeepSpeed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """What an engine is made with."""

    zero_stage: int
    """0 shards nothing; 1 the optimizer's state; 2 gradients too; 3 weights too."""
    offload_optimizer: bool = False
    """The optimizer's state and step are in the host's memory; stage 1 and above."""
    offload_param: bool = False
    """Weights are in the host's memory until they are used; stage 3."""
    user_config: Mapping[str, Any] | None = None
    """Further keys of DeepSpeed's own, none of them below."""


def engine_config(settings: DeepSpeedSettings, *, num_ranks: int) -> dict[str, Any]:
    """What ``deepspeed.initialize`` takes. Sizes of batches are formal: a step alone ends an accumulation."""
    config = dict(settings.user_config or {})
    zero: dict[str, Any] = {"overlap_comm": False} | config.get("zero_optimization", {})
    zero["stage"] = settings.zero_stage
    if settings.offload_optimizer:
        zero.setdefault("offload_optimizer", {"device": "cpu", "pin_memory": True})
    if settings.offload_param:
        zero.setdefault("offload_param", {"device": "cpu", "pin_memory": True})
    ours = {
        "zero_optimization": zero,
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # whoever steps clips, by what it is told then
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW steps offloaded state too, and nothing has to be compiled
    }
    return {"steps_per_print": 2**31 - 1} | config | ours
