"""Advantages of turns and tokens as columns of rows, whatever rows train them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator, with_advantages
from skyrl_async.algorithms.credit import SampleCredit, WeightedAdvantages
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.columns import VersionSpans, is_repeated
from skyrl_async.errors import TrainingError
from skyrl_async.registries import Unit
from skyrl_async.rollout.staleness import STALENESS_POLICIES
from skyrl_async.types import ENVIRONMENT_VERSION, Group, Trajectory, TurnSpan

RETURN_TO_GO = AdvantageEstimator(
    compute=lambda samples, constants: [one.returns(constants.turn_discount) for one in samples], unit=Unit.TURN
)
"""Each turn's return, so that a column shows which turn is where."""


def row_of(
    *parts: tuple[str, int], sample: int = 0, versions: Sequence[int] | None = None, **fields: object
) -> Trajectory:
    """A row from parts: a turn by its index or ``env``, and how many tokens it has. A part ``old`` was trained in another row."""
    mask = [is_trained for name, num in parts for is_trained in [name.isdigit()] * num]
    spans, place = [], 0
    for name, num in parts:
        if name.isdigit():
            spans.append(TurnSpan(index=int(name), start=place, end=place + num))
        place += num
    given = {"reward": 0.0, "turn_spans": tuple(spans), "versions": np.where(mask, 0, ENVIRONMENT_VERSION)} | fields
    ids = [ord(name[0]) for name, num in parts for _ in range(num)]
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=ids,
        loss_mask=mask,
        logprobs=[-0.5 if is_trained else 0.0 for is_trained in mask],
        sample_index=sample,
        **(given | ({} if versions is None else {"versions": versions})),  # type: ignore[arg-type]
    )


def group_of(*rows: Trajectory) -> Group:
    return Group(uid="a", admission_index=0, scheduled_version=0, trajectories=rows)


def columns(group: Group) -> list[list[float]]:
    return [column.tolist() for column in group.advantages]


def test_each_turn_has_its_advantage_at_its_own_tokens_and_nothing_between() -> None:
    row = row_of(("0", 2), ("env", 1), ("1", 1), ("env", 2), ("2", 3), reward=7.0, turn_rewards=(1.0, 2.0, 4.0))
    (found,) = with_advantages([group_of(row)], RETURN_TO_GO)
    assert columns(found) == [[7.0, 7.0, 0.0, 6.0, 0.0, 0.0, 4.0, 4.0, 4.0]]
    assert not found.advantages[0].flags.writeable


def test_turns_of_a_rewritten_history_are_taken_in_the_order_in_which_they_were_sampled() -> None:
    earned = {"reward": 15.0, "turn_rewards": (1.0, 2.0, 4.0, 8.0)}
    trunk = row_of(("0", 1), ("env", 1), ("3", 2), **earned)
    branch = row_of(("old", 1), ("env", 1), ("1", 1), ("env", 1), ("2", 1), **earned)
    alone = row_of(("0", 1), sample=1, reward=3.0)
    (found,) = with_advantages([group_of(trunk, alone, branch)], RETURN_TO_GO)
    assert columns(found) == [[15.0, 0.0, 8.0, 8.0], [3.0], [0.0, 0.0, 14.0, 0.0, 12.0]]


def test_what_is_known_of_the_whole_sample_alone_is_earned_by_its_last_turn() -> None:
    plain = row_of(("0", 1), ("env", 1), ("1", 1), reward=3.0)
    shaped = row_of(("0", 1), ("env", 1), ("1", 1), sample=1, reward=3.0, turn_rewards=(1.0, 2.0), shaped_reward=2.5)
    (found,) = with_advantages(
        [group_of(plain, shaped)],
        AdvantageEstimator(compute=lambda samples, _: [one.rewards for one in samples], unit=Unit.TURN),
    )
    assert columns(found) == [[0.0, 0.0, 3.0], [1.0, 0.0, 1.5]]


def test_a_row_that_names_no_turns_is_one() -> None:
    (found,) = with_advantages([group_of(row_of(("0", 2), reward=1.0, turn_spans=()))], RETURN_TO_GO)
    assert columns(found) == [[1.0, 1.0]]


