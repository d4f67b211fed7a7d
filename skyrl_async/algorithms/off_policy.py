"""The off-policy correction of a run: a micro-batch's log-probs in; one factor per token for its policy loss, and figures, out.

A correction multiplies the policy loss of each token by ``weight * mask``. It never multiplies the divergence from a reference.

Masked tokens still count in the denominator of gradients (``Policy.step``), because a mask is a factor of 0 in an estimated sum. Without
them the step would grow with the number of masked tokens, and would depend on how rows are split (as in M2PO, arXiv 2510.01161; IcePop
and OPSM divide by the lengths of whole answers, too). If every token of a mini-batch is masked, its policy gradient is 0 and the step is
taken like one of zero advantages; the trainer logs and counts it.

Which policy is ``pi``? A weight corrects a loss from the tokens' sampler to a policy, and must not do so twice:

    loss            its own ratio     a weight is of    pi of the masks
    rollout_is      none beside it    the policy        the policy           the weight takes the place of the loss's own
    decoupled_ppo   pi / old          old / mu          old                  likewise
    cispo_old       pi / old          old / mu          old                  it has none of its own
    a user's, around recomputed log-probs: as cispo_old
    any other       pi / mu           refused           the policy

The loss gets the anchor in place of ``mu``, so that its own weight is 1. OPSM and M2PO measure how far the policy is from the sampler,
whatever the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from skyrl_async.algorithms import corrections
from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.corrections import Rows, Weights
from skyrl_async.algorithms.losses import TokenLoss, sums_by_lag
from skyrl_async.algorithms.settings import Bounds, CorrectionSettings
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES

_MAX_LOG_WEIGHT = 300.0
"""Largest logarithm of a weight in an effective sample size, of either sign: float64 holds the squares of such weights, and their sums."""


class Anchor(Enum):
    """The policy at which a loss's own ratio begins; importance weights lead from the sampler to it."""

    BEHAVIOR = auto()
    """The sampler itself: no weight is left to apply."""
    POLICY = auto()
    OLD = auto()
    """The policy of the recomputed log-probs."""


_ANCHORS = {"rollout_is": Anchor.POLICY, "decoupled_ppo": Anchor.OLD, "cispo_old": Anchor.OLD}


