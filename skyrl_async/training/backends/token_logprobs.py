"""Log-probs and entropies of chosen tokens under a causal language model, and log-probs of other tokens in their place.

The output projection runs on the chosen hidden states chunk by chunk, and again in the backward pass. Memory for logits is therefore
bounded by the chunk times the vocabulary, however long the sequences are. Knows neither losses nor how the model is sharded.
"""

import logging
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.packing import packed_arguments

logger = logging.getLogger(__name__)

_PROBE_RANGE = 50.0
"""Probe logits lie between minus and plus this, wide enough for the caps and scales of known architectures to change them."""


class Entropies(Enum):
    """Whether entropies are computed and differentiated."""

    NONE = "none"
    """Not computed; returned as 0."""
    VALUES = "values"
    """Computed without gradients."""
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The tokens of the running forward."""

    positions: Tensor
    """(N,) int64 into the B * T positions."""
    targets: Tensor
    """(N,) int64."""
    temperature: float
    entropies: Entropies
    top: Tensor | int
    """As of ``TokenLogprobs.scores``."""

    @property
    def per_position(self) -> tuple[Tensor, ...]:
        """What is cut into chunks with the positions."""
        return (self.targets,) if isinstance(self.top, int) else (self.targets, self.top)


class TokenScores(NamedTuple):
    """What a model says at N positions."""

    logprobs: Tensor
    """(N,) float32, nats, of the targets; with gradients."""
    entropies: Tensor
    """(N,) float32, nats."""
    top_ids: Tensor
    """(N, K) int64: other tokens there."""
    top_logprobs: Tensor
    """(N, K + 1) float32, nats, with gradients: of these tokens and, last, of the rest of the vocabulary together. (N, K) without a rest
    where K is the vocabulary, and where it is 0.
    """


class TokenLogprobs:
    """Replaces the forward of a model's output projection, inside the model's own forward.

    This works for any architecture, and for any wrapper that keeps the modules and gathers weights around the forward of the model or of
    the projection.

    If the model returns the projection's logits unchanged, the replacement computes log-probs and entropies in chunks and returns these
    instead. If the model scales or caps the logits, it returns the logits of all chosen positions at once. A forward at construction, by
    every rank at the same time, tells which.
    """

    def __init__(self, model: nn.Module, *, chunk_size: int) -> None:
        """``chunk_size``: positions whose logits exist at once, >= 1."""
        # By name: an engine around a model has the model's methods, but not its class.
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise PolicyError(
                f"the policy must be a causal language model with an output projection, got {type(model)}"
            )
        self._model = model
        self._chunk_size = chunk_size
        self._request: _Request | None = None
        self._probe: Tensor | None = None
        self._project = head.forward
        head.forward = self._replace_projection
        self._is_chunked = self._returns_projection()
        if not self._is_chunked:
            logger.warning(
                "%s changes the logits of its output projection: log-probs are not made in chunks of "
                "training.logprobs_chunk_size=%d tokens, and a long micro-batch takes memory for all its logits",
                type(model).__name__,
                chunk_size,
            )

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        entropies: Entropies = Entropies.NONE,
        row_lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each target under ``softmax(logits / temperature)``, and the entropy there: the first two of ``scores``."""
        return self.scores(
            *(input_ids, positions, targets), temperature=temperature, entropies=entropies, row_lengths=row_lengths
        )[:2]

    def scores(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        entropies: Entropies = Entropies.NONE,
        row_lengths: tuple[int, ...] | None = None,
        top: Tensor | int = 0,
    ) -> TokenScores:
        """Log-probs under ``softmax(logits / temperature)``, and entropies.

        Args:
            input_ids: (B, T) int64, right-padded; or (1, T), rows laid end to end.
            positions: (N,) int64 into the B * T positions, each the one before its target.
            targets: (N,) int64.
            temperature: > 0.
            entropies: whether they are computed and differentiated.
            row_lengths: lengths of the rows laid end to end; None if each has a row of ``input_ids``.
            top: (N, K) int32, the other tokens whose log-probs are wanted; or K, for the K likeliest at each position (all of a smaller
                vocabulary).
        """
        request = _Request(positions=positions, targets=targets, temperature=temperature, entropies=entropies, top=top)
        packed = {} if row_lengths is None else packed_arguments(self._model, row_lengths, input_ids.device)
        self._request = request
        try:  # (1, N, C), or (1, N, V) logits
            output: Tensor = self._model(input_ids=input_ids, use_cache=False, **packed).logits
        finally:
            self._request = None
        if not self._is_chunked:
            output = _from_logits(output, request, *(each.unsqueeze(0) for each in request.per_position))
        logprobs, entropy, others = output[0, :, 0], output[0, :, 1], output[0, :, 2:]
        if isinstance(top, int):
            top_ids, others = others.split([num := others.shape[-1] // 2, others.shape[-1] - num], dim=-1)
        else:
            top_ids = top
        return TokenScores(
            logprobs=logprobs,
            entropies=entropy if entropies is Entropies.GRADIENTS else entropy.detach(),
            top_ids=top_ids.detach().long(),
            top_logprobs=others,
        )

    def _replace_projection(self, hidden: Tensor) -> Tensor:
        """Turn (B, T, H) hidden states into what the model takes for logits."""
        request = self._request
        if request is None:
            logits: Tensor = self._project(hidden)
            if self._probe is not None:
                self._probe = logits = (
                    torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, logits.numel()).to(logits).view_as(logits)
                )
            return logits
        chosen = hidden.flatten(0, 1)[request.positions].unsqueeze(0)  # (1, N, H)
        return self._in_chunks(chosen, request) if self._is_chunked else self._project(chosen)

    def _in_chunks(self, chosen: Tensor, request: _Request) -> Tensor:
        """(1, N, H) to (1, N, C). A single chunk keeps its logits for the backward pass."""

        def run_chunk(hidden: Tensor, *per_position: Tensor) -> Tensor:
            return _from_logits(self._project(hidden), request, *per_position)

        given = (chosen, *(each.unsqueeze(0) for each in request.per_position))
        if chosen.shape[1] <= self._chunk_size:
            return run_chunk(*given)
        chunks = zip(*(each.split(self._chunk_size, dim=1) for each in given), strict=True)
        results = [checkpoint(run_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.cat(results, dim=1)

    @torch.no_grad()
    def _returns_projection(self) -> bool:
        """Whether the model returns the projection's output unchanged: it gets probe logits that no projection computes."""
        device = next(self._model.parameters()).device
        self._probe = torch.empty(0)
        try:
            logits = self._model(
                input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False
            ).logits
            return logits.shape == self._probe.shape and torch.equal(logits.float(), self._probe.float())
        finally:
            self._probe = None


def _from_logits(logits: Tensor, request: _Request, targets: Tensor, top_ids: Tensor | None = None) -> Tensor:
    """(1, N, V) logits to (1, N, C) float32: what ``scores`` returns side by side, in nats. Ids are exact below 2^24."""
    logits = logits.float()
    logprobs = (logits if request.temperature == 1.0 else logits / request.temperature).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1))
    entropy = torch.zeros_like(chosen)
    if request.entropies is not Entropies.NONE:
        entropy_logprobs = logprobs if request.entropies is Entropies.GRADIENTS else logprobs.detach()
        entropy = -(entropy_logprobs.exp() * entropy_logprobs).sum(dim=-1, keepdim=True)
    if top_ids is not None:
        return torch.cat([chosen, entropy, *_of_tokens(logprobs, top_ids.long())], dim=-1)
    if not (num_top := min(int(request.top), logprobs.shape[-1])):
        return torch.cat([chosen, entropy], dim=-1)
    likeliest = logprobs.detach().topk(num_top, dim=-1).indices
    return torch.cat([chosen, entropy, likeliest.float(), *_of_tokens(logprobs, likeliest)], dim=-1)


def _of_tokens(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """(1, N, K) log-probs of ``ids``, and (1, N, 1) of the rest together, summed itself: 1 less the others would round a small one away."""
    of_ids = logprobs.gather(-1, ids)
    if ids.shape[-1] == logprobs.shape[-1]:
        return (of_ids,)
    return of_ids, logprobs.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)


@torch.no_grad()
def batch_logprobs(model: TokenLogprobs, batch: MicroBatch, *, temperature: float) -> Tensor:
    """Log-probs of a micro-batch's sampled tokens: (N,) float32, nats."""
    return batch_scores(model, batch, temperature=temperature).logprobs


@torch.no_grad()
def batch_scores(model: TokenLogprobs, batch: MicroBatch, *, temperature: float, num_top: int = 0) -> TokenScores:
    """The same with log-probs of the ``num_top`` likeliest tokens in the place of each."""
    return model.scores(
        *(batch.input_ids, batch.positions, batch.targets),
        temperature=temperature,
        row_lengths=batch.row_lengths,
        top=num_top,
    )
