"""Policy losses against closed forms, finite differences, and a policy that can be enumerated, with behavior policies that change within
an answer."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.algorithms.losses import (
    LossTokens,
    TokenLoss,
    make_policy_loss,
    token_figures,
)
from skyrl_async.algorithms.policy_losses import (
    cispo,
    cispo_old,
    decoupled_ppo,
    dppo,
    dual_clip,
    gspo,
    ppo_clip,
    rollout_is,
    sapo,
)
from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.errors import ConfigError
from skyrl_async.metrics.step import StepFigures
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.types import Group, Trajectory
from tests.cpu.enumerated_policy import OUTCOMES, REWARDS, logits_of, policy_gradient, probability, token_logprobs

NAMES = [name for name in sorted(POLICY_LOSSES.entries) if not name.startswith("own_")]
CONSTANTS = LossConstants()
UNCUT = LossConstants(
    eps_clip_low=0.999,
    eps_clip_high=1e6,
    clip_ratio_c=1e6,
    tis_cap=math.inf,
    cispo_eps_clip_low=1.0,
    cispo_eps_clip_high=1e6,
    dppo_delta_low=1.0,
    dppo_delta_high=1.0,
)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(
    logprobs: Tensor, behavior: Tensor, advantages: Tensor, old: Tensor | None = None, rows: Tensor | None = None
) -> LossTokens:
    return LossTokens(
        logprobs=logprobs,
        behavior_logprobs=behavior,
        advantages=advantages,
        row_indices=torch.arange(len(logprobs)) if rows is None else rows,
        old_logprobs=old,
        weights=torch.ones_like(advantages),
        is_marked=torch.zeros(len(logprobs), dtype=torch.bool),
    )


def slopes(loss: Tensor, logprobs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return gradient


class TestAgainstTheTruePolicyGradient:
    """Every outcome of two tokens out of three, weighted by the chance that the behavior policies give it."""

    LOGITS = logits_of(seed=1)
    FIRST, SECOND = logits_of(seed=2), logits_of(seed=3)
    """Of the versions that sampled the first token and the second."""
    OLD = logits_of(seed=4)

    def behavior(self, outcome: tuple[int, int], on_policy: bool) -> Tensor:
        if on_policy:
            return token_logprobs(self.LOGITS, outcome)
        return torch.stack([token_logprobs(self.FIRST, outcome)[0], token_logprobs(self.SECOND, outcome)[1]])

    def mean_gradient(self, name: str, constants: LossConstants, *, on_policy: bool) -> Tensor:
        """(4, 3): of the sum over an answer's tokens, averaged over answers."""
        leaf = self.LOGITS.clone().requires_grad_()
        behavior = torch.stack([self.behavior(outcome, on_policy) for outcome in OUTCOMES])  # (9, 2)
        old = self.LOGITS if on_policy else self.OLD
        tokens = LossTokens(
            logprobs=torch.stack([token_logprobs(leaf, outcome) for outcome in OUTCOMES]).flatten(),
            behavior_logprobs=behavior.flatten(),
            advantages=tensor(*(REWARDS[outcome] for outcome in OUTCOMES)).repeat_interleave(2),
            row_indices=torch.arange(9).repeat_interleave(2),
            old_logprobs=torch.stack([token_logprobs(old, outcome) for outcome in OUTCOMES]).flatten(),
            is_marked=torch.zeros(18, dtype=torch.bool),
        )
        losses = make_policy_loss(name, constants)(tokens).loss.reshape(9, 2).sum(-1)
        (gradient,) = torch.autograd.grad((behavior.sum(-1).exp() * losses).sum(), leaf)
        return gradient

    def surrogate_gradient(self) -> Tensor:
        """Of TRPO's surrogate (arXiv 1502.05477, equation 14) per token: the mean under the samplers of ratio times reward."""
        leaf = self.LOGITS.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for outcome in OUTCOMES:
            behavior = self.behavior(outcome, on_policy=False).exp()
            ratios = token_logprobs(leaf, outcome).exp() / behavior
            total = total + behavior.prod() * REWARDS[outcome] * ratios.sum()
        return slopes(total, leaf)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_loss_has_the_true_gradient_where_the_policy_itself_has_sampled(self, name: str) -> None:
        gradient = self.mean_gradient(name, CONSTANTS, on_policy=True)
        torch.testing.assert_close(gradient, -policy_gradient(self.LOGITS, REWARDS), atol=1e-9, rtol=0)

    @pytest.mark.parametrize("name", [n for n in NAMES if n not in ("gspo", "sapo", "cispo_old")])
    def test_contract_10_uncut_it_has_the_gradient_of_the_surrogate_with_a_version_per_token(self, name: str) -> None:
        gradient = self.mean_gradient(name, UNCUT, on_policy=False)
        torch.testing.assert_close(gradient, -self.surrogate_gradient(), atol=1e-9, rtol=0)

    def test_contract_10_of_one_token_the_surrogate_has_the_true_gradient_whoever_sampled_it(self) -> None:
        leaf, behavior = self.LOGITS[0].clone().requires_grad_(), self.FIRST[0].log_softmax(0)
        tokens = tokens_of(leaf.log_softmax(0), behavior, tensor(1.0, -0.7, 0.2), self.OLD[0].log_softmax(0))
        (expected,) = torch.autograd.grad(-(leaf.softmax(0) * tokens.advantages).sum(), leaf)
        for name in (n for n in NAMES if n not in ("gspo", "sapo", "cispo_old")):
            losses = make_policy_loss(name, UNCUT)(tokens).loss
            (gradient,) = torch.autograd.grad((behavior.exp() * losses).sum(), leaf, retain_graph=True)
            torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=0)

    def test_gspo_follows_the_length_normalised_ratio_of_whole_answers_with_a_version_per_token(self) -> None:
        leaf = self.LOGITS.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for outcome in OUTCOMES:
            behavior = self.behavior(outcome, on_policy=False).sum().exp()
            ratio = (probability(leaf, outcome) / behavior).sqrt()
            clipped = ratio.clamp(1 - CONSTANTS.eps_clip_low, 1 + CONSTANTS.eps_clip_high)
            total = total - behavior * torch.minimum(ratio * REWARDS[outcome], clipped * REWARDS[outcome])
        mean_over_tokens = self.mean_gradient("gspo", CONSTANTS, on_policy=False) / 2
        torch.testing.assert_close(mean_over_tokens, slopes(total, leaf), atol=1e-9, rtol=0)


