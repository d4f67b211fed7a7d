"""LoRA (arXiv 2106.09685) on any ``TrainingBackend``: adapters of low rank train beside frozen weights.

    h = W x + (alpha / rank) B A x        W: (out, in), as loaded; A: (rank, in), drawn; B: (out, rank), 0 before the first step

Engines and exports get one weight W + (alpha / rank) B A under the name of W, or A and B alone. Checkpoints get the adapters and a checksum
of the frozen weights. Knows neither how the backend shards nor what is trained.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import peft
import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_async.config.schema.policy import LoraConfig, LoraInit
from skyrl_async.errors import PolicyError
from skyrl_async.training.export.manifest import AdapterDescription, check_adapter
from skyrl_async.training.protocol import TrainingBackend
from skyrl_async.weights.formats import tensor_names

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ADAPTER = "default"
_BASE = ".base_layer."
_A = f".lora_A.{_ADAPTER}.weight"
_B = f".lora_B.{_ADAPTER}.weight"


class LoraBackend:
    """Adds adapters to the model, has ``inner`` train them alone, and merges the weights that it gathers."""

    def __init__(self, inner: TrainingBackend, settings: LoraConfig, *, base: str, seed: int) -> None:
        self._inner = inner
        self._settings = settings
        self._base = base
        self._seed = seed
        self._layers: dict[str, LoraLayer] = {}
        self._description: AdapterDescription

    def __getattr__(self, name: str) -> Any:
        """What adapters change nothing about: gradients, steps, the learning rate, the version, the end."""
        return getattr(self._inner, name)

    def build(self, model: nn.Module) -> nn.Module:
        """As ``TrainingBackend``. Raises ``PolicyError`` if no layer has a name that the settings ask for."""
        checksum = weights_checksum(model)
        self._layers = add_adapters(model, self._settings, seed=self._seed)
        self._description = AdapterDescription(
            rank=self._settings.rank,
            alpha=self._settings.alpha,
            modules=tuple(self._layers),
            base=self._base,
            base_checksum=checksum,
        )
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        logger.info("adapters of rank %d on %d layers: %d parameters", self._settings.rank, len(self._layers), trained)
        return self._inner.build(model)

    @contextlib.contextmanager
    def without_adapters(self, policy: T) -> Iterator[T]:
        """In the block, ``policy`` (anything that calls the model) is the initial policy.

        The adapters run, times zero: ranks make the same collective calls.
        """
        for layer in self._layers.values():
            layer.set_scale(_ADAPTER, 0.0)
        try:
            yield policy
        finally:
            for layer in self._layers.values():
                layer.set_scale(_ADAPTER, 1.0)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by Hugging Face name, with the adapters merged."""
        shapes = self._inner.parameter_shapes()
        return {name.replace(_BASE, "."): s for name, s in shapes.items() if not name.endswith((_A, _B))}

    def iter_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter under its Hugging Face name, adapters merged, in a fixed order. Collective."""
        return merged(self._inner.iter_full_params(), scaling=self._settings.alpha / self._settings.rank)

    def iter_trained_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of every adapted layer under peft's names, in a fixed order. Collective."""
        for name, tensor in self._inner.iter_trained_params():
            is_a = name.endswith(_A)
            yield tensor_names(name.removesuffix(_A if is_a else _B))[0 if is_a else 1], tensor

    def save(self, directory: Path) -> None:
        """Write adapters, optimizer and scheduler, and ``adapter.json``. The frozen weights are not written."""
        self._inner.save(directory)
        if dist.get_rank() == 0:
            self._description.write(directory)

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Raises ``CheckpointError`` if it belongs to other adapters or other weights."""
        check_adapter(directory, self._description)
        self._inner.load(directory)


def add_adapters(model: nn.Module, settings: LoraConfig, *, seed: int) -> dict[str, LoraLayer]:
    """Put adapters into ``model``, in place; nothing else trains afterwards. Every rank draws the same values.

    Returns the adapted layers by their previous names. Raises ``PolicyError`` if no layer has a name that the settings ask for.
    """
    names = adapted_layers(model, settings)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=names,
        init_lora_weights="gaussian" if settings.init_method is LoraInit.gaussian else True,
    )
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator only: dropout on GPUs differs from rank to rank.
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    if settings.dropout:
        model.register_forward_pre_hook(_drop_only_with_gradients)
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def adapted_layers(model: nn.Module, settings: LoraConfig) -> list[str]:
    """Names of the linear layers that get an adapter. Never the output projection: it may share its weight with the embedding."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    targets = settings.named_targets
    missing = [target for target in targets if not any(_is_called(name, target) for name in linear)]
    if missing:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise PolicyError(
            f"policy.lora.target_modules must name linear layers of the policy ({known}), got {missing[0]}"
        )
    chosen = [name for name in linear if not targets or any(_is_called(name, target) for target in targets)]
    kept = [name for name in chosen if not any(_is_called(name, excluded) for excluded in settings.exclude_modules)]
    if not kept:
        raise PolicyError(f"policy.lora.exclude_modules must leave a layer that trains, got {settings.exclude_modules}")
    return kept


def _is_called(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _drop_only_with_gradients(model: nn.Module, _: tuple[Any, ...]) -> None:
    """Turn dropout off for forwards without gradients: log-probs are the sampling policy's, and draw no random numbers."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train(torch.is_grad_enabled())


@torch.no_grad()
def merged(parameters: Iterable[tuple[str, Tensor]], *, scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Turn full parameters of a model with adapters into those of an equal model without.

    Within an adapted layer, B must come last, as in peft's layers.
    """
    weights: dict[str, Tensor] = {}
    downs: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if name.endswith(f"{_BASE}weight"):
            weights[name.removesuffix(f"{_BASE}weight")] = tensor
        elif name.endswith(_A):
            downs[name.removesuffix(_A)] = tensor
        elif name.endswith(_B):
            layer = name.removesuffix(_B)
            yield f"{layer}.weight", weights.pop(layer) + scaling * (tensor @ downs.pop(layer))
        else:
            yield name.replace(_BASE, "."), tensor


@torch.no_grad()
def weights_checksum(model: nn.Module) -> str:
    """A checksum of a model's float32 weights, from the sums of their bits as integers: no order of adding changes those."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        bits = parameter.detach().view(torch.int32).sum(dtype=torch.int64).item()
        digest.update(f"{name} {tuple(parameter.shape)} {bits}\n".encode())
    return digest.hexdigest()
