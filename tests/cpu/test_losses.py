"""Policy losses against closed forms, and against a policy of three tokens that can be enumerated."""

import math

import pytest
import torch
from torch import Tensor

from skyrl_async.algorithms.losses import (
    PolicyLossFn,
    TokenLoss,
    decoupled_ppo,
    make_policy_loss,
    merge_figures,
    needs_old_logprobs,
    ppo_clip,
    rollout_is,
    token_figures,
)
from skyrl_async.errors import ConfigError

LOGITS = [0.3, -0.5, 0.1]
BEHAVIOR = [0.45, 0.25, 0.30]
ADVANTAGES = [1.0, -0.7, 0.2]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean_gradient(loss_fn: PolicyLossFn) -> Tensor:
    """Gradient with respect to the logits of the loss of each of three tokens, averaged under the behavior policy."""
    logits = tensor(*LOGITS).requires_grad_()
    behavior = tensor(*BEHAVIOR)
    losses = loss_fn(logits.log_softmax(0), behavior.log(), tensor(*ADVANTAGES)).loss
    (gradient,) = torch.autograd.grad((behavior * losses).sum(), logits)
    return gradient


def true_gradient() -> Tensor:
    """Of the expected advantage under the policy itself."""
    logits = tensor(*LOGITS).requires_grad_()
    (gradient,) = torch.autograd.grad((logits.softmax(0) * tensor(*ADVANTAGES)).sum(), logits)
    return gradient


def test_contract_10_an_uncapped_rollout_is_estimates_the_true_policy_gradient() -> None:
    loss = make_policy_loss("rollout_is", eps_clip_low=0.2, eps_clip_high=0.28, tis_cap=math.inf)
    torch.testing.assert_close(mean_gradient(loss), -true_gradient(), atol=1e-12, rtol=0)


def test_contract_10_ppo_within_its_bounds_estimates_the_true_policy_gradient() -> None:
    loss = make_policy_loss("ppo_clip", eps_clip_low=0.99, eps_clip_high=100.0, tis_cap=2.0)
    torch.testing.assert_close(mean_gradient(loss), -true_gradient(), atol=1e-12, rtol=0)


def test_contract_10_the_cap_of_rollout_is_weights_each_token_by_the_smaller_of_ratio_and_cap() -> None:
    policy = tensor(*LOGITS).softmax(0)
    weights = torch.minimum(policy / tensor(*BEHAVIOR), tensor(1.0))
    scores = torch.eye(3, dtype=torch.float64) - policy  # d log pi(a) / d logits
    expected = -(tensor(*BEHAVIOR) * weights * tensor(*ADVANTAGES)) @ scores
    loss = make_policy_loss("rollout_is", eps_clip_low=0.2, eps_clip_high=0.28, tis_cap=1.0)
    torch.testing.assert_close(mean_gradient(loss), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "is_clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
        (0.5, 2.0, -1.0, -1.0, False),
        (0.5, -2.0, 1.6, 0.0, True),
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip_takes_the_pessimistic_side(
    ratio: float, advantage: float, loss: float, slope: float, is_clipped: bool
) -> None:
    logprobs = tensor(math.log(ratio)).requires_grad_()
    result = ppo_clip(logprobs, tensor(0.0), tensor(advantage), eps_low=0.2, eps_high=0.28)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)
    assert result.is_clipped.tolist() == [is_clipped]


@pytest.mark.parametrize("name", ["ppo_clip", "rollout_is", "decoupled_ppo"])
def test_a_token_without_advantage_has_no_gradient_and_a_wild_ratio_stays_finite(name: str) -> None:
    loss_fn = make_policy_loss(name, eps_clip_low=0.2, eps_clip_high=0.28, tis_cap=2.0)
    logprobs = torch.tensor([-1.0, -1.0, -200.0]).requires_grad_()
    behavior, old = torch.tensor([-2.0, -200.0, -1.0]), torch.tensor([-1.5, -100.0, -100.0])
    losses = loss_fn(logprobs, behavior, torch.tensor([0.0, 1.0, 1.0]), old).loss
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient[0].item() == 0.0
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="must be one of decoupled_ppo, ppo_clip, rollout_is, got 'ppo'"):
        make_policy_loss("ppo", eps_clip_low=0.2, eps_clip_high=0.28, tis_cap=2.0)


