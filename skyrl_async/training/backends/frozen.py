"""``TrainingBackend`` of a model that does not train: a reference, or a copy of the policy that loads published weights.

The model is sharded like the trained one, so that equal weights give equal log-probs. There is neither an optimizer nor gradients.
"""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Never

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_async.errors import TrainingError
from skyrl_async.training.backends import process_group
from skyrl_async.training.backends.fsdp import shard, sharded_modules
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.types import WeightUpdate


class FrozenBackend:
    """Forward passes only. Methods that would train or save the model raise ``TrainingError``."""

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._model: nn.Module
        self._parameters: dict[str, nn.Parameter]
        self._version = 0

    def build(self, model: nn.Module) -> nn.Module:
        """Shard the model; no optimizer is made."""
        model.requires_grad_(False)
        shard(model, self._device, mixed_precision=self._settings.mixed_precision)
        self._model = model
        self._parameters = dict(model.named_parameters())
        return model

    @property
    def version(self) -> int:
        """Version of the loaded weights; 0 before any were."""
        return self._version

    @property
    def lr(self) -> float:
        """Always 0."""
        return 0.0

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by those of a published version.

        Raises:
            TrainingError: a file is gone, or the weights are not of this model; the previous version stays.
        """
        with contextlib.ExitStack() as stack:
            try:
                files = [stack.enter_context(safe_open(chunk["path"], framework="pt")) for chunk in update.chunks]
            except (OSError, SafetensorError) as error:
                raise TrainingError(f"the weights of version {update.version} cannot be read: {error}") from error
            file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            self._check(update, file_of.keys())
            for module in sharded_modules(self._model):
                module.reshard()
            for name, parameter in self._parameters.items():
                self._replace(parameter, file_of[name].get_tensor(name))
        self._version = update.version

    def _check(self, update: WeightUpdate, names: Collection[str]) -> None:
        """Raise ``TrainingError`` unless the update holds every parameter in its shape."""
        for name, shape in self.parameter_shapes().items():
            _, found = update.manifest.get(name, ("", None))
            if found != shape or name not in names:
                raise TrainingError(
                    f"version {update.version} is of another model: {name} has shape {found} there and {shape} here"
                )

    @torch.no_grad()
    def _replace(self, parameter: nn.Parameter, full: Tensor) -> None:
        assert isinstance(parameter, DTensor)
        full = full.to(device=self._device, dtype=parameter.dtype)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by Hugging Face name."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter under its Hugging Face name, in a fixed order. Collective."""
        for name, parameter in self._parameters.items():
            assert isinstance(parameter, DTensor)
            yield name, parameter.detach().full_tensor()

    def iter_trained_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing."""
        return iter(())

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Raise ``TrainingError``."""
        self._refuse("take gradients")

    def step(self, denominator: float) -> float:
        """Raise ``TrainingError``."""
        self._refuse("step")

    def save(self, directory: Path) -> None:
        """Raise ``TrainingError``."""
        self._refuse("be saved")

    def load(self, directory: Path) -> None:
        """Raise ``TrainingError``."""
        self._refuse("load a checkpoint")

    def close(self) -> None:
        """Leave the process group."""
        process_group.leave()

    def _refuse(self, action: str) -> Never:
        raise TrainingError(f"a model that does not train cannot {action} (rank {dist.get_rank()})")
