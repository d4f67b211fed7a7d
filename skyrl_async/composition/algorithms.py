"""The parts of the algorithm that the configuration names: advantages, losses, corrections, reward shaping."""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator
from skyrl_async.algorithms.distillation import Distillation
from skyrl_async.algorithms.history import PromptRewards
from skyrl_async.algorithms.reward_shaping import RewardShape, penalise_overlong
from skyrl_async.algorithms.settings import AdvantageConstants, Bounds, CorrectionSettings, LossConstants
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.config.schema.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    Divergence,
    KlControl,
    OffPolicyCorrectionConfig,
    SequenceMaskMetric,
    TisRatioType,
)
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.run import Config
from skyrl_async.registries import POLICY_LOSSES, import_function

if TYPE_CHECKING:
    from skyrl_async.algorithms.kl import KlPenalty
    from skyrl_async.algorithms.policy_losses import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Where advantages are computed."""

    of_stage: AdvantageEstimator | None
    """Computes them in the reward stage, as soon as a group is finished; None: not there."""
    of_step: StepAdvantages
    """Computes them when a group is trained."""


def check_algorithm(algorithm: AlgorithmConfig, *, has_lone_samples: bool = False) -> None:
    """Try the estimator and the policy loss on a few numbers. Raises ``ConfigError`` when one cannot be used.

    Args:
        algorithm: names both.
        has_lone_samples: the estimator may get groups of one sample.
    """
    from skyrl_async.algorithms.losses import make_policy_loss
    from skyrl_async.algorithms.trial import try_estimator, try_policy_loss

    try_estimator(algorithm.advantage_estimator, _estimator(algorithm), has_lone_samples=has_lone_samples)
    name = algorithm.policy_loss_type
    try_policy_loss(name, make_policy_loss(name, loss_constants(algorithm)), POLICY_LOSSES.entry(name))


def make_advantages(algorithm: AlgorithmConfig) -> Advantages:
    """Compute advantages in the reward stage if they depend on the group's rewards alone, else when the group is trained."""
    estimator = _estimator(algorithm)
    mark = _mark(algorithm)
    reads_more = estimator.needs_mini_batch or estimator.needs_baseline
    reads_columns = estimator.needs_values or estimator.needs_old_logprobs  # which later stages fill in
    is_of_stage = not (reads_more or reads_columns or algorithm.use_kl_in_reward)
    penalty = _penalty(algorithm) if algorithm.use_kl_in_reward else None
    return Advantages(
        of_stage=estimator if is_of_stage else None,
        of_step=StepAdvantages(
            estimator=None if is_of_stage else estimator,
            penalty=penalty,
            history=PromptRewards(decay=algorithm.running_mean.decay) if estimator.needs_baseline else None,
            normalises=algorithm.advantage_batch_normalize,
            distillation=_distillation(algorithm.distillation),
            mark=mark,
        ),
    )


def _estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    if algorithm.distillation.is_alone:  # advantages of rewards are replaced: the one that asks for least will do
        return make_advantage_estimator("dr_grpo")
    constants = from_section(
        AdvantageConstants,
        *(algorithm, algorithm.gigpo),
        norm_by_std=algorithm.grpo_norm_by_std,
        credit_decay=algorithm.turn_credit.decay,
        credit_weight=algorithm.turn_credit.weight,
    )
    return make_advantage_estimator(algorithm.advantage_estimator, constants)


def _distillation(config: DistillationConfig) -> Distillation | None:
    if not config.teachers:
        return None
    is_in_loss = config.top_k is not None
    return Distillation(
        coef=0.0 if is_in_loss else config.coef,
        forward=config.divergence is Divergence.forward_kl and not is_in_loss,
        ratio_clip=config.ratio_clip,
        is_alone=not config.use_rewards,
    )


def _mark(algorithm: AlgorithmConfig) -> "Mark | None":
    """Return what marks tokens for the policy loss; None where the loss needs no marks."""
    path = POLICY_LOSSES.entry(algorithm.policy_loss_type).marker
    if path is None:
        return None
    return functools.partial(
        import_function("trainer.algorithm.policy_loss_type", path), constants=loss_constants(algorithm)
    )


def _penalty(algorithm: AlgorithmConfig) -> "KlPenalty":
    from skyrl_async.algorithms.kl import KL_ESTIMATORS, KlController, KlPenalty

    control = algorithm.kl_ctrl
    controller = KlController(
        coefficient=algorithm.kl_loss_coef,
        target=control.kl_target if control.type is KlControl.adaptive else None,
        horizon=control.horizon,
    )
    return KlPenalty(KL_ESTIMATORS[algorithm.kl_estimator.name], controller)


def loss_constants(algorithm: AlgorithmConfig) -> LossConstants:
    """Collect the constants of all policy losses."""
    return from_section(
        LossConstants,
        *(algorithm, algorithm.cispo, algorithm.dppo, algorithm.clip_cov, algorithm.kl_cov),
        dppo_delta_low=algorithm.dppo.delta_low,
        dppo_delta_high=algorithm.dppo.delta_high,
        sapo_tau_pos=algorithm.sapo.tau_pos,
        sapo_tau_neg=algorithm.sapo.tau_neg,
        clip_cov_ratio=algorithm.clip_cov.clip_ratio,
    )


def correction_settings(config: OffPolicyCorrectionConfig) -> CorrectionSettings:
    """Translate ``trainer.algorithm.off_policy_correction`` for the training workers."""
    kind, metric = config.tis_ratio_type, config.sequence_mask_metric
    return from_section(
        CorrectionSettings,
        config,
        token_tis=config.token_tis_ratio_clip_high if kind is TisRatioType.token else None,
        sequence_tis=config.sequence_tis_ratio_clip_high if kind is TisRatioType.sequence else None,
        token_mask=_bounds(config.token_mask_is_threshold_low, config.token_mask_is_threshold_high),
        product_mask=(config.product_mask_low, config.product_mask_high)
        if metric is SequenceMaskMetric.product
        else None,
        geometric_mask=(config.geo_mask_low, config.geo_mask_high) if metric is SequenceMaskMetric.geometric else None,
        outlier_mask=_bounds(config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high),
    )


def _bounds(low: float | None, high: float | None) -> Bounds | None:
    """Return bounds that are open where a side is None; None where both are."""
    if low is None and high is None:
        return None
    return (0.0 if low is None else low, math.inf if high is None else high)


def check_reward_shaping(config: Config) -> None:
    """Try the user's reward shaping on a few numbers. Raises ``ConfigError`` when it cannot be imported or does not shape rewards."""
    from skyrl_async.algorithms.trial import try_shape

    name = config.trainer.algorithm.reward_shaping
    if name is not None:
        try_shape(name, reward_shapes(config)[0])


def reward_shapes(config: Config) -> list[RewardShape]:
    """Return the user's shaping, then the length penalty. Raises ``ConfigError`` when the function cannot be imported."""
    algorithm, shapes = config.trainer.algorithm, []
    if algorithm.reward_shaping is not None:
        shapes.append(cast(RewardShape, import_function("trainer.algorithm.reward_shaping", algorithm.reward_shaping)))
    if algorithm.overlong_buffer_len:
        longest, factor = config.generator.longest_response, algorithm.overlong_buffer_penalty_factor
        shapes.append(penalise_overlong(max_tokens=longest, buffer_len=algorithm.overlong_buffer_len, factor=factor))
    return shapes
