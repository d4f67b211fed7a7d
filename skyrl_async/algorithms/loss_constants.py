"""The constants of every policy loss, as plain values that any process can hold.

Flows in: nothing. Flows out: values. Knows no tensors.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConstants:
    """Each loss reads its own."""

    eps_clip_low: float = 0.2
    """In [0, 1): lower clip range of ppo_clip, clip_higher, dual_clip, decoupled_ppo, gspo and clip_cov."""
    eps_clip_high: float = 0.28
    """>= 0: upper clip range of the same."""
    clip_ratio_c: float = 3.0
    """> 1: of dual_clip."""
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
    """>= 0: the same of raising."""
    sapo_tau_pos: float = 1.0
    """> 0: steepness of sapo's gate for positive advantages."""
    sapo_tau_neg: float = 1.05
    """> 0: the same for others."""
    clip_cov_ratio: float = 0.0002
    """In (0, 1]: share of a mini-batch's tokens that clip_cov leaves out."""
    clip_cov_lb: float = 1.0
    """Nats: tokens of larger covariance may be left out, ..."""
    clip_cov_ub: float = 5.0
    """... up to this, > ``clip_cov_lb``."""
    kl_cov_frac: float = 0.002
    """In (0, 1]: share of a mini-batch's tokens that kl_cov holds back."""
    ppo_kl_coef: float = 1.0
    """>= 0: how strongly."""