PPO_CASES = [
    (1.1, 2.0, -2.2, -2.2, False),
    (1.5, 2.0, -2.56, 0.0, True),
    (1.5, -2.0, 3.0, 3.0, False),
    (0.5, 2.0, -1.0, -1.0, False),
    (0.5, -2.0, 1.6, 0.0, True),
    (3.0, 0.0, 0.0, 0.0, False),
]
CISPO = replace(CONSTANTS, cispo_eps_clip_low=0.2, cispo_eps_clip_high=1.0)


@pytest.mark.parametrize(
    ("loss_fn", "constants", "ratio", "advantage", "loss", "slope", "is_clipped"),
    [
        *((ppo_clip, CONSTANTS, *case) for case in PPO_CASES),
        *((dual_clip, CONSTANTS, *case) for case in PPO_CASES),
        (dual_clip, CONSTANTS, 2.9, -2.0, 5.8, 5.8, False),
        (dual_clip, CONSTANTS, 5.0, -2.0, 6.0, 0.0, True),
        (dual_clip, CONSTANTS, 5.0, 2.0, -2.56, 0.0, True),
        *((gspo, CONSTANTS, *case) for case in PPO_CASES),
        (rollout_is, CONSTANTS, 1.5, 2.0, 3.0, -3.0, False),
        (rollout_is, CONSTANTS, 4.0, 2.0, 4.0, -4.0, True),
        (cispo, CISPO, 1.5, 2.0, 3.0, -3.0, False),
        (cispo, CISPO, 4.0, 2.0, 4.0, -4.0, True),
        (cispo, CISPO, 0.1, -2.0, -1.6, 1.6, True),
        (cispo_old, CISPO, 4.0, 2.0, 4.0, -4.0, True),
    ],
)
def test_one_token_has_the_loss_and_the_slope_of_the_closed_form(
    loss_fn, constants: LossConstants, ratio: float, advantage: float, loss: float, slope: float, is_clipped: bool
) -> None:
    """At log pi = -1."""
    logprobs = tensor(-1.0).requires_grad_()
    anchor = tensor(-1.0 - math.log(ratio))
    result = loss_fn(tokens_of(logprobs, anchor, tensor(advantage), anchor), constants)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert slopes(result.loss, logprobs).item() == pytest.approx(slope, abs=1e-12)
    assert result.is_clipped.tolist() == [is_clipped]


