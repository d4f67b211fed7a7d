"""Which off-policy corrections a run makes, as plain values: no torch, so that any process can hold them.

Flows in: the values of ``trainer.algorithm.off_policy_correction``. Flows out: the same, under the names of this package. What they
mean is in ``corrections``; bounds are on ``pi / mu``.
"""

from dataclasses import dataclass

Bounds = tuple[float, float]
"""(low, high) of ``pi / mu``, both kept; 0 and infinity leave a side open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """None leaves a correction out."""

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
        """Has importance weights, not masks alone."""
        return self.token_tis is not None or self.sequence_tis is not None

    @property
    def is_empty(self) -> bool:
        """Corrects nothing."""
        return self == CorrectionSettings()
