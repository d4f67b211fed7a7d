"""The off-policy corrections that a configuration asks for, as training takes them.

Flows in: the keys under ``trainer.algorithm.off_policy_correction``. Flows out: ``CorrectionSettings``.
"""

import math

from skyrl_async.algorithms.correction_settings import Bounds, CorrectionSettings
from skyrl_async.config.schema.corrections import OffPolicyCorrectionConfig, SequenceMaskMetric, TisRatioType


def correction_settings(config: OffPolicyCorrectionConfig) -> CorrectionSettings:
    """The same under the names of the algorithms."""
    kind, metric = config.tis_ratio_type, config.sequence_mask_metric
    return CorrectionSettings(
        token_tis=config.token_tis_ratio_clip_high if kind is TisRatioType.token else None,
        sequence_tis=config.sequence_tis_ratio_clip_high if kind is TisRatioType.sequence else None,
        token_mask=_bounds(config.token_mask_is_threshold_low, config.token_mask_is_threshold_high),
        product_mask=(config.product_mask_low, config.product_mask_high)
        if metric is SequenceMaskMetric.product
        else None,
        geometric_mask=(config.geo_mask_low, config.geo_mask_high) if metric is SequenceMaskMetric.geometric else None,
        outlier_mask=_bounds(config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high),
        opsm_delta=config.opsm_delta,
        m2_threshold=config.m2_threshold,
    )


def _bounds(low: float | None, high: float | None) -> Bounds | None:
    """With a side left open where it is null; None where both are."""
    if low is None and high is None:
        return None
    return (0.0 if low is None else low, math.inf if high is None else high)
