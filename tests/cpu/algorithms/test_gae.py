"""Generalized advantage estimation by hand, against SkyRL's cases, and against policies that can be enumerated."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.advantages import make_advantage_estimator, with_advantages
from skyrl_async.algorithms.credit import SampleCredit, returns_of
from skyrl_async.algorithms.estimators.gae import gae_advantages, turn_gae_advantages
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.algorithms.step_advantages import normalised
from skyrl_async.errors import TrainingError
from skyrl_async.registries import Unit
from skyrl_async.types import Group, Trajectory, TurnSpan
from tests.cpu.enumerated_policy import (
    OUTCOMES,
    REWARDS,
    Outcome,
    logits_of,
    policy_gradient,
    probability,
    token_logprobs,
)

CONSTANTS = AdvantageConstants()
LOGITS, BEHAVIOR = logits_of(seed=4), logits_of(seed=9)
COMPUTE = {Unit.TOKEN: gae_advantages, Unit.TURN: turn_gae_advantages}


def sample(
    rewards: Sequence[float],
    values: Sequence[float],
    num_tokens: Sequence[int] | None = None,
    log_ratios: Sequence[float] | None = None,
) -> SampleCredit:
    """Turns of one token each, unless ``num_tokens`` says otherwise."""
    return SampleCredit(
        rewards=tuple(rewards),
        num_tokens=tuple(num_tokens or (1,) * len(rewards)),
        values=np.array(values, np.float32),
        log_ratios=np.array(log_ratios or [0.0] * len(values), np.float32),
    )


def returns(one: SampleCredit, constants: AdvantageConstants, unit: Unit = Unit.TOKEN) -> list[float]:
    return returns_of(one, unit, COMPUTE[unit]([one], constants)[0], constants.vtrace_clip).tolist()


@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"),
    [(1.0, 1.0, [6.0, 5.0, 3.0]), (0.5, 1.0, [2.75, 3.5, 3.0]), (1.0, 0.5, [3.625, 4.25, 3.0])],
)
def test_returns_are_those_of_skyrl(gamma: float, lambd: float, expected: list[float]) -> None:
    one = sample([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    assert returns(one, AdvantageConstants(gamma=gamma, lambd=lambd)) == pytest.approx(expected)


def test_a_token_that_is_not_trained_is_no_step_and_what_it_earned_goes_to_the_one_before() -> None:
    one = sample([1.0, 2.0, 3.0], [0.5, 1.5], num_tokens=[1, 0, 1])
    assert returns(one, CONSTANTS) == [6.0, 3.0]
    before = sample([1.0, 2.0], [0.5], num_tokens=[0, 1])
    assert returns(before, CONSTANTS) == [2.0]


def test_what_single_tokens_earned_counts_from_them_on_across_turns() -> None:
    row = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2, 3, 4, 9, 5, 6),
        loss_mask=(1, 1, 1, 0, 1, 1),
        logprobs=(-1.0, -1.0, -1.0, 0.0, -1.0, -1.0),
        versions=(0, 0, 0, -1, 0, 0),
        reward=1.75,
        turn_rewards=(0.75, 1.0),
        turn_spans=(TurnSpan(index=0, start=0, end=3), TurnSpan(index=1, start=4, end=6)),
        token_rewards=(0.5, 0.0, 0.25, 0.0, 0.0, 1.0),
        values=(0.2, 0.4, 0.6, 0.0, 0.8, 0.1),
    )

    def advantages(one: Trajectory, **constants: float) -> list[float]:
        group = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(one,))
        estimator = make_advantage_estimator("gae", AdvantageConstants(**constants))
        (found,) = with_advantages([group], estimator)
        return found.advantages[0].tolist()

    # By hand, from the last token: d_t + 0.25 A_(t+1) with d = (0.5, -0.1, 0.05, -0.75, 0.9).
    expected = [0.469921875, -0.1203125, -0.08125, 0.0, -0.525, 0.9]
    assert advantages(row, gamma=0.5, lambd=0.5) == pytest.approx(expected, abs=1e-6)
    whole = replace(row, values=(0.0,) * 6)
    assert advantages(whole) == [1.75, 1.25, 1.25, 0.0, 1.0, 1.0]
    masked = replace(whole, loss_mask=(1, 1, 0, 0, 1, 0))
    assert advantages(masked) == [1.75, 1.25, 0.0, 0.0, 1.0, 0.0], "what a masked token earned is the one's before it"
    shaped = replace(whole, shaped_reward=1.5)
    assert advantages(shaped) == [1.5, 1.0, 1.0, 0.0, 0.75, 0.75], "what is taken from the whole, the last token loses"


floats = st.floats(-3, 3, width=16)
steps = st.lists(st.tuples(floats, floats, st.floats(-1, 1, width=16)), max_size=40)


@given(steps, st.floats(0, 1), st.floats(0, 1), st.sampled_from([None, 0.5, 1.0, math.inf]))
def test_advantages_are_those_of_the_recursion(
    drawn: list[tuple[float, float, float]], gamma: float, lambd: float, clip: float | None
) -> None:
    rewards, values, log_ratios = zip(*drawn, strict=True) if drawn else ((), (), ())
    one = sample(rewards or [0.0], values, num_tokens=(1,) * len(values) or [0], log_ratios=list(log_ratios))
    weights = [1.0 if clip is None else min(clip, math.exp(log_ratio)) for log_ratio in log_ratios]
    expected, following = [], (0.0, 0.0, 0.0)
    for reward, value, weight in reversed(list(zip(rewards, values, weights, strict=True))):
        next_value, next_weight, next_advantage = following
        advantage = reward + gamma * next_value - value + gamma * lambd * next_weight * next_advantage
        following = (value, weight, advantage)
        expected.append(advantage)
    (found,) = gae_advantages([one], AdvantageConstants(gamma=gamma, lambd=lambd, vtrace_clip=clip))
    np.testing.assert_allclose(found, expected[::-1], rtol=1e-6, atol=1e-6)


def mean_gradient(estimate: dict[tuple[int, int], np.ndarray], behavior: torch.Tensor, weighted: bool) -> torch.Tensor:
    """(4, 3): mean under ``behavior`` of advantages times scores of ``LOGITS``, each token weighted by its own ratio if asked."""
    total = torch.zeros_like(LOGITS)
    for outcome in OUTCOMES:
        leaf = LOGITS.clone().requires_grad_()
        logprobs = token_logprobs(leaf, outcome)
        ratios = (logprobs - token_logprobs(behavior, outcome)).exp().detach()
        # What came before a token is weighted too: states are visited as often as the policy would.
        weights = torch.cumprod(ratios, 0) if weighted else torch.ones(2, dtype=torch.float64)
        surrogate = (weights * torch.tensor(estimate[outcome]) * logprobs).sum()
        total += probability(behavior, outcome) * torch.autograd.grad(surrogate, leaf)[0]
    return total


def exact_values(logits: torch.Tensor = LOGITS) -> dict[int | None, float]:
    """What is earned in the mean from the beginning (None) and after each first token."""
    first = logits[0].softmax(-1)
    after = {
        token: float(sum(logits[1 + token].softmax(-1)[second] * REWARDS[token, second] for second in range(3)))
        for token in range(3)
    }
    return {None: float(sum(first[token] * after[token] for token in range(3)))} | after


@pytest.mark.parametrize(("lambd", "is_exact"), [(1.0, True), (1.0, False), (0.3, True)])
def test_the_mean_is_the_gradient_with_any_values_for_lambd_1_and_with_the_right_ones_for_less(
    lambd: float, is_exact: bool
) -> None:
    values = exact_values() if is_exact else {None: 0.4, 0: -1.0, 1: 2.0, 2: 0.3}
    constants = AdvantageConstants(lambd=lambd)
    found = {
        outcome: gae_advantages([sample([0.0, REWARDS[outcome]], [values[None], values[outcome[0]]])], constants)[0]
        for outcome in OUTCOMES
    }
    gradient = policy_gradient(LOGITS, REWARDS)
    torch.testing.assert_close(mean_gradient(found, LOGITS, weighted=False), gradient, atol=1e-6, rtol=0)


def stale_sample(outcome: Outcome, values: Sequence[float], unit: Unit) -> SampleCredit:
    """Sampled by ``BEHAVIOR``. Turns are of two tokens that share the log-ratio; nobody reads the value before the second one."""
    log_ratios = (token_logprobs(LOGITS, outcome) - token_logprobs(BEHAVIOR, outcome)).tolist()
    rewards = [0.0, REWARDS[outcome]]
    if unit is Unit.TOKEN:
        return sample(rewards, values, log_ratios=log_ratios)
    of_tokens = [share * log_ratio for log_ratio in log_ratios for share in (0.3, 0.7)]
    return sample(rewards, [values[0], 9.0, values[1], 9.0], num_tokens=(2, 2), log_ratios=of_tokens)


@pytest.mark.parametrize("unit", [Unit.TOKEN, Unit.TURN])
def test_weighted_returns_of_stale_samples_are_in_the_mean_what_the_policy_earns_and_lead_to_its_gradient(
    unit: Unit,
) -> None:
    values, constants = exact_values(), AdvantageConstants(vtrace_clip=math.inf)
    advantages, mean_return = {}, 0.0
    for outcome in OUTCOMES:
        one = stale_sample(outcome, [0.4, values[outcome[0]]], unit)
        (advantages[outcome],) = COMPUTE[unit]([one], constants)
        mean_return += float(probability(BEHAVIOR, outcome)) * returns(one, constants, unit)[0]
    # A value of 0.4 at the beginning is wrong; weights of mean 1 leave no trace of it.
    assert mean_return == pytest.approx(values[None], abs=1e-6)
    found = mean_gradient(advantages, BEHAVIOR, weighted=True)
    torch.testing.assert_close(found, policy_gradient(LOGITS, REWARDS), atol=1e-6, rtol=0)


@pytest.mark.parametrize("unit", [Unit.TOKEN, Unit.TURN])
def test_values_of_the_policy_between_the_sampler_and_the_trained_one_are_where_bounded_weights_lead(
    unit: Unit,
) -> None:
    values = exact_values(torch.minimum(BEHAVIOR.softmax(-1), LOGITS.softmax(-1)).log())
    assert abs(values[None] - exact_values()[None]) > 0.01
    mean_return = 0.0
    for outcome in OUTCOMES:
        one = stale_sample(outcome, [values[None], values[outcome[0]]], unit)
        mean_return += float(probability(BEHAVIOR, outcome)) * returns(one, CONSTANTS, unit)[0]
    assert mean_return == pytest.approx(values[None], abs=1e-6)


def test_unweighted_returns_of_stale_samples_are_those_of_the_policy_that_sampled_them() -> None:
    found = 0.0
    for outcome in OUTCOMES:
        one = sample([0.0, REWARDS[outcome]], [0.4, 0.1], log_ratios=[0.5, -0.5])
        found += float(probability(BEHAVIOR, outcome)) * returns(one, AdvantageConstants(vtrace_clip=None))[0]
    earned = sum(float(probability(BEHAVIOR, outcome)) * REWARDS[outcome] for outcome in OUTCOMES)
    assert found == pytest.approx(earned, abs=1e-6)


ROW = Trajectory(
    prompt_token_ids=(1, 2),
    response_token_ids=(3, 4, 9, 5, 6),
    loss_mask=(1, 1, 0, 1, 1),
    logprobs=(-1.0, -1.0, 0.0, -1.0, -1.0),
    old_logprobs=(-1.5, -1.2, 0.0, -1.4, -0.7),
    old_version=7,
    versions=(6, 6, -1, 7, 7),
    values=(0.5, 0.25, 0.0, 0.75, 1.0),
    reward=1.5,
    turn_rewards=(0.5, 1.0),
    turn_spans=(TurnSpan(index=0, start=0, end=2), TurnSpan(index=1, start=3, end=5)),
    num_turns=2,
)


def group(*rows: Trajectory) -> Group:
    return Group(uid="a", admission_index=0, scheduled_version=6, trajectories=rows)


def test_columns_of_advantages_and_returns_weigh_what_an_older_policy_sampled_and_nothing_else() -> None:
    (found,) = with_advantages([group(ROW)], make_advantage_estimator("gae"))
    (advantages,), (towards,) = found.advantages, found.returns
    stale = math.exp(-0.2)  # of the second token; those of version 7 weigh 1, whatever their log-probs
    last, third = 1.0 - 1.0, 1.0 - 0.75
    second = 0.5 + 0.75 - 0.25 + third
    expected = [0.25 - 0.5 + stale * second, second, 0.0, third, last]
    assert advantages.tolist() == pytest.approx(expected)
    weights = [math.exp(-0.5), stale, math.nan, 1.0, 1.0]
    assert towards.tolist() == pytest.approx((ROW.values + weights * np.array(expected)).tolist(), nan_ok=True)


def test_turns_have_one_advantage_and_train_the_value_before_their_first_token_alone() -> None:
    (found,) = with_advantages([group(ROW)], make_advantage_estimator("turn_gae", AdvantageConstants(vtrace_clip=None)))
    (advantages,), (towards,) = found.advantages, found.returns
    assert advantages[ROW.loss_mask].tolist() == [1.5 - 0.5] * 2 + [1.0 - 0.75] * 2
    assert towards[[0, 3]].tolist() == [1.5, 1.0]
    assert np.isnan(towards[[1, 2, 4]]).all()


def test_samples_that_are_not_trained_have_no_returns_and_values_that_nobody_computed_are_named() -> None:
    masked = replace(ROW, loss_mask=(0,) * 5, is_overlong=True)
    (found,) = with_advantages([group(masked)], make_advantage_estimator("gae"))
    assert np.isnan(found.returns[0]).all() and not found.advantages[0].any()
    with pytest.raises(TrainingError, match="needs trajectories with values, which a critic computes; some have none"):
        with_advantages([group(replace(ROW, values=None))], make_advantage_estimator("gae"))


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_trained_tokens_of_all_groups() -> None:
    other = replace(ROW, reward=0.0, turn_rewards=())
    groups = with_advantages([group(ROW), group(other)], make_advantage_estimator("gae"))
    found = np.concatenate([column[ROW.loss_mask] for one in normalised(groups) for column in one.advantages])
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)
    (alone,) = normalised([replace(group(ROW), advantages=(np.array([5.5, 1.5, 4.0, 5.5, 1.5], np.float32),))])
    of_skyrl = math.sqrt(4 / 3) * 2
    assert alone.advantages[0][[0, 1]].tolist() == pytest.approx([2 / of_skyrl, -2 / of_skyrl], abs=1e-6)


def test_whitened_advantages_of_a_masked_sample_are_those_of_skyrl() -> None:
    masked = Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=(3, 9, 4),
        loss_mask=(1, 0, 1),
        logprobs=(-1.0, 0.0, -1.0),
        versions=(6, -1, 6),
        values=(0.5, 0.0, 1.5),
        reward=6.0,
        turn_rewards=(3.0, 3.0),
        turn_spans=(TurnSpan(index=0, start=0, end=1), TurnSpan(index=1, start=2, end=3)),
        num_turns=2,
    )
    (found,) = normalised(with_advantages([group(masked)], make_advantage_estimator("gae")))
    (advantages,), (towards,) = found.advantages, found.returns
    assert towards[masked.loss_mask].tolist() == [6.0, 3.0]
    assert advantages[masked.loss_mask].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])  # +-0.7071
