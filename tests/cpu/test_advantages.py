"""Advantages against closed forms."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.advantages import get_advantage_estimator, grpo_advantages
from skyrl_async.errors import ConfigError

rewards_of_a_group = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def test_grpo_divides_centred_rewards_by_the_unbiased_standard_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-6)
    assert grpo_advantages(rewards, norm_by_std=True) == pytest.approx(expected.tolist(), abs=1e-12)


def test_without_the_standard_deviation_rewards_are_only_centred() -> None:
    assert grpo_advantages([1.0, 0.0, 0.0, 0.0], norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [], [0.0, 0.0]])
def test_a_group_of_equal_rewards_has_exactly_zero_advantages(rewards: list[float], norm_by_std: bool) -> None:
    assert grpo_advantages(rewards, norm_by_std=norm_by_std) == [0.0] * len(rewards)


@given(rewards=rewards_of_a_group, shift=st.floats(-5, 5, width=32))
def test_adding_a_constant_to_all_rewards_changes_no_advantage(rewards: list[float], shift: float) -> None:
    here = grpo_advantages(rewards, norm_by_std=False)
    there = grpo_advantages([reward + shift for reward in rewards], norm_by_std=False)
    assert there == pytest.approx(here, abs=1e-9)


@given(rewards=rewards_of_a_group)
def test_advantages_of_a_group_sum_to_zero_and_have_unit_spread(rewards: list[float]) -> None:
    advantages = grpo_advantages(rewards, norm_by_std=True)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    if statistics.stdev(rewards) > 0.1:
        assert statistics.stdev(advantages) == pytest.approx(1.0, abs=1e-4)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite, got nan"):
        grpo_advantages([1.0, math.nan], norm_by_std=True)


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="advantage_estimator must be one of grpo, got 'gpro'"):
        get_advantage_estimator("gpro")


def test_grpo_is_found_by_name_and_needs_one_group_only() -> None:
    estimator = get_advantage_estimator("grpo")
    assert estimator.compute([1.0, 0.0], norm_by_std=False) == [0.5, -0.5]
    assert not estimator.needs_mini_batch
