"""A model and its optimizer in one rank's process: names and shapes of parameters, adapters, AdamW and its learning rate, and saving.

FSDP2 and DeepSpeed shard the model and take the steps. The learning rate is a pure function of the number of completed steps. A checkpoint
holds that number only: a resumed run follows its own configuration.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyrl_async.training import rank_process
from skyrl_async.training.backends.file_names import FileNames
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.state_files import persistent_buffers, write_state
from skyrl_async.training.export.manifest import check_adapter

if TYPE_CHECKING:
    from skyrl_async.training.backends.lora import LoraAdapters


class ShardedBackend(ABC):
    """Shards over all ranks of the default process group. Every method is collective; ``close`` leaves the group."""

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._model: nn.Module
        self._parameters: dict[str, nn.Parameter]
        self._trained: dict[str, nn.Parameter]
        self._shapes: dict[str, tuple[int, ...]]
        self._file_names: FileNames
        self._optimizer: torch.optim.Optimizer
        self.adapters: LoraAdapters | None = None
        """What trains in place of the weights; None: these do."""
        self.version = 0
        """Optimizer steps made on the weights, those before a checkpoint included."""
        self.lr = 0.0
        """Learning rate of the next step."""

    def build(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` (on CPU, float32), with adapters where these train, and make its optimizer and schedule.

        Returns the module to call for a forward.
        """
        settings = self._settings
        self._file_names = FileNames(model)
        if settings.trains and not settings.is_critic and settings.published_adapter is None:
            self._file_names.check_all_are_in(Path(settings.policy_path))
        if settings.lora is not None:
            from skyrl_async.training.backends.lora import LoraAdapters

            self.adapters = LoraAdapters(model, settings.lora, base=settings.policy_path, seed=settings.seed)
        if settings.trains and settings.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        built = self._build(model)
        if settings.trains:
            self._continue_after(0)
        return built

    @abstractmethod
    def _build(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` and ``_take`` it; returns the module to call for a forward."""

    @abstractmethod
    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of ``loss``, a sum over this rank's tokens; summed, not averaged, over the ranks."""

    @abstractmethod
    def step(self, denominator: float, lr_scale: float = 1.0) -> float:
        """Divide gradients by ``denominator``, clip, step, clear; returns the norm before clipping. As ``Policy.step``.

        Raises:
            TrainingError: the norm is not finite; nothing is applied, and the gradients are cleared.
        """

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

    def skip_to(self, version: int) -> None:
        """Count the steps before ``version`` as taken: the end of the data left no groups for them. Changes the learning rate alone."""
        if self.version < version:
            self._continue_after(version)

    def _continue_after(self, num_steps: int) -> None:
        """Set the version, and the learning rate of the step after ``num_steps``."""
        self.version = num_steps
        self.lr = self._settings.lr * lr_factor(num_steps, self._settings)
        self._scale_lr(1.0)

    def _scale_lr(self, scale: float) -> None:
        """Have the next step take ``scale`` times the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr * scale

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by the name that it has in the model's files, with adapters merged."""
        shapes = self._shapes if self.adapters is None else self.adapters.merged_shapes(self._shapes)
        return self._file_names.shapes(shapes)

    def iter_full_params(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter in ``dtype``, and persistent buffer in its own, as in the model's files, adapters merged, in a fixed
        order.
        """
        parameters = self._full(self._parameters)
        if self.adapters is not None:
            parameters = self.adapters.merged(parameters)
        return self._file_names.renamed(chain(_cast(parameters, dtype), persistent_buffers(self._model)))

    def iter_trained_params(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Like ``iter_full_params``, for the parameters that train; adapters have peft's names (``weights.formats``)."""
        trained = _cast(self._full(self._trained), dtype)
        return trained if self.adapters is None else self.adapters.renamed(trained)

    @abstractmethod
    def _full(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Gather one parameter after the other."""

    def save(self, directory: Path) -> None:
        """Write model, optimizer and completed steps under ``directory``, without frozen parameters. Raises as ``write_state``."""
        write_state(directory, self._state(), self.version)
        if self.adapters is not None and dist.get_rank() == 0:
            self.adapters.description.write(directory)

    def load(self, directory: Path) -> None:
        """Restore what ``save`` of either backend wrote, on any number of ranks, however it shards. Hyper-parameters stay this run's.

        Raises:
            CheckpointError: the checkpoint belongs to other adapters or other weights.
        """
        check_adapter(directory, None if self.adapters is None else self.adapters.description)
        self._load(directory)

    @abstractmethod
    def _load(self, directory: Path) -> None:
        """Restore model, optimizer and completed steps."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Model and optimizer as torch's ``get_optimizer_state_dict`` returns them, each parameter once."""

    def close(self) -> None:
        """Leave the process group."""
        rank_process.leave()


def _cast(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in parameters:
        yield name, tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def lr_factor(num_completed_steps: int, settings: TrainingSettings) -> float:
    """Learning rate of the next step as a fraction of the peak, in [0, 1].

    Warm-up rises linearly from above 0 and reaches the peak at its last step. ``linear`` and ``cosine`` then fall to 0 at
    ``num_steps``.
    """
    schedule, num_warmup_steps, num_steps = settings.lr_schedule, settings.num_warmup_steps, settings.num_steps
    if num_completed_steps < num_warmup_steps:
        return (num_completed_steps + 1) / num_warmup_steps
    if schedule == "constant" or num_steps is None:
        return 1.0
    progress = min(1.0, (num_completed_steps - num_warmup_steps) / max(num_steps - num_warmup_steps, 1))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
