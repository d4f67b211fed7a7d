"""Advantages against closed forms, and against a policy whose groups can be enumerated."""

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator
from skyrl_async.algorithms.credit import GroupRewards
from skyrl_async.algorithms.estimators.outcome import (
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    rloo_advantages,
)
from skyrl_async.algorithms.estimators.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.types import Group, Trajectory
from tests.cpu.advantage_columns import numbers, row_advantages
from tests.cpu.enumerated_policy import IS_RIGHT, REWARDS, Outcome, logits_of, mean_of_estimator, policy_gradient

LOGITS = logits_of(seed=1)
OF_GROUP = {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages, "maxrl": maxrl_advantages}
rewards_of_a_group = st.lists(st.floats(0, 10, width=32), min_size=2, max_size=16)


def row(reward: float, *, tokens: int = 2, sample: int | None = None, abandoned: bool = False) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * tokens,
        loss_mask=(int(not abandoned),) * tokens,
        logprobs=(0.0,) * tokens,
        versions=(0,) * tokens,
        reward=reward,
        sample_index=sample,
        is_abandoned=abandoned,
    )


class TestClosedForms:
    REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5)

    def test_grpo_divides_centred_rewards_by_the_unbiased_standard_deviation(self) -> None:
        values = torch.tensor(self.REWARDS, dtype=torch.float64)
        expected = (values - values.mean()) / (values.std() + 1e-6)
        assert grpo_advantages(self.REWARDS) == pytest.approx(expected.tolist(), abs=1e-12)

    def test_dr_grpo_only_centres(self) -> None:
        assert dr_grpo_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]

    def test_rloo_takes_the_mean_of_the_others_away(self) -> None:
        others = [statistics.mean(r for j, r in enumerate(self.REWARDS) if j != i) for i in range(5)]
        expected = [reward - other for reward, other in zip(self.REWARDS, others, strict=True)]
        assert rloo_advantages(self.REWARDS) == pytest.approx(expected, abs=1e-12)

    def test_maxrl_divides_by_the_share_of_right_answers(self) -> None:
        assert maxrl_advantages([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
        assert maxrl_advantages([0.0, 0.0]) == [0.0, 0.0]

    def test_reinforce_pp_normalises_over_the_tokens_of_the_mini_batch(self) -> None:
        groups = [GroupRewards(rewards=(1.0, 0.0), num_tokens=(3, 5)), GroupRewards(rewards=(0.5,), num_tokens=(2,))]
        tokens = torch.tensor([1.0] * 3 + [0.0] * 5 + [0.5] * 2, dtype=torch.float64)
        of = {reward: (reward - tokens.mean().item()) / tokens.std(correction=0).item() for reward in (1.0, 0.0, 0.5)}
        first, second = reinforce_pp_advantages(groups)
        assert first == pytest.approx([of[1.0], of[0.0]], abs=1e-6)
        assert second == pytest.approx([of[0.5]], abs=1e-6)

    def test_reinforce_pp_with_baseline_centres_within_the_group_before_it_normalises(self) -> None:
        groups = [
            GroupRewards(rewards=(3.0, 1.0), num_tokens=(1, 1)),
            GroupRewards(rewards=(0.0, 0.5), num_tokens=(2, 2)),
        ]
        tokens = torch.tensor([1.0, -1.0, -0.25, -0.25, 0.25, 0.25], dtype=torch.float64)
        std = tokens.std(correction=0).item()
        first, second = reinforce_pp_baseline_advantages(groups)
        assert first == pytest.approx([1 / std, -1 / std], abs=1e-6)
        assert second == pytest.approx([-0.25 / std, 0.25 / std], abs=1e-6)


class TestAgainstTheTruePolicyGradient:
    """Means over every group of a policy of nine outcomes."""

    @pytest.mark.parametrize("size", [2, 3])
    def test_rloo_is_unbiased_for_groups_of_any_size(self, size: int) -> None:
        mean = mean_of_estimator(LOGITS, size, lambda group: rloo_advantages([REWARDS[o] for o in group]))
        torch.testing.assert_close(mean, policy_gradient(LOGITS, REWARDS), atol=1e-12, rtol=0)

    @pytest.mark.parametrize("size", [2, 3])
    def test_dr_grpo_is_the_gradient_less_each_samples_part_in_its_own_baseline(self, size: int) -> None:
        mean = mean_of_estimator(LOGITS, size, lambda group: dr_grpo_advantages([REWARDS[o] for o in group]))
        true = policy_gradient(LOGITS, REWARDS)
        torch.testing.assert_close(mean, (size - 1) / size * true, atol=1e-12, rtol=0)

    @pytest.mark.parametrize("size", [2, 3])
    def test_maxrl_is_the_gradient_of_the_expanded_log_likelihood_cut_after_one_term_less_than_samples(
        self, size: int
    ) -> None:
        mean = mean_of_estimator(LOGITS, size, lambda group: maxrl_advantages([IS_RIGHT[o] for o in group]))
        chance = sum(self.chances_of_being_right())
        series = sum((1 - chance) ** (k - 1) for k in range(1, size))
        torch.testing.assert_close(mean, series * policy_gradient(LOGITS, IS_RIGHT), atol=1e-12, rtol=0)

    def chances_of_being_right(self) -> list[float]:
        logs = LOGITS.log_softmax(-1)
        return [(logs[0, a] + logs[1 + a, b]).exp().item() for (a, b), right in IS_RIGHT.items() if right]

    @pytest.mark.parametrize("size", [2, 3])
    def test_abandoned_members_leave_a_group_unbiased_whatever_their_reward(self, size: int) -> None:
        estimator = make_advantage_estimator("rloo").compute

        def advantages(group: tuple[Outcome, ...]) -> list[float]:
            lost = row(100.0 * REWARDS[group[0]], sample=size, abandoned=True)
            found = row_advantages([lost, *(row(REWARDS[o], sample=i) for i, o in enumerate(group))], estimator)
            assert found[0] == 0.0
            return found[1:]

        mean = mean_of_estimator(LOGITS, size, advantages)
        torch.testing.assert_close(mean, policy_gradient(LOGITS, REWARDS), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", sorted(OF_GROUP))
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [], [0.0, 0.0]])
def test_a_group_of_equal_rewards_has_exactly_zero_advantages(rewards: list[float], name: str) -> None:
    assert OF_GROUP[name](rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("compute", [reinforce_pp_advantages, reinforce_pp_baseline_advantages])
def test_a_mini_batch_of_equal_rewards_or_without_tokens_has_exactly_zero_advantages(compute) -> None:
    equal = [GroupRewards(rewards=(0.1, 0.1), num_tokens=(3, 4))] * 2
    assert compute(equal) == [[0.0, 0.0], [0.0, 0.0]]
    assert compute([GroupRewards(rewards=(), num_tokens=()), GroupRewards(rewards=(1.0,), num_tokens=(0,))]) == [
        [],
        [0.0],
    ]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rewards=rewards_of_a_group, shift=st.floats(-5, 5, width=32))
def test_adding_a_constant_to_all_rewards_changes_no_advantage(name: str, rewards: list[float], shift: float) -> None:
    if 0 < max(rewards) - min(rewards) < 1e-3:
        return
    there = OF_GROUP[name]([reward + shift for reward in rewards])
    assert there == pytest.approx(OF_GROUP[name](rewards), abs=1e-5)


@pytest.mark.parametrize("name", sorted(OF_GROUP))
@given(rewards=rewards_of_a_group)
def test_advantages_of_a_group_sum_to_zero(name: str, rewards: list[float]) -> None:
    assert math.fsum(OF_GROUP[name](rewards)) == pytest.approx(0.0, abs=1e-6)


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=4),
    tokens=st.integers(1, 9),
)
def test_reinforce_pp_has_mean_zero_and_unit_spread_over_the_tokens(rewards: list[list[float]], tokens: int) -> None:
    groups = [GroupRewards(rewards=tuple(r), num_tokens=tuple(tokens + i for i in range(len(r)))) for r in rewards]
    found = reinforce_pp_advantages(groups)
    values = [
        a for of, g in zip(found, groups, strict=True) for a, n in zip(of, g.num_tokens, strict=True) for _ in range(n)
    ]
    assert statistics.fmean(values) == pytest.approx(0.0, abs=1e-6)
    assert statistics.pstdev(values) == pytest.approx(float(len({r for of in rewards for r in of}) > 1), abs=1e-6)


