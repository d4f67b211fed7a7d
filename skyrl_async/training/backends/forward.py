"""Micro-batches of rows in, log-probs of their sampled tokens out: the forward of training, without its backward.

Knows neither sharding nor which model it runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.training.backends.token_logprobs import TokenLogprobs


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
