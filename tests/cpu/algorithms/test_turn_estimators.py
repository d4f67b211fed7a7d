"""Estimators of turns against the gradient of a policy whose episodes can be enumerated, and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimator_bias import (
    GROUP_SIZE,
    UNBIASED,
    compared,
    moments,
    place_mean,
    sampled_estimates,
    sampled_variance_of,
    turn_advantages,
)
from benchmarks.turn_policy import EPISODES, MAX_TURNS, Episode, Floats, make_policy
from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator
from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.estimators.gigpo import gigpo_advantages
from skyrl_async.algorithms.estimators.outcome import rloo_advantages
from skyrl_async.algorithms.estimators.turn_credit import turn_credit_advantages
from skyrl_async.algorithms.estimators.turn_rloo import turn_rloo_advantages
from skyrl_async.algorithms.settings import AdvantageConstants
from tests.cpu.enumerated_policy import REWARDS as TWO_TOKEN_REWARDS
from tests.cpu.enumerated_policy import groups_of, logits_of, policy_gradient, token_logprobs

POLICY = make_policy(seed=3)
GRADIENT = POLICY.gradient_of(lambda episode: sum(episode.rewards))
CONSTANTS = AdvantageConstants()

rewards_of_turns = st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=4).map(tuple)
groups = st.lists(rewards_of_turns, min_size=2, max_size=5)


def sample(*rewards: float, num_tokens: tuple[int, ...] | None = None, shown: str = "") -> SampleCredit:
    return SampleCredit(
        rewards=rewards,
        num_tokens=num_tokens or (1,) * len(rewards),
        observations=tuple(char.encode() for char in shown or "abcdefg"[: len(rewards)]),
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", UNBIASED)
def test_what_is_claimed_to_be_unbiased_is_where_the_policy_decides_how_many_turns_it_takes(
    name: str, size: int
) -> None:
    one = compared(POLICY)[name]
    mean, _ = moments(POLICY, one, size - one.estimator.needs_baseline)  # one visit more makes the baseline
    np.testing.assert_allclose(mean, GRADIENT, atol=1e-9)


def test_sampled_estimates_vary_as_much_as_all_of_them() -> None:
    one = compared(POLICY)["rloo"]
    _, variance = moments(POLICY, one, GROUP_SIZE)
    found, error = sampled_variance_of(sampled_estimates(POLICY, one, 500, seed=0))
    assert abs(found - variance) < 3 * error < 0.3 * variance


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_advantages_from_a_critic_are_unbiased_with_any_values_of_what_came_before_the_token(name: str) -> None:
    rng, known = np.random.default_rng(1), dict[tuple[object, ...], float]()

    def values(episode: Episode) -> Floats:
        places = [(turn, token) for turn, num in enumerate(episode.num_tokens) for token in range(num)]
        before = [(episode.actions[:turn], episode.actions[turn] if token else None) for turn, token in places]
        return np.array([known.setdefault(seen, rng.normal()) for seen in before])

    mean, _ = moments(POLICY, replace(compared(POLICY)[name], critic=values), 2)
    np.testing.assert_allclose(mean, GRADIENT, atol=1e-9)


def test_a_baseline_by_the_place_of_a_turn_pushes_against_further_turns_by_what_they_earn_in_the_mean() -> None:
    mean, _ = moments(POLICY, compared(POLICY)["mt_grpo"], 2)
    expected = GRADIENT.copy()
    for turn in range(1, MAX_TURNS):
        of_other = sum(POLICY.chance_of(other) * place_mean([other.rewards], turn) for other in EPISODES)
        expected -= of_other * POLICY.gradient_of(lambda episode, turn=turn: float(len(episode.states) > turn))
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    assert mean @ GRADIENT / np.linalg.norm(mean) / np.linalg.norm(GRADIENT) < 0.9


@given(groups)
def test_with_one_turn_each_or_a_reward_at_the_end_alone_turns_get_the_advantage_of_their_sample(
    drawn: list[tuple[float, ...]],
) -> None:
    ends = [sample(*(0.0,) * (len(rewards) - 1), rewards[-1]) for rewards in drawn]
    expected = rloo_advantages([one.rewards[-1] for one in ends])
    for one, level in zip(turn_rloo_advantages(ends, CONSTANTS), expected, strict=True):
        assert one == pytest.approx([level] * len(one), abs=1e-9)


def test_a_turn_is_compared_with_what_the_others_earned_from_there_on() -> None:
    found = turn_rloo_advantages([sample(1.0, 0.0, 2.0), sample(0.5), sample(0.0, 1.0)], CONSTANTS)
    assert [of_sample.tolist() for of_sample in found] == [
        [3.0 - 0.75, 2.0 - 0.75, 2.0 - 0.75],
        [0.5 - 2.0],
        [1.0 - 1.75, 1.0 - 1.25],
    ]
    discounted = turn_rloo_advantages([sample(0.0, 1.0), sample(0.0)], AdvantageConstants(turn_discount=0.5))
    assert [of_sample.tolist() for of_sample in discounted] == [[0.5, 1.0], [-0.5]]


def test_a_token_is_not_credited_with_what_earlier_tokens_of_its_turn_earned() -> None:
    by_token = replace(sample(1.0, 2.0, num_tokens=(3, 1)), token_rewards=np.array([0.75, 0.0, 0.25, 2.0], np.float32))
    untrained = replace(sample(4.0, 1.0, num_tokens=(0, 2)), token_rewards=np.array([0.5, 0.5], np.float32))
    found = turn_rloo_advantages([by_token, untrained], CONSTANTS)
    assert found[0].tolist() == [3.0 - 5.0, 2.25 - 5.0, 2.25 - 5.0, 2.0 - 1.0]
    assert found[1].tolist() == [1.0 - 2.0, 0.5 - 2.0]


def test_with_rewards_of_tokens_the_mean_is_the_gradient() -> None:
    logits = logits_of(seed=6)
    credits, scores = {}, {}
    for outcome, reward in TWO_TOKEN_REWARDS.items():
        of_first = (0.5, -1.0, 2.0)[outcome[0]]
        # In place of float32, which is exact to 1e-7 only.
        split = np.array([of_first, reward - of_first])
        credits[outcome] = SampleCredit(rewards=(reward,), num_tokens=(2,), token_rewards=split)
        leaf = logits.clone().requires_grad_()
        of_tokens = token_logprobs(leaf, outcome)
        scores[outcome] = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in of_tokens]
    mean = torch.zeros_like(logits)
    for chance, group in groups_of(2, logits):
        found = turn_rloo_advantages([credits[outcome] for outcome in group], CONSTANTS)
        for outcome, advantages in zip(group, found, strict=True):
            mean += chance / 2 * sum(a * score for a, score in zip(advantages, scores[outcome], strict=True))
    torch.testing.assert_close(mean, policy_gradient(logits, TWO_TOKEN_REWARDS), atol=1e-9, rtol=0)


def test_turns_that_were_shown_the_same_are_compared_with_each_other_wherever_they_are() -> None:
    group = [sample(0.0, 1.0, shown="sx"), sample(0.0, 0.0, shown="sy"), sample(0.0, 0.0, 1.0, shown="syx")]
    constants = AdvantageConstants(norm_by_std=False, step_advantage_w=0.5)
    episode = [1 / 3, -2 / 3, 1 / 3]
    at_s, at_y = [1 / 3, -2 / 3, 1 / 3], [-0.5, 0.5]
    expected = [
        [episode[0] + at_s[0] / 2, episode[0]],  # both at x earned 1
        [episode[1] + at_s[1] / 2, episode[1] + at_y[0] / 2],
        [episode[2] + at_s[2] / 2, episode[2] + at_y[1] / 2, episode[2]],
    ]
    for found, of_sample in zip(gigpo_advantages(group, constants), expected, strict=True):
        assert found == pytest.approx(of_sample)


@given(groups, st.data())
def test_credit_moves_between_turns_and_their_tokens_sum_to_the_advantage_of_the_sample(
    drawn: list[tuple[float, ...]], data: st.DataObject
) -> None:
    num_tokens = [tuple(data.draw(st.integers(0, 3)) for _ in rewards) for rewards in drawn]
    group = [sample(*rewards, num_tokens=num) for rewards, num in zip(drawn, num_tokens, strict=True)]
    levels = rloo_advantages([one.reward for one in group])
    for level, num, found in zip(levels, num_tokens, turn_credit_advantages(group, CONSTANTS), strict=True):
        total = math.fsum(advantage * n for advantage, n in zip(found, num, strict=True))
        assert total == pytest.approx(level * sum(num), abs=1e-6)


def test_credit_for_a_reward_goes_to_its_turn_and_less_of_it_to_those_before() -> None:
    constants = AdvantageConstants(credit_decay=0.5)
    (found, _) = turn_credit_advantages([sample(0.0, 0.0, 1.0), sample(0.0, 0.0, 1.0)], constants)
    assert found == pytest.approx([1 / 7 - 1 / 3, 2 / 7 - 1 / 3, 4 / 7 - 1 / 3])
    without = turn_credit_advantages([sample(1.0, 0.0), sample(0.0)], AdvantageConstants(credit_weight=0.0))
    assert without == [[1.0, 1.0], [-1.0]]


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo", "turn_credit"])
def test_a_lone_sample_has_no_group_to_be_compared_with(name: str) -> None:
    estimator: AdvantageEstimator = make_advantage_estimator(name)
    (found,) = turn_advantages(estimator, [[EPISODES[0]]])
    assert found.tolist() == [0.0]
