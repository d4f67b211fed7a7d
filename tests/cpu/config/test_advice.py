"""Settings that are allowed and hardly ever meant are said when a run starts, with what is meant instead."""

import pytest

from skyrl_async.config.rules import notices
from skyrl_async.config.rules.notices import advice
from tests.cpu.quick_config import config_of

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
GSPO = f"{ALGORITHM}.policy_loss_type=gspo"
IN_THE_REWARD = f"{ALGORITHM}.use_kl_in_reward=true"
IN_THE_LOSS = f"{ALGORITHM}.use_kl_loss=true"
RUNNING_MEAN = f"{ALGORITHM}.advantage_estimator=running_mean"
FILTERS = "trainer.fully_async.sample_full_batch=true"
AGENT = ("generator.kind=agent", "generator.command=true")


def test_bounds_and_reductions_that_do_not_go_with_a_loss() -> None:
    assert advice(config_of()) == []
    clips, reduces = advice(config_of(GSPO))
    assert "eps_clip_high of some 1e-4 are usual, 0.2 and 0.28 clip nothing" in clips
    assert (
        "policy_loss_type=gspo is meant for trainer.algorithm.loss_reduction=sequence_mean, got token_mean" in reduces
    )
    (m2,) = advice(config_of(f"{CORRECTION}.m2_threshold=0.04"))
    assert "policy_loss_type=ppo_clip clips as well, set rollout_is" in m2
    bounds = (f"{ALGORITHM}.eps_clip_low=3e-4", f"{ALGORITHM}.eps_clip_high=4e-4")
    assert advice(config_of(GSPO, f"{ALGORITHM}.loss_reduction=sequence_mean", *bounds)) == []


@pytest.mark.parametrize(
    ("name", "force"),
    [
        ("k2", "has next to no force near the reference"),
        ("k3", "pushes as KL(reference, policy) would pull"),
        ("abs", "has a force of either sign"),
    ],
)
def test_estimators_whose_gradient_in_the_reward_is_no_divergences(name: str, force: str) -> None:
    (found,) = advice(config_of(IN_THE_REWARD, f"{ALGORITHM}.kl_estimator_type={name}"))
    assert found.startswith(f"{ALGORITHM}.kl_estimator_type={name} ") and force in found
    assert "k1 pulls as KL(policy, reference) does there" in found
    assert (
        advice(config_of(IN_THE_REWARD, f"{ALGORITHM}.kl_estimator_type={name}", f"{ALGORITHM}.kl_loss_coef=0")) == []
    )


def test_k1_in_the_loss_is_advised_against_and_a_default_is_not() -> None:
    (found,) = advice(config_of(IN_THE_LOSS, f"{ALGORITHM}.kl_estimator_type=k1"))
    assert "kl_estimator_type=k1 does nothing in the mean with use_kl_loss=true" in found
    assert advice(config_of(IN_THE_LOSS)) == advice(config_of(IN_THE_REWARD)) == []
    assert advice(config_of(IN_THE_REWARD, f"{ALGORITHM}.kl_estimator_type=k1")) == []


@pytest.mark.parametrize(
    "settings",
    [
        (f"{CORRECTION}.tis_ratio_type=sequence", f"{ALGORITHM}.policy_loss_type=rollout_is"),
        (f"{CORRECTION}.sequence_mask_metric=product",),
        (f"{CORRECTION}.sequence_mask_metric=geometric",),
        (f"{CORRECTION}.opsm_delta=0.1",),
        (GSPO, f"{ALGORITHM}.loss_reduction=sequence_mean", f"{ALGORITHM}.eps_clip_high=4e-4"),
    ],
)
def test_ratios_of_rows_that_are_not_whole_answers(settings: tuple[str, ...]) -> None:
    assert advice(config_of(*settings)) == []
    (masked,) = advice(config_of(*settings, "trainer.staleness_policy=mask"))
    assert f"out of the ratio that {settings[0]} takes" in masked and "set wait or resample" in masked
    (rewritten,) = advice(config_of(*settings, *AGENT))
    assert f"the ratio that {settings[0]} takes of a row is without the turns before it" in rewritten
    assert advice(config_of("trainer.staleness_policy=mask", *AGENT)) == [], "tokens have their own"


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        *(
            (f"{ALGORITHM}.advantage_estimator={name}", ())
            for name in ("turn_rloo", "turn_credit", "gae", "reinforce++", "reinforce++_baseline")
        ),
        (RUNNING_MEAN, ("task.num_train_prompts=128",)),
        (f"{ALGORITHM}.advantage_batch_normalize=true", ()),
        (IN_THE_REWARD, ()),
        (f"{ALGORITHM}.distillation.teachers={{t: /x}}", (f"{ALGORITHM}.distillation.use_rewards=true",)),
    ],
)
def test_groups_of_equal_rewards_that_would_be_trained(setting: str, others: tuple[str, ...]) -> None:
    (found,) = advice(config_of(FILTERS, setting, *others))
    assert found.startswith(FILTERS) and f"some of which {setting.partition('={')[0]} would train;" in found
    assert advice(config_of(setting, *others)) == []


