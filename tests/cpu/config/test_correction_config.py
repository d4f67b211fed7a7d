"""The keys of off-policy corrections: what they become, and what is refused with which advice."""

import math
from pathlib import Path

import pytest

from skyrl_async.algorithms.off_policy import Anchor
from skyrl_async.algorithms.settings import CorrectionSettings
from skyrl_async.composition.algorithms import correction_settings
from skyrl_async.composition.logprobs import training_settings
from skyrl_async.composition.processes import _endpoint_settings
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.algorithm import _WEIGHABLE, whole_vocabulary_settings
from skyrl_async.config.rules.notices import idle_settings
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.training.backends.assembly import make_objective
from skyrl_async.training.backends.settings import TrainingSettings
from tests.cpu import quick_config

PREFIX = "trainer.algorithm.off_policy_correction"
ROLLOUT_IS = "trainer.algorithm.policy_loss_type=rollout_is"
DECOUPLED = "trainer.algorithm.policy_loss_type=decoupled_ppo"
GAE = "trainer.algorithm.advantage_estimator=gae"
TEACHER = "trainer.algorithm.distillation.teachers={t: http://host:8000/v1}"


def config_of(*overrides: str) -> Config:
    """With short names for corrections."""
    return from_overrides(*(text if "." in text.partition("=")[0] else f"{PREFIX}.{text}" for text in overrides))


def settings_of(*overrides: str) -> CorrectionSettings:
    return correction_settings(config_of(*overrides).trainer.algorithm.off_policy_correction)


def test_by_default_nothing_is_corrected() -> None:
    assert settings_of().is_empty


@pytest.mark.slow
def test_keys_are_skyrls_and_become_bounds_on_the_ratio() -> None:
    assert settings_of(ROLLOUT_IS, "tis_ratio_type=token") == CorrectionSettings(token_tis=2.0)
    sequence = settings_of(ROLLOUT_IS, "tis_ratio_type=sequence", "sequence_tis_ratio_clip_high=inf")
    assert sequence == CorrectionSettings(sequence_tis=math.inf)
    assert settings_of("sequence_mask_metric=geometric") == CorrectionSettings(geometric_mask=(0.99, 1.01))
    product = settings_of("sequence_mask_metric=product", "product_mask_low=0")
    assert product == CorrectionSettings(product_mask=(0.0, 2.0))
    outlier = settings_of("outlier_token_is_threshold_low=1e-4", "outlier_token_is_threshold_high=100")
    assert outlier == CorrectionSettings(outlier_mask=(1e-4, 100.0))
    assert settings_of("token_mask_is_threshold_high=5") == CorrectionSettings(token_mask=(0.0, 5.0))
    assert settings_of("token_mask_is_threshold_low=0.5") == CorrectionSettings(token_mask=(0.5, math.inf))
    assert settings_of("opsm_delta=0.1", "m2_threshold=0.04") == CorrectionSettings(opsm_delta=0.1, m2_threshold=0.04)


