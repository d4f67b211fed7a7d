"""Divergence in the reward: closed forms, the true gradient of a policy that is enumerated, and a coefficient that survives a resume."""

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_async.algorithms.advantages import AdvantageEstimator
from skyrl_async.algorithms.estimators.outcome import grpo_advantages, rloo_advantages
from skyrl_async.algorithms.estimators.reinforce_pp import reinforce_pp_advantages
from skyrl_async.algorithms.kl import KL_ESTIMATORS, KlController, KlPenalty
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import read_state
from skyrl_async.composition.algorithms import Advantages
from skyrl_async.errors import TrainingError
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.samples import Sample
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group, Trajectory
from tests.cpu.advantage_columns import numbers
from tests.cpu.enumerated_policy import (
    OUTCOMES,
    REWARDS,
    Outcome,
    expected,
    logits_of,
    mean_of_estimator,
    token_logprobs,
)

LOGITS, REFERENCE = logits_of(seed=1), logits_of(seed=2)


def row(
    logprobs: tuple[float, ...],
    ref: tuple[float, ...] | None,
    *,
    reward: float = 0.0,
    mask: tuple[int, ...] | None = None,
) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * len(logprobs),
        loss_mask=mask or (1,) * len(logprobs),
        logprobs=logprobs,
        versions=(0,) * len(logprobs),
        reward=reward,
        ref_logprobs=ref,
    )


def group(*rows: Trajectory) -> Group:
    return Group(uid="p", admission_index=0, scheduled_version=0, trajectories=rows)


def penalty(name: str = "k1", coefficient: float = 0.5, target: float | None = None) -> KlPenalty:
    return KlPenalty(KL_ESTIMATORS[name], KlController(coefficient=coefficient, target=target, horizon=100))


class TestController:
    @pytest.mark.parametrize(
        ("divergence", "factor"),
        [(0.1, 1.0), (0.11, 1 + 0.1 * 0.3), (0.09, 1 - 0.1 * 0.3), (5.0, 1 + 0.2 * 0.3), (0.0, 1 - 0.2 * 0.3)],
    )
    def test_it_follows_the_relative_error_which_it_cuts_at_a_fifth(self, divergence: float, factor: float) -> None:
        controller = KlController(coefficient=0.05, target=0.1, horizon=100)
        controller.update(divergence, num_samples=30)
        assert controller.coefficient == pytest.approx(0.05 * factor, abs=1e-12)

    def test_without_a_target_it_stays(self) -> None:
        controller = KlController(coefficient=0.05)
        controller.update(9.0, num_samples=30)
        assert controller.coefficient == 0.05

    def test_it_settles_where_the_divergence_is_the_target(self) -> None:
        """Of a policy whose divergence falls with the coefficient."""
        controller = KlController(coefficient=1.0, target=0.1, horizon=1000)
        for _ in range(2000):
            controller.update(0.02 / controller.coefficient, num_samples=32)
        assert 0.02 / controller.coefficient == pytest.approx(0.1, rel=1e-6)


