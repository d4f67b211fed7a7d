"""The constants of single policy losses, under ``trainer.algorithm``; names are SkyRL's.

Flows in: nothing. Flows out: dataclasses for the schema, and which loss reads which key.
"""

import math
from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.fields import doc, require


@dataclass
class CispoConfig:
    cispo_eps_clip_low: float = doc(
        1.0,
        "Weights are at least 1 less this; 1 is no lower bound, as in its paper; 0 raises every weight to at least 1.",
    )
    cispo_eps_clip_high: float = doc(4.0, "Weights are at most 1 plus this.")

    def __post_init__(self) -> None:
        low, high = self.cispo_eps_clip_low, self.cispo_eps_clip_high
        require(0 <= low <= 1, "trainer.algorithm.cispo.cispo_eps_clip_low", "in [0, 1]", low)
        require(high >= 0, "trainer.algorithm.cispo.cispo_eps_clip_high", ">= 0", high)


class DppoType(Enum):
    binary_tv = "binary_tv"
    binary_kl = "binary_kl"


@dataclass
class DppoConfig:
    dppo_type: DppoType = doc(
        DppoType.binary_tv,
        "How far a token's probability has changed: binary_tv by its difference, binary_kl by the divergence of 'this token or any "
        "other' in nats, for which bounds of some 0.05 do.",
    )
    delta_low: float = doc(0.2, "Fall of a token's probability past which a negative advantage lowers it no further.")
    delta_high: float = doc(0.2, "Rise of a token's probability past which a positive advantage raises it no further.")

    def __post_init__(self) -> None:
        most = 1.0 if self.dppo_type is DppoType.binary_tv else math.inf
        expected = "in [0, 1] with dppo_type=binary_tv" if most == 1.0 else ">= 0"
        for key in ("delta_low", "delta_high"):
            value = getattr(self, key)
            require(0 <= value <= most, f"trainer.algorithm.dppo.{key}", expected, value)


@dataclass
class SapoConfig:
    tau_pos: float = doc(1.0, "How fast a positive advantage loses its force away from ratio 1.")
    tau_neg: float = doc(1.05, "The same of other advantages.")

    def __post_init__(self) -> None:
        for key in ("tau_pos", "tau_neg"):
            require(getattr(self, key) > 0, f"trainer.algorithm.sapo.{key}", "> 0", getattr(self, key))


@dataclass
class ClipCovConfig:
    clip_ratio: float = doc(
        0.0002, "Share of a mini-batch's tokens that are left out, one at least, drawn from those between the bounds."
    )
    clip_cov_lb: float = doc(1.0, "Lower bound of a token's covariance of log-prob and advantage.")
    clip_cov_ub: float = doc(5.0, "Upper bound of it.")

    def __post_init__(self) -> None:
        require(0 < self.clip_ratio <= 1, "trainer.algorithm.clip_cov.clip_ratio", "in (0, 1]", self.clip_ratio)
        low, high = self.clip_cov_lb, self.clip_cov_ub
        require(low < high, "trainer.algorithm.clip_cov.clip_cov_ub", f"> clip_cov_lb ({low:g})", high)


@dataclass
class KlCovConfig:
    kl_cov_frac: float = doc(
        0.002,
        "Share of a mini-batch's tokens, one at least, that are held back: those of largest covariance (the paper's is 0.0002 to 0.002, "
        "SkyRL's default 0.2).",
    )
    ppo_kl_coef: float = doc(1.0, "How strongly they are held to the engine's log-probs, >= 0.")

    def __post_init__(self) -> None:
        require(0 < self.kl_cov_frac <= 1, "trainer.algorithm.kl_cov.kl_cov_frac", "in (0, 1]", self.kl_cov_frac)
        require(self.ppo_kl_coef >= 0, "trainer.algorithm.kl_cov.ppo_kl_coef", ">= 0", self.ppo_kl_coef)


_CLIPPED = ("ppo_clip", "regular", "clip_higher", "dual_clip", "decoupled_ppo", "gspo", "clip_cov")
LOSSES_THAT_READ: dict[str, tuple[str, ...]] = {
    "eps_clip_low": _CLIPPED,
    "eps_clip_high": _CLIPPED,
    "clip_ratio_c": ("dual_clip",),
    "tis_cap": ("rollout_is", "decoupled_ppo"),
    "cispo.cispo_eps_clip_low": ("cispo", "cispo_old"),
    "cispo.cispo_eps_clip_high": ("cispo", "cispo_old"),
    "dppo.dppo_type": ("dppo",),
    "dppo.delta_low": ("dppo",),
    "dppo.delta_high": ("dppo",),
    "sapo.tau_pos": ("sapo",),
    "sapo.tau_neg": ("sapo",),
    "clip_cov.clip_ratio": ("clip_cov",),
    "clip_cov.clip_cov_lb": ("clip_cov",),
    "clip_cov.clip_cov_ub": ("clip_cov",),
    "kl_cov.kl_cov_frac": ("kl_cov",),
    "kl_cov.ppo_kl_coef": ("kl_cov",),
}
"""Key under ``trainer.algorithm`` -> the policy losses that read it."""
