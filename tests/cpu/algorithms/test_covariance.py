"""Tokens of large covariance against brute force and numpy, and the losses that hold them back, from groups to gradients."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl_async.algorithms.advantages import AdvantageEstimator
from skyrl_async.algorithms.batching import Row, collate
from skyrl_async.algorithms.losses import LossTokens
from skyrl_async.algorithms.policy_losses import (
    Mark,
    clip_cov,
    clip_cov_marks,
    kl_cov,
    kl_cov_marks,
    ppo_clip,
    token_covariances,
)
from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.columns import repeated
from skyrl_async.composition.algorithms import Advantages, loss_constants, make_advantages
from skyrl_async.errors import TrainingError
from skyrl_async.rollout.group_state import from_json, group_to_json
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.backends.assembly import make_objective
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import split_work
from skyrl_async.types import Group, Trajectory
from tests.cpu.quick_config import config_of

LOSS = "trainer.algorithm.policy_loss_type"
HALF = LossConstants(clip_cov_ratio=0.5, clip_cov_lb=0.0, clip_cov_ub=3.0, kl_cov_frac=0.3)
logprobs_and_masks = st.lists(st.tuples(st.floats(-8, 0), st.booleans()), min_size=1, max_size=8)
groups_of_rows = st.lists(
    st.lists(st.tuples(logprobs_and_masks, st.floats(-3, 3)), min_size=1, max_size=4), min_size=1, max_size=4
)


def row_of(tokens: Sequence[tuple[float, bool]]) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=tuple(range(3, 3 + len(tokens))),
        loss_mask=tuple(int(is_sampled) for _, is_sampled in tokens),
        logprobs=tuple(logprob if is_sampled else 0.0 for logprob, is_sampled in tokens),
        versions=tuple(0 if is_sampled else -1 for _, is_sampled in tokens),
        reward=0.0,
    )


def groups_of(drawn: Sequence[Sequence[tuple[Sequence[tuple[float, bool]], float]]], *, first: int = 0) -> list[Group]:
    return [
        Group(
            uid=str(index),
            admission_index=first + index,
            scheduled_version=0,
            trajectories=tuple(row_of(tokens) for tokens, _ in rows),
            advantages=tuple(repeated(advantage, len(tokens)) for tokens, advantage in rows),
        )
        for index, rows in enumerate(drawn)
    ]


def sampled(groups: Sequence[Group]) -> list[tuple[float, float, int | None]]:
    """Log-prob, advantage and mark of every sampled token."""
    return [
        (logprob, advantages[position].item(), None if row.marks is None else int(row.marks[position]))
        for group in groups
        for row, advantages in zip(group.trajectories, group.advantages, strict=True)
        for position, (logprob, is_sampled) in enumerate(
            zip(row.logprobs.tolist(), row.loss_mask.tolist(), strict=True)
        )
        if is_sampled
    ]


@given(groups_of_rows)
def test_their_mean_is_the_covariance_over_the_sampled_tokens_of_the_mini_batch(drawn) -> None:
    groups = groups_of(drawn)
    tokens = sampled(groups)
    covariances = token_covariances(groups)
    assert len(covariances) == len(tokens)
    if tokens:
        expected = np.cov([t[0] for t in tokens], [t[1] for t in tokens], bias=True)[0, 1]
        assert covariances.mean().item() == pytest.approx(expected, abs=1e-12)


@given(groups_of_rows)
def test_kl_cov_marks_the_tokens_of_largest_positive_covariance(drawn) -> None:
    groups = groups_of(drawn)
    covariances = token_covariances(groups).tolist()
    marks = [mark for *_, mark in sampled(kl_cov_marks(groups, HALF))]
    num = min(max(1, math.floor(0.3 * len(marks))), sum(covariance > 0 for covariance in covariances))
    assert sum(marks) == num
    chosen = sorted(covariance for covariance, mark in zip(covariances, marks, strict=True) if mark)
    assert chosen == sorted(covariances)[len(covariances) - num :]


@given(groups_of_rows)
def test_clip_cov_marks_a_share_of_the_tokens_between_the_bounds_the_same_each_time(drawn) -> None:
    groups = groups_of(drawn)
    covariances = token_covariances(groups).tolist()
    marked = clip_cov_marks(groups, HALF)
    marks = [mark for *_, mark in sampled(marked)]
    is_within = [0.0 < covariance < 3.0 for covariance in covariances]
    assert sum(marks) == min(max(1, math.floor(0.5 * len(marks))), sum(is_within))
    assert all(is_within[place] for place, mark in enumerate(marks) if mark)
    assert clip_cov_marks(groups, HALF) == marked
    for group in marked:
        for row in group.trajectories:
            assert row.marks is not None
            assert all(is_sampled or not mark for mark, is_sampled in zip(row.marks, row.loss_mask, strict=True))


def test_clip_cov_draws_evenly_and_equal_advantages_have_nothing_to_mark() -> None:
    likely, unlikely = [(-0.1, True)] * 2, [(-3.0, True)] * 2
    drawn = [[(likely, 1.0), (unlikely, -1.0)]]
    one = replace(HALF, clip_cov_ratio=0.25)
    times = Counter(
        [mark for *_, mark in sampled(clip_cov_marks(groups_of(drawn, first=first), one))].index(1)
        for first in range(400)
    )
    assert sorted(times) == [0, 1, 2, 3] and all(60 < number < 140 for number in times.values())
    equal = groups_of([[(likely, 0.5), (unlikely, 0.5)]])
    for mark in (clip_cov_marks, kl_cov_marks):
        assert not any(mark for *_, mark in sampled(mark(equal, HALF)))


def tokens_of(logprobs: Tensor, marks: Sequence[bool], weights: Sequence[float]) -> LossTokens:
    weight = torch.tensor(weights, dtype=torch.float64)
    return LossTokens(
        logprobs=logprobs,
        behavior_logprobs=torch.tensor([-1.0, -2.0, -0.3, -1.2], dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0, -0.5, -0.5], dtype=torch.float64) * weight,
        row_indices=torch.tensor([0, 0, 1, 1]),
        weights=weight,
        is_marked=torch.tensor(marks),
    )


def test_marked_tokens_have_no_gradient_or_one_that_holds_them_back() -> None:
    logprobs = torch.tensor([-0.9, -2.5, -0.2, -1.2], dtype=torch.float64, requires_grad=True)
    marks, weights = [True, False, True, False], [0.5, 0.5, 2.0, 2.0]
    tokens = tokens_of(logprobs, marks, weights)
    constants = LossConstants(ppo_kl_coef=0.7)

    def slopes(loss: Tensor) -> list[float]:
        return torch.autograd.grad(loss.sum(), logprobs)[0].tolist()

    plain = slopes(ppo_clip(tokens, constants).loss)
    found = clip_cov(tokens, constants)
    assert slopes(found.loss) == pytest.approx([0.0, plain[1], 0.0, plain[3]], abs=1e-12)
    assert found.is_clipped.tolist() == [True, False, True, False]
    ratios = [math.exp(0.1), math.exp(-0.5), math.exp(0.1), 1.0]
    expected = [
        weight * (-ratio * advantage + (0.7 if mark else 0.0))  # both marked tokens became likelier
        for ratio, advantage, weight, mark in zip(ratios, [1.0, 1.0, -0.5, -0.5], weights, marks, strict=True)
    ]
    assert slopes(kl_cov(tokens, constants).loss) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_from_groups_to_gradients_it_is_a_dense_reference_on_the_whole_mini_batch(name: str) -> None:
    """On the policy itself, as the paper has it: covariances of the mini-batch, largest first, in one padded tensor."""
    draw = torch.Generator().manual_seed(3)
    lengths, advantages = [5, 9, 3, 7], [1.2, -0.8, 0.4, -0.8]
    logprobs = -3 * torch.rand(4, 9, generator=draw)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    per_token = torch.tensor(advantages)[:, None].expand(4, 9)
    num = int(mask.sum())

    leaf = logprobs.clone().requires_grad_()
    mean_logprob, mean_advantage = logprobs[mask].mean(), per_token[mask].mean()
    covariance = ((logprobs - mean_logprob) * (per_token - mean_advantage)).masked_fill(~mask, -math.inf)
    largest = torch.zeros(36, dtype=torch.bool)
    largest[covariance.flatten().topk(int(0.25 * num)).indices] = True
    largest = largest.view(4, 9)
    moved = leaf + 0.05  # ratios above 1, so that the pull back is felt
    ratio = (moved - logprobs).exp()
    if name == "clip_cov":
        losses = torch.where(largest, 0.0, -ratio * per_token)
    else:
        losses = -ratio * per_token + 0.5 * torch.where(largest, (moved - logprobs).abs(), 0.0)
    (expected,) = torch.autograd.grad((losses * mask).sum() / num, leaf)

    within = sorted(covariance[mask].tolist(), reverse=True)[int(0.25 * num) - 1 : int(0.25 * num) + 1]
    keys = {  # all between the bounds are drawn: those that are largest
        "clip_cov.clip_ratio": 0.25,
        "clip_cov.clip_cov_lb": sum(within) / 2,
        "clip_cov.clip_cov_ub": 100.0,
        "kl_cov.kl_cov_frac": 0.25,
        "kl_cov.ppo_kl_coef": 0.5,
    }
    algorithm = config_of(f"{LOSS}={name}", *(f"trainer.algorithm.{k}={v}" for k, v in keys.items())).trainer.algorithm
    made = make_advantages(algorithm)
    assert made.of_step.need_mini_batch
    drawn = [
        [([(p, True) for p in logprobs[i, : lengths[i]].tolist()], advantages[i]) for i in pair]
        for pair in ((0, 1), (2, 3))
    ]
    objective = make_objective(
        TrainingSettings(policy_path="", policy_loss=name, loss_constants=loss_constants(algorithm))
    )
    rows = [
        Row(trajectory=row, advantages=of_row)
        for group in made.of_step(groups_of(drawn))
        for row, of_row in zip(group.trajectories, group.advantages, strict=True)
    ]
    found = torch.zeros(4, 9)
    for chosen in ([0, 3], [1], [2]):  # any micro-batches
        batch = collate([rows[i] for i in chosen], torch.device("cpu"), is_packed=True)
        policy = (batch.behavior_logprobs + 0.05).requires_grad_()
        (gradient,) = torch.autograd.grad(objective(policy, batch, None).total / num, policy)
        for index, of_row in zip(chosen, gradient.split([lengths[i] for i in chosen]), strict=True):
            found[index, : lengths[index]] = of_row
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_rows_without_marks_are_refused_and_a_marked_row_without_advantage_is_trained() -> None:
    settings = TrainingSettings(policy_path="", policy_loss="kl_cov")
    row = row_of([(-1.0, True), (-2.0, True)])
    with pytest.raises(TrainingError, match="policy_loss_type=kl_cov needs trajectories with marks"):
        split_work([row], [1.0], 0, settings=settings, num_ranks=1)
    for marks, has_gradient in (((0, 1), True), ((0, 0), False)):
        (work,) = split_work([replace(row, marks=marks)], [0.0], 0, settings=settings, num_ranks=1)
        assert work.has_gradient is has_gradient


def test_marks_are_of_a_step_and_no_part_of_a_checkpoint() -> None:
    (group,) = kl_cov_marks(groups_of([[([(-0.1, True)], 1.0), ([(-3.0, True)], -1.0)]]), HALF)
    assert any(row.marks is not None and row.marks.any() for row in group.trajectories)
    saved = group_to_json(group)
    assert all("marks" not in row for row in saved["trajectories"])
    assert [row.marks for row in from_json(Group, saved).trajectories] == [None, None]


def test_in_the_loop_all_groups_of_a_step_are_marked_together() -> None:
    seen: list[int] = []

    def mark(groups: Sequence[Group]) -> Sequence[Group]:
        seen.append(len(groups))
        return kl_cov_marks(groups, HALF)

    async def main(mark: Mark) -> list[tuple[Trajectory, ...]]:
        job = SimulationSettings(mean_tokens=50.0, num_steps=3, mini_batch_size=4, stream_mini_batch=False)
        simulation = Simulation(
            job,
            advantages=Advantages(
                of_stage=None,
                of_step=StepAdvantages(AdvantageEstimator(compute=lambda rewards: [0.0] * len(rewards)), mark=mark),
            ),
        )
        await simulation.trainer.run()
        return [group for step in simulation.policy.steps for group in step]

    trained = run_in_virtual_time(main(mark))
    assert seen == [4, 4, 4]
    assert all(row.marks is not None for group in trained for row in group)
