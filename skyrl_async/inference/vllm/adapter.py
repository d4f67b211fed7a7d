"""The policy's adapter in an engine: which updates can be one, and the one slot that every publish replaces in place.

    boot ──open──> an adapter that adds nothing ──load──> the published one ──load──> the next ...

vLLM keys its prefix cache and its memory for adapters by name and number. Both stay the same, so that frozen requests continue with the new
adapter and no old one is left. The engine must be paused while an adapter loads, and its prefix cache dropped after. vLLM is imported in
functions. An engine without vLLM merges adapters into its weights instead.
"""

import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_async.errors import PublishError
from skyrl_async.inference.policy_files import UpdateValidator, chunk_manifest, read_manifest, require_same
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

    def as_directory(self, update: WeightUpdate, path: str, *, base: str) -> dict[str, str]:
        """The chunk of a received update, with the tensors at ``path``, as a directory that vLLM loads. It replaces the one before."""
        assert update.adapter is not None
        if self._received is None:
            self._received = tempfile.TemporaryDirectory(prefix="skyrl_async-adapter-")
        weights, config = (Path(self._received.name) / name for name in (WEIGHTS_FILE, CONFIG_FILE))
        weights.unlink(missing_ok=True)
        weights.symlink_to(path)
        config.write_text(peft_config(update.adapter, adapted_layers(update.manifest), base=base))
        return {"path": str(weights), "config_path": str(config)}

    async def load(self, update: WeightUpdate) -> None:
        """Replace the adapter on every worker."""
        from vllm.lora.request import LoRARequest

        (chunk,) = update.chunks
        directory = str(Path(chunk["path"]).parent)
        if not await self._llm.add_lora(LoRARequest(_NAME, _ID, directory, load_inplace=True)):
            raise PublishError(f"vLLM did not load the adapter in {directory}")

    def close(self) -> None:
        """Remove the directory of received updates. Idempotent."""
        if self._received is not None:
            self._received.cleanup()
            self._received = None


class AdapterValidator:
    """Checks that an update can be an adapter of the policy, before anything is changed."""

    def __init__(self, policy_dir: str, rank: int) -> None:
        self._policy_dir = policy_dir
        self._shapes = {name: shape for name, (_, shape) in read_manifest(policy_dir).items()}
        self._rank = rank
        self._dtypes: dict[str, str] | None = None

    def check(self, update: WeightUpdate) -> None:
        """Raise ``PublishError`` unless A and B fit the policy's weights and the files contain them."""
        if update.adapter is None:
            raise PublishError(
                f"weight update {update.version} holds all weights, and this engine takes adapters of rank {self._rank} beside those "
                "it booted with"
            )
        shapes = {name: shape for name, (_, shape) in update.manifest.items()}
        require_same(f"the manifest, against {self._policy_dir},", shapes, self._expected(update), update.version)
        dtypes = {name: dtype for name, (dtype, _) in update.manifest.items()}
        require_same("the manifest, against the first update,", dtypes, self._dtypes or dtypes, update.version)
        (chunk,) = update.chunks
        require_same("the file", chunk_manifest(chunk, update.version), update.manifest, update.version)
        sent = {"r": update.adapter.rank, "lora_alpha": update.adapter.alpha}
        require_same(chunk["config_path"], _described(chunk, update), sent, update.version)

    def accept(self, update: WeightUpdate) -> None:
        """Require the layers and dtypes of this update of later ones."""
        self._dtypes = {name: dtype for name, (dtype, _) in update.manifest.items()}

    def _expected(self, update: WeightUpdate) -> dict[str, tuple[int, ...]]:
        try:
            layers = adapted_layers(update.manifest)
        except ValueError as error:
            raise PublishError(f"weight update {update.version}: {error}") from error
        expected: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            a, b = tensor_names(layer)
            num_out, num_in = self._shape_of(layer, update)
            expected |= {a: (self._rank, num_in), b: (num_out, self._rank)}
        return expected

    def _shape_of(self, layer: str, update: WeightUpdate) -> tuple[int, ...]:
        """Shape of the layer's weight; derived from A and B if the directory has no safetensors."""
        if not self._shapes:
            (_, of_a), (_, of_b) = (update.manifest.get(name, ("", (0,))) for name in tensor_names(layer))
            return of_b[0], of_a[-1]
        shape = self._shapes.get(f"{layer}.weight", ())
        if len(shape) != 2:
            raise PublishError(
                f"weight update {update.version} adapts {layer}, which is no matrix of {self._policy_dir}"
            )
        return shape


def update_validator(policy_dir: str, adapter_rank: int) -> UpdateValidator | AdapterValidator:
    """The validator for an engine that takes adapters of this rank; 0: all weights."""
    return AdapterValidator(policy_dir, adapter_rank) if adapter_rank else UpdateValidator(policy_dir)


def _described(chunk: dict[str, str], update: WeightUpdate) -> dict[str, object]:
    """Rank and alpha in peft's file."""
    try:
        content = json.loads(Path(chunk["config_path"]).read_text())
        return {key: content.get(key) for key in ("r", "lora_alpha")}
    except (OSError, ValueError) as error:
        raise PublishError(f"weight update {update.version}: {chunk['config_path']} cannot be read: {error}") from error


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
        (chunk,) = update.chunks
        tensors = load_file(chunk["path"])
        for layer in adapted_layers(update.manifest):
            weight = self._parameters[f"{layer}.weight"]
            base = self._base_weights.setdefault(layer, weight.clone())
            a, b = (tensors[name].to(weight.dtype) for name in tensor_names(layer))
            weight.copy_(base + update.adapter.scaling * (b @ a))