def anchor_of(policy_loss: str) -> Anchor:
    """Return the anchor of the loss called ``policy_loss``. A user's loss that needs recomputed log-probs is anchored on these."""
    asks_for_old = POLICY_LOSSES.entry(policy_loss).needs_old_logprobs
    return _ANCHORS.get(policy_loss, Anchor.OLD if asks_for_old else Anchor.BEHAVIOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """The correction of a micro-batch's tokens; all tensors are without gradient."""

    factors: Tensor
    """(N,) float, >= 0: weight times mask."""
    is_cut: Tensor
    """(N,) bool: the weight was cut."""
    masked: dict[str, Tensor]
    """Kind of mask -> (N,) bool, true where it leaves a token out."""
    anchor_logprobs: Tensor
    """(N,) float, nats: given to the loss in place of the behavior log-probs."""

    @property
    def is_masked(self) -> Tensor:
        """(N,) bool: tokens that any mask leaves out."""
        return torch.stack([torch.zeros_like(self.is_cut), *self.masked.values()]).any(0)

    def applied_to(self, tokens: TokenLoss) -> TokenLoss:
        """Return the corrected loss of the same tokens. A loss that is not finite stays so, even if it is masked."""
        return TokenLoss(loss=tokens.loss * self.factors, is_clipped=tokens.is_clipped | self.is_cut)

    def figures(self, token_lags: Tensor) -> dict[str, float]:
        """Return sums over N >= 1 tokens; ``lag<k>_...`` over the tokens sampled k versions before the one being trained."""
        sums = {"correction_weight_sum": self.factors.double()}
        sums |= {f"correction_masked_{kind}_sum": is_out.double() for kind, is_out in self.masked.items()}
        by_lag = {"correction_clipped_sum": self.is_cut.double(), "correction_masked_sum": self.is_masked.double()}
        figures = {name: values.sum().item() for name, values in (sums | by_lag).items()}
        return figures | sums_by_lag(token_lags, by_lag)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyCorrection:
    """The product of all corrections of a run.

    Args:
        settings: the corrections, with their bounds.
        anchor: anchor of the policy loss.

    Raises:
        ConfigError: there are weights, and the loss is anchored on the behavior log-probs.
    """

    settings: CorrectionSettings
    anchor: Anchor

    def __post_init__(self) -> None:
        if self.settings.weighs and self.anchor is Anchor.BEHAVIOR:
            raise ConfigError(
                "trainer.algorithm.off_policy_correction.tis_ratio_type must be null with a policy loss whose ratio is already taken to "
                "the behavior log-probs: the weight would count it twice"
            )

    @torch.no_grad()
    def __call__(self, logprobs: Tensor, batch: MicroBatch) -> Corrected:
        """Return the correction of one micro-batch.

        Args:
            logprobs: (N,) float32, nats, of the policy being trained.
            batch: the same tokens; rows are whole.
        """
        logprobs, behavior = logprobs.detach(), batch.behavior_logprobs
        anchor = logprobs
        if self.anchor is Anchor.OLD:
            assert batch.old_logprobs is not None, "split_work requires them"
            anchor = batch.old_logprobs
        rows = Rows(indices=batch.row_indices, num_rows=batch.num_rows)
        weights = self._weights(anchor - behavior, rows)
        keeps = self._masks(anchor - behavior, logprobs - behavior, batch.advantages, rows)
        factors = weights.values
        for keep in keeps.values():
            factors = factors * keep
        return Corrected(
            factors=factors.to(logprobs.dtype),
            is_cut=weights.is_cut,
            masked={kind: ~keep for kind, keep in keeps.items()},
            anchor_logprobs=anchor if self.settings.weighs else behavior,
        )

    def _weights(self, log_ratio: Tensor, rows: Rows) -> Weights:
        if self.settings.token_tis is not None:
            return corrections.token_tis(log_ratio, high=self.settings.token_tis)
        if self.settings.sequence_tis is not None:
            return corrections.sequence_tis(log_ratio, rows, high=self.settings.sequence_tis)
        ones = torch.ones_like(log_ratio, dtype=torch.float64)
        return Weights(values=ones, is_cut=torch.zeros_like(ones, dtype=torch.bool))

    def _masks(self, log_ratio: Tensor, policy_log_ratio: Tensor, advantages: Tensor, rows: Rows) -> dict[str, Tensor]:
        """Kind of mask -> (N,) bool, true where a token is kept."""
        settings = self.settings

        def within(bounds: Bounds | None, mask: Callable[..., Tensor], *of: Rows) -> Tensor | None:
            return None if bounds is None else mask(log_ratio, *of, low=bounds[0], high=bounds[1])

        def up_to(mask: Callable[..., Tensor], **bound: float | None) -> Tensor | None:
            return None if None in bound.values() else mask(policy_log_ratio, advantages, rows, **bound)

        keeps = {
            "token": within(settings.token_mask, corrections.token_mask),
            "product": within(settings.product_mask, corrections.product_mask, rows),
            "geometric": within(settings.geometric_mask, corrections.geometric_mask, rows),
            "outlier": within(settings.outlier_mask, corrections.outlier_mask, rows),
            "opsm": up_to(corrections.opsm_mask, delta=settings.opsm_delta),
            "m2": up_to(corrections.m2_mask, threshold=settings.m2_threshold),
        }
        return {kind: keep for kind, keep in keeps.items() if keep is not None}


@torch.no_grad()
def sample_size_figures(logprobs: Tensor, batch: MicroBatch, token_lags: Tensor) -> dict[str, float]:
    """Sums from which ``metrics.step.effective_shares`` takes effective sample sizes: how many fresh tokens the tokens of a step are worth.

    The effective sample size of n weights is ``(sum w)^2 / sum w^2``, at most n (Kish 1965; Owen, "Monte Carlo theory, methods and
    examples", chapter 9), here of ``w = pi / mu``, per token and per row. Sums rather than sizes, so that micro-batches, ranks and
    streaming add up. It does not depend on the scale of the weights: those of long answers may all be tiny, and stay as they are down
    to ``exp(-300)``, below which they are 0.

    Args:
        logprobs: (N,) float32, nats, of the policy being trained; N >= 1.
        batch: the same tokens.
        token_lags: (N,) int64, >= 0.

    Returns:
        ``ess_count``, ``ess_weights`` and ``ess_squares`` over tokens; the same over rows (``sequence_ess_...``), and over the tokens
        sampled k versions before the one being trained (``lag<k>_ess_...``).
    """
    log_ratio = (logprobs - batch.behavior_logprobs).double()
    rows = Rows(indices=batch.row_indices, num_rows=batch.num_rows)
    has_tokens = rows.sums(torch.ones_like(log_ratio)) > 0
    figures: dict[str, float] = {}
    for prefix, log_weights in (("sequence_", rows.sums(log_ratio)[has_tokens]), ("", log_ratio)):
        weights = log_weights.clamp(max=_MAX_LOG_WEIGHT).exp() * (log_weights >= -_MAX_LOG_WEIGHT)
        sums = {"ess_count": torch.ones_like(weights), "ess_weights": weights, "ess_squares": weights.square()}
        figures |= {f"{prefix}{name}": of.sum().item() for name, of in sums.items()}
    return figures | sums_by_lag(token_lags, sums)