@pytest.mark.parametrize("name", ["grpo", "rloo", "tests.cpu.own_algorithms:unregistered_advantages"])
def test_groups_of_equal_rewards_that_train_nothing_are_left_out_without_a_word(name: str) -> None:
    assert advice(config_of(FILTERS, f"{ALGORITHM}.advantage_estimator={name}")) == []


def test_baselines_of_earlier_visits_without_a_second_visit() -> None:
    (found,) = advice(config_of(RUNNING_MEAN))
    assert (
        "none comes twice in 560 groups (trainer.num_steps=70) of task.num_train_prompts=2048: the baseline is" in found
    )
    dataset = ("task.name=dataset", f"task.train_files=[{__file__}]", "task.env_class=gsm8k", "policy.path=/x")
    (found,) = advice(config_of(RUNNING_MEAN, *dataset, "trainer.num_epochs=1"))
    assert "none comes twice with trainer.num_epochs=1: the baseline is the mean of all prompts" in found
    for others in (("task.num_train_prompts=559",), dataset, (f"{ALGORITHM}.distillation.teachers={{t: /x}}",)):
        assert advice(config_of(RUNNING_MEAN, *others)) == []


def test_a_falling_learning_rate_over_steps_that_will_not_happen() -> None:
    filtered = ("trainer.num_steps=null", FILTERS)
    (found,) = advice(config_of(*filtered, "trainer.num_epochs=2"))
    assert found.startswith("training.lr_schedule=linear is laid over all steps that trainer.num_epochs=2 hold")
    assert found.endswith("set trainer.num_steps, or training.lr_schedule=constant")
    assert advice(config_of(*filtered, "training.lr_schedule=constant")) == []
    assert advice(config_of("trainer.num_steps=null")) == advice(config_of(filtered[1])) == []


def test_a_warm_up_that_passes_while_the_critic_alone_is_trained() -> None:
    gae, both = (
        f"{ALGORITHM}.advantage_estimator=gae",
        ("trainer.critic.warmup_steps=4", "training.num_warmup_steps=10"),
    )
    (found,) = advice(config_of(gae, *both))
    assert "the policy's first step takes 50% of training.lr; set more num_warmup_steps" in found
    (found,) = advice(config_of(gae, both[0], "training.num_warmup_steps=3"))
    assert "the policy's first step takes 100% of training.lr" in found
    for others in ((gae, both[0], "training.num_warmup_steps=0"), (gae, both[1]), both):
        assert advice(config_of(*others)) == []


def test_rows_that_the_trainers_memory_cannot_hold_are_said_with_all_their_factors() -> None:
    huge = (
        "trainer.policy_mini_batch_size=2048",
        "generator.n_samples_per_prompt=64",
        "engine.max_model_len=100000000",
    )
    (found,) = advice(config_of(*huge, "trainer.max_staleness_steps=3"))
    assert (
        "policy_mini_batch_size=2048 x 4 (trainer.max_staleness_steps + 1) x generator.n_samples_per_prompt=64" in found
    )
    assert "rows of up to 100,000,000 tokens may take 471,859 GB in this process" in found
    columns = (
        f"{ALGORITHM}.use_kl_loss=true",
        f"{ALGORITHM}.policy_loss_type=decoupled_ppo",
        f"{ALGORITHM}.advantage_estimator=gae",
        f"{ALGORITHM}.distillation.teachers={{t: teacher}}",
        f"{ALGORITHM}.distillation.use_rewards=true",
    )
    (found,) = advice(config_of(*huge, *columns, "trainer.max_staleness_steps=3"))
    assert "may take 1,310,720 GB in this process" in found, "25 bytes in place of 9"
    assert advice(config_of(*huge[:1], "trainer.max_staleness_steps=3")) == []


def test_bfloat16_on_a_cpu_without_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served, trained = "policy.dtype=bfloat16", "training.mixed_precision=true"
    monkeypatch.setattr(notices, "has_fast_bfloat16", lambda: True)
    assert advice(config_of(served, trained)) == []
    monkeypatch.setattr(notices, "has_fast_bfloat16", lambda: False)
    assert advice(config_of()) == []
    (both,) = advice(config_of(served, trained))
    assert both.startswith("policy.dtype=bfloat16 and training.mixed_precision=true: this CPU has no instructions")
    (one,) = advice(config_of(served))
    assert one.startswith("policy.dtype=bfloat16: this CPU") and "set policy.dtype=float32" in one
