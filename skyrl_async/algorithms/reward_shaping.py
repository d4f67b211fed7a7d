"""Turns the rewards of finished groups into those that advantages are computed of.

Flows in: groups with the environment's rewards. Flows out: the same with shaped rewards beside them; the environment's stay what is
reported, compared with held-out prompts and asked for a signal. Shaping a group again gives the same, whatever was there. Does not know
what shapes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from skyrl_async.algorithms.overlong import Shape
from skyrl_async.errors import GenerationError
from skyrl_async.samples import Sample, samples_of
from skyrl_async.types import Group


def shaped(group: Group, shapes: Sequence[Shape]) -> Group:
    """The group with ``shaped_reward`` in every row, each shape going on from the one before.

    Raises ``GenerationError`` for a shape that raises, or does not return one finite number per sample.
    """
    if not shapes:
        return group
    positions = {id(row): index for index, row in enumerate(group.trajectories)}
    rows = [replace(row, shaped_reward=None) for row in group.trajectories]
    places = [[positions[id(row)] for row in sample.rows] for sample in samples_of(group.trajectories)]
    for shape in shapes:
        samples = [Sample(rows=tuple(rows[place] for place in places_of_one)) for places_of_one in places]
        rewards = _rewards(shape, samples, group.uid)
        for places_of_one, reward in zip(places, rewards, strict=True):
            for place in places_of_one:
                rows[place] = replace(rows[place], shaped_reward=reward)
    return replace(group, trajectories=tuple(rows))


def _rewards(shape: Shape, samples: Sequence[Sample], uid: str) -> list[float]:
    key = "trainer.algorithm.reward_shaping"
    try:
        found = [float(reward) for reward in shape(samples)]
    except Exception as error:  # it is the user's
        raise GenerationError(f"{key} raises {error!r} for the {len(samples)} samples of {uid!r}") from error
    if len(found) != len(samples) or not all(map(math.isfinite, found)):
        raise GenerationError(
            f"{key} must return one finite reward for each of the {len(samples)} samples of {uid!r}, got {found}"
        )
    return found
