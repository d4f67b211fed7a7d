"""The keys under ``trainer.algorithm.off_policy_correction``, with SkyRL's names where it has one. Formulas: ``algorithms.corrections``."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.fields import doc, require

_PREFIX = "trainer.algorithm.off_policy_correction"


class TisRatioType(Enum):
    token = "token"
    sequence = "sequence"


class SequenceMaskMetric(Enum):
    product = "product"
    geometric = "geometric"


@dataclass
class OffPolicyCorrectionConfig:
    tis_ratio_type: TisRatioType | None = doc(
        None,
        "Weigh the loss by the importance ratio pi / mu of each token, or of its whole row (product over its tokens), cut from above; mu "
        "is the engine's. With policy_loss_type=rollout_is pi is the policy, with decoupled_ppo the recomputed one; the weight takes the "
        "place of theirs and of tis_cap.",
    )
    token_tis_ratio_clip_high: float = doc(2.0, "Largest weight with tis_ratio_type=token; inf does not cut.")
    sequence_tis_ratio_clip_high: float = doc(5.0, "Largest weight with tis_ratio_type=sequence; inf does not cut.")
    sequence_mask_metric: SequenceMaskMetric | None = doc(
        None,
        "Mask rows whose ratio pi / mu is out of bounds: its product over the tokens, or its geometric mean. Masked tokens add nothing to "
        "the policy loss, and count in the mean over tokens.",
    )
    geo_mask_high: float = doc(1.01, "Upper bound with sequence_mask_metric=geometric.")
    geo_mask_low: float = doc(0.99, "Lower bound with sequence_mask_metric=geometric.")
    product_mask_high: float = doc(
        2.0,
        "Upper bound with sequence_mask_metric=product. With tis_ratio_type=sequence and product_mask_low=0 it is the C of sequence-level "
        "masked importance sampling (MIS).",
    )
    product_mask_low: float = doc(0.5, "Lower bound with sequence_mask_metric=product.")
    outlier_token_is_threshold_low: float | None = doc(
        None, "Mask rows with a token whose ratio pi / mu is below this, such as 1e-4; null: none."
    )
    outlier_token_is_threshold_high: float | None = doc(
        None, "Mask rows with a token whose ratio pi / mu is above this, such as 100; null: none."
    )
    token_mask_is_threshold_low: float | None = doc(
        None,
        "Mask tokens whose ratio pi / mu is below this; null: none. IcePop is tis_ratio_type=token with token_tis_ratio_clip_high=inf and "
        "thresholds of 0.5 and 5; token-level MIS has the upper one alone.",
    )
    token_mask_is_threshold_high: float | None = doc(None, "Mask tokens whose ratio pi / mu is above this; null: none.")
    opsm_delta: float | None = doc(
        None,
        "Off-policy sequence masking (DeepSeek-V3.2): mask tokens of negative advantage in rows whose mean of log(mu / pi) is above this, "
        "in nats; pi is the policy. Null: none.",
    )
    m2_threshold: float | None = doc(
        None,
        "M2PO: mask the tokens of largest squared log-ratio until their mean in the row is at most this, such as 0.04, among those that "
        "the loss would push further off; pi is the policy. The paper's mean is over the batch; held in each row the bound masks "
        "more, above all of a single row that has drifted for long. In place of clipping: with policy_loss_type=rollout_is. Null: none.",
    )

    def __post_init__(self) -> None:
        for key in ("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high"):
            require(getattr(self, key) > 0, f"{_PREFIX}.{key}", "> 0", getattr(self, key))
        for kind in ("geo_mask_{}", "product_mask_{}", "outlier_token_is_threshold_{}", "token_mask_is_threshold_{}"):
            low, high = kind.format("low"), kind.format("high")
            self._require_bound(low, lambda value: 0 <= value < 1, "in [0, 1)")
            self._require_bound(high, lambda value: value > 1, "> 1")
        for key in ("opsm_delta", "m2_threshold"):
            value = getattr(self, key)
            require(value is None or value > 0, f"{_PREFIX}.{key}", "> 0 or null", value)

    def _require_bound(self, key: str, is_fine: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, key)
        reason = "a token that its own sampler would sample as often has a ratio of 1, and must not be masked"
        require(value is None or is_fine(value), f"{_PREFIX}.{key}", f"{expected} ({reason})", value)