@pytest.mark.parametrize(
    ("before", "now", "advantage", "is_out"),
    [
        (0.6, 0.9, 1.0, True),
        (0.6, 0.9, -1.0, False),
        (0.6, 0.3, -1.0, True),
        (0.6, 0.3, 1.0, False),
        (0.6, 0.75, 1.0, False),
        (0.001, 0.1, 1.0, False),
        (0.6, 0.9, 0.0, False),
    ],
)
def test_dppo_masks_what_takes_a_probability_further_off_and_not_rare_tokens_of_large_ratio(
    before: float, now: float, advantage: float, is_out: bool
) -> None:
    logprobs = tensor(math.log(now)).requires_grad_()
    result = dppo(tokens_of(logprobs, tensor(math.log(before)), tensor(advantage)), CONSTANTS)
    assert result.loss.item() == pytest.approx(-now / before * advantage, abs=1e-12)
    assert slopes(result.loss, logprobs).item() == pytest.approx(
        0.0 if is_out else -now / before * advantage, abs=1e-12
    )
    assert result.is_clipped.tolist() == [is_out]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_sapo_gates_softly(ratio: float, advantage: float, tau: float) -> None:
    logprobs = tensor(-1.0).requires_grad_()
    result = sapo(tokens_of(logprobs, tensor(-1.0 - math.log(ratio)), tensor(advantage)), CONSTANTS)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert result.loss.item() == pytest.approx(-4 / tau * gate * advantage, abs=1e-12)
    assert slopes(result.loss, logprobs).item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, abs=1e-12)
    assert result.is_clipped.tolist() == [False]


def test_gspo_has_one_ratio_per_row_of_the_micro_batch() -> None:
    logprobs, behavior = tensor(-1.0, -2.0, -0.5).requires_grad_(), tensor(-1.3, -1.9, -0.5)
    ratio = math.exp((0.3 - 0.1) / 2)
    tokens = tokens_of(logprobs, behavior, tensor(1.0, 1.0, -1.0), rows=torch.tensor([0, 0, 3]))
    result = gspo(tokens, CONSTANTS)
    assert result.loss.tolist() == pytest.approx([-ratio, -ratio, 1.0], abs=1e-12)
    assert slopes(result.loss, logprobs).tolist() == pytest.approx([-ratio, -ratio, 1.0], abs=1e-12)


@pytest.mark.parametrize("bound", [0.05, 0.2])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_dppo_may_bound_the_divergence_of_this_token_or_any_other(advantage: float, bound: float) -> None:
    constants = replace(CONSTANTS, dppo_type="binary_kl", dppo_delta_low=bound, dppo_delta_high=bound)
    before, now = torch.meshgrid(*[torch.linspace(0.02, 0.98, 25, dtype=torch.float64)] * 2, indexing="ij")
    mu, pi = (Bernoulli(p.flatten()) for p in (before, now))
    is_further = (pi.probs - mu.probs) * advantage > 0
    is_out = is_further & (kl_divergence(mu, pi) > bound)
    logprobs = pi.probs.log().requires_grad_()
    result = dppo(tokens_of(logprobs, mu.probs.log(), torch.full((625,), advantage, dtype=torch.float64)), constants)
    assert result.is_clipped.tolist() == is_out.tolist() and (is_out.any() or advantage == 0)
    expected = torch.where(is_out, 0.0, -pi.probs / mu.probs * advantage)
    torch.testing.assert_close(slopes(result.loss, logprobs), expected, atol=1e-12, rtol=0)


