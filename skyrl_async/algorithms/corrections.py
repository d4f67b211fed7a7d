"""Off-policy corrections, one pure function each: log-ratios ``log pi - log mu`` in, importance weights or masks out.

Weights are >= 0; a mask is true where a token is kept. Nothing here reduces over tokens.

The ratio is always ``pi / mu``, the policy over the sampler. Above 1 are tokens that the policy now likes better than their sampler did.
All bounds are on this ratio, and a value at a bound is kept. ``mu`` is taken from the very version that sampled the token. A row whose
tokens come from several versions therefore needs no special case: its ratio is still the product over its tokens. A token whose ratio is
not finite has no effect on other rows.

A *sequence* is the trained tokens of a row. Tokens that ``trainer.staleness_policy=mask`` left out do not belong to it, nor do turns of a
session that another row trains. If there are such tokens, the ratio is not that of the whole answer, and statements about whole answers
below do not hold.

Some combinations of a weight without a cap and a mask have names of their own. Token-level MIS is ``token_tis`` with ``token_mask`` up to
C; sequence-level MIS is ``sequence_tis`` with ``product_mask`` up to C; IcePop is ``token_tis`` with ``token_mask`` in [alpha, beta].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_async.algorithms.losses import MAX_LOG_RATIO

_ROUNDING = 1e-6
"""Nats (squared for M2PO) by which a value may pass a bound and still be kept, because log-probs are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Importance weights of tokens."""

    values: Tensor
    """(N,) float64, >= 0, without gradient."""
    is_cut: Tensor
    """(N,) bool: the weight was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which row each token belongs to. Rows are whole and in any order."""

    indices: Tensor
    """(N,) int64, in [0, num_rows)."""
    num_rows: int

    def sums(self, values: Tensor) -> Tensor:
        """(N,) to (num_rows,): sums over the tokens of each row."""
        return values.new_zeros(self.num_rows).index_add(0, self.indices, values)

    def means(self, values: Tensor) -> Tensor:
        """(N,) to (num_rows,): means over the tokens of each row; 0 for a row without tokens."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def each(self, of_rows: Tensor) -> Tensor:
        """(num_rows,) to (N,): the value of each token's row."""
        return of_rows[self.indices]


def token_tis(log_ratio: Tensor, *, high: float) -> Weights:
    """``min(pi / mu, high)`` per token: token-level truncated importance sampling.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), section "Truncated importance sampling";
    the truncation is IMPALA's (arXiv 1802.01561, section 4.1). Without a cap the mean is that of the first-order surrogate
    ``E_{s ~ mu} sum_a pi(a | s) Q_mu(s, a)`` (TRPO, arXiv 1502.05477, equation 3). The tokens before and after are still weighted as if
    ``mu`` were the policy. For sequences it is therefore biased, with little variance.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats.
        high: largest weight, > 0.
    """
    return _cut(log_ratio.double(), high)


def sequence_tis(log_ratio: Tensor, rows: Rows, *, high: float) -> Weights:
    """``min(prod_t pi_t / mu_t, high)``, the same for every token of a row: sequence-level truncated importance sampling.

    Liu, Li et al., "When speed kills stability" (2025), part 2, "Sequence-level TIS". Without a cap and for rows that are whole
    answers, the mean under ``mu`` is the exact policy gradient, whatever versions sampled the tokens. The variance grows exponentially
    with the length. Arguments as in ``token_tis``.
    """
    weights = _cut(rows.sums(log_ratio.double()), high)
    return Weights(values=rows.each(weights.values), is_cut=rows.each(weights.is_cut))


