"""How many fresh tokens the tokens of a step are worth: log-probs in, sums out from which ``metrics.sample_sizes`` takes shares.

The effective sample size of n weights is ``(sum w)^2 / sum w^2``, at most n (Kish 1965; Owen, "Monte Carlo theory, methods and examples",
chapter 9), here of ``w = pi / mu``, per token and per row. Sums rather than sizes, so that micro-batches, ranks and streaming add up.
"""

import torch
from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.corrections import Rows
from skyrl_async.algorithms.lags import sums_by_lag
from skyrl_async.algorithms.losses import MAX_LOG_RATIO


@torch.no_grad()
def sample_size_figures(logprobs: Tensor, batch: MicroBatch, token_lags: Tensor) -> dict[str, float]:
    """``ess_count``, ``ess_weights`` and ``ess_squares`` over N >= 1 tokens; the same of rows (``sequence_ess_...``) and of the tokens
    sampled k versions before (``lag<k>_ess_...``).

    Args:
        logprobs: (N,) float32, nats, of the policy being trained.
        batch: the same tokens.
        token_lags: (N,) int64, >= 0.
    """
    log_ratio = (logprobs - batch.behavior_logprobs).double()
    rows = Rows(indices=batch.row_indices, num_rows=batch.num_rows)
    has_tokens = rows.sums(torch.ones_like(log_ratio)) > 0
    weights = _weights(log_ratio)
    per_lag = sums_by_lag(token_lags, torch.ones_like(weights), weights, weights.square())
    figures = _sums("", weights) | _sums("sequence_", _weights(rows.sums(log_ratio)[has_tokens]))
    for lag, (count, total, squares) in enumerate(per_lag):
        if count:
            figures |= _named(f"lag{lag}_", count, total, squares)
    return figures


def _weights(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sums(prefix: str, weights: Tensor) -> dict[str, float]:
    return _named(prefix, float(weights.numel()), weights.sum().item(), weights.square().sum().item())


def _named(prefix: str, count: float, total: float, squares: float) -> dict[str, float]:
    return {f"{prefix}ess_count": count, f"{prefix}ess_weights": total, f"{prefix}ess_squares": squares}
