"""The contract of a policy loss: log-probs of sampled tokens in, one loss per token out, with figures of how far off-policy they are.

A loss is a pure function of (N,) tensors, one entry per sampled token, and of constants. ``policy_losses`` holds the built-in ones; the
configuration may name others. Nothing here reduces over the tokens of a batch. The caller sums, and divides once per step, so that
neither micro-batches nor ranks change the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.registries import POLICY_LOSSES, LossEntry, path_of

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at this, so that ``exp`` stays finite. Past it the gradient is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The N sampled tokens of a micro-batch, as a policy loss sees them. N is 0 if a rank has no rows of its own."""

    logprobs: Tensor
    """(N,) float32, nats, of the policy being trained: ``log pi``, with gradient."""
    behavior_logprobs: Tensor
    """(N,) float32, nats, of the engine that sampled the token: ``log mu``."""
    advantages: Tensor
    """(N,) float32, advantages times ``weights``: a loss must be linear in a positive factor of them."""
    row_indices: Tensor
    """(N,) int64: the row of each token. Rows are whole; their numbers may have gaps."""
    old_logprobs: Tensor | None = None
    """(N,) float32, nats, of the policy when the row was finished: ``log pi_prox``; None unless the loss asks for it."""
    weights: Tensor | None = None
    """(N,) float32, weight of the token, with that of its row: terms that are no multiple of the advantage must be multiplied by it.
    None: 1."""
    is_marked: Tensor | None = None
    """(N,) bool: marked among all tokens of the step (``policy_losses.Mark``); None unless the loss asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The result of a policy loss, per token."""

    loss: Tensor
    """(N,) float32, to be minimised; its gradient flows to the policy's log-probs."""
    is_clipped: Tensor
    """(N,) bool: the importance ratio was cut."""


PolicyLossFn = Callable[[LossTokens], TokenLoss]
"""A loss with its constants: returns the loss of each token.

A token of advantage 0 must have no gradient, unless it is marked. A row's tokens must have no effect on other rows. With N = 0 too the
result must depend on the policy's log-probs, so that gradients can be taken.
"""


def importance_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """``pi / mu`` per token, from log-probs in nats, each (N,)."""
    return (logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def make_policy_loss(name: str, constants: LossConstants) -> PolicyLossFn:
    """Return the loss called ``name``, or at the path ``name``, with its constants. Raises ``ConfigError`` with the known names."""
    loss = POLICY_LOSSES.load(POLICY_LOSSES.entry(name))
    return lambda tokens: loss(tokens, constants)


F = TypeVar("F", bound=Callable[..., TokenLoss])


def register_policy_loss(name: str, *, needs_old_logprobs: bool = False) -> Callable[[F], F]:
    """Decorator: let ``trainer.algorithm.policy_loss_type=name`` mean the decorated function of (``LossTokens``, ``LossConstants``).

    Policy workers are other processes; they import the function's module by its path.

    Args:
        name: without a colon; a known name is replaced.
        needs_old_logprobs: log-probs of finished rows are recomputed for the loss (``LossTokens.old_logprobs``).

    Raises:
        ConfigError: the function is not at the top of a module that can be imported.
    """

    def register(function: F) -> F:
        POLICY_LOSSES.register(name, LossEntry(path=path_of(function), needs_old_logprobs=needs_old_logprobs))
        return function

    return register


@torch.no_grad()
def token_figures(
    token_loss: TokenLoss, logprobs: Tensor, behavior_logprobs: Tensor, token_lags: Tensor
) -> dict[str, float]:
    """Sums (``_sum``) and maxima (``_max``) over N >= 1 sampled tokens, and ``num_tokens``.

    ``behavior_kl`` is the k3 estimate of KL(mu, pi), ``r - 1 - log r`` (Schulman, "Approximating KL divergence",
    2020), whose mean under mu is exact and whose every term is >= 0. ``lag<k>_...`` are the same figures over the
    tokens sampled k versions before the one being trained. ``lag0_logprob_gap_max`` shows how far engine and trainer disagree under the
    same weights: through rounding, or because the engine does not hold these weights.

    Args:
        token_loss: loss of the same tokens.
        logprobs: (N,) float32, nats.
        behavior_logprobs: (N,) float32, nats.
        token_lags: (N,) int64, >= 0: version being trained minus version sampled under.
    """
    ratio = importance_ratio(logprobs, behavior_logprobs).double()
    kl = ratio - 1 - ratio.log()
    is_clipped = token_loss.is_clipped.double()
    gaps = (logprobs - behavior_logprobs).abs()
    sums = {
        "loss_sum": token_loss.loss.double().sum(),
        "clipped_sum": is_clipped.sum(),
        "ratio_sum": ratio.sum(),
        "behavior_kl_sum": kl.sum(),
        "token_lag_sum": token_lags.sum().double(),
        "ratio_max": ratio.max(),
        "logprob_gap_max": gaps.max().double(),
    }
    figures = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # one copy from the device
    figures["num_tokens"] = float(logprobs.numel())
    figures["token_lag_max"] = float(token_lags.max())
    of_tokens = {"tokens_sum": torch.ones_like(kl), "behavior_kl_sum": kl, "clipped_sum": is_clipped}
    figures |= sums_by_lag(token_lags, of_tokens)
    if (is_fresh := token_lags == 0).any():
        figures["lag0_logprob_gap_max"] = float(gaps[is_fresh].max())
    return figures


def sums_by_lag(token_lags: Tensor, values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ``lag<k>_<name>``: sums of ``values`` over the tokens of each lag k that occurs.

    Computed on the CPU, because CUDA's bincount has no fixed order.

    Args:
        token_lags: (N,) int64, >= 0, N >= 1: version being trained minus version sampled under.
        values: name -> (N,) float64.
    """
    lags = token_lags.cpu()
    sums = {name: torch.bincount(lags, weights=of.cpu()).tolist() for name, of in values.items()}
    return {f"lag{lag}_{name}": of_lags[lag] for lag in lags.unique().tolist() for name, of_lags in sums.items()}