class TestDecoupledPpo:
    """Of AReaL, with the proximal policy between behavior and policy."""

    OLD = (0.4, 0.35, 0.25)

    def gradient(self, *, old: Tensor, cap: float = math.inf, eps_low: float = 0.2) -> Tensor:
        """With respect to the logits, averaged under the behavior policy."""
        logits, behavior = tensor(*LOGITS).requires_grad_(), tensor(*BEHAVIOR)
        losses = decoupled_ppo(
            logits.log_softmax(0),
            behavior.log(),
            tensor(*ADVANTAGES),
            old,
            eps_low=eps_low,
            eps_high=100.0,
            cap=cap,
        ).loss
        (gradient,) = torch.autograd.grad((behavior * losses).sum(), logits)
        return gradient

    @pytest.mark.parametrize(
        ("new_over_old", "old_over_behavior", "advantage", "loss", "slope", "is_clipped"),
        [
            (1.1, 1.5, 2.0, -3.3, -3.3, False),
            (1.5, 1.5, 2.0, -3.84, 0.0, True),
            (1.5, 1.5, -2.0, 4.5, 4.5, False),
            (0.5, 0.5, -2.0, 0.8, 0.0, True),
            (1.1, 4.0, 2.0, -4.4, -4.4, True),
            (3.0, 4.0, 0.0, 0.0, 0.0, True),
        ],
    )
    def test_it_clips_around_the_proximal_policy_and_weights_by_how_far_that_is_from_behavior(
        self,
        new_over_old: float,
        old_over_behavior: float,
        advantage: float,
        loss: float,
        slope: float,
        is_clipped: bool,
    ) -> None:
        behavior = tensor(-1.0)
        old = behavior + math.log(old_over_behavior)
        logprobs = (old + math.log(new_over_old)).requires_grad_()
        result = decoupled_ppo(logprobs, behavior, tensor(advantage), old, eps_low=0.2, eps_high=0.28, cap=2.0)
        (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
        assert result.loss.item() == pytest.approx(loss, abs=1e-12)
        assert gradient.item() == pytest.approx(slope, abs=1e-12)
        assert result.is_clipped.tolist() == [is_clipped]

    def test_gradients_are_those_of_finite_differences(self) -> None:
        behavior, old, advantages = tensor(-1.0, -2.0, -0.5), tensor(-1.2, -1.0, -0.6), tensor(1.0, -0.7, 0.2)
        logprobs, step = tensor(-1.25, -1.05, -0.5), 1e-6

        def losses(at: Tensor) -> Tensor:
            return decoupled_ppo(at, behavior, advantages, old, eps_low=0.2, eps_high=0.28, cap=2.0).loss

        leaf = logprobs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(leaf).sum(), leaf)
        differences = (losses(logprobs + step) - losses(logprobs - step)) / (2 * step)
        torch.testing.assert_close(gradient, differences, atol=1e-6, rtol=0)

    def test_contract_10_within_its_bounds_and_uncapped_it_estimates_the_true_policy_gradient(self) -> None:
        gradient = self.gradient(old=tensor(*self.OLD).log(), eps_low=0.99)
        torch.testing.assert_close(gradient, -true_gradient(), atol=1e-12, rtol=0)

    def test_with_the_behavior_policy_as_proximal_it_is_ppo_clip(self) -> None:
        loss = make_policy_loss("ppo_clip", eps_clip_low=0.2, eps_clip_high=100.0, tis_cap=2.0)
        gradient = self.gradient(old=tensor(*BEHAVIOR).log())
        torch.testing.assert_close(gradient, mean_gradient(loss), atol=1e-12, rtol=0)

    def test_with_the_policy_itself_as_proximal_its_gradient_is_that_of_rollout_is(self) -> None:
        loss = make_policy_loss("rollout_is", eps_clip_low=0.2, eps_clip_high=100.0, tis_cap=1.0)
        gradient = self.gradient(old=tensor(*LOGITS).log_softmax(0), cap=1.0)
        torch.testing.assert_close(gradient, mean_gradient(loss), atol=1e-12, rtol=0)

    def test_it_alone_needs_recomputed_log_probs(self) -> None:
        names = ("ppo_clip", "rollout_is", "decoupled_ppo")
        assert [name for name in names if needs_old_logprobs(name)] == ["decoupled_ppo"]


def test_the_k3_estimate_has_the_divergence_of_behavior_from_policy_as_its_mean() -> None:
    policy, behavior = tensor(*LOGITS).softmax(0), tensor(*BEHAVIOR)
    expected = (behavior * (behavior / policy).log()).sum().item()
    estimate = 0.0
    for p, mu in zip(policy, behavior, strict=True):
        loss = TokenLoss(loss=tensor(0.0), is_clipped=torch.tensor([False]))
        figures = token_figures(loss, p.log().reshape(1), mu.log().reshape(1), torch.tensor([0]))
        assert figures["behavior_kl_sum"] >= 0
        estimate += mu.item() * figures["behavior_kl_sum"]
    assert estimate == pytest.approx(expected, abs=1e-12)


def test_figures_of_parts_join_to_the_figures_of_the_whole() -> None:
    logprobs, behavior = torch.randn(12).neg().abs(), torch.randn(12).neg().abs()
    advantages, lags = torch.randn(12), torch.tensor([0, 2, 1, 0, 0, 4, 4, 1, 0, 2, 2, 1])

    def figures(part: slice) -> dict[str, float]:
        loss = rollout_is(logprobs[part], behavior[part], advantages[part], cap=1.0)
        return token_figures(loss, logprobs[part], behavior[part], lags[part])

    joined = merge_figures([figures(slice(0, 5)), {}, figures(slice(5, 12))])
    assert joined == pytest.approx(figures(slice(0, 12)), rel=1e-12)
    assert joined["num_tokens"] == 12
    assert joined["token_lag_max"] == 4
    assert joined["lag2_tokens_sum"] == 3
    assert joined["lag0_logprob_gap_max"] == pytest.approx((logprobs - behavior)[lags == 0].abs().max().item())
    assert "lag0_logprob_gap_max" not in figures(slice(5, 8))
    assert "lag3_tokens_sum" not in joined
