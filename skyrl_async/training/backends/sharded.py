"""What FSDP2 and DeepSpeed have in common as ``TrainingBackend``s: names and shapes of parameters, AdamW and its learning rate, and saving.

The learning rate is a pure function of the number of completed steps. A checkpoint holds that number only: a resumed run follows its own
configuration.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_async.errors import ConfigError
from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.state_files import write_state


class ShardedBackend(ABC):
    """A ``TrainingBackend`` over all ranks of the default process group but for gradients. ``close`` leaves the group."""

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._model: nn.Module
        self._parameters: dict[str, nn.Parameter]
        self._trained: dict[str, nn.Parameter]
        self._shapes: dict[str, tuple[int, ...]]
        self._optimizer: torch.optim.Optimizer
        self.version = 0
        """Optimizer steps made on the weights, those before a checkpoint included."""
        self.lr = 0.0
        """Learning rate of the next step."""

    def _take(self, model: nn.Module) -> None:
        """Use the parameters that ``model`` has now, and make AdamW (arXiv 1711.05101) over those that train, at learning rate 0."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if self._settings.trains:
            self._optimizer = torch.optim.AdamW(
                list(self._trained.values()),
                lr=0.0,
                betas=(self._settings.adam_beta1, self._settings.adam_beta2),
                weight_decay=self._settings.weight_decay,
                fused=True,
            )

    def _continue_after(self, num_steps: int) -> None:
        """Set the version, and the learning rate of the step after ``num_steps``."""
        self.version = num_steps
        self.lr = self._settings.lr * lr_factor(num_steps, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by Hugging Face name."""
        return dict(self._shapes)

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter and persistent buffer under its Hugging Face name, in a fixed order. Collective."""
        yield from self._full(self._parameters)
        yield from persistent_buffers(self._model)

    def iter_trained_params(self) -> Iterator[tuple[str, Tensor]]:
        """Like ``iter_full_params``, for the parameters that train."""
        yield from self._full(self._trained)

    @abstractmethod
    def _full(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other. Collective."""

    def save(self, directory: Path) -> None:
        """Write model, optimizer and completed steps under ``directory``, without frozen parameters. Raises as ``write_state``."""
        write_state(directory, self._state(), self.version)

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Model and optimizer as torch's ``get_optimizer_state_dict`` returns them, each parameter once. Collective."""

    def close(self) -> None:
        """Leave the process group."""
        rank_process.leave()


def lr_factor(num_completed_steps: int, settings: TrainingSettings) -> float:
    """Learning rate of the next step as a fraction of the peak, in [0, 1].

    Warm-up rises linearly from above 0 and reaches the peak at its last step. ``linear`` and ``cosine`` then fall to 0 at
    ``num_steps``.

    Raises:
        ConfigError: an unknown schedule.
    """
    schedule, num_warmup_steps, num_steps = settings.lr_schedule, settings.num_warmup_steps, settings.num_steps
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"training.lr_schedule must be one of constant, cosine, linear, got {schedule!r}")
    if num_completed_steps < num_warmup_steps:
        return (num_completed_steps + 1) / num_warmup_steps
    if schedule == "constant" or num_steps is None:
        return 1.0
    progress = (num_completed_steps - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
    progress = min(progress, 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint holds beside the parameters; equal on every rank."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer.detach()
