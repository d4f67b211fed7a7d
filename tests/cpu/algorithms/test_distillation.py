"""On-policy distillation against a policy that can be enumerated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_async.algorithms.advantages import make_advantage_estimator
from skyrl_async.algorithms.distillation import Distillation
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.errors import TrainingError
from skyrl_async.types import Group, Trajectory
from tests.cpu.enumerated_policy import OUTCOMES, REWARDS, logits_of, probability, token_logprobs

STUDENT, TEACHER = logits_of(seed=1), logits_of(seed=2)
REVERSE = Distillation(coef=0.5)


def row(outcome: tuple[int, int], **changes: object) -> Trajectory:
    return replace(
        Trajectory(
            prompt_token_ids=(9,),
            response_token_ids=outcome,
            loss_mask=(1, 1),
            logprobs=token_logprobs(STUDENT, outcome).numpy().astype(np.float32),
            teacher_logprobs=token_logprobs(TEACHER, outcome).numpy().astype(np.float32),
            versions=(0, 0),
            reward=REWARDS[outcome],
        ),
        **changes,
    )


def group(*rows: Trajectory) -> Group:
    return Group(uid="a", admission_index=0, scheduled_version=0, trajectories=rows)


def advantages(distillation: Distillation, *rows: Trajectory) -> list[list[float]]:
    step = StepAdvantages(make_advantage_estimator("rloo"), distillation=distillation)
    (found,) = step([group(*rows)])
    return [column.tolist() for column in found.advantages]


def divergence(policy: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(policy, other) at the first place, and after each first token as often as ``STUDENT`` samples it."""
    logs, others = policy.log_softmax(-1), other.log_softmax(-1)
    weights = torch.cat([torch.ones(1, dtype=torch.float64), STUDENT[0].softmax(-1)])
    return (weights * (logs.exp() * (logs - others)).sum(-1)).sum()


def mean_gradient(sampler: torch.Tensor, distillation: Distillation = REVERSE) -> torch.Tensor:
    """Of what ``sampler`` samples, with the importance weight of everything up to each token."""
    total = torch.zeros_like(STUDENT)
    for outcome in OUTCOMES:
        behavior = token_logprobs(sampler, outcome)
        (found,) = advantages(distillation, row(outcome, logprobs=behavior.numpy().astype(np.float32)))
        leaf = STUDENT.clone().requires_grad_()
        weights = (token_logprobs(STUDENT, outcome) - behavior).cumsum(0).exp()
        surrogate = (weights * torch.tensor(found, dtype=torch.float64) * token_logprobs(leaf, outcome)).sum()
        total += probability(sampler, outcome) * torch.autograd.grad(surrogate, leaf)[0]
    return total


def test_the_mean_is_the_gradient_of_the_divergence_from_the_teacher_at_each_place() -> None:
    leaf = STUDENT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(leaf, TEACHER), leaf)
    torch.testing.assert_close(mean_gradient(STUDENT), -0.5 * gradient, atol=1e-6, rtol=0)


def test_the_forward_mean_is_the_gradient_of_the_divergence_of_the_teacher() -> None:
    leaf = STUDENT.clone().requires_grad_()
    logs = leaf.log_softmax(-1)
    weights = torch.cat([torch.ones(1, dtype=torch.float64), STUDENT[0].softmax(-1)])
    forward = -(
        weights * (TEACHER.softmax(-1) * logs).sum(-1)
    ).sum()  # but for the teacher's entropy, which is constant
    (gradient,) = torch.autograd.grad(forward, leaf)
    found = mean_gradient(STUDENT, Distillation(coef=0.5, forward=True))
    torch.testing.assert_close(found, -0.5 * gradient, atol=1e-6, rtol=0)


def test_the_forward_ratio_has_a_bound() -> None:
    one = row((1, 2), logprobs=np.float32([-8.0, -1.0]), teacher_logprobs=np.float32([-1.0, -1.0]))
    (found,) = advantages(Distillation(forward=True, ratio_clip=5.0, coef=2.0), one)
    assert found == pytest.approx([8.0, 0.0])


def test_with_stale_tokens_the_divergence_from_their_policy_is_taken_off() -> None:
    stale, leaf = STUDENT + 0.5 * logits_of(seed=3), STUDENT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(leaf, TEACHER) - divergence(leaf, stale), leaf)
    torch.testing.assert_close(mean_gradient(stale), -0.5 * gradient, atol=1e-6, rtol=0)


def test_under_truncated_sampling_a_student_that_is_its_teacher_stays_so_only_where_it_was_recomputed() -> None:
    """The engine's log-probs are of its two likelier tokens alone."""
    logs = STUDENT.log_softmax(-1)
    kept = logs.topk(2).indices
    truncated = torch.full_like(logs, -torch.inf).scatter(1, kept, logs.gather(1, kept))
    outcome = (int(kept[0, 0]), int(kept[1 + kept[0, 0], 0]))
    whole, behavior = (token_logprobs(each, outcome).numpy().astype(np.float32) for each in (STUDENT, truncated))
    one = row(outcome, teacher_logprobs=whole, logprobs=behavior)
    assert max(advantages(REVERSE, one)[0]) < -0.01, "pushed away from what both say"
    assert advantages(REVERSE, replace(one, old_logprobs=whole, old_version=0)) == [[0.0, 0.0]]


def test_it_takes_the_place_of_the_rewards_or_is_added_to_them() -> None:
    pair = (row((0, 1)), row((2, 0)))
    alone = advantages(Distillation(coef=2.0), *pair)
    for found, one in zip(alone, pair, strict=True):
        assert found == pytest.approx((2 * (one.teacher_logprobs - one.logprobs)).tolist(), abs=1e-6)
    added = advantages(Distillation(coef=2.0, is_alone=False), *pair)
    difference = REWARDS[0, 1] - REWARDS[2, 0]
    for found, of_teacher, level in zip(added, alone, (difference, -difference), strict=True):
        assert found == pytest.approx([value + level for value in of_teacher], abs=1e-6)


@pytest.mark.parametrize("is_alone", [True, False])
def test_in_place_of_the_rewards_it_is_not_weighed_by_them_either(is_alone: bool) -> None:
    weighed = replace(group(row((0, 1), token_weights=(0.5, 0.0))), advantages=(np.ones(2, np.float32),))
    (found,) = Distillation(is_alone=is_alone)(weighed).trajectories
    assert (found.token_weights is None) == is_alone


def test_the_student_is_as_it_was_recomputed_and_only_trained_tokens_are_judged() -> None:
    one = row((1, 2), old_logprobs=(-0.5, -0.25), old_version=3, loss_mask=(0, 1))
    (found,) = advantages(Distillation(), one)
    assert found == pytest.approx([0.0, float(one.teacher_logprobs[1]) + 0.25])
    masked = row((1, 2), loss_mask=(0, 0), is_overlong=True, teacher_logprobs=None)
    assert advantages(Distillation(), masked) == [[0.0, 0.0]]
    with pytest.raises(TrainingError, match="needs trajectories with teacher_logprobs; some have none"):
        advantages(Distillation(), row((1, 2), teacher_logprobs=None))