class TestPenalty:
    @pytest.mark.parametrize(
        ("name", "of_token"),
        [
            ("k1", lambda d: d),
            ("k2", lambda d: d * d / 2),
            ("k3", lambda d: math.exp(-d) - 1 + d),
            ("abs", abs),
        ],
    )
    def test_a_sample_loses_the_divergence_of_its_sampled_tokens_over_all_its_rows(
        self, name: str, of_token: Callable[[float], float]
    ) -> None:
        first = row((-1.0, 0.0, -0.5), (-1.5, 0.0, -0.25), reward=2.0, mask=(1, 0, 1))
        second = row((-2.0,), (-1.0,), reward=2.0)
        lost = of_token(0.5) + of_token(-0.25) + of_token(-1.0)
        assert penalty(name).penalised(Sample(rows=(first, second))) == pytest.approx(2.0 - 0.5 * lost, abs=1e-9)

    def test_the_divergence_of_a_step_is_the_mean_over_samples_of_their_means_whatever_their_order(self) -> None:
        samples = [Sample(rows=(row((-0.125 * i,) * n, (-0.375,) * n),)) for i, n in enumerate((1, 7, 3, 5))]
        found = []
        for order in (samples, samples[::-1]):
            one = penalty(target=0.1)
            for sample in order:
                one.penalised(sample)
            found.append((one.end_step(), one.controller.coefficient))
        assert found[0] == found[1]
        assert found[0][0]["reward_kl"] == pytest.approx(sum(0.375 - 0.125 * i for i in range(4)) / 4, abs=1e-12)
        assert found[0][0]["reward_kl_coef"] == 0.5

    def test_a_step_begins_without_the_samples_of_the_one_before(self) -> None:
        one = penalty()
        one.penalised(Sample(rows=(row((-1.0,), (-2.0,)),)))
        assert one.end_step()["reward_kl"] == 1.0
        one.penalised(Sample(rows=(row((-1.0,), (-1.0,)),)))
        assert one.end_step()["reward_kl"] == 0.0

    def test_a_long_answer_costs_no_python_object_per_token(self) -> None:
        """Making them would hold the event loop."""
        num_tokens = 100_000
        sample = Sample(rows=(row((-1.0,) * num_tokens, (-2.0,) * num_tokens),))
        tracemalloc.start()
        assert penalty().penalised(sample) == -0.5 * num_tokens
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 16 * num_tokens

    def test_rows_without_reference_log_probs_are_refused(self) -> None:
        with pytest.raises(
            TrainingError, match="use_kl_in_reward needs trajectories with ref_logprobs; some have none"
        ):
            penalty().penalised(Sample(rows=(row((-1.0,), None),)))

    def test_advantages_are_of_penalised_rewards_and_rewards_stay_what_the_environment_said(self) -> None:
        rows = (row((-1.0,), (-2.0,), reward=1.0), row((-1.0,), (-1.0,), reward=0.25))
        (found,) = StepAdvantages(AdvantageEstimator(compute=grpo_advantages), penalty())([group(*rows)])
        assert numbers(found.advantages) == pytest.approx(grpo_advantages([0.5, 0.25]), rel=1e-6)
        assert found.trajectories == rows
        (alone,) = StepAdvantages(
            AdvantageEstimator(compute=reinforce_pp_advantages, needs_mini_batch=True), penalty()
        )([group(*rows)])
        assert numbers(alone.advantages) == pytest.approx((1.0, -1.0), abs=1e-6)


def mean_over_outcomes(leaf: Tensor, of_outcome: Callable[[Tensor, Tensor], Tensor], *, is_policys: bool) -> Tensor:
    """Of a function of the (2,) log-probs under policy and reference; with ``is_policys`` its gradient is also that of the sampling."""

    def chance(outcome: Outcome) -> Tensor:
        return token_logprobs(leaf, outcome).sum().exp()

    terms = [
        (chance(o) if is_policys else chance(o).detach())
        * of_outcome(token_logprobs(leaf, o), token_logprobs(REFERENCE, o))
        for o in OUTCOMES
    ]
    return torch.stack(terms).sum()


