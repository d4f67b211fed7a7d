"""Weight updates that hold an adapter alone: whether one can be of the policy that an engine booted with, and what it makes of it.

Flows in: a policy's directory and updates. Flows out: nothing, or ``PublishError`` before anything is touched; or a model's merged
weights. Knows no engine, and not vLLM, which adds A and B to what it computes by itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from skyrl_async.errors import PublishError
from skyrl_async.inference.policy_files import UpdateValidator, chunk_manifest, read_manifest, require_same
from skyrl_async.inference.vllm.weight_map import WeightMap
from skyrl_async.types import Adapter, WeightUpdate
from skyrl_async.weights.adapters import adapted_layers, tensor_names

_LOAD_BUCKET_BYTES = 64 << 20


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
