"""Answers cut at the length limit, or near it: what DAPO (arXiv 2503.14476, section 3.4) does about them.

Flows in: samples. Flows out: rows with a mask, or rewards. Does not know the estimator or the loss.

Overlong filtering takes a cut answer out of the loss *and* out of its group's baseline. With R the reward, F the event that an answer ends
by itself, and m = E[R | F], a group's live samples then have the gradient of m, times a positive number: what a cut answer would have
earned counts for nothing. Were its reward in the baseline (as where only the loss is masked), the gradient would have a term
(m - E[R]) grad P(F) more: a pull towards short answers, which is what the filter is to take away.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from skyrl_async.samples import Sample, samples_of
from skyrl_async.types import Group, Trajectory

Shape = Callable[[Sequence[Sample]], Sequence[float]]
"""The samples of a group -> the reward of each that advantages are computed of."""


def without_overlong(group: Group) -> Group:
    """The group with every sample that a length limit cut masked from the loss and from the baseline, all rows of it."""
    cut = {id(row) for sample in samples_of(group.trajectories) if sample.is_truncated for row in sample.rows}
    if not cut:
        return group
    return replace(group, trajectories=tuple(_masked(row) if id(row) in cut else row for row in group.trajectories))


def _masked(row: Trajectory) -> Trajectory:
    """Tokens keep their log-probs and versions: they were sampled, and are counted as that."""
    return replace(row, loss_mask=(0,) * len(row.loss_mask), is_overlong=True)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_len: int, factor: float) -> float:
    """Soft overlong punishment: ``R_length`` of DAPO, equation 13, times ``factor``.

    0 up to ``max_tokens - buffer_len`` tokens, from there linear to ``-factor`` at ``max_tokens``, and ``-factor`` beyond.

    Args:
        num_tokens: length of the response.
        max_tokens: the longest that is allowed, >= buffer_len.
        buffer_len: tokens over which the penalty grows, >= 1.
        factor: the largest penalty, >= 0.
    """
    num_exceeding = num_tokens - (max_tokens - buffer_len)
    return -factor * min(max(num_exceeding / buffer_len, 0.0), 1.0)


def penalise_overlong(*, max_tokens: int, buffer_len: int, factor: float) -> Shape:
    """``overlong_penalty`` added to each sample's reward; the length of a sample of several rows is that of its longest."""

    def shape(samples: Sequence[Sample]) -> list[float]:
        lengths = [max(len(row.response_token_ids) for row in sample.rows) for sample in samples]
        penalties = [
            overlong_penalty(length, max_tokens=max_tokens, buffer_len=buffer_len, factor=factor) for length in lengths
        ]
        return [sample.shaped_reward + penalty for sample, penalty in zip(samples, penalties, strict=True)]

    return shape
