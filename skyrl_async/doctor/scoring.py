"""Log-probs by transformers alone: one row at a time, unpacked, in one dtype, with none of the code of the trainer or of vLLM.

Knows neither runs nor what might be wrong with them.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from skyrl_async.doctor.rows import Tokens
from skyrl_async.inference.engines.deterministic import processed_logprobs
from skyrl_async.inference.layer_outputs import LayerOutputs, decoder_layers
from skyrl_async.training.backends.assembly import load_model
from skyrl_async.types import SamplingParams

Values: TypeAlias = NDArray[np.float64]
HEAD, EMBEDDINGS = "the output head", "the input embeddings"


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Compute on one thread in the block. An engine's core is a fork: it would wait for ever for OpenMP's other threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Scorer:
    """A model at one policy version, in float32.

    Args:
        directory: Hugging Face directory.
        device: ``cpu`` or ``cuda``.
        trust_remote_code: passed to transformers.
    """

    def __init__(self, directory: Path, *, device: str, trust_remote_code: bool = False) -> None:
        model = load_model(directory, trust_remote_code=trust_remote_code).eval().requires_grad_(False)
        self.directory = directory
        """As given."""
        self._model = model.to(device)
        self._device = device
        paths = {module: path for path, module in model.named_modules()}
        layers = {f"layer {i}": paths[layer] for i, layer in enumerate(decoder_layers(model))}
        self.parts = {
            EMBEDDINGS: paths[model.get_input_embeddings()],
            **layers,
            HEAD: paths[model.get_output_embeddings()],
        }
        """Names of what ``with_part`` replaces, and where the model has it."""

    @torch.no_grad()
    def logprobs(
        self, ids: NDArray[np.int32], places: NDArray[np.int64], samplings: Sequence[SamplingParams]
    ) -> Values:
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

    def scores(self, tokens: Tokens, sampling: SamplingParams) -> Values:
        """(N,) log-probs of all tokens, whatever version they are of."""
        return scores(tokens, dict.fromkeys(tokens.version.tolist(), self), [sampling])[0]

    def rounded(self) -> "Scorer":
        """The same model in bfloat16, with weights rounded to it."""
        rounded = copy.copy(self)
        rounded._model = copy.deepcopy(self._model).to(torch.bfloat16)
        return rounded

    def layer_outputs(self, ids: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
        """What enters the first layer and what each layer returns, (L, H) for (L,) tokens."""
        outputs = LayerOutputs(self._model)
        self.logprobs(np.append(ids, ids[-1:]), np.array([len(ids)]), [SamplingParams(max_tokens=1)])
        return {name: output.numpy() for name, output in outputs.close().items()}

    def part(self, name: str) -> nn.Module:
        """One of ``parts``."""
        return self._model.get_submodule(self.parts[name])

    @contextlib.contextmanager
    def with_part(self, name: str, module: nn.Module) -> Iterator[None]:
        """Use another module for one of ``parts`` meanwhile. A tied head is replaced without its embeddings."""
        own = self.part(name)
        self._model.set_submodule(self.parts[name], module)
        try:
            yield
        finally:
            self._model.set_submodule(self.parts[name], own)

    @property
    def has_tied_head(self) -> bool:
        """Whether the output head has the weights of the input embeddings."""
        return bool(self.part(HEAD).weight is self.part(EMBEDDINGS).weight)

    def tied_head(self) -> nn.Module:
        """An output head with the weights of the input embeddings."""
        weight = self._model.get_input_embeddings().weight
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = weight
        return head


def scores(
    tokens: Tokens,
    scorers: Mapping[int, Scorer],
    samplings: Sequence[SamplingParams],
    change: Callable[[int], contextlib.AbstractContextManager[None]] = lambda version: contextlib.nullcontext(),
) -> Values:
    """(S, N) log-probs of all tokens, each by the scorer of its own version; nan where there is none.

    ``change`` changes the scorer of a version meanwhile.
    """
    parts = tokens.by_row(tokens.version)
    found = [np.full((len(samplings), len(versions)), np.nan) for versions in parts]
    for version, scorer in scorers.items():
        with change(version):
            for row, versions, values in zip(tokens.rows, parts, found, strict=True):
                if (is_own := versions == version).any():
                    values[:, is_own] = scorer.logprobs(row.ids, row.places[is_own], samplings)
    return np.concatenate(found, axis=1)
