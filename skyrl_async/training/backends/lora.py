"""LoRA (arXiv 2106.09685): adapters of low rank train beside frozen weights, with any backend.

    h = W x + (alpha / rank) B A x        W: (out, in), as loaded; A: (rank, in), drawn; B: (out, rank), 0 before the first step

Engines and exports get one weight W + (alpha / rank) B A under the name of W, or A and B alone. Checkpoints get the adapters and a checksum
of the frozen weights. Knows neither how the backend shards nor what is trained.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_async.config.schema.policy import LoraConfig, LoraInit
from skyrl_async.errors import PolicyError
from skyrl_async.training.export.manifest import AdapterDescription
from skyrl_async.weights.formats import tensor_names

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ADAPTER = "default"
_BASE = ".base_layer."
_A = f".lora_A.{_ADAPTER}.weight"
_B = f".lora_B.{_ADAPTER}.weight"


class LoraAdapters:
    """The adapters of a model: what they change about its parameters' names and values, and what a checkpoint says of them.

    Args:
        model: gets the adapters, in place; nothing else trains afterwards.
        settings: which layers are adapted, and how.
        base: directory of the model's weights.
        seed: of the drawn values.

    Raises:
        PolicyError: no layer has a name that the settings ask for, or is linear.
    """

    def __init__(self, model: nn.Module, settings: LoraConfig, *, base: str, seed: int) -> None:
        checksum = weights_checksum(model)
        self._layers = add_adapters(model, settings, seed=seed)
        self._scaling = settings.alpha / settings.rank
        self.description = AdapterDescription(
            rank=settings.rank, alpha=settings.alpha, modules=tuple(self._layers), base=base, base_checksum=checksum
        )
        """Written with each checkpoint, and compared with that of a checkpoint to load."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        logger.info("adapters of rank %d on %d layers: %d parameters", settings.rank, len(self._layers), trained)

    @contextlib.contextmanager
    def left_out(self, policy: T) -> Iterator[T]:
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

    def merged_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Every parameter's full shape by Hugging Face name, with the adapters merged."""
        return {name.replace(_BASE, "."): s for name, s in shapes.items() if not name.endswith((_A, _B))}

    def merged(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Turn full parameters with adapters into those of an equal model without."""
        return merged(parameters, scaling=self._scaling)

    def renamed(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Give A and B of every adapted layer peft's names."""
        for name, tensor in trained:
            is_a = name.endswith(_A)
            yield tensor_names(name.removesuffix(_A if is_a else _B))[0 if is_a else 1], tensor


def add_adapters(model: nn.Module, settings: LoraConfig, *, seed: int) -> dict[str, LoraLayer]:
    """Put adapters into ``model``, in place; nothing else trains afterwards. Every rank draws the same values.

    Returns the adapted layers by their previous names. Raises ``PolicyError`` if no layer has a name that the settings ask for, or
    is linear.
    """
    names = adapted_layers(model, settings)
    if not settings.named_targets:
        _warn_of_stacked_layers(model)
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
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linear = [name for name, m in layers.items() if m is not head]
    if not linear:
        raise PolicyError(
            f"policy.lora.rank must be 0 for a {type(model).__name__}, got {settings.rank}: it has no linear layer (torch.nn.Linear) that "
            "could get an adapter"
        )
    targets = settings.named_targets
    # Excluding the head, as other trainers need to, is no mistake.
    for key, names, known in (("target", targets, linear), ("exclude", settings.exclude_modules, list(layers))):
        if missing := [end for end in names if not any(_is_called(name, end) for name in known)]:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise PolicyError(
                f"policy.lora.{key}_modules must name linear layers of the policy ({ends}), got {missing[0]}"
            )
    chosen = [name for name in linear if not targets or any(_is_called(name, target) for target in targets)]
    kept = [name for name in chosen if not any(_is_called(name, excluded) for excluded in settings.exclude_modules)]
    if not kept:
        raise PolicyError(f"policy.lora.exclude_modules must leave a layer that trains, got {settings.exclude_modules}")
    return kept


def _warn_of_stacked_layers(model: nn.Module) -> None:
    """Name what holds the matrices of several layers, as of experts, and is no linear layer."""
    sizes = {
        f"{name}.{key}": parameter.numel()
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and not isinstance(module, nn.Conv1d)
    }
    if sizes:
        share = sum(sizes.values()) / sum(parameter.numel() for parameter in model.parameters())
        logger.warning(
            "policy.lora.target_modules=[all-linear]: %d parameters that each hold the matrices of several experts get no adapter and "
            "do not train, such as %s; they are %.0f %% of the model",
            len(sizes),
            next(iter(sizes)),
            100 * share,
        )


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