def token_divergences(leaf: Tensor, divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Of the first token, and of the second after each first one that the policy samples; sampling has no gradient."""
    logs, ref = leaf.log_softmax(-1), REFERENCE.log_softmax(-1)
    first = logs[0].detach().exp()
    return divergence(logs[0], ref[0]) + sum(first[i] * divergence(logs[1 + i], ref[1 + i]) for i in range(3))


def forces(leaf: Tensor) -> dict[str, Tensor]:
    """What each estimator takes from the reward, as something to be differentiated; see ``KlPenalty``."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum()

    return {
        "k1": mean_over_outcomes(leaf, lambda p, q: (p - q).sum(), is_policys=True),
        "k2": mean_over_outcomes(leaf, lambda p, q: (p - q).square().sum() / 2, is_policys=True)
        - token_divergences(leaf, kl),
        "k3": mean_over_outcomes(leaf, lambda p, q: (p - q).sum(), is_policys=True)
        - token_divergences(leaf, lambda p, q: kl(q, p)),
        "abs": mean_over_outcomes(leaf, lambda p, q: (p - q).abs().sum(), is_policys=True)
        - mean_over_outcomes(leaf, lambda p, q: ((p - q).detach().sign() * p).sum(), is_policys=False),
    }


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_the_mean_gradient_is_that_of_the_reward_less_what_the_estimator_takes_and_of_k1_that_is_the_divergence(
    name: str,
) -> None:
    """Over every group of two that the policy itself samples."""
    logs = {
        outcome: tuple(tuple(token_logprobs(of, outcome).tolist()) for of in (LOGITS, REFERENCE))
        for outcome in OUTCOMES
    }
    estimate = StepAdvantages(AdvantageEstimator(compute=rloo_advantages), penalty(name, coefficient=0.3))

    def advantages(outcomes: tuple[Outcome, ...]) -> tuple[float, ...]:
        (found,) = estimate([group(*(row(*logs[outcome], reward=REWARDS[outcome]) for outcome in outcomes))])
        return numbers(found.advantages)

    leaf = LOGITS.clone().requires_grad_()
    (true,) = torch.autograd.grad(expected(leaf, REWARDS) - 0.3 * forces(leaf)[name], leaf)
    torch.testing.assert_close(mean_of_estimator(LOGITS, 2, advantages), true, atol=1e-7, rtol=0)  # rows hold float32


def test_of_estimators_in_the_reward_k2_and_k3_have_next_to_no_force_near_the_reference() -> None:
    """A hundredth of the way there a divergence has about a hundredth of its force, these two some ten thousandth."""
    sizes = {}
    for distance in (1.0, 0.01):
        leaf = (REFERENCE + distance * (LOGITS - REFERENCE)).requires_grad_()
        sizes[distance] = {
            name: torch.autograd.grad(force, leaf, retain_graph=True)[0].norm().item()
            for name, force in forces(leaf).items()
        }
    shrunk = {name: sizes[0.01][name] / sizes[1.0][name] for name in sizes[1.0]}
    assert 1e-3 < shrunk["k1"] < 0.1 and 1e-3 < shrunk["abs"] < 0.1
    assert shrunk["k2"] < 1e-3 and shrunk["k3"] < 1e-3


class TestInTheLoop:
    SETTINGS = SimulationSettings(
        mean_tokens=60.0,
        sigma=0.8,
        num_steps=8,
        mini_batch_size=4,
        step_seconds=0.5,
        deterministic=True,
        num_prompts=32,
    )

    @staticmethod
    def reference(policy: ModelledPolicy) -> dict[str, Prepare]:
        async def ref_logp(of: Group) -> Group:
            distance = 0.01 * (1 + int(of.uid[1:]) % 7)
            rows = (replace(r, ref_logprobs=r.logprobs - distance) for r in of.trajectories)
            return replace(of, trajectories=tuple(rows))

        return {"ref_logp": ref_logp}

    def coefficients(
        self, settings: SimulationSettings, directory: Path | None = None, resumed: Path | None = None
    ) -> dict[int, tuple[float, float]]:
        """Step -> the coefficient it was trained with, and its divergence."""

        async def main() -> dict[int, tuple[float, float]]:
            estimator = AdvantageEstimator(compute=grpo_advantages)
            simulation = Simulation(
                settings,
                advantages=Advantages(of_stage=None, of_step=StepAdvantages(estimator, penalty(target=0.0471))),
                prepare_with=self.reference,
                checkpoint_dir=directory,
            )
            if resumed is not None:
                await simulation.trainer.resume(resumed)
            await simulation.trainer.run()
            return {
                step: (values["policy/reward_kl_coef"], values["policy/reward_kl"])
                for step, values in simulation.logged
                if "policy/reward_kl" in values
            }

        return run_in_virtual_time(main())

    def test_a_resumed_run_goes_on_with_the_very_coefficient(self, tmp_path: Path) -> None:
        settings = replace(self.SETTINGS, checkpoint_interval_steps=3)
        whole = self.coefficients(settings, tmp_path)
        assert len({coefficient for coefficient, _ in whole.values()}) == 8, "it moves"
        checkpoint = tmp_path / "global_step_6"
        assert read_state(checkpoint).kl_coef == whole[7][0]
        rest = self.coefficients(settings, tmp_path / "resumed", checkpoint)
        assert rest == {step: of_step for step, of_step in whole.items() if step > 6}

    def test_streaming_changes_neither_divergence_nor_coefficient(self) -> None:
        whole = self.coefficients(replace(self.SETTINGS, stream_mini_batch=False))
        assert whole == self.coefficients(self.SETTINGS)
        assert len(whole) == 8

    def test_a_coefficient_is_the_configurations_after_a_resume_unless_it_followed_a_target_and_still_does(
        self,
    ) -> None:
        for target_before, target, coefficient in (
            (None, None, 0.1),
            (None, 0.05, 0.1),
            (0.05, None, 0.1),
            (0.05, 0.05, 0.7),
        ):
            before, after = (
                StepAdvantages(penalty=penalty(coefficient=0.7, target=target_before)),
                StepAdvantages(penalty=penalty(coefficient=0.1, target=target)),
            )
            after.restore(before.kl_coef, {})
            assert after.penalty is not None and after.penalty.controller.coefficient == coefficient
        assert StepAdvantages().kl_coef is None
