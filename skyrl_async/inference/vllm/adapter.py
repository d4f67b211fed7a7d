"""The policy's adapter in a vLLM engine: one, in one place, replaced in place at every publish.

    boot ──open──> an adapter that adds nothing ──load──> the published one ──load──> the next ...

Flows in: published adapters. Flows out: what requests bear to be sampled with it. vLLM keys its prefix cache and its memory for adapters
by name and number: both stay, so that requests that are frozen meanwhile go on with the new one, and no old one is left. Whoever loads
has to have the engine paused, and drops its prefix cache. vLLM is imported in functions.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from skyrl_async.errors import PublishError
from skyrl_async.inference.policy_files import read_manifest
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.adapters import CONFIG_FILE, WEIGHTS_FILE, adapted_layers, peft_config

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NEVER_ADAPTED = {"lm_head", "embed_tokens"}
_ID = 1
_NAME = "policy"
_IN_PLACE = "the one that was published last"
"""Is no path: an engine without the adapter fails rather than sampling without it."""


def largest_rank(rank: int) -> int:
    """The smallest of the ranks that vLLM makes room for which holds ``rank``; the rest is zeros."""
    from vllm.config.lora import MaxLoRARanks

    return min(served for served in get_args(MaxLoRARanks) if served >= rank)


def adaptable_modules(policy_dir: str, targets: Collection[str]) -> list[str] | None:
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
        self.of_requests = LoRARequest(_NAME, _ID, _IN_PLACE)
        """What every request bears, from the first on: one that is frozen across a publish keeps what it bears."""

    async def open(self) -> None:
        """Put an adapter in that adds nothing."""
        await self._llm.collective_rpc("put_blank_adapter", args=(_NAME, _ID, self._rank))

    async def layers_left_out(self, update: WeightUpdate) -> list[str]:
        """Those that vLLM has no adapters for: it would leave them out in silence. Asked of the workers once."""
        if self._known.issuperset(update.manifest):
            return []
        names = list(update.manifest)
        found: list[list[str]] = await self._llm.collective_rpc("unadaptable", args=(names,))
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
