"""Advantages of rows as numbers, for tests of estimators that give one to a sample."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skyrl_async.algorithms.advantages import AdvantageEstimator, with_advantages
from skyrl_async.columns import Advantages
from skyrl_async.types import Group, Trajectory


def one_token_row(reward: float, **columns: Any) -> Trajectory:
    """A prompt and an answer of a token each."""
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,),
        loss_mask=(1,),
        logprobs=(-1.0,),
        versions=(0,),
        reward=reward,
        **columns,
    )


def numbers(columns: Iterable[Advantages]) -> tuple[float, ...]:
    """The number that each column repeats."""
    values = [set(column.tolist()) for column in columns]
    assert all(len(of_row) <= 1 for of_row in values)
    return tuple(next(iter(of_row), 0.0) for of_row in values)


def row_advantages(rows: Sequence[Trajectory], compute: Callable[[Sequence[float]], Sequence[float]]) -> list[float]:
    """The number of each row of a group."""
    group = Group(uid="0", admission_index=0, scheduled_version=0, trajectories=tuple(rows))
    return list(numbers(with_advantages([group], AdvantageEstimator(compute=compute))[0].advantages))
