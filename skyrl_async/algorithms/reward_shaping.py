"""Changes rewards before advantages are computed of them, and handles answers that are too long.

Shaped rewards stand beside the environment's rewards, which stay what is reported, compared with held-out prompts, and used to filter
groups. Shaping a group twice gives the same result as shaping it once.

DAPO (arXiv 2503.14476, section 3.4) has two measures for answers that a length limit cuts. The soft overlong punishment lowers the reward
of an answer near the limit. Overlong filtering takes a cut answer out of the loss *and* out of its group's baseline. With R the reward, F
the event that an answer ends by itself, and m = E[R | F], a group's live samples then have the gradient of m, times a positive number:
what a cut answer would have earned counts for nothing. Were its reward in the baseline (as where only the loss is masked), the gradient
would have a further term (m - E[R]) grad P(F): a pull towards short answers, which the filter is meant to remove.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from skyrl_async.errors import GenerationError
from skyrl_async.samples import Sample, per_row, samples_of
from skyrl_async.types import Group

_KEY = "trainer.algorithm.reward_shaping"

RewardShape = Callable[[Sequence[Sample]], Sequence[float]]
"""The samples of a group -> one reward each, of which advantages are computed."""


def shape_rewards(group: Group, shapes: Sequence[RewardShape]) -> Group:
    """Return the group with ``shaped_reward`` in every row, or without shapes in none.

    Each shape starts from the rewards of the one before.

    Raises ``GenerationError`` if a shape raises, or does not return one finite number per sample.
    """
    if not shapes and all(row.shaped_reward is None for row in group.trajectories):
        return group
    rows = tuple(replace(row, shaped_reward=None) for row in group.trajectories)
    for shape in shapes:
        samples = samples_of(rows)
        shaped = shaped_rewards(shape, samples, f"the {len(samples)} samples of {group.uid!r}")
        of_rows = per_row(rows, zip(samples, shaped, strict=True), 0.0)
        rows = tuple(replace(row, shaped_reward=reward) for row, reward in zip(rows, of_rows, strict=True))
    return replace(group, trajectories=rows)


def shaped_rewards(shape: RewardShape, samples: Sequence[Sample], described: str, *, key: str = _KEY) -> list[float]:
    """Call a shape. Raises ``GenerationError`` as ``shape_rewards``, about the samples as ``described``."""
    try:
        found = [float(reward) for reward in shape(samples)]
    except Exception as error:  # it is the user's
        raise GenerationError(f"{key} raises {error!r} for {described}") from error
    if len(found) != len(samples) or not all(map(math.isfinite, found)):
        raise GenerationError(f"{key} must return one finite reward for each of {described}, got {found}")
    return found


def penalise_overlong(*, max_tokens: int, buffer_len: int, factor: float) -> RewardShape:
    """Return a shape that adds ``overlong_penalty`` to each sample's reward. A sample is as long as its longest row's response."""

    def shape(samples: Sequence[Sample]) -> list[float]:
        lengths = [max(len(row.response_token_ids) for row in sample.rows) for sample in samples]
        return [
            sample.shaped_reward + overlong_penalty(length, max_tokens=max_tokens, buffer_len=buffer_len, factor=factor)
            for sample, length in zip(samples, lengths, strict=True)
        ]

    return shape


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_len: int, factor: float) -> float:
    """Soft overlong punishment: ``R_length`` of DAPO, equation 13, times ``factor``.

    0 up to ``max_tokens - buffer_len`` tokens, from there linear to ``-factor`` at ``max_tokens``, and ``-factor`` beyond.

    Args:
        num_tokens: length of the response.
        max_tokens: the longest response that is allowed, >= buffer_len.
        buffer_len: tokens over which the penalty grows, >= 1.
        factor: the largest penalty, >= 0.
    """
    num_exceeding = num_tokens - (max_tokens - buffer_len)
    return -factor * min(max(num_exceeding / buffer_len, 0.0), 1.0)


def mask_overlong(group: Group) -> Group:
    """Mask every sample that a length limit cut, with all of its rows, from the loss and from the baseline.

    Its tokens keep their log-probs and versions: they were sampled, and are counted as sampled.
    """
    are_cut = per_row(group.trajectories, ((s, s.is_truncated) for s in samples_of(group.trajectories)), False)
    if not any(are_cut):
        return group
    rows = (
        replace(row, loss_mask=np.zeros_like(row.loss_mask), is_overlong=True) if is_cut else row
        for row, is_cut in zip(group.trajectories, are_cut, strict=True)
    )
    return replace(group, trajectories=tuple(rows))
