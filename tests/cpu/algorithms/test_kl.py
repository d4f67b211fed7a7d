"""Estimates of the divergence from a reference: closed forms, finite differences, and a policy of three tokens."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.kl import KL_ESTIMATORS
from skyrl_async.algorithms.losses import make_policy_loss
from skyrl_async.algorithms.objective import Objective
from skyrl_async.algorithms.settings import LossConstants

LOGITS = [0.3, -0.5, 0.1]
REFERENCE = [0.45, 0.25, 0.30]
NAMES = ["k1", "k2", "k3", "abs"]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def divergence(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy * (policy / reference).log()).sum()


def gradient_of(scalar: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(scalar, logits)
    return gradient


def mean_loss_gradient(name: str) -> Tensor:
    """Of the estimate taken as a loss, averaged under the policy that is differentiated."""
    logits = tensor(*LOGITS).requires_grad_()
    policy = logits.softmax(0)
    estimates = KL_ESTIMATORS[name](policy.log(), tensor(*REFERENCE).log())
    return gradient_of((policy.detach() * estimates).sum(), logits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("abs", math.log(2)),
    ],
)
def test_a_token_twice_as_likely_as_under_the_reference_has_the_estimate_of_the_closed_form(
    name: str, expected: float
) -> None:
    estimate = KL_ESTIMATORS[name](tensor(math.log(0.5)), tensor(math.log(0.25)))
    assert estimate.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    estimator, step = KL_ESTIMATORS[name], 1e-6
    logprobs, reference = tensor(-0.5, -3.0, -1.2), tensor(-1.0, -1.0, -1.1)
    leaf = logprobs.clone().requires_grad_()
    differences = (estimator(logprobs + step, reference) - estimator(logprobs - step, reference)) / (2 * step)
    torch.testing.assert_close(gradient_of(estimator(leaf, reference).sum(), leaf), differences, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_from_the_reference_as_their_mean_under_the_policy(name: str) -> None:
    policy, reference = tensor(*LOGITS).softmax(0), tensor(*REFERENCE)
    mean = (policy * KL_ESTIMATORS[name](policy.log(), reference.log())).sum()
    assert mean.item() == pytest.approx(divergence(policy, reference).item(), abs=1e-12)


def test_as_losses_k2_follows_the_divergence_of_the_policy_k3_that_of_the_reference_and_k1_nothing() -> None:
    logits, reference = tensor(*LOGITS).requires_grad_(), tensor(*REFERENCE)
    reverse = gradient_of(divergence(logits.softmax(0), reference), logits)
    forward = gradient_of(divergence(reference, logits.softmax(0)), logits)
    torch.testing.assert_close(mean_loss_gradient("k1"), torch.zeros_like(reverse), atol=1e-12, rtol=0)
    torch.testing.assert_close(mean_loss_gradient("k2"), reverse, atol=1e-12, rtol=0)
    torch.testing.assert_close(mean_loss_gradient("k3"), forward, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "expected"), [("k1", 0.0973), ("k2", -0.0020), ("k3", -0.0027), ("abs", -0.0098)])
def test_in_the_reward_k1_alone_follows_the_divergence_and_the_others_push_away(name: str, expected: float) -> None:
    """Where the score alone has a gradient: tokens of 0.6 and 0.4 beside a reference of 0.5 each."""
    logit, reference = tensor(math.log(0.6 / 0.4)).requires_grad_(), tensor(0.5, 0.5)
    policy = torch.cat([logit.sigmoid(), (-logit).sigmoid()])
    estimates = KL_ESTIMATORS[name](policy.log(), reference.log()).detach()
    found = gradient_of((policy.detach() * estimates * policy.log()).sum(), logit)
    assert found.item() == pytest.approx(expected, abs=5e-5)
    if name == "k1":
        policy = torch.cat([logit.sigmoid(), (-logit).sigmoid()])
        torch.testing.assert_close(found, gradient_of(divergence(policy, reference), logit), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_an_estimate_is_never_negative_and_zero_where_policy_and_reference_agree(name: str) -> None:
    estimator = KL_ESTIMATORS[name]
    assert (estimator(tensor(-0.1, -5.0, -300.0, -0.1), tensor(-5.0, -0.1, -0.1, -300.0)) >= 0).all()
    assert estimator(tensor(-1.5), tensor(-1.5)).item() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_no_token_has_an_estimate_of_more_than_ten_nats_nor_the_pull_of_more_than_thirteen(name: str) -> None:
    log_ratios = torch.tensor([*range(-30, 31), -math.inf, math.inf], dtype=torch.float32)
    leaf = torch.full_like(log_ratios, -31.0).requires_grad_()
    estimate = KL_ESTIMATORS[name](leaf, leaf.detach() + log_ratios)
    assert estimate.abs().max() <= 10
    assert gradient_of(estimate.sum(), leaf).abs().max() <= 13


@pytest.mark.parametrize("name", NAMES)
def test_a_log_prob_that_is_no_number_has_an_estimate_that_is_none(name: str) -> None:
    estimate = KL_ESTIMATORS[name](tensor(math.nan, -1.0, -math.inf), tensor(-1.0, -1.0, -math.inf))
    assert estimate.isnan().tolist() == [True, False, True]


class TestObjective:
    LOGPROBS = (-0.5, -3.0, -1.2)
    REF = (-1.0, -1.0, -1.1)
    WEIGHTS = (1.0, 0.5, 0.5)

    def batch(self) -> MicroBatch:
        where = torch.zeros(3, dtype=torch.int64)
        return MicroBatch(
            input_ids=where.unsqueeze(0),
            positions=where,
            targets=where,
            row_indices=where,
            behavior_logprobs=tensor(-0.6, -2.8, -1.2),
            advantages=tensor(0.5, -1.0, 0.25),
            returns=tensor(0.0, 0.0, 0.0),
            weights=tensor(*self.WEIGHTS),
            versions=where,
            ref_logprobs=tensor(*self.REF),
            old_logprobs=None,
        )

    def objective(self, kl_coef: float) -> Objective:
        policy_loss = make_policy_loss("rollout_is", LossConstants())
        return Objective(policy_loss=policy_loss, kl_estimator=KL_ESTIMATORS["k3"], kl_coef=kl_coef)

    def test_the_divergence_is_added_token_by_token_with_the_weight_of_the_row(self) -> None:
        loss = self.objective(0.1)(tensor(*self.LOGPROBS), self.batch(), tensor(*self.REF))
        log_ratios = [ref - new for new, ref in zip(self.LOGPROBS, self.REF, strict=True)]
        divergences = [math.exp(r) - 1 - r for r in log_ratios]
        weighted = sum(w * d for w, d in zip(self.WEIGHTS, divergences, strict=True))
        assert loss.total.item() == pytest.approx(loss.tokens.loss.sum().item() + 0.1 * weighted, abs=1e-12)
        assert loss.figures() == {"ref_kl_sum": pytest.approx(sum(divergences), abs=1e-12)}

    def test_a_coefficient_of_zero_measures_and_does_not_pull(self) -> None:
        leaf = tensor(*self.LOGPROBS).requires_grad_()
        loss = self.objective(0.0)(leaf, self.batch(), tensor(*self.REF))
        assert loss.figures()["ref_kl_sum"] > 0
        assert torch.equal(gradient_of(loss.total, leaf), self.gradient_without())

    def test_the_entropy_is_taken_off_token_by_token_with_the_weight_of_the_row(self) -> None:
        entropies = tensor(0.7, 1.3, 0.2)
        rewarding = replace(self.objective(0.1), entropy_coef=0.5)
        with_bonus = rewarding(tensor(*self.LOGPROBS), self.batch(), tensor(*self.REF), entropies)
        without = self.objective(0.1)(tensor(*self.LOGPROBS), self.batch(), tensor(*self.REF), entropies)
        bonus = 0.5 * (1.0 * 0.7 + 0.5 * 1.3 + 0.5 * 0.2)
        assert with_bonus.total.item() == pytest.approx(without.total.item() - bonus, abs=1e-12)

    def gradient_without(self) -> Tensor:
        leaf = tensor(*self.LOGPROBS).requires_grad_()
        alone = Objective(policy_loss=self.objective(0.0).policy_loss)(leaf, self.batch(), None)
        assert alone.figures() == {}
        return gradient_of(alone.total, leaf)
