"""Which algorithms a configuration may name, and which go together."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.algorithms.advantages import with_advantages
from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.composition.algorithms import check_algorithm, loss_constants, make_advantages
from skyrl_async.composition.logprobs import training_settings
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.algorithm import needs_critic
from skyrl_async.config.rules.notices import idle_settings
from skyrl_async.errors import ConfigError
from skyrl_async.samples import Sample
from skyrl_async.types import Group, Trajectory, TurnSpan
from tests.cpu.advantage_columns import one_token_row
from tests.cpu.quick_config import config_of

ESTIMATOR = "trainer.algorithm.advantage_estimator"
LOSS = "trainer.algorithm.policy_loss_type"
TEACHER = "trainer.algorithm.distillation.teachers={t: /x}"
NORMALISES = "trainer.algorithm.advantage_batch_normalize=true"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "reinforce++_baseline"])
def test_a_run_may_name_any_estimator(name: str) -> None:
    assert config_of(f"{ESTIMATOR}={name}").trainer.algorithm.advantage_estimator == name


def test_log_probs_that_are_recomputed_at_any_time_make_no_deterministic_run() -> None:
    keys = ["trainer.deterministic=true", "trainer.algorithm.policy_loss_type=cispo_old"]
    with pytest.raises(ConfigError, match="max_staleness_steps must be 0 with .*policy_loss_type=cispo_old, got 4"):
        config_of(*keys)
    config_of(*keys, "trainer.max_staleness_steps=0")
    config_of("trainer.deterministic=true", "trainer.algorithm.policy_loss_type=rollout_is")


def test_the_command_line_takes_signs_and_paths_as_they_are() -> None:
    path = "tests.cpu.own_algorithms:half_importance"
    algorithm = from_overrides(f"{ESTIMATOR}=reinforce++_baseline", f"{LOSS}={path}").trainer.algorithm
    assert (algorithm.advantage_estimator, algorithm.policy_loss_type) == ("reinforce++_baseline", path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{ESTIMATOR}=gea"],
            f"{ESTIMATOR} must be one of dr_grpo, gae, gigpo, grpo, maxrl, .* or package.module:function, got 'gea'",
        ),
        ([f"{ESTIMATOR}=rlo"], r"got 'rlo'; did you mean rloo\?"),
        ([f"{ESTIMATOR}=no.such:function"], f"{ESTIMATOR}='no.such:function' cannot be imported: No module named 'no'"),
        ([f"{ESTIMATOR}=math:nothing"], "cannot be imported: module 'math' has no attribute 'nothing'"),
        ([f"{ESTIMATOR}=math:pi"], "'math:pi' must be a function, got float"),
        (
            [f"{ESTIMATOR}=skyrl_async.registries:import_function"],
            r"must be a function of \(rewards\), got import_function\(key: str, path: str\) .*: missing a required argument",
        ),
        (
            [f"{ESTIMATOR}=reinforce++", "trainer.stream_mini_batch=true"],
            r"trainer.stream_mini_batch must be false or null with .*=reinforce\+\+, got true: its advantages depend on all "
            "groups of a step; choose rloo or grpo",
        ),
        (
            [NORMALISES, "trainer.stream_mini_batch=true"],
            "trainer.stream_mini_batch must be false or null with .*advantage_batch_normalize=true, got true: it takes the mean over all",
        ),
        (
            [NORMALISES, TEACHER],
            "advantage_batch_normalize must be false with .*distillation.teachers, got true: it would change what coef weighs",
        ),
        (
            [f"{ESTIMATOR}=gae", "trainer.algorithm.vtrace_clip=null", "trainer.deterministic=true"],
            "max_staleness_steps must be 0 with trainer.deterministic=true and .*=gae, got 4: values are computed by the critic",
        ),
        (
            [f"{ESTIMATOR}=tests.cpu.own_algorithms:ratio_advantages", "trainer.deterministic=true"],
            "max_staleness_steps must be 0 with trainer.deterministic=true and .*, got 4: log-probs are computed by the policy that",
        ),
        (
            [f"{ESTIMATOR}=gae", "trainer.critic.warmup_steps=50", "trainer.num_steps=50"],
            r"trainer.critic.warmup_steps must be < trainer.num_steps \(50\), got 50: the policy would never be trained",
        ),
        (
            ["trainer.algorithm.use_kl_in_reward=true", TEACHER],
            "use_kl_in_reward must be false with .*distillation.teachers and use_rewards=false, got true: rewards train nothing there",
        ),
    ],
)
def test_a_wrong_algorithm_is_refused_with_what_to_change(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config_of(*overrides)


@pytest.mark.parametrize("name", ["reinforce++", "running_mean", "gae", "turn_gae"])
def test_estimators_that_compare_no_samples_of_a_prompt_run_on_single_ones(name: str) -> None:
    config = config_of(f"{ESTIMATOR}={name}", "generator.n_samples_per_prompt=1")
    check_algorithm(config.trainer.algorithm, has_lone_samples=True)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce++_baseline", "turn_rloo", "gigpo", "turn_credit"]
)
def test_estimators_that_compare_the_samples_of_a_prompt_refuse_single_ones(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"n_samples_per_prompt must be >= 2 with .*estimator={re.escape(name)}, got 1: a group of"
    ):
        config_of(f"{ESTIMATOR}={name}", "generator.n_samples_per_prompt=1")
    config_of(f"{ESTIMATOR}={name}", "generator.n_samples_per_prompt=2")


def test_estimators_of_groups_may_be_streamed() -> None:
    config_of(f"{ESTIMATOR}=rloo", "trainer.stream_mini_batch=true")


@pytest.mark.parametrize(
    ("name", "key", "of_first", "of_second"),
    [
        ("gigpo", "gigpo.step_advantage_w=1", (2**0.5, 0.5**0.5), (-(2**0.5), -(0.5**0.5))),
        ("gigpo", "gigpo.step_advantage_w=3", (8**0.5, 0.5**0.5), (-(8**0.5), -(0.5**0.5))),
        ("gigpo", "turn_discount=0", (0.5**0.5, 0.5**0.5), (-(0.5**0.5), -(0.5**0.5))),
        ("turn_credit", "turn_credit.decay=0.9", (1 + 0.9 / 1.9 - 0.5, 1 + 1 / 1.9 - 0.5), (-1.0, -1.0)),
        ("turn_credit", "turn_credit.decay=0", (0.5, 1.5), (-1.0, -1.0)),
        ("turn_credit", "turn_credit.weight=0", (1.0, 1.0), (-1.0, -1.0)),
        ("turn_rloo", "turn_discount=0.5", (0.5, 1.0), (-0.5, -1.0)),
        ("gae", "gamma=0.5", (0.125, 0.5), (-0.125, -0.5)),
        ("gae", "lambd=0.5", (0.375, 0.5), (0.125, -0.5)),
        ("gae", "vtrace_clip=1", (0.5, 0.5), (0.0, -0.5)),
        ("gae", "vtrace_clip=null", (0.75, 0.5), (-0.25, -0.5)),
        ("turn_gae", "gamma=0.5", (0.125, 0.5), (-0.125, -0.5)),
        ("turn_gae", "vtrace_clip=1", (0.5, 0.5), (0.0, -0.5)),
    ],
)
def test_a_key_of_an_estimator_of_turns_or_tokens_reaches_the_advantages(
    name: str, key: str, of_first: tuple[float, float], of_second: tuple[float, float]
) -> None:
    algorithm = from_overrides(f"{ESTIMATOR}={name}", f"trainer.algorithm.{key}").trainer.algorithm
    rows = [
        Trajectory(
            prompt_token_ids=(1,),
            response_token_ids=(2, shown, 2),
            loss_mask=(1, 0, 1),
            logprobs=(-1.0, 0.0, -1.0),
            versions=(0, -1, 0),
            reward=reward,
            turn_rewards=(0.0, reward),
            turn_spans=(TurnSpan(index=0, start=0, end=1), TurnSpan(index=1, start=2, end=3)),
            values=(0.25, 0.0, 0.5),
            old_logprobs=(-1.0, 0.0, -1.0 - math.log(2)),
            old_version=1,
        )
        for shown, reward in ((3, 1.0), (4, 0.0))  # the first turns were shown the same
    ]
    group = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=tuple(rows))
    made = make_advantages(algorithm)
    (found,) = made.of_step([group] if made.of_stage is None else with_advantages([group], made.of_stage))
    columns = [column[[0, 2]].tolist() for column in found.advantages]
    assert columns == [pytest.approx(of_first, abs=1e-5), pytest.approx(of_second, abs=1e-5)]


@pytest.mark.parametrize("name", ["gae", "reinforce++", "running_mean"])
def test_teachers_alone_need_neither_a_critic_nor_a_mini_batch_nor_baselines(name: str) -> None:
    config = config_of(TEACHER, f"{ESTIMATOR}={name}", "trainer.stream_mini_batch=true")
    made = make_advantages(config.trainer.algorithm)
    assert not needs_critic(config) and made.of_stage is not None and not made.of_step.need_mini_batch
    row = replace(one_token_row(1.0), teacher_logprobs=(-0.5,))
    group = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,))
    (found,) = made.of_step(with_advantages([group], made.of_stage))
    assert found.advantages[0].tolist() == [-0.5 - row.logprobs[0]]


@pytest.mark.parametrize(("decay", "expected"), [("0", 0.0), ("0.5", 1 / 3), ("1", 0.5)])
def test_the_decay_of_a_running_mean_reaches_the_baseline(decay: str, expected: float) -> None:
    keys = (f"{ESTIMATOR}=running_mean", f"trainer.algorithm.running_mean.decay={decay}")
    of_step = make_advantages(config_of(*keys).trainer.algorithm).of_step
    for reward in (1.0, 0.0, 0.0):
        row = one_token_row(reward)
        (found,) = of_step([Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,))])
        of_step.end_step()
    assert found.advantages[0].tolist() == [pytest.approx(-expected)]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gigpo.step_advantage_w=-1", "gigpo.step_advantage_w must be in [0, inf), got -1.0"),
        ("gigpo.step_advantage_w=inf", "gigpo.step_advantage_w must be in [0, inf), got inf"),
        ("turn_credit.decay=1.5", "turn_credit.decay must be in [0, 1], got 1.5"),
        ("turn_credit.weight=-0.5", "turn_credit.weight must be in [0, inf), got -0.5"),
        ("turn_credit.weight=nan", "turn_credit.weight must be in [0, inf), got nan"),
    ],
)
def test_a_wrong_setting_of_an_estimator_of_turns_is_refused_with_what_to_change(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"trainer.algorithm.{expected}")):
        from_overrides(f"trainer.algorithm.{override}")


def test_a_setting_of_another_estimator_is_said_to_do_nothing() -> None:
    (idle,) = idle_settings(config_of(f"{ESTIMATOR}=rloo", "trainer.algorithm.grpo_norm_by_std=false"))
    assert idle == "trainer.algorithm.grpo_norm_by_std=false does nothing without advantage_estimator=grpo or gigpo"


def test_skyrls_name_of_the_mean_over_sequences_is_that_of_verl_too() -> None:
    by_name = [
        config_of(f"trainer.algorithm.loss_reduction={name}").trainer.algorithm.loss_reduction.name
        for name in ("sequence_mean", "seq_mean_token_mean")
    ]
    assert by_name == ["sequence_mean", "sequence_mean"]


def test_dr_grpos_constant_is_asked_for_and_elsewhere_said_to_do_nothing() -> None:
    reduction, length = "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "trainer.algorithm.max_seq_len=320"
    with pytest.raises(ConfigError, match="max_seq_len must be set with .*seq_mean_token_sum_norm, got None"):
        config_of(reduction)
    with pytest.raises(ConfigError, match="max_seq_len must be >= 1 or null, got 0"):
        config_of(reduction, "trainer.algorithm.max_seq_len=0")
    assert idle_settings(config_of(reduction, length)) == []
    assert idle_settings(config_of(length)) == [
        "trainer.algorithm.max_seq_len=320 does nothing without loss_reduction=seq_mean_token_sum_norm"
    ]


def test_a_run_may_name_any_policy_loss_and_its_constants_reach_the_workers() -> None:
    for name in (
        "ppo_clip",
        "regular",
        "dual_clip",
        "gspo",
        "dppo",
        "decoupled_ppo",
        "rollout_is",
        "cispo",
        "sapo",
        "clip_cov",
    ):
        assert config_of(f"{LOSS}={name}").trainer.algorithm.policy_loss_type == name
    prefix = "trainer.algorithm"
    algorithm = config_of(
        *(f"{prefix}.{key}" for key in ("eps_clip_low=0.1", "eps_clip_high=0.3", "clip_ratio_c=4", "tis_cap=5")),
        *(f"{prefix}.cispo.cispo_eps_clip_{side}" for side in ("low=0.5", "high=6")),
        *(f"{prefix}.dppo.delta_{side}" for side in ("low=0.15", "high=0.25")),
        *(f"{prefix}.sapo.tau_{side}" for side in ("pos=2", "neg=3")),
        f"{prefix}.dppo.dppo_type=binary_kl",
        *(f"{prefix}.clip_cov.{key}" for key in ("clip_ratio=0.01", "clip_cov_lb=0.5", "clip_cov_ub=2")),
        *(f"{prefix}.kl_cov.{key}" for key in ("kl_cov_frac=0.02", "ppo_kl_coef=0.5")),
    ).trainer.algorithm
    assert loss_constants(algorithm) == LossConstants(
        eps_clip_low=0.1,
        eps_clip_high=0.3,
        clip_ratio_c=4.0,
        tis_cap=5.0,
        cispo_eps_clip_low=0.5,
        cispo_eps_clip_high=6.0,
        dppo_delta_low=0.15,
        dppo_delta_high=0.25,
        sapo_tau_pos=2.0,
        sapo_tau_neg=3.0,
        dppo_type="binary_kl",
        clip_cov_ratio=0.01,
        clip_cov_lb=0.5,
        clip_cov_ub=2.0,
        kl_cov_frac=0.02,
        ppo_kl_coef=0.5,
    )


def test_the_defaults_of_the_configuration_are_those_of_the_constants() -> None:
    assert loss_constants(config_of().trainer.algorithm) == LossConstants()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{LOSS}=gsp"], r"policy_loss_type must be one of cispo, .* got 'gsp'; did you mean gspo\?"),
        (
            [f"{LOSS}=clip_higher", "trainer.algorithm.eps_clip_high=0.2"],
            r"eps_clip_high must be > .*eps_clip_low \(0.2\)",
        ),
        (["trainer.algorithm.clip_ratio_c=1"], "clip_ratio_c must be > 1, got 1.0"),
        (["trainer.algorithm.cispo.cispo_eps_clip_low=2"], r"cispo.cispo_eps_clip_low must be in \[0, 1\], got 2.0"),
        (
            ["trainer.algorithm.dppo.delta_high=-1"],
            r"dppo.delta_high must be in \[0, 1\] with dppo_type=binary_tv, got -1",
        ),
        (
            ["trainer.algorithm.dppo.dppo_type=binary_kl", "trainer.algorithm.dppo.delta_low=-1"],
            "dppo.delta_low must be >= 0, got -1.0",
        ),
        (["trainer.algorithm.clip_cov.clip_ratio=0"], r"clip_cov.clip_ratio must be in \(0, 1\], got 0.0"),
        (["trainer.algorithm.clip_cov.clip_cov_lb=6"], r"clip_cov.clip_cov_ub must be > clip_cov_lb \(6\), got 5.0"),
        (["trainer.algorithm.kl_cov.kl_cov_frac=2"], r"kl_cov.kl_cov_frac must be in \(0, 1\], got 2.0"),
        (["trainer.algorithm.kl_cov.ppo_kl_coef=-1"], r"kl_cov.ppo_kl_coef must be in \[0, inf\), got -1.0"),
        *(
            (
                [f"{LOSS}={name}", "trainer.stream_mini_batch=true"],
                f"trainer.stream_mini_batch must be false or null with {LOSS}={name}, got true: it chooses tokens among all of a step",
            )
            for name in ("clip_cov", "kl_cov")
        ),
        (["trainer.algorithm.sapo.tau_neg=0"], "sapo.tau_neg must be > 0, got 0.0"),
        (
            ["training.num_logp_workers=1", f"{LOSS}=gspo"],
            "num_logp_workers must be 0 with .*policy_loss_type=gspo, got 1: decoupled_ppo asks for recomputed log-probs",
        ),
    ],
)
def test_a_wrong_policy_loss_is_refused_with_what_to_change(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config_of(*overrides)


KL = "trainer.algorithm.use_kl_in_reward=true"
ADAPTIVE = "trainer.algorithm.kl_ctrl.type=adaptive"


def test_the_least_horizon_takes_a_fifth_of_an_adaptive_coefficient_in_a_step() -> None:
    config = config_of(KL, ADAPTIVE, "trainer.algorithm.kl_ctrl.horizon=64", "trainer.algorithm.kl_loss_coef=0.05")
    penalty = make_advantages(config.trainer.algorithm).of_step.penalty
    assert penalty is not None
    penalty.controller.update(0.0, num_samples=64)
    assert penalty.controller.coefficient == pytest.approx(0.04)
    assert config_of(KL, "trainer.algorithm.kl_ctrl.horizon=1"), "nothing follows it"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([KL, "trainer.algorithm.use_kl_loss=true"], "use_kl_in_reward must be false with .*use_kl_loss=true"),
        ([ADAPTIVE], "kl_ctrl.type must be fixed without trainer.algorithm.use_kl_in_reward=true, got 'adaptive'"),
        ([KL, ADAPTIVE, "trainer.algorithm.kl_loss_coef=0"], "kl_loss_coef must be > 0 with .*type=adaptive"),
        ([KL, "trainer.algorithm.kl_ctrl.kl_target=0"], "kl_ctrl.kl_target must be > 0, got 0.0"),
        ([KL, "trainer.algorithm.kl_ctrl.horizon=0"], "kl_ctrl.horizon must be >= 1, got 0"),
        (
            [KL, ADAPTIVE, "trainer.algorithm.kl_ctrl.horizon=63"],
            r"kl_ctrl.horizon must be >= .*n_samples_per_prompt \(8 \* 8 = 64\) with kl_ctrl.type=adaptive, got 63: it counts samples",
        ),
        ([KL, "trainer.algorithm.ref_logp=inline"], "ref_logp must be stage with .*use_kl_in_reward=true, got inline"),
        ([KL, f"{ESTIMATOR}=maxrl"], "use_kl_in_reward must be false with .*=maxrl, got true: .* set use_kl_loss=true"),
        (
            [f"{ESTIMATOR}=maxrl", "trainer.algorithm.overlong_buffer_len=32", "generator.max_turns=1"],
            "overlong_buffer_len must be 0 with .*=maxrl, got 32: .* set generator.apply_overlong_filtering=true",
        ),
    ],
)
def test_a_contradictory_divergence_or_penalty_is_refused_with_what_to_change(
    overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        config_of(*overrides)


def test_divergence_in_the_reward_asks_for_the_reference_and_is_applied_when_a_group_is_trained() -> None:
    config = config_of(KL, ADAPTIVE, "trainer.algorithm.kl_loss_coef=0.02", "training.num_ref_workers=1")
    assert config.trainer.algorithm.uses_reference
    assert idle_settings(config) == []
    made = make_advantages(config.trainer.algorithm)
    assert (made.of_stage, made.of_step.need_mini_batch, made.of_step.kl_coef) == (None, False, 0.02)
    plain = make_advantages(config_of().trainer.algorithm)
    assert plain.of_stage is not None
    assert plain.of_step.kl_coef is None
    assert make_advantages(config_of(f"{ESTIMATOR}=reinforce++").trainer.algorithm).of_step.need_mini_batch


@pytest.mark.parametrize(
    ("overrides", "in_the_loss", "in_the_reward"),
    [
        (["trainer.algorithm.use_kl_loss=true"], "k3", None),
        (["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_estimator_type=k2"], "k2", None),
        ([KL], None, 0.5),
        ([KL, "trainer.algorithm.kl_estimator_type=k3"], None, math.exp(-0.5) - 1 + 0.5),
    ],
)
def test_the_default_estimator_depends_on_whether_it_is_in_the_loss_or_in_the_reward(
    overrides: list[str], in_the_loss: str | None, in_the_reward: float | None
) -> None:
    config = config_of(*overrides)
    assert training_settings(config, Path("policy"), 10).kl_estimator == in_the_loss
    penalty = make_advantages(config.trainer.algorithm).of_step.penalty
    if in_the_reward is None:
        assert penalty is None
        return
    row = one_token_row(1.0, ref_logprobs=(-1.5,))
    assert penalty is not None
    assert penalty.penalised(Sample(rows=(row,))) == pytest.approx(1 - 0.001 * in_the_reward, abs=1e-12)
