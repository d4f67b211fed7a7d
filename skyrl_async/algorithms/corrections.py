"""How far the sampler of each token was from the policy in, importance weights and masks out: one pure function per correction.

Flows in: log-ratios ``log pi - log mu``, and which row each token is of. Flows out: weights >= 0, or a mask that is true where a token is
kept. Nothing here reduces over tokens, nor knows what the weights are multiplied with.

The ratio is always ``pi / mu``, the policy over the sampler, and so are all bounds, which belong to what is kept: above 1 are tokens that
the policy now likes better than their sampler did. Each token has the ``mu`` of the very version that sampled it, so that a row whose
first tokens are of one version and whose later ones are of another needs nothing special: its ratio is the product over its tokens all
the same. A token whose ratio is not finite has no effect on other rows.

A *sequence* is a row: the tokens of it that are trained. What ``trainer.staleness_policy=mask`` left out is no part of it, nor are the
turns of a session that another of its rows trains (``inference.sessions.rows``): with these the ratio is not that of the whole answer,
and what is said below of whole answers does not hold.

Combinations that go by names of their own, each of a weight without a cap and a mask: token-level MIS is ``token_tis`` with
``token_mask`` up to C, sequence-level MIS ``sequence_tis`` with ``product_mask`` up to C, IcePop ``token_tis`` with ``token_mask`` in
[alpha, beta].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_async.algorithms.losses import MAX_LOG_RATIO

_ROUNDING = 1e-6
"""Nats (squared for M2PO): log-probs are float32, so that a ratio of 2 may be more than 2 by that much. What is at a bound is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Importance weights."""

    values: Tensor
    """(N,) float64, >= 0, without gradient."""
    is_cut: Tensor
    """(N,) bool: the weight was larger and is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which row each token is of; rows are whole, in any order."""

    indices: Tensor
    """(N,) int64, in [0, num_rows)."""
    num_rows: int

    def sums(self, values: Tensor) -> Tensor:
        """(N,) to (num_rows,): over the tokens of each row."""
        return values.new_zeros(self.num_rows).index_add(0, self.indices, values)

    def means(self, values: Tensor) -> Tensor:
        """(N,) to (num_rows,): over the tokens of each row; 0 where it has none."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def each(self, of_rows: Tensor) -> Tensor:
        """(num_rows,) to (N,): every token what its row has."""
        return of_rows[self.indices]


def token_tis(log_ratio: Tensor, *, high: float) -> Weights:
    """``min(pi / mu, high)`` per token: token-level truncated importance sampling.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), section "Truncated importance sampling";
    the truncation is IMPALA's (arXiv 1802.01561, section 4.1). Without a cap it makes the mean that of the first-order surrogate
    ``E_{s ~ mu} sum_a pi(a | s) Q_mu(s, a)`` (TRPO, arXiv 1502.05477, equation 3): the tokens before and after are still weighted as if
    ``mu`` were the policy, so that for sequences it is biased, with little variance.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats.
        high: largest weight, > 0.
    """
    return _cut(log_ratio.double(), high)


def sequence_tis(log_ratio: Tensor, rows: Rows, *, high: float) -> Weights:
    """``min(prod_t pi_t / mu_t, high)``, the same for every token of a row: sequence-level truncated importance sampling.

    Liu, Li et al., "When speed kills stability" (2025), part 2, "Sequence-level TIS". Without a cap, and of rows that are whole
    answers, the mean under ``mu`` is the exact policy gradient, whatever versions ``mu`` is pieced together of; the variance grows
    exponentially with the length. Arguments as in ``token_tis``.
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
    3, "Seq-MIS"). Long rows go first: their ratio is the product of more factors. Arguments and result as in ``token_mask``.
    """
    return rows.each(_within(rows.sums(log_ratio.double()), low, high))


def geometric_mask(log_ratio: Tensor, rows: Rows, *, low: float, high: float) -> Tensor:
    """Keep rows with ``low <= (prod_t pi_t / mu_t)^(1 / T) <= high``, T the tokens of the row.

    Liu, Li et al. (2025), part 3, "Geometric-level": a bound per token, which long rows pass as short ones do. Arguments and result as
    in ``token_mask``.
    """
    return rows.each(_within(rows.means(log_ratio.double()), low, high))


def outlier_mask(log_ratio: Tensor, rows: Rows, *, low: float, high: float) -> Tensor:
    """Keep rows of which every token has ``low <= pi / mu <= high``: one outlier vetoes its row.

    Liu, Li et al. (2025), part 3, on toxic tails: a token that the policy finds all but impossible comes from where the log-probs of
    sampler and trainer mean different things, and taints what was sampled after it. Arguments and result as in ``token_mask``.
    """
    is_outlier = ~_within(log_ratio.double(), low, high)
    return rows.each(rows.sums(is_outlier.double())) == 0


def opsm_mask(log_ratio: Tensor, advantages: Tensor, rows: Rows, *, delta: float) -> Tensor:
    """Leave out tokens of negative advantage in rows whose ``mean_t log(mu_t / pi_t)`` exceeds ``delta``.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): what the policy would no longer say is not worth
    unlearning, while good answers are kept however far off. Its ``pi_old`` is the sampler's, hence ``mu``.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats, of the policy being trained.
        advantages: (N,) float.
        rows: of the same tokens.
        delta: nats per token, > 0.

    Returns:
        (N,) bool, true where kept.
    """
    is_far = -rows.means(log_ratio.double()) > delta + _ROUNDING
    return ~((advantages < 0) & rows.each(is_far))


def m2_mask(log_ratio: Tensor, advantages: Tensor, rows: Rows, *, threshold: float) -> Tensor:
    """Leave out the tokens of largest ``(log pi / mu)^2`` until the mean of those that are left is at most ``threshold``, row by row.

    M2PO (arXiv 2510.01161). Only trust-region tokens are looked at (A > 0
    and ratio > 1, or A < 0 and ratio < 1), as those alone are pushed further away. The paper takes them over the batch; here the bound
    holds in every row, hence in every batch of rows too, so that neither micro-batches nor streaming change the mask. It leaves out at
    least as many tokens as the paper's, above all of a single row that is far off, for which no other row makes up. It takes the place
    of clipping: the paper's objective is ``rollout_is`` without a cap.

    Args:
        log_ratio: (N,) float, ``log pi - log mu``, nats, of the policy being trained.
        advantages: (N,) float.
        rows: of the same tokens.
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
    means = torch.cat([_running_means(of_row) for of_row in moments[order].cpu().split(num_tokens)])
    is_kept = torch.ones_like(log_ratio, dtype=torch.bool)
    is_kept[where[order]] = (means <= threshold + _ROUNDING).to(is_kept.device)  # they never fall within a row
    return is_kept


def _running_means(values: Tensor) -> Tensor:
    """Of the first one, two, ... values: on the host, where additions have an order; on CUDA they have none."""
    return values.cumsum(0) / torch.arange(1, len(values) + 1)


def _cut(log_weight: Tensor, high: float) -> Weights:
    values = log_weight.clamp(max=MAX_LOG_RATIO).exp()
    return Weights(values=values.clamp(max=high), is_cut=values > high)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    least = math.log(low) if low > 0 else -math.inf
    return (log_ratio >= least - _ROUNDING) & (log_ratio <= math.log(high) + _ROUNDING)