def token_mask(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Keep tokens with ``low <= pi / mu <= high``.

    With ``token_tis`` it is the ``M(k)`` of IcePop, which is k within the bounds and 0 outside (Ring-1T, arXiv 2510.18855, section on
    IcePop, with alpha = 0.5, beta = 5; INTELLECT-3 technical report, equations 1 and 2, with pi the policy being trained), and with
    ``low = 0`` the token-level masked importance sampling of Liu, Li et al. (2025), part 3.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats.
        low: >= 0.
        high: may be infinite.

    Returns:
        (N,) bool, true where kept.
    """
    return _within(log_ratio.double(), low, high)


def product_mask(log_ratio: Tensor, rows: Rows, *, low: float, high: float) -> Tensor:
    """Keep rows with ``low <= prod_t pi_t / mu_t <= high``.

    With ``sequence_tis`` and ``low = 0`` it is sequence-level masked importance sampling, ``1[rho <= C] rho`` (Liu, Li et al., 2025, part
    3, "Seq-MIS"). Long rows are masked first: their ratio is a product of more factors. Arguments and result as in ``token_mask``.
    """
    return rows.each(_within(rows.sums(log_ratio.double()), low, high))


def geometric_mask(log_ratio: Tensor, rows: Rows, *, low: float, high: float) -> Tensor:
    """Keep rows with ``low <= (prod_t pi_t / mu_t)^(1 / T) <= high``, T the tokens of the row.

    Liu, Li et al. (2025), part 3, "Geometric-level": a bound per token, equally strict for long and short rows. Arguments and result as
    in ``token_mask``.
    """
    return rows.each(_within(rows.means(log_ratio.double()), low, high))


def outlier_mask(log_ratio: Tensor, rows: Rows, *, low: float, high: float) -> Tensor:
    """Keep rows in which every token has ``low <= pi / mu <= high``: one outlier masks its row.

    Liu, Li et al. (2025), part 3, on toxic tails: where the policy finds a token all but impossible, the log-probs of sampler and trainer
    disagree, and the tokens after it are affected too. Arguments and result as in ``token_mask``.
    """
    is_outlier = ~_within(log_ratio.double(), low, high)
    return rows.each(rows.sums(is_outlier.double())) == 0


def opsm_mask(log_ratio: Tensor, advantages: Tensor, rows: Rows, *, delta: float) -> Tensor:
    """Leave out tokens of negative advantage in rows whose ``mean_t log(mu_t / pi_t)`` exceeds ``delta``.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): a bad answer that the policy would no longer give need not be
    unlearned, while good answers are kept, however far off. The paper's ``pi_old`` is the sampler, hence ``mu``.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats, of the policy being trained.
        advantages: (N,) float.
        rows: rows of the same tokens.
        delta: nats per token, > 0.

    Returns:
        (N,) bool, true where kept.
    """
    is_far = -rows.means(log_ratio.double()) > delta + _ROUNDING
    return ~((advantages < 0) & rows.each(is_far))


def m2_mask(log_ratio: Tensor, advantages: Tensor, rows: Rows, *, threshold: float) -> Tensor:
    """Mask, row by row, the tokens of largest ``(log pi / mu)^2`` until the mean over the others is at most ``threshold``.

    M2PO (arXiv 2510.01161). It considers only tokens that the loss would push further away (A > 0 and ratio > 1, or A < 0 and ratio < 1).
    The paper takes the mean over the batch. Here the bound holds in every row, hence in every batch of rows, so that neither
    micro-batches nor streaming change the mask. It masks at least as many tokens as the paper's, above all in a single row that is far
    off, which no other row balances. It replaces clipping: the paper's objective is ``rollout_is`` without a cap.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats, of the policy being trained.
        advantages: (N,) float.
        rows: rows of the same tokens.
        threshold: squared nats, > 0; the paper's is 0.04.

    Returns:
        (N,) bool, true where kept.
    """
    ratios = log_ratio.double()
    where = (advantages * ratios > 0).nonzero().flatten()
    moments, row_of = ratios[where].square(), rows.indices[where]
    by_size = moments.argsort(stable=True)
    order = by_size[row_of[by_size].argsort(stable=True)]  # rows together, their smallest moments first
    num_tokens = torch.bincount(row_of.cpu(), minlength=rows.num_rows).tolist()
    by_row = moments[order].cpu().split(num_tokens)  # on the host, because additions on CUDA have no fixed order
    means = torch.cat([of_row.cumsum(0) / torch.arange(1, len(of_row) + 1) for of_row in by_row])  # of its first tokens
    is_kept = torch.ones_like(log_ratio, dtype=torch.bool)
    is_kept[where[order]] = (means <= threshold + _ROUNDING).to(is_kept.device)  # they never fall within a row
    return is_kept


def _cut(log_weight: Tensor, high: float) -> Weights:
    values = log_weight.clamp(max=MAX_LOG_RATIO).exp()
    return Weights(values=values.clamp(max=high), is_cut=values > high)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    least = math.log(low) if low > 0 else -math.inf
    return (log_ratio >= least - _ROUNDING) & (log_ratio <= math.log(high) + _ROUNDING)
