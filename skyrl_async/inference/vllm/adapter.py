"""The policy's adapter in a vLLM engine: one, in one place, replaced in place at every publish.

    boot ──open──> an adapter that adds nothing ──load──> the published one ──load──> the next ...

Flows in: published adapters. Flows out: what requests bear to be sampled with it. vLLM keys its prefix cache and its memory for adapters
by name and number: both stay, so that requests that are frozen meanwhile go on with the new one, and no old one is left. Whoever loads
has to have the engine paused, and drops its prefix cache. vLLM is imported in functions.
"""

import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from skyrl_async.errors import PublishError
from skyrl_async.inference.policy_files import UpdateValidator, chunk_manifest, read_manifest, require_same
from skyrl_async.inference.vllm.weight_map import WeightMap
from skyrl_async.types import Adapter, WeightUpdate
from skyrl_async.weights.formats import CONFIG_FILE, WEIGHTS_FILE, adapted_layers, peft_config, tensor_names

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NEVER_ADAPTED = {"lm_head", "embed_tokens"}
_LOAD_BUCKET_BYTES = 64 << 20
_ID = 1
_NAME = "policy"
_IN_PLACE = "the one that was published last"
"""Is no path: an engine without the adapter fails rather than sampling without it."""


def supported_rank(rank: int) -> int:
    """The smallest of the ranks that vLLM makes room for which holds ``rank``; the rest is zeros."""
    from vllm.config.lora import MaxLoRARanks

    return min(served for served in get_args(MaxLoRARanks) if served >= rank)


def adapted_modules(policy_dir: str, targets: Collection[str]) -> list[str] | None:
    """Last parts of the names of the layers that adapters are on: vLLM computes adapters of these alone, of zeros or not.

    Without ``targets`` of all matrices but embeddings and the output projection; None (all that vLLM can) where the directory does not say
    what matrices there are.
    """
    matrices = [name for name, (_, shape) in read_manifest(policy_dir).items() if len(shape) == 2]
    linear = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices} - _NEVER_ADAPTED
    wanted = {target.rpartition(".")[2] for target in targets} or linear
    return sorted(linear & wanted) or None


class AdapterSlot:
    """Of one engine that was booted with adapters of ``rank``."""

    def __init__(self, llm: "AsyncLLM", rank: int) -> None:
        from vllm.lora.request import LoRARequest

        self._llm = llm
        self._rank = rank
        self._known: frozenset[str] = frozenset()
        """Tensors of adapters that vLLM has layers for."""
        self._received: tempfile.TemporaryDirectory[str] | None = None
        self.lora_request = LoRARequest(_NAME, _ID, _IN_PLACE)
        """What every request bears, from the first on: one that is frozen across a publish keeps what it bears."""

    async def open(self) -> None:
        """Put an adapter in that adds nothing."""
        await self._llm.collective_rpc("put_blank_adapter", args=(_NAME, _ID, self._rank))

    async def layers_without_adapters(self, update: WeightUpdate) -> list[str]:
        """Those that vLLM has no adapters for: it would leave them out in silence. Asked of the workers once."""
        if self._known.issuperset(update.manifest):
            return []
        names = list(update.manifest)
        found: list[list[str]] = await self._llm.collective_rpc("layers_without_adapters", args=(names,))
        left_out = sorted(set().union(*found))
        if not left_out:
            self._known = frozenset(names)
        return left_out

    def as_directory(self, update: WeightUpdate, path: str, *, base: str) -> dict[str, str]:
        """The chunk of a received update whose tensors are at ``path``: a directory that vLLM loads. The one before is gone."""
        assert update.adapter is not None
        if self._received is None:
            self._received = tempfile.TemporaryDirectory(prefix="skyrl_async-adapter-")
        weights, config = (Path(self._received.name) / name for name in (WEIGHTS_FILE, CONFIG_FILE))
        weights.unlink(missing_ok=True)
        weights.symlink_to(path)
        config.write_text(peft_config(update.adapter, adapted_layers(update.manifest), base=base))
        return {"path": str(weights), "config_path": str(config)}

    async def load(self, update: WeightUpdate) -> None:
        """Put the update in the place of the adapter before, on every worker."""
        from vllm.lora.request import LoRARequest

        (chunk,) = update.chunks
        directory = str(Path(chunk["path"]).parent)
        if not await self._llm.add_lora(LoRARequest(_NAME, _ID, directory, load_inplace=True)):
            raise PublishError(f"vLLM did not load the adapter in {directory}")

    def close(self) -> None:
        """Remove what was made of received updates. Idempotent."""
        if self._received is not None:
            self._received.cleanup()
            self._received = None


class AdapterValidator:
    """Decides whether an update can be an adapter of the policy, before anything is touched; see ``UpdateValidator``."""

    def __init__(self, policy_dir: str, rank: int) -> None:
        self._policy_dir = policy_dir
        self._shapes = {name: shape for name, (_, shape) in read_manifest(policy_dir).items()}
        self._rank = rank
        self._dtypes: dict[str, str] | None = None

    def check(self, update: WeightUpdate) -> None:
        """Raise ``PublishError`` unless A and B fit weights of the policy, and the files hold them."""
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
        require_same(chunk["config_path"], _described(chunk, update), _of(update.adapter), update.version)

    def accept(self, update: WeightUpdate) -> None:
        """Hold later updates to the layers and dtypes of this one."""
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
        """Of the layer's weight; where the directory has no safetensors to read it from, what A and B make of it."""
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
    """Of an engine that takes adapters of this rank; 0: that takes all weights."""
    return AdapterValidator(policy_dir, adapter_rank) if adapter_rank else UpdateValidator(policy_dir)


def _described(chunk: dict[str, str], update: WeightUpdate) -> dict[str, object]:
    """What peft's file says of the adapter."""
    try:
        content = json.loads(Path(chunk["config_path"]).read_text())
        return {key: content.get(key) for key in ("r", "lora_alpha")}
    except (OSError, ValueError) as error:
        raise PublishError(f"weight update {update.version}: {chunk['config_path']} cannot be read: {error}") from error


def _of(adapter: Adapter) -> dict[str, object]:
    return {"r": adapter.rank, "lora_alpha": adapter.alpha}


class MergedAdapters:
    """Puts W + (alpha / rank) B A in the place of each adapted weight W, in float32, as training merges them.

    Args:
        parameters: a model's, by Hugging Face name; written to in place.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._beneath: dict[str, Tensor] = {}
        """Adapted weights as they were."""

    @torch.no_grad()
    def load(self, update: WeightUpdate) -> None:
        """The adapter takes the place of the one before. ``update`` is checked."""
        assert update.adapter is not None
        (chunk,) = update.chunks
        with WeightMap(chunk["path"], _LOAD_BUCKET_BYTES) as weights:
            for layer in adapted_layers(update.manifest):
                weight = self._parameters[f"{layer}.weight"]
                if layer not in self._beneath:
                    self._beneath[layer] = weight.clone()
                a, b = (weights.tensor(name).to(weight.dtype) for name in tensor_names(layer))
                weight.copy_(self._beneath[layer] + update.adapter.scaling * (b @ a))
