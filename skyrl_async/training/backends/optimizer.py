"""AdamW and its learning-rate schedule.

The schedule is a pure function of the number of completed steps. A checkpoint holds that number only: a resumed run follows its own
configuration.
"""

import math
from collections.abc import Sequence

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


class WarmupSchedule:
    """Sets an optimizer's learning rate by ``lr_factor``.

    Args:
        optimizer: at no completed step.
        settings: the schedule, and the peak.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self.continue_after(0)

    def continue_after(self, num_steps: int) -> None:
        """Set the learning rate of the step after ``num_steps``."""
        settings = self._settings
        self.num_steps = num_steps
        factor = lr_factor(
            num_steps,
            schedule=settings.lr_schedule,
            num_warmup_steps=settings.num_warmup_steps,
            num_steps=settings.num_steps,
        )
        self.lr = settings.lr * factor
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr


def make_optimizer(parameters: Sequence[torch.nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over ``parameters``; ``WarmupSchedule`` sets its learning rate."""
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