@pytest.mark.parametrize("name", sorted(OF_GROUP))
def test_a_reward_that_is_not_finite_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite, got nan"):
        OF_GROUP[name]([1.0, math.nan])
    with pytest.raises(ValueError, match=r"rewards\[0\] must be finite, got inf"):
        reinforce_pp_advantages([GroupRewards(rewards=(math.inf,), num_tokens=(1,))])


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"rewards must be >= 0 with .*maxrl, .* got -1.0; shift them"):
        maxrl_advantages([1.0, -1.0])


def test_an_unknown_estimator_is_refused_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"must be one of dr_grpo, gae, gigpo, grpo, .* got 'gpro'; did you mean grpo\?"
    ):
        make_advantage_estimator("gpro")


def test_grpo_without_the_standard_deviation_is_dr_grpo() -> None:
    assert make_advantage_estimator("grpo").compute is grpo_advantages
    assert make_advantage_estimator("grpo", AdvantageConstants(norm_by_std=False)).compute is dr_grpo_advantages
    assert make_advantage_estimator("reinforce++").needs_mini_batch


def test_a_mini_batch_gets_its_advantages_row_by_row_without_abandoned_samples() -> None:
    rows = [
        (row(1.0, sample=0), row(1.0, sample=0, tokens=1), row(9.0, sample=1, abandoned=True), row(0.0, sample=2)),
        (row(0.5, sample=0, tokens=4),),
    ]
    groups = [
        Group(uid=str(i), admission_index=i, scheduled_version=0, trajectories=of_one) for i, of_one in enumerate(rows)
    ]
    first, second = StepAdvantages(AdvantageEstimator(compute=reinforce_pp_advantages, needs_mini_batch=True))(groups)
    expected = reinforce_pp_advantages(
        [GroupRewards(rewards=(1.0, 0.0), num_tokens=(3, 2)), GroupRewards(rewards=(0.5,), num_tokens=(4,))]
    )
    of_rows = [expected[0][0], expected[0][0], 0.0, expected[0][1], expected[1][0]]
    assert numbers(first.advantages + second.advantages) == pytest.approx(of_rows, rel=1e-6)
    assert (first.trajectories, second.trajectories) == tuple(rows)


