"""The constants of single policy losses, under ``trainer.algorithm``; names are SkyRL's.

Flows in: nothing. Flows out: dataclasses for the schema.
"""

from dataclasses import dataclass

from skyrl_async.config.fields import doc, require


@dataclass
class CispoConfig:
    cispo_eps_clip_low: float = doc(
        1.0,
        "Weights are at least 1 less this; 1 is no lower bound, as in its paper (SkyRL has 0, weights of at least 1).",
    )
    cispo_eps_clip_high: float = doc(5.0, "Weights are at most 1 plus this.")

    def __post_init__(self) -> None:
        low, high = self.cispo_eps_clip_low, self.cispo_eps_clip_high
        require(0 <= low <= 1, "trainer.algorithm.cispo.cispo_eps_clip_low", "in [0, 1]", low)
        require(high >= 0, "trainer.algorithm.cispo.cispo_eps_clip_high", ">= 0", high)


@dataclass
class DppoConfig:
    delta_low: float = doc(0.2, "Fall of a token's probability past which a negative advantage lowers it no further.")
    delta_high: float = doc(0.2, "Rise of a token's probability past which a positive advantage raises it no further.")

    def __post_init__(self) -> None:
        for key in ("delta_low", "delta_high"):
            require(0 <= getattr(self, key) <= 1, f"trainer.algorithm.dppo.{key}", "in [0, 1]", getattr(self, key))


@dataclass
class SapoConfig:
    tau_pos: float = doc(1.0, "How fast a positive advantage loses its force away from ratio 1.")
    tau_neg: float = doc(1.05, "The same of other advantages.")

    def __post_init__(self) -> None:
        for key in ("tau_pos", "tau_neg"):
            require(getattr(self, key) > 0, f"trainer.algorithm.sapo.{key}", "> 0", getattr(self, key))
