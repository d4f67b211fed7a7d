"""Log-probs by transformers alone: one row at a time, unpacked, in one dtype, with none of the code of the trainer or of vLLM.

Knows neither runs nor what might be wrong with them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from skyrl_async.inference.engines.deterministic import processed_logprobs
from skyrl_async.training.backends.assembly import load_model
from skyrl_async.types import SamplingParams

HEAD, EMBEDDINGS = "the output head", "the input embeddings"


class Scorer:
    """A model at one policy version.

    Args:
        directory: Hugging Face directory.
        device: ``cpu`` or ``cuda``.
        trust_remote_code: passed to transformers.
        is_bfloat16: computes in bfloat16, with weights rounded to it, instead of float32.
    """

    def __init__(
        self, directory: Path, *, device: str, trust_remote_code: bool = False, is_bfloat16: bool = False
    ) -> None:
        model = load_model(directory, trust_remote_code=trust_remote_code).eval().requires_grad_(False)
        self._model = model.to(device, torch.bfloat16 if is_bfloat16 else torch.float32)
        self._device = device

    @torch.no_grad()
    def logprobs(
        self, ids: NDArray[np.int32], places: NDArray[np.int64], samplings: Sequence[SamplingParams]
    ) -> NDArray[np.float64]:
        """Log-probs in nats of sampled tokens, as an engine reports them.

        Args:
            ids: (L,) tokens.
            places: (N,) of the sampled tokens, each >= 1.
            samplings: temperature (> 0) and truncation, S of them.

        Returns:
            (S, N); ``-inf`` for a token that truncation excludes.
        """
        if not len(places):
            return np.empty((len(samplings), 0))
        read = torch.tensor(ids[: places[-1]], dtype=torch.int64, device=self._device)
        kept = torch.tensor(places - 1, device=self._device)
        logits = self._model(input_ids=read[None], use_cache=False, logits_to_keep=kept).logits[0].float()
        targets = torch.tensor(ids[places], dtype=torch.int64, device=self._device)[:, None]
        found = [processed_logprobs(logits, sampling).gather(-1, targets)[:, 0] for sampling in samplings]
        return torch.stack(found).double().cpu().numpy()

    @property
    def parts(self) -> list[str]:
        """Names of what ``with_part`` replaces."""
        return [EMBEDDINGS, *(f"layer {i}" for i in range(len(self._layers))), HEAD]

    @contextlib.contextmanager
    def with_part(self, part: str, other: "Scorer") -> Iterator[None]:
        """Use one part of another model of the same architecture meanwhile. A tied head is replaced without its embeddings."""
        model = self._model
        if part == HEAD:
            own, replace = model.get_output_embeddings(), model.set_output_embeddings
            replacement = other._model.get_output_embeddings()
        elif part == EMBEDDINGS:
            own, replace = model.get_input_embeddings(), model.set_input_embeddings
            replacement = other._model.get_input_embeddings()
        else:
            number = int(part.removeprefix("layer "))
            own, replacement = self._layers[number], other._layers[number]

            def replace(layer: nn.Module) -> None:
                self._layers[number] = layer

        replace(replacement)
        try:
            yield
        finally:
            replace(own)

    @property
    def has_tied_head(self) -> bool:
        """Whether the output head has the weights of the input embeddings."""
        return bool(self._model.get_output_embeddings().weight is self._model.get_input_embeddings().weight)

    @contextlib.contextmanager
    def with_tied_head(self) -> Iterator[None]:
        """Use the input embeddings as the output head meanwhile."""
        own = self._model.get_output_embeddings()
        weight = self._model.get_input_embeddings().weight
        tied = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        tied.weight = weight
        self._model.set_output_embeddings(tied)
        try:
            yield
        finally:
            self._model.set_output_embeddings(own)

    @property
    def _layers(self) -> nn.ModuleList:
        lists = [module for module in self._model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