@pytest.mark.parametrize("is_of_mini_batch", [False, True])
def test_a_group_of_which_no_sample_is_left_asks_no_estimator_and_has_no_advantage(is_of_mini_batch: bool) -> None:
    def of_group(rewards: Sequence[float]) -> list[float]:
        return [reward - max(rewards) for reward in rewards]  # which has no maximum of nothing

    def of_mini_batch(groups: Sequence[GroupRewards]) -> list[list[float]]:
        assert groups, "nothing to normalise"
        return [of_group(group.rewards) for group in groups]

    compute = of_mini_batch if is_of_mini_batch else of_group
    estimator = AdvantageEstimator(compute=compute, needs_mini_batch=is_of_mini_batch)
    gone = (row(1.0, sample=0, abandoned=True), row(0.0, sample=1, abandoned=True))
    kept = (row(1.0, sample=0), row(0.0, sample=1))
    groups = [
        Group(uid=str(i), admission_index=i, scheduled_version=0, trajectories=rows)
        for i, rows in enumerate((gone, kept))
    ]
    assert [numbers(group.advantages) for group in StepAdvantages(estimator)(groups)] == [(0.0, 0.0), (0.0, -1.0)]
    assert [numbers(group.advantages) for group in StepAdvantages(estimator)(groups[:1])] == [(0.0, 0.0)]
    assert row_advantages(gone, of_group) == [0.0, 0.0]


@pytest.mark.parametrize(
    "returned", [[1.0], [1.0, math.nan], [1.0, math.inf], [0.0, 0.0, 0.0]], ids=["too few", "nan", "inf", "too many"]
)
def test_what_an_estimator_returns_in_the_run_is_checked_and_named(returned: list[float]) -> None:
    with pytest.raises(TrainingError, match=r"must return one finite advantage per reward of \[1.0, 0.5\], got \["):
        row_advantages([row(1.0, sample=0), row(0.5, sample=1)], lambda rewards: returned)
