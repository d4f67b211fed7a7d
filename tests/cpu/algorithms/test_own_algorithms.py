"""Algorithms of users: by the name they registered, or by the path of a function, also in other processes."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator, register_advantage_estimator
from skyrl_async.algorithms.credit import GroupRewards, SampleCredit
from skyrl_async.algorithms.losses import register_policy_loss
from skyrl_async.algorithms.settings import AdvantageConstants, LossConstants
from skyrl_async.algorithms.trial import try_estimator
from skyrl_async.composition.algorithms import check_algorithm, make_advantages
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Unit
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from skyrl_async.types import Group, Trajectory
from tests.cpu import own_algorithms
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_run import build_policy

HERE = "tests.cpu.own_algorithms"
ESTIMATOR, LOSS = "trainer.algorithm.advantage_estimator", "trainer.algorithm.policy_loss_type"


class TestEstimators:
    def test_a_name_and_a_path_lead_to_the_function(self) -> None:
        for name in ("own_median", f"{HERE}:median_advantages"):
            algorithm = config_of(f"{ESTIMATOR}={name}").trainer.algorithm
            check_algorithm(algorithm)
            assert make_advantages(algorithm).of_stage.compute is own_algorithms.median_advantages
        plain = make_advantage_estimator(f"{HERE}:unregistered_advantages").compute
        assert plain is own_algorithms.unregistered_advantages

    def test_one_that_takes_the_name_grpo_is_called_without_norm_by_std_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "entries", dict(ADVANTAGE_ESTIMATORS.entries))
        monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_builtin", ADVANTAGE_ESTIMATORS._builtin)
        register_advantage_estimator("grpo")(own_algorithms.median_advantages)
        made = make_advantage_estimator("grpo", AdvantageConstants(norm_by_std=False))
        assert made.compute is own_algorithms.median_advantages

    def test_what_was_said_at_its_registration_holds_by_its_path_too(self) -> None:
        for name in ("own_mini_batch", f"{HERE}:mini_batch_advantages"):
            with pytest.raises(ConfigError, match="trainer.stream_mini_batch must be false or null with"):
                config_of(f"{ESTIMATOR}={name}", "trainer.stream_mini_batch=true")
            algorithm = config_of(f"{ESTIMATOR}={name}").trainer.algorithm
            check_algorithm(algorithm)
            assert make_advantages(algorithm).of_step.need_mini_batch
        config_of(f"{ESTIMATOR}=own_median", "generator.n_samples_per_prompt=1")

    def test_one_that_does_not_return_an_advantage_per_reward_is_refused(self) -> None:
        algorithm = config_of(f"{ESTIMATOR}={HERE}:too_few_advantages").trainer.algorithm
        with pytest.raises(
            ConfigError,
            match=r"too_few_advantages must return one finite advantage per reward of .*, got \[0.0, 0.5, 0.0\]",
        ):
            check_algorithm(algorithm)

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            ("unvalued_advantages", r"raises TypeError\(.*; it passes if .* says needs_values=True, without which"),
            (
                "unasked_ratio_advantages",
                r"raises TypeError\(.*; it passes if .* says needs_old_logprobs=True, without",
            ),
            ("token_advantages", r"must return one finite advantage per turn .*; it passes if .* says unit='token'"),
            ("based_advantages", r"raises TypeError\(.*; it passes if .* says needs_baseline=True"),
            ("alone_advantages", r"raises AttributeError\(.*; it passes if .* says needs_mini_batch=True"),
        ],
    )
    def test_one_that_reads_what_it_has_not_declared_is_refused_with_what_to_declare(
        self, function: str, expected: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"{ESTIMATOR}={HERE}:{function} {expected}"):
            check_algorithm(config_of(f"{ESTIMATOR}={HERE}:{function}").trainer.algorithm)

    def test_one_of_samples_that_is_not_registered_is_told_how_its_arguments_are_asked_for(self) -> None:
        with pytest.raises(
            ConfigError, match=r"must be a function of \(rewards\), got .*; @register_.*unit='turn' or 'token'"
        ):
            config_of(f"{ESTIMATOR}={HERE}:valued_advantages")

    def test_one_that_divides_by_the_spread_of_equal_rewards_is_refused_before_they_come(self) -> None:
        algorithm = config_of(f"{ESTIMATOR}={HERE}:spread_advantages").trainer.algorithm
        with pytest.raises(ConfigError, match=r"raises ZeroDivisionError.* for groups of the rewards \[\(0.0, 0.0\)\]"):
            check_algorithm(algorithm)

        def of_mini_batch(groups: Sequence[GroupRewards]) -> list[list[float]]:
            spread = statistics.pstdev([reward for group in groups for reward in group.rewards])
            return [[reward / spread for reward in group.rewards] for group in groups]

        with pytest.raises(
            ConfigError, match=r"own raises ZeroDivisionError.* for groups of the rewards \[\(0.0, 0.0\)\]"
        ):
            try_estimator("own", AdvantageEstimator(compute=of_mini_batch, needs_mini_batch=True))

    def test_one_that_fails_for_a_turn_without_trained_tokens_or_for_rewards_by_token_is_refused(self) -> None:
        def per_token(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
            return [[r / n for r, n in zip(one.rewards, one.num_tokens, strict=True)] for one in samples]

        def of_turns_alone(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
            return [[reward - (one.token_rewards or 0.0) for reward in one.rewards] for one in samples]

        for compute, expected in (
            (per_token, r"raises ZeroDivisionError.* and num_tokens \[\(\(2,\), \(0, 2\), \(2, 2, 2\), \(0,\)\)\]"),
            (of_turns_alone, r"raises ValueError\('The truth value of an array"),
        ):
            with pytest.raises(ConfigError, match=f"own {expected}"):
                try_estimator("own", AdvantageEstimator(compute=compute, unit=Unit.TURN))

    def test_one_that_needs_two_samples_is_refused_where_a_filter_may_leave_one(self) -> None:
        algorithm = config_of(f"{ESTIMATOR}={HERE}:baseline_of_others_advantages").trainer.algorithm
        check_algorithm(algorithm)
        with pytest.raises(ConfigError, match=r"raises ZeroDivisionError.* for groups of the rewards \[\(1.0,\)\]"):
            check_algorithm(algorithm, has_lone_samples=True)

    def test_one_that_reads_recomputed_log_probs_gets_them_when_groups_are_trained(self) -> None:
        algorithm = config_of(f"{ESTIMATOR}=own_recomputed_ratios", "training.num_logp_workers=1").trainer.algorithm
        check_algorithm(algorithm)
        made = make_advantages(algorithm)
        (row, _), halved = rows(), (-3.0 - math.log(2), -3.0, -3.0, -3.0)
        row = replace(row, reward=1.0, old_logprobs=halved, old_version=1)
        group = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,))
        (found,) = made.of_step([group])
        assert made.of_stage is None and found.advantages[0].tolist() == pytest.approx([0.5, 1.0, 1.0, 1.0])
        with pytest.raises(TrainingError, match="needs trajectories with old_logprobs, which the stage logp computes"):
            made.of_step([replace(group, trajectories=(replace(row, old_logprobs=None),))])

    def test_one_that_reads_recomputed_log_probs_gives_advantages_of_turns_or_tokens(self) -> None:
        with pytest.raises(ConfigError, match="unit must be turn or token with needs_old_logprobs=True, got .*sample"):
            register_advantage_estimator("own_ratios", needs_old_logprobs=True)

    @pytest.mark.parametrize("unit", ["sample", Unit.SAMPLE])
    def test_one_that_reads_a_critics_values_gives_advantages_of_turns_or_tokens(self, unit: str) -> None:
        with pytest.raises(ConfigError, match="unit must be turn or token with needs_values=True, got .*sample.*"):
            register_advantage_estimator("own_valued", unit=unit, needs_values=True)
        with pytest.raises(ConfigError, match="unit must be turn or token with needs_values=True"):
            register_advantage_estimator("own_valued", needs_values=True)
        for allowed in ("turn", "token"):
            register_advantage_estimator("own_valued", unit=allowed, needs_values=True)
        assert "own_valued" not in ADVANTAGE_ESTIMATORS.entries


class TestPolicyLosses:
    def test_a_name_and_a_path_lead_to_the_function_and_only_paths_leave_the_process(self) -> None:
        path = f"{HERE}:half_importance"
        for name in ("own_half", path):
            check_algorithm(config_of(f"{LOSS}={name}").trainer.algorithm)
            assert POLICY_LOSSES.portable(name) == path
        assert POLICY_LOSSES.portable("gspo") == "gspo"

    def test_one_in_the_place_of_a_built_in_loss_is_judged_as_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weighted = (f"{LOSS}=rollout_is", "trainer.algorithm.off_policy_correction.tis_ratio_type=token")
        cut = (f"{LOSS}=rollout_is", "generator.sampling.top_p=0.9")
        for overrides in (weighted, cut):
            config_of(*overrides)
        monkeypatch.setattr(POLICY_LOSSES, "entries", dict(POLICY_LOSSES.entries))
        monkeypatch.setattr(POLICY_LOSSES, "_builtin", POLICY_LOSSES._builtin)
        register_policy_loss("rollout_is")(own_algorithms.half_importance)
        with pytest.raises(ConfigError, match="tis_ratio_type must be null with .*=rollout_is, got token"):
            config_of(*weighted)
        with pytest.raises(ConfigError, match="top_p must be left at its default with .*=rollout_is"):
            config_of(*cut)

    def test_what_was_said_at_its_registration_holds_by_its_path_too(self) -> None:
        for name in ("own_recomputed", f"{HERE}:recomputed"):
            assert POLICY_LOSSES.entry(name).needs_old_logprobs
            config_of(f"{LOSS}={name}", "training.num_logp_workers=1")
        assert not POLICY_LOSSES.entry(f"{HERE}:half_importance").needs_old_logprobs

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            ("nothing", "cannot be imported: module 'tests.cpu.own_algorithms' has no attribute 'nothing'"),
            ("NOT_A_FUNCTION", "must be a function, got int"),
            (
                "loss_of_skyrl",
                r"must be a function of \(tokens, constants\), got loss_of_skyrl\(log_probs, .*: missing",
            ),
            ("loss_that_returns_a_tensor", "must return a TokenLoss, got Tensor"),
            ("loss_that_raises", r"raises KeyError\('no such thing'\) for LossTokens"),
            (
                "loss_that_is_a_mean",
                r"must return one loss and one is_clipped per token, shape \(5,\), got \(\) and \(5,\)",
            ),
            ("loss_without_gradient", "must have a gradient with respect to tokens.logprobs; it has none"),
            ("loss_that_is_not_linear", "must be linear in a positive factor of the advantages"),
            (
                "loss_that_counts_rows",
                r"raises RuntimeError.* for LossTokens.*, no tokens: a policy worker without rows of its own",
            ),
            (
                "loss_that_forgets_the_policy_without_tokens",
                "must have a gradient with respect to tokens.logprobs; it has none",
            ),
            (
                "loss_of_recomputed",
                r"reads tokens.old_logprobs, which .* raises TypeError\(.*decorate it with @register_policy_loss\(<name>, needs_old",
            ),
            ("loss_of_marked", r"reads tokens.is_marked, which .* raises TypeError\(.*LossEntry\(path=..., marker="),
            ("loss_of_other_rows", "must give a row the same gradient whatever other rows|must leave a token without"),
        ],
    )
    def test_one_that_cannot_be_trained_with_is_refused_with_the_reason(self, function: str, expected: str) -> None:
        with pytest.raises(ConfigError, match=expected):
            check_algorithm(config_of(f"{LOSS}={HERE}:{function}").trainer.algorithm)

    def test_one_that_does_without_what_it_did_not_ask_for_passes(self) -> None:
        check_algorithm(config_of(f"{LOSS}={HERE}:loss_of_recomputed_where_there_are").trainer.algorithm)

    @pytest.mark.parametrize("name", sorted(POLICY_LOSSES.entries))
    def test_every_known_loss_passes_the_trial(self, name: str) -> None:
        check_algorithm(config_of(f"{LOSS}={name}").trainer.algorithm)


@pytest.mark.parametrize("name", list(filter(ADVANTAGE_ESTIMATORS.is_builtin, sorted(ADVANTAGE_ESTIMATORS.entries))))
def test_every_known_estimator_passes_the_trial(name: str) -> None:
    check_algorithm(config_of(f"{ESTIMATOR}={name}").trainer.algorithm, has_lone_samples=True)


@pytest.mark.parametrize("register", [register_advantage_estimator, register_policy_loss])
def test_what_other_processes_could_not_import_cannot_be_registered(register) -> None:
    def local(*arguments):
        return arguments

    with pytest.raises(
        ConfigError, match=r"<locals>.local cannot be imported by other processes; define it at the top"
    ):
        register("own")(local)
    with pytest.raises(ConfigError, match="<lambda> cannot be imported by other processes"):
        register("own")(lambda *arguments: arguments)
    with pytest.raises(ConfigError, match="cannot be registered as 'a:b'; give a name without a colon"):
        register("a:b")(own_algorithms.median_advantages)


def rows() -> list[Trajectory]:
    return [
        Trajectory(
            prompt_token_ids=(1, 2),
            response_token_ids=tuple(range(3, 3 + length)),
            loss_mask=(1,) * length,
            logprobs=(-3.0,) * length,
            versions=(0,) * length,
            reward=0.0,
        )
        for length in (4, 7)
    ]


@pytest.mark.slow
async def test_policy_workers_find_a_users_loss_by_its_path(tmp_path: Path, ray_session: None) -> None:
    directory = build_policy(tmp_path / "policy")

    def settings(name: str) -> TrainingSettings:
        constants = LossConstants(tis_cap=math.inf)
        return TrainingSettings(policy_path=str(directory), policy_loss=name, loss_constants=constants)

    workers = await PolicyWorkers.start(settings(POLICY_LOSSES.portable("own_half")), num_workers=1)
    try:
        figures = await workers.forward_backward(rows(), [1.0, -0.5], 0)
    finally:
        await workers.close()
    whole = InProcessPolicy(settings("rollout_is"))
    expected = await whole.forward_backward(rows(), [1.0, -0.5], 0)
    await whole.close()
    assert figures["loss_sum"] == pytest.approx(expected["loss_sum"] / 2, rel=1e-5)
