"""The baseline per prompt: means of what earlier samples earned, whatever the order in which groups are trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.advantages import make_advantage_estimator
from skyrl_async.algorithms.history import PromptRewards
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.types import Group, Trajectory


def group(uid: str, *rewards: float, index: int = 0) -> Group:
    rows = tuple(
        Trajectory(
            prompt_token_ids=(1,),
            response_token_ids=(2, 3),
            loss_mask=(1, 1),
            logprobs=(-1.0, -1.0),
            versions=(0, 0),
            reward=reward,
        )
        for reward in rewards
    )
    return Group(uid=uid, admission_index=index, scheduled_version=0, trajectories=rows)


def advantages(step: StepAdvantages, *groups: Group) -> list[list[float]]:
    found = [[column[0].item() for column in one.advantages] for one in step(groups)]
    step.end_step()
    return found


def step_advantages(decay: float = 0.5) -> StepAdvantages:
    return StepAdvantages(make_advantage_estimator("running_mean"), history=PromptRewards(decay=decay))


def test_a_sample_is_compared_with_earlier_ones_of_its_prompt_and_never_with_itself() -> None:
    step = step_advantages()
    assert advantages(step, group("a", 1.0), group("b", 0.0, index=1)) == [[1.0], [0.0]]
    assert advantages(step, group("a", 1.0), group("c", 1.0, index=1)) == [[0.0], [0.5]]  # c: the mean of all so far
    assert advantages(step, group("a", 0.0, 1.0)) == [[-1.0, 0.0]]
    expected = (1.0 * 0.25 + 1.0 * 0.5 + 1.0) / (0.25 + 0.5 + 2)
    assert advantages(step, group("a", 0.0)) == [[pytest.approx(-expected)]]


groups = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=3)), max_size=8
)


@given(groups, st.randoms())
def test_neither_the_order_of_groups_nor_streaming_nor_a_checkpoint_changes_a_baseline(
    drawn: list[tuple[str, list[float]]], random: object
) -> None:
    of_step = [group(uid, *rewards, index=index) for index, (uid, rewards) in enumerate(drawn)]
    whole, streamed, resumed = step_advantages(), step_advantages(), step_advantages()
    whole(of_step)
    shuffled = list(of_step)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one in shuffled:
        streamed([one])
    for step in (whole, streamed):
        step.end_step()
    assert whole.prompt_rewards == streamed.prompt_rewards
    whole([group("a", 5.0)])  # of a step that is not over: trained again by the run that is resumed
    resumed.restore(None, whole.prompt_rewards)
    for uid in "abcd":
        assert resumed.history.baseline(uid) == streamed.history.baseline(uid)
