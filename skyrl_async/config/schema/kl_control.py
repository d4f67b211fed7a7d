"""The coefficient of the divergence in the reward, under ``trainer.algorithm``; names are SkyRL's.

Flows in: nothing. Flows out: a dataclass for the schema.
"""

from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.fields import doc, require


class KlControl(Enum):
    fixed = "fixed"
    adaptive = "adaptive"


@dataclass
class KlCtrlConfig:
    type: KlControl = doc(
        KlControl.fixed, "adaptive moves the coefficient after each step, so that the divergence comes to kl_target."
    )
    kl_target: float = doc(0.1, "Mean divergence per token to come to, nats.")
    horizon: int = doc(
        10_000,
        "Samples, not steps, over which the coefficient moves by at most a fifth; the larger, the more slowly it follows. With "
        "type=adaptive at least those of a step: policy_mini_batch_size * n_samples_per_prompt.",
    )

    def __post_init__(self) -> None:
        require(self.kl_target > 0, "trainer.algorithm.kl_ctrl.kl_target", "> 0", self.kl_target)
        require(self.horizon >= 1, "trainer.algorithm.kl_ctrl.horizon", ">= 1", self.horizon)
