"""The policy's adapter in an engine: one slot, in which every publish replaces the adapter before.

    boot ──open──> an adapter that adds nothing ──load──> the published one ──load──> the next ...

vLLM keys its prefix cache and its memory for adapters by name and number. Both stay the same, so that frozen requests continue with the new
adapter and no old one is left. The engine must be paused while an adapter loads, and its prefix cache dropped after. vLLM is imported in
functions. An engine without vLLM merges adapters into its weights instead.
"""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_async.errors import PublishError
from skyrl_async.inference.policy_files import read_manifest
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.formats import CONFIG_FILE, WEIGHTS_FILE, adapted_layers, peft_config, tensor_names

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NEVER_ADAPTED = {"lm_head", "embed_tokens"}
_ID = 1
_NAME = "policy"
_IN_PLACE = "the one that was published last"
"""Not a path: an engine without the adapter fails instead of sampling without it."""


def supported_rank(rank: int) -> int:
    """The smallest rank vLLM supports that is at least ``rank``; the rest is zeros."""
    from vllm.config.lora import MaxLoRARanks

    return min(served for served in get_args(MaxLoRARanks) if served >= rank)


def adapted_modules(policy_dir: str, targets: Collection[str]) -> list[str] | None:
    """Last parts of the names of the layers with adapters: vLLM computes adapters of these alone, even of zeros.

    Without ``targets``: all matrices but embeddings and the output projection. None (all that vLLM supports) if the directory does not list
    matrices.
    """
    matrices = [name for name, (_, shape) in read_manifest(policy_dir).items() if len(shape) == 2]
    linear = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices} - _NEVER_ADAPTED
    wanted = {target.rpartition(".")[2] for target in targets} or linear
    return sorted(linear & wanted) or None


class AdapterSlot:
    """The adapter slot of an engine that was booted with adapters of ``rank``."""

    def __init__(self, llm: "AsyncLLM", rank: int) -> None:
        from vllm.lora.request import LoRARequest

        self._llm = llm
        self._rank = rank
        self._known: frozenset[str] = frozenset()
        """Names of adapter tensors for which vLLM has layers."""
        self._received: tempfile.TemporaryDirectory[str] | None = None
        self.lora_request = LoRARequest(_NAME, _ID, _IN_PLACE)
        """Sent with every request from the first on: a request frozen across a publish keeps it."""

    async def open(self) -> None:
        """Add an adapter of zeros."""
        await self._llm.collective_rpc("put_blank_adapter", args=(_NAME, _ID, self._rank))

    async def layers_without_adapters(self, update: WeightUpdate) -> list[str]:
        """Layers for which vLLM has no adapters, and which it would silently leave out. The workers are asked once."""
        if self._known.issuperset(update.manifest):
            return []
        names = list(update.manifest)
        found: list[list[str]] = await self._llm.collective_rpc("layers_without_adapters", args=(names,))
        left_out = sorted(set().union(*found))
        if not left_out:
            self._known = frozenset(names)
        return left_out

    def as_directory(self, update: WeightUpdate, path: str, *, base: str) -> str:
        """Put a received update, with the tensors at ``path``, into a directory that vLLM loads, in place of the one before.

        Returns the path of the tensors there.
        """
        assert update.adapter is not None
        if self._received is None:
            self._received = tempfile.TemporaryDirectory(prefix="skyrl_async-adapter-")
        weights, config = (Path(self._received.name) / name for name in (WEIGHTS_FILE, CONFIG_FILE))
        weights.unlink(missing_ok=True)
        weights.symlink_to(path)
        config.write_text(peft_config(update.adapter, adapted_layers(update.manifest), base=base))
        return str(weights)

    async def load(self, update: WeightUpdate) -> None:
        """Replace the adapter on every worker."""
        from vllm.lora.request import LoRARequest

        directory = str(Path(update.path).parent)
        if not await self._llm.add_lora(LoRARequest(_NAME, _ID, directory, load_inplace=True)):
            raise PublishError(f"vLLM did not load the adapter in {directory}")

    def close(self) -> None:
        """Remove the directory of received updates. Idempotent."""
        if self._received is not None:
            self._received.cleanup()
            self._received = None


class MergedAdapters:
    """Replaces each adapted weight W by W + (alpha / rank) B A, in float32, as training merges them.

    Args:
        parameters: the model's, by Hugging Face name; written in place.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._base_weights: dict[str, Tensor] = {}
        """Adapted weights without any adapter."""

    @torch.no_grad()
    def load(self, update: WeightUpdate) -> None:
        """Merge a checked adapter in the place of the one before."""
        assert update.adapter is not None
        tensors = load_file(update.path)
        for layer in adapted_layers(update.manifest):
            weight = self._parameters[f"{layer}.weight"]
            base = self._base_weights.setdefault(layer, weight.clone())
            a, b = (tensors[name].to(weight.dtype) for name in tensor_names(layer))
            weight.copy_(base + update.adapter.scaling * (b @ a))