def test_corrections_reach_the_policy_workers() -> None:
    settings = training_settings(config_of("opsm_delta=0.1"), Path("policy"), 10)
    assert settings.correction == CorrectionSettings(opsm_delta=0.1)
    correction = make_objective(settings).correction
    assert correction is not None and correction.anchor is Anchor.BEHAVIOR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tis_ratio_type=row"], "tis_ratio_type.*token.*sequence"),
        (["token_tis_ratio_clip_high=0"], f"{PREFIX}.token_tis_ratio_clip_high must be > 0, got 0"),
        (["geo_mask_low=1.001"], f"{PREFIX}.geo_mask_low must be in \\[0, 1\\) .* must not be masked\\), got 1.001"),
        (["product_mask_high=1"], f"{PREFIX}.product_mask_high must be > 1 "),
        (["outlier_token_is_threshold_high=0.5"], f"{PREFIX}.outlier_token_is_threshold_high must be > 1 "),
        (["token_mask_is_threshold_low=-1"], f"{PREFIX}.token_mask_is_threshold_low must be in \\[0, 1\\) "),
        (["opsm_delta=0"], f"{PREFIX}.opsm_delta must be > 0 or null, got 0"),
        (["m2_threshold=-0.1"], f"{PREFIX}.m2_threshold must be > 0 or null, got -0.1"),
        (
            ["tis_ratio_type=token"],
            f"{PREFIX}.tis_ratio_type must be null with trainer.algorithm.policy_loss_type=ppo_clip, got token: .* count it twice; set "
            "policy_loss_type=decoupled_ppo or cispo_old, .* or rollout_is",
        ),
        (
            [ROLLOUT_IS, "tis_ratio_type=sequence", "generator.sampling.top_p=0.9"],
            f"generator.sampling.top_p must be left at its default with {PREFIX}.tis_ratio_type=sequence, got 0.9",
        ),
        (
            ["sequence_mask_metric=product", "generator.sampling.top_k=20"],
            f"generator.sampling.top_k must be left at its default with {PREFIX}.sequence_mask_metric=product, got 20",
        ),
        (
            ["opsm_delta=0.1", "generator.sampling.min_p=0.1"],
            f"generator.sampling.min_p must be left at its default with {PREFIX}.opsm_delta=0.1, got 0.1",
        ),
        (
            ["trainer.algorithm.policy_loss_type=gspo", "generator.sampling.top_p=0.9"],
            "generator.sampling.top_p must be left at its default with trainer.algorithm.policy_loss_type=gspo, got 0.9",
        ),
        (
            ["trainer.algorithm.use_kl_in_reward=true", "generator.sampling.top_p=0.9"],
            "generator.sampling.top_p must be left at its default with .*use_kl_in_reward=true, got 0.9: .* set use_kl_loss=true",
        ),
        (
            ["trainer.algorithm.use_kl_in_reward=true", DECOUPLED, "generator.sampling.min_p=0.1"],
            "generator.sampling.min_p must be left at its default with trainer.algorithm.use_kl_in_reward=true, got 0.1",
        ),
        (
            ["generator.sampling.top_k=20"],
            "generator.sampling.top_k must be left at its default with trainer.algorithm.policy_loss_type=ppo_clip, got 20: .* set "
            "policy_loss_type=decoupled_ppo or cispo_old, .* or rollout_is or cispo",
        ),
        (
            [DECOUPLED, "m2_threshold=0.04", "generator.sampling.min_p=0.1"],
            f"generator.sampling.min_p must be left at its default with {PREFIX}.m2_threshold=0.04, got 0.1: .* leave it null",
        ),
        (
            [ROLLOUT_IS, GAE, "generator.sampling.top_p=0.9"],
            "generator.sampling.top_p must be left at its default with trainer.algorithm.vtrace_clip=1, got 0.9: .* set vtrace_clip=null",
        ),
        (
            [ROLLOUT_IS, "token_mask_is_threshold_high=5", "generator.sampling.top_p=0.9"],
            f"generator.sampling.top_p must be left at its default with {PREFIX}.token_mask_is_threshold_high=5, got 0.9",
        ),
        (
            [
                ROLLOUT_IS,
                "trainer.algorithm.advantage_estimator=tests.cpu.own_algorithms:ratio_advantages",
                "generator.sampling.top_p=0.9",
            ],
            "generator.sampling.top_p must be left at its default with .*:ratio_advantages, got 0.9: .* log_ratios that it reads are too",
        ),
        (
            [ROLLOUT_IS, "trainer.guard.min_ess=0.3", "generator.sampling.top_p=0.9"],
            "generator.sampling.top_p must be left at its default with trainer.guard.min_ess=0.3, got 0.9: .* leave the guard off",
        ),
        (
            [ROLLOUT_IS, "trainer.guard.scale_lr_by_ess=true", "generator.sampling.top_k=20"],
            "generator.sampling.top_k must be left at its default with trainer.guard.scale_lr_by_ess=true, got 20",
        ),
        (
            [ROLLOUT_IS, "outlier_token_is_threshold_low=1e-4", "generator.sampling.top_p=0.9"],
            f"generator.sampling.top_p must be left at its default with {PREFIX}.outlier_token_is_threshold_low=0.0001, got 0.9",
        ),
        (
            [ROLLOUT_IS, TEACHER, "generator.sampling.top_p=0.9"],
            "generator.sampling.top_p must be left at its default with trainer.algorithm.distillation.teachers and top_k=null, got 0.9: .* "
            "set top_k, or policy_loss_type=decoupled_ppo or cispo_old",
        ),
    ],
)
def test_values_without_a_meaning_are_refused_with_what_to_change(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_a_divergence_in_the_loss_goes_with_truncated_sampling() -> None:
    """It is the policy's from the reference, both of the whole vocabulary."""
    config = config_of("trainer.algorithm.use_kl_loss=true", DECOUPLED, "generator.sampling.top_p=0.9")
    assert config.trainer.algorithm.use_kl_loss


def test_a_weight_goes_with_truncated_sampling_and_held_out_prompts_are_sampled_at_will() -> None:
    assert config_of(ROLLOUT_IS, "tis_ratio_type=token", "generator.sampling.top_p=0.9").generator.sampling.top_p == 0.9
    assert config_of("evaluation.sampling.top_p=0.9").evaluation.sampling.top_p == 0.9
    for unweighted in ("trainer.algorithm.vtrace_clip=null", "trainer.max_staleness_steps=0"):
        config_of(ROLLOUT_IS, GAE, unweighted, "generator.sampling.top_p=0.9")
    config_of(DECOUPLED, TEACHER, "generator.sampling.top_p=0.9")


def test_a_divergence_from_teachers_alone_goes_with_truncated_sampling_whatever_the_loss_that_it_replaces() -> None:
    alone = ("trainer.algorithm.distillation.teachers={t: teacher}", "trainer.algorithm.distillation.top_k=4")
    config = quick_config.config_of(*alone, "generator.sampling.top_p=0.9")
    assert not whole_vocabulary_settings(config), "tokens under a grammar are trained"
    with pytest.raises(ConfigError, match="with trainer.algorithm.policy_loss_type=ppo_clip, got 0.9"):
        quick_config.config_of(
            *alone, "trainer.algorithm.distillation.use_rewards=true", "generator.sampling.top_p=0.9"
        )


@pytest.mark.parametrize(
    "loss",
    [*sorted(POLICY_LOSSES.entries), "tests.cpu.own_algorithms:recomputed", "tests.cpu.own_algorithms:half_importance"],
)
def test_the_rule_and_the_training_agree_on_which_losses_take_a_weight(loss: str) -> None:
    settings = TrainingSettings(policy_path="", policy_loss=loss, correction=CorrectionSettings(token_tis=2.0))
    if loss in _WEIGHABLE or POLICY_LOSSES.entry(loss).needs_old_logprobs:
        assert make_objective(settings).correction is not None
    else:
        with pytest.raises(ConfigError, match="count it twice"):
            make_objective(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "are_trained"),
    [
        ([], False),
        ([ROLLOUT_IS], True),
        ([DECOUPLED], True),
        ([DECOUPLED, "sequence_mask_metric=product"], False),
        ([DECOUPLED, "trainer.algorithm.use_kl_in_reward=true"], False),
        ([DECOUPLED, "trainer.algorithm.use_kl_loss=true"], True),
    ],
)
def test_tokens_sampled_under_a_grammar_are_trained_where_truncated_sampling_is_allowed(
    overrides: list[str], are_trained: bool
) -> None:
    config = config_of(*overrides)
    assert _endpoint_settings(config, Path("policy"), 100, "k", "c").sessions.trains_constrained == are_trained


@pytest.mark.slow
def test_a_bound_that_does_nothing_is_named() -> None:
    (idle,) = idle_settings(config_of("geo_mask_high=1.1"))
    assert idle == f"{PREFIX}.geo_mask_high=1.1 does nothing without sequence_mask_metric=geometric"
    assert idle_settings(config_of("geo_mask_high=1.1", "sequence_mask_metric=geometric")) == []
    (idle,) = idle_settings(config_of(ROLLOUT_IS, "tis_ratio_type=token", "trainer.algorithm.tis_cap=3"))
    assert idle.startswith(f"trainer.algorithm.tis_cap=3.0 does nothing without {PREFIX}.tis_ratio_type=null")