def test_dppo_masks_what_becomes_certain() -> None:
    constants = replace(CONSTANTS, dppo_type="binary_kl", dppo_delta_high=0.05)
    tokens = tokens_of(tensor(0.0, 0.0, -0.5), tensor(-0.5, 0.0, 0.0), tensor(1.0, 1.0, -1.0))
    assert dppo(tokens, constants).is_clipped.tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "dppo", "sapo", "decoupled_ppo", "kl_cov"])
def test_without_a_stop_in_its_value_its_gradient_is_that_of_finite_differences(name: str) -> None:
    at, step = tensor(-1.25, -1.05, -0.5), 1e-6

    def losses(logprobs: Tensor) -> Tensor:
        old = tensor(-1.2, -1.0, -0.6)
        tokens = tokens_of(logprobs, tensor(-1.0, -1.1, -0.52), tensor(1.0, -0.7, 0.2), old)
        tokens = replace(tokens, is_marked=torch.tensor([True, True, False]))
        return make_policy_loss(name, CONSTANTS)(tokens).loss

    leaf = at.clone().requires_grad_()
    differences = (losses(at + step) - losses(at - step)) / (2 * step)
    torch.testing.assert_close(slopes(losses(leaf), leaf), differences, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
class TestEveryLoss:
    def test_a_token_without_advantage_has_no_gradient_and_a_wild_ratio_stays_finite(self, name: str) -> None:
        logprobs = torch.tensor([-1.0, -1.0, -200.0]).requires_grad_()
        behavior, old = torch.tensor([-2.0, -200.0, -1.0]), torch.tensor([-1.5, -100.0, -100.0])
        tokens = tokens_of(logprobs, behavior, torch.tensor([0.0, 1.0, 1.0]), old)
        losses = make_policy_loss(name, CONSTANTS)(tokens).loss
        gradient = slopes(losses, logprobs)
        assert gradient[0].item() == 0.0
        assert losses.isfinite().all()
        assert gradient.isfinite().all()

    def test_it_is_linear_in_the_weight_of_a_row(self, name: str) -> None:
        draw = torch.Generator().manual_seed(0)
        logprobs, behavior, advantages, old = torch.randn(4, 40, generator=draw, dtype=torch.float64)
        rows = torch.arange(40) // 4
        tokens = tokens_of(-logprobs.abs(), -behavior.abs(), advantages, -old.abs(), rows)
        loss = make_policy_loss(name, CONSTANTS)
        tokens = replace(tokens, is_marked=torch.arange(40) % 3 == 0)
        weighted = replace(tokens, advantages=advantages * 0.125, weights=torch.full_like(advantages, 0.125))
        torch.testing.assert_close(loss(weighted).loss, 0.125 * loss(tokens).loss, atol=1e-12, rtol=0)

    def test_an_idle_micro_batch_has_no_loss(self, name: str) -> None:
        none = torch.empty(0)
        result = make_policy_loss(name, CONSTANTS)(tokens_of(none, none, none, none, torch.empty(0, dtype=torch.int64)))
        assert result.loss.numel() == result.is_clipped.numel() == 0


def test_an_unknown_loss_is_refused_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"must be one of cispo, .* got 'ppo_clp'; did you mean ppo_clip\?"):
        make_policy_loss("ppo_clp", CONSTANTS)


def test_losses_around_a_recomputed_policy_say_that_they_need_it() -> None:
    assert [name for name in NAMES if POLICY_LOSSES.entry(name).needs_old_logprobs] == ["cispo_old", "decoupled_ppo"]