def test_an_estimator_of_tokens_gives_one_per_trained_token_of_the_step() -> None:
    seen: list[SampleCredit] = []

    def numbered(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[np.ndarray]:
        seen.extend(samples)
        return [np.arange(1.0, 1 + len(one.logprobs)) for one in samples]

    row = row_of(("0", 2), ("env", 1), ("1", 2), reward=1.0, versions=(0, 3, ENVIRONMENT_VERSION, 3, 4))
    policy = STALENESS_POLICIES["mask"]
    step = StepAdvantages(AdvantageEstimator(compute=numbered, unit=Unit.TOKEN))
    (found,) = step([group_of(row)], lambda group: policy.masked_group(group, version=4, max_staleness_steps=1))
    assert columns(found) == [[0.0, 1.0, 0.0, 2.0, 3.0]]
    assert (seen[0].num_tokens, seen[0].logprobs.tolist()) == ((1, 2), [-0.5] * 3)


def test_a_turn_is_told_by_what_was_shown_before_it() -> None:
    seen: list[tuple[bytes, ...]] = []

    def looking(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
        seen.extend(one.observations for one in samples)
        return [[0.0] * len(one.rewards) for one in samples]

    first, second = (row_of(("0", n), ("env", 2), ("1", n), ("env", 2), ("2", 1), sample=n) for n in (1, 2))
    with_advantages([group_of(first, second)], AdvantageEstimator(compute=looking, unit=Unit.TURN))
    (start, after, later), of_second = seen
    assert (start, after, later) == of_second
    assert start != after == later  # both observations are of the same two tokens


def test_a_sample_that_is_left_out_has_zeros_and_is_in_no_baseline() -> None:
    abandoned = row_of(("old", 2), sample=2, reward=9.0, is_abandoned=True)
    rows = (row_of(("0", 1), reward=1.0), row_of(("0", 1), sample=1, reward=0.0), abandoned)
    (found,) = with_advantages([group_of(*rows)], make_advantage_estimator("turn_rloo"))
    assert columns(found) == [[1.0], [-1.0], [0.0, 0.0]]


def test_a_trained_token_that_is_in_no_turn_is_refused() -> None:
    row = row_of(("0", 1), ("env", 1), ("1", 1), turn_spans=(TurnSpan(index=0, start=0, end=1),))
    with pytest.raises(
        TrainingError, match=r"turn_spans must hold every trained token, got turns of \[1\] tokens for 2"
    ):
        with_advantages([group_of(row)], RETURN_TO_GO)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"turn_rewards": (1.0, 2.0)}, r"turn_rewards must sum to reward \(0.0\), got \(1.0, 2.0\)"),
        ({"turn_rewards": (np.inf, -np.inf)}, r"turn_rewards must be finite, got inf for turn 0"),
        ({"turn_rewards": (0.0,)}, r"turn_rewards has 1 entries, but turn 1 is trained"),
        (
            {"turn_spans": (TurnSpan(index=0, start=0, end=4),)},
            r"turn_spans must follow each other within the 3 response",
        ),
        (
            {"turn_spans": (TurnSpan(index=0, start=1, end=3), TurnSpan(index=1, start=2, end=3))},
            r"must follow each other",
        ),
        ({"token_rewards": (0.5, 0.0)}, r"token_rewards has 2 entries for 3 response tokens"),
        ({"token_rewards": (0.5, 0.0, np.inf)}, r"token_rewards must be finite, got inf for token 2"),
        ({"token_rewards": (0.0, 0.0, 0.0)}, r"token_rewards needs turn_rewards in a sample of several turns"),
        (
            {"token_rewards": (0.5, 0.0, 0.5), "turn_rewards": (0.5, -0.5)},
            r"token_rewards must sum to what turn 1 earned \(-0.5\), got 0.5",
        ),
    ],
)
def test_turns_that_do_not_fit_their_row_are_refused_by_name(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        row_of(("0", 1), ("env", 1), ("1", 1), **fields)


def test_what_an_estimator_owes_is_said_by_turn() -> None:
    estimator = AdvantageEstimator(compute=lambda samples, _: [[1.0]] * len(samples), unit=Unit.TURN)
    rows = row_of(("0", 1), ("env", 1), ("1", 1)), row_of(("0", 1), sample=1)
    with pytest.raises(
        TrainingError, match=r"one finite advantage per turn of samples that have 2 and 1, got \[\[1.0\]"
    ):
        with_advantages([group_of(*rows)], estimator)


def test_one_advantage_for_all_tokens_takes_the_memory_of_one() -> None:
    row = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=np.zeros(100_000, np.int32),
        loss_mask=np.ones(100_000, np.bool_),
        logprobs=np.zeros(100_000, np.float32),
        versions=VersionSpans.constant(0, 100_000),
        reward=1.0,
    )
    (found,) = with_advantages([group_of(row)], make_advantage_estimator("rloo"))
    (column,) = found.advantages
    assert len(column) == 100_000 and column.base is not None and memoryview(column.base).nbytes == 4


def weighing(*weights: object) -> AdvantageEstimator:
    """Advantages of 1 with a sample's weights each; None: no weights."""

    def compute(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[object]:
        ones = [np.ones(len(one.logprobs)) for one in samples]
        return [
            one if of_one is None else WeightedAdvantages(advantages=one, weights=of_one)
            for one, of_one in zip(ones, weights, strict=True)
        ]

    return AdvantageEstimator(compute=compute, unit=Unit.TOKEN)


def test_weights_of_tokens_are_columns_of_the_rows_that_have_them_and_go_when_they_are_not_given_again() -> None:
    rows = (row_of(("0", 2), ("env", 1), ("1", 1)), row_of(("0", 1), sample=1), row_of(("old", 1), is_abandoned=True))
    rows = (rows[0], rows[1], replace(rows[2], sample_index=2))
    (found,) = with_advantages([group_of(*rows)], weighing([0.5, 2.0, 0.25], None))
    weights = [row.token_weights for row in found.trajectories]
    assert weights[0] is not None and weights[0].tolist() == [0.5, 2.0, 0.0, 0.25] and weights[0].dtype == np.float32
    assert weights[1:] == [None, None]
    assert columns(found) == [[1.0, 1.0, 0.0, 1.0], [1.0], [0.0]]
    (again,) = with_advantages([found], weighing(None, None))
    assert again.trajectories == rows


def test_a_weight_of_a_whole_sample_takes_the_memory_of_one() -> None:
    estimator = AdvantageEstimator(
        compute=lambda rewards: [WeightedAdvantages(advantages=reward, weights=0.5) for reward in rewards]
    )
    (found,) = with_advantages([group_of(row_of(("0", 3), reward=2.0))], estimator)
    (row,) = found.trajectories
    assert row.token_weights is not None and is_repeated(row.token_weights) and is_repeated(found.advantages[0])
    assert (row.token_weights.tolist(), columns(found)) == ([0.5] * 3, [[2.0] * 3])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.5], [1.0, math.nan], [math.inf, 1.0]])
def test_weights_that_do_not_fit_their_tokens_are_refused_with_what_was_returned(weights: list[float]) -> None:
    said = r"must return one finite weight >= 0 per token of samples that have 2, if any, got \[WeightedAdvantages"
    with pytest.raises(TrainingError, match=said):
        with_advantages([group_of(row_of(("0", 2)))], weighing(weights))
