"""The constants of policy losses and the off-policy corrections of a run, as plain values without torch: any process can hold them."""

from dataclasses import dataclass

Bounds = tuple[float, float]
"""(low, high) of ``pi / mu``, both kept; 0 and infinity leave a side open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConstants:
    """The constants of every policy loss. Each loss reads its own."""

    eps_clip_low: float = 0.2
    """In [0, 1): lower clip range of ppo_clip, clip_higher, dual_clip, decoupled_ppo, gspo and clip_cov."""
    eps_clip_high: float = 0.28
    """>= 0: upper clip range of the same losses."""
    clip_ratio_c: float = 3.0
    """> 1: ratio up to which dual_clip still lowers a token."""
    tis_cap: float = 2.0
    """> 0: largest importance weight of rollout_is and decoupled_ppo."""
    cispo_eps_clip_low: float = 1.0
    """In [0, 1]: cispo's weights are >= 1 less this."""
    cispo_eps_clip_high: float = 4.0
    """>= 0: cispo's weights are <= 1 plus this."""
    dppo_type: str = "binary_tv"
    """``binary_tv`` or ``binary_kl``: how dppo measures a change of probability."""
    dppo_delta_low: float = 0.2
    """>= 0: change past which dppo lowers a token no further; of binary_tv <= 1, of binary_kl nats."""
    dppo_delta_high: float = 0.2
    """>= 0: the same for raising."""
    sapo_tau_pos: float = 1.0
    """> 0: steepness of sapo's gate for positive advantages."""
    sapo_tau_neg: float = 1.05
    """> 0: the same for others."""
    clip_cov_ratio: float = 0.0002
    """In (0, 1]: share of a mini-batch's tokens that clip_cov leaves out."""
    clip_cov_lb: float = 1.0
    """Nats: clip_cov leaves out tokens of larger covariance than this."""
    clip_cov_ub: float = 5.0
    """Nats, > ``clip_cov_lb``: clip_cov leaves out tokens of smaller covariance than this."""
    kl_cov_frac: float = 0.002
    """In (0, 1]: share of a mini-batch's tokens that kl_cov holds back."""
    ppo_kl_coef: float = 1.0
    """>= 0: factor of the penalty by which kl_cov holds them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConstants:
    """The constants of advantage estimators. Each estimator reads its own."""

    turn_discount: float = 1.0
    """In [0, 1]: what a reward counts for the turn before it, of turn_rloo and gigpo."""
    step_advantage_w: float = 1.0
    """>= 0: weight of gigpo's comparison of turns that saw the same."""
    norm_by_std: bool = True
    """Whether grpo and gigpo divide by standard deviations."""
    credit_decay: float = 0.9
    """In [0, 1]: share of turn_credit's credit that the turn before gets."""
    credit_weight: float = 1.0
    """>= 0: how much turn_credit moves between turns."""
    gamma: float = 1.0
    """In [0, 1]: what a reward counts one token, or turn, earlier, of gae and turn_gae."""
    lambd: float = 1.0
    """In [0, 1]: how far gae and turn_gae look past the next value."""
    vtrace_clip: float | None = 1.0
    """> 0: largest importance weight of a stale token, or turn, in the returns of gae and turn_gae; None: they are not weighted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Which off-policy corrections a run makes; None leaves one out. ``corrections`` has the formulas. Bounds are on ``pi / mu``."""

    token_tis: float | None = None
    """Largest weight of a token."""
    sequence_tis: float | None = None
    """Largest weight of a row; with it ``token_tis`` is None."""
    token_mask: Bounds | None = None
    product_mask: Bounds | None = None
    geometric_mask: Bounds | None = None
    outlier_mask: Bounds | None = None
    opsm_delta: float | None = None
    """Nats per token."""
    m2_threshold: float | None = None
    """Squared nats."""

    @property
    def weighs(self) -> bool:
        """Whether there are importance weights, not masks alone."""
        return self.token_tis is not None or self.sequence_tis is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is corrected."""
        return self == CorrectionSettings()
