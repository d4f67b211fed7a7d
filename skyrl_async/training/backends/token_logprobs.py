"""A causal language model and chosen positions in, log-probs and entropies of the tokens there out.

Logits exist for some positions at a time: the output projection is applied to the chosen hidden states chunk by chunk, and applied
again in the backward pass, so that memory is bounded by the chunk times the vocabulary however long the sequences are. Knows
neither losses nor how the model is sharded.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.packing import packed_arguments

logger = logging.getLogger(__name__)

_PROBE_RANGE = 50.0
"""Logits between minus and plus this: caps and scales of known architectures change them."""


class Entropies(Enum):
    """What is asked about entropies."""

    NONE = "none"
    """They are 0."""
    VALUES = "values"
    """Without gradients."""
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the forward under way is for."""

    positions: Tensor
    """(N,) int64 into the B * T positions."""
    targets: Tensor
    """(N,) int64."""
    temperature: float
    entropies: Entropies


class TokenLogprobs:
    """Stands in for the output projection's forward, inside the model's own, so that any architecture and any wrapper that keeps its
    modules (and gathers their weights around the forward of the whole model or of the projection) works as it is.

    Where the model hands out the projection's logits unchanged, log-probs and entropies are handed out in their place, made in
    chunks. Where it scales or caps them after the projection, all chosen positions' logits are made at once, as it makes them.

    The model is run once to find out, by every rank at the same time.
    """

    def __init__(self, model: nn.Module, *, chunk_size: int) -> None:
        """``chunk_size``: positions whose logits exist at once, >= 1."""
        # By name: what wraps a model to prepare its backward passes has the model's methods, but not its class.
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise PolicyError(
                f"the policy must be a causal language model with an output projection, got {type(model)}"
            )
        self._model = model
        self._chunk_size = chunk_size
        self._asked: _Asked | None = None
        self._probe: Tensor | None = None
        self._project = head.forward
        head.forward = self._in_place_of_projection
        self._is_chunked = self._hands_out_its_logits()
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
        """Log-prob of each target under ``softmax(logits / temperature)``, and the entropy there.

        Args:
            input_ids: (B, T) int64, right-padded; or (1, T), rows laid end to end.
            positions: (N,) int64 into the B * T positions, each the one before its target.
            targets: (N,) int64.
            temperature: > 0.
            entropies: whether they are computed, and differentiated.
            row_lengths: of the rows laid end to end; None where ``input_ids`` has a row per row.

        Returns:
            (N,) float32 log-probs in nats with gradients, and (N,) float32 entropies in nats.
        """
        asked = _Asked(positions=positions, targets=targets, temperature=temperature, entropies=entropies)
        packed = {} if row_lengths is None else packed_arguments(self._model, row_lengths, input_ids.device)
        self._asked = asked
        try:  # (1, N, 2), or (1, N, V) logits
            found: Tensor = self._model(input_ids=input_ids, use_cache=False, **packed).logits
        finally:
            self._asked = None
        if not self._is_chunked:
            found = _of_logits(found, targets.unsqueeze(0), asked)
        logprobs, entropy = found[0].unbind(-1)
        return logprobs, entropy if entropies is Entropies.GRADIENTS else entropy.detach()

    def _in_place_of_projection(self, hidden: Tensor) -> Tensor:
        """(B, T, H) hidden states to what the model takes for logits."""
        asked = self._asked
        if asked is None:
            logits: Tensor = self._project(hidden)
            if self._probe is not None:
                self._probe = logits = (
                    torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, logits.numel()).to(logits).view_as(logits)
                )
            return logits
        chosen = hidden.flatten(0, 1)[asked.positions].unsqueeze(0)  # (1, N, H)
        return self._in_chunks(chosen, asked) if self._is_chunked else self._project(chosen)

    def _in_chunks(self, chosen: Tensor, asked: _Asked) -> Tensor:
        """(1, N, H) to (1, N, 2). What fits into one chunk keeps its logits for the backward pass."""

        def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
            return _of_logits(self._project(hidden), targets, asked)

        targets = asked.targets.unsqueeze(0)
        if targets.shape[1] <= self._chunk_size:
            return of_chunk(chosen, targets)
        chunks = zip(chosen.split(self._chunk_size, dim=1), targets.split(self._chunk_size, dim=1), strict=True)
        made = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.cat(made, dim=1)

    @torch.no_grad()
    def _hands_out_its_logits(self) -> bool:
        """Whether what the projection says is what the model says, told by what no projection would say."""
        device = next(self._model.parameters()).device
        self._probe = torch.empty(0)
        try:
            logits = self._model(
                input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False
            ).logits
            return logits.shape == self._probe.shape and torch.equal(logits.float(), self._probe.float())
        finally:
            self._probe = None


def _of_logits(logits: Tensor, targets: Tensor, asked: _Asked) -> Tensor:
    """(1, N, V) logits to (1, N, 2) float32 nats: the log-prob of each target, and the entropy as it is ``asked``."""
    logits = logits.float()
    logprobs = (logits if asked.temperature == 1.0 else logits / asked.temperature).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if asked.entropies is Entropies.NONE:
        return torch.stack([chosen, torch.zeros_like(chosen)], dim=-1)
    of_entropy = logprobs if asked.entropies is Entropies.GRADIENTS else logprobs.detach()
    return torch.stack([chosen, -(of_entropy.exp() * of_entropy).sum(dim=-1)], dim=-1)


@torch.no_grad()
def batch_logprobs(model: TokenLogprobs, batch: MicroBatch, *, temperature: float) -> Tensor:
    """(N,) float32, nats, one per sampled token."""
    logprobs, _ = model(
        batch.input_ids, batch.positions, batch.targets, temperature=temperature, row_lengths=batch.row_lengths
    )
    return logprobs


def row_logprobs(
    model: TokenLogprobs,
    micro_batches: Sequence[Sequence[Row]],
    *,
    device: torch.device,
    temperature: float,
    is_packed: bool,
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Per micro-batch and row one value per sampled token, nats. Collective: an empty micro-batch is an idle forward."""
    found = []
    for rows in micro_batches:
        values = batch_logprobs(model, collate(rows, device, is_packed=is_packed), temperature=temperature)
        per_row = values.split([row.trajectory.num_sampled_tokens for row in rows]) if rows else ()
        found.append(tuple(tuple(row.tolist()) for row in per_row))
    return tuple(found)