class TestDecoupledPpo:
    """Of AReaL, with the proximal policy between behavior and policy."""

    LOGPROBS, BEHAVIOR, OLD = (-1.25, -1.05, -0.5), (-1.0, -2.0, -0.5), (-1.2, -1.0, -0.6)
    ADVANTAGES = (1.0, -0.7, 0.2)

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
        result = decoupled_ppo(tokens_of(logprobs, behavior, tensor(advantage), old), CONSTANTS)
        assert result.loss.item() == pytest.approx(loss, abs=1e-12)
        assert slopes(result.loss, logprobs).item() == pytest.approx(slope, abs=1e-12)
        assert result.is_clipped.tolist() == [is_clipped]

    def gradient(self, loss_fn, *, old: tuple[float, ...], constants: LossConstants = CONSTANTS) -> Tensor:
        leaf = tensor(*self.LOGPROBS).requires_grad_()
        tokens = tokens_of(leaf, tensor(*self.BEHAVIOR), tensor(*self.ADVANTAGES), tensor(*old))
        return slopes(loss_fn(tokens, constants).loss, leaf)

    def test_with_the_behavior_policy_as_proximal_it_is_ppo_clip(self) -> None:
        expected = self.gradient(ppo_clip, old=self.OLD)
        torch.testing.assert_close(self.gradient(decoupled_ppo, old=self.BEHAVIOR), expected, atol=1e-12, rtol=0)

    def test_with_the_policy_itself_as_proximal_its_gradient_is_that_of_rollout_is(self) -> None:
        capped = replace(CONSTANTS, tis_cap=1.0)
        expected = self.gradient(rollout_is, old=self.OLD, constants=capped)
        gradient = self.gradient(decoupled_ppo, old=self.LOGPROBS, constants=capped)
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


def test_the_k3_estimate_has_the_divergence_of_behavior_from_policy_as_its_mean() -> None:
    policy, behavior = tensor(0.3, -0.5, 0.1).softmax(0), tensor(0.45, 0.25, 0.30)
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
        tokens = tokens_of(logprobs[part], behavior[part], advantages[part])
        loss = rollout_is(tokens, LossConstants(tis_cap=1.0))
        return token_figures(loss, logprobs[part], behavior[part], lags[part])

    joined = merge_figures([figures(slice(0, 5)), {}, figures(slice(5, 12))])
    assert joined == pytest.approx(figures(slice(0, 12)), rel=1e-12)
    assert joined["num_tokens"] == 12
    assert joined["token_lag_max"] == 4
    assert joined["lag2_tokens_sum"] == 3
    assert joined["lag0_logprob_gap_max"] == pytest.approx((logprobs - behavior)[lags == 0].abs().max().item())
    assert "lag0_logprob_gap_max" not in figures(slice(5, 8))
    assert "lag3_tokens_sum" not in joined


def test_a_lags_figures_are_those_of_its_tokens_and_per_token_of_them() -> None:
    versions, version = (5, 3, 3, 6, 5, 3, 3), 6  # none of lag 2
    ratios, is_clipped = (1.5, 0.7, 3.0, 1.0, 0.9, 1.1, 0.2), (True, True, False, False, False, False, True)
    behavior = tensor(-1.0, -2.0, -3.0, -0.5, -1.5, -0.7, -0.1)
    logprobs = behavior + tensor(*ratios).log()
    row = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * 7,
        loss_mask=(1,) * 7,
        logprobs=tuple(behavior.tolist()),
        versions=versions,
        reward=0.0,
    )
    figures = StepFigures(trained_version=version, max_staleness_steps=4)
    lags = version - torch.tensor(versions)
    sums = []
    for part in (slice(0, 3), slice(3, 7)):
        loss = TokenLoss(loss=torch.zeros_like(logprobs[part]), is_clipped=torch.tensor(is_clipped[part]))
        sums.append(token_figures(loss, logprobs[part], behavior[part], lags[part]))
    group = Group(uid="a", admission_index=0, scheduled_version=3, trajectories=(row,))
    figures.add_group(group, merge_figures(sums), denominator=7)

    expected = {"policy/lag0_logprob_gap_max": 0.0}
    for lag, places in {0: (3,), 1: (0, 4), 3: (1, 2, 5, 6)}.items():
        kls = [ratios[place] - 1 - math.log(ratios[place]) for place in places]
        expected |= {
            f"policy/lag{lag}_tokens": len(places) / 7,
            f"policy/lag{lag}_behavior_kl": sum(kls) / len(places),
            f"policy/lag{lag}_clip_frac": sum(is_clipped[place] for place in places) / len(places),
        }
    found = {name: value for name, value in figures.values().items() if name.startswith("policy/lag")}
    assert found == pytest.approx(expected, abs=1e-12)
    assert figures.values()["policy/clip_frac"] == pytest.approx(3 / 7)
