"""AdamW and its learning-rate schedule.

The schedule is a pure function of the number of completed steps. A checkpoint holds that number only: a resumed run follows its own
configuration.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skyrl_async.errors import ConfigError
from skyrl_async.training.backends.settings import TrainingSettings


def lr_factor(num_completed_steps: int, *, schedule: str, num_warmup_steps: int, num_steps: int | None) -> float:
    """Learning rate of the next step as a fraction of the peak, in [0, 1].

    Warm-up rises linearly from above 0 and reaches the peak at its last step. ``linear`` and ``cosine`` then fall to 0 at
    ``num_steps``.

    Raises:
        ConfigError: an unknown schedule.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"training.lr_schedule must be one of constant, cosine, linear, got {schedule!r}")
    if num_completed_steps < num_warmup_steps:
        return (num_completed_steps + 1) / num_warmup_steps
    if schedule == "constant" or num_steps is None:
        return 1.0
    progress = (num_completed_steps - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
    progress = min(progress, 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class WarmupSchedule(torch.optim.lr_scheduler.LambdaLR):
    """``lr_factor`` on an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> None:
        super().__init__(
            optimizer,
            lambda num_completed_steps: lr_factor(
                num_completed_steps,
                schedule=settings.lr_schedule,
                num_warmup_steps=settings.num_warmup_steps,
                num_steps=settings.num_steps,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of completed steps."""
        return {"num_completed_steps": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after that many steps, at this configuration's learning rate."""
        self.last_epoch = int(state_dict["num_completed_steps"])
        self._last_lr = [
            base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


@contextlib.contextmanager
def keeping_hyper_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep learning rate, weight decay and the like while the block loads the optimizer's state."""
    kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def make_optimizer(parameters: Sequence[torch.nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over ``parameters``."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
