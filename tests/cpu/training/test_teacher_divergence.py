"""The divergence over a teacher's likeliest tokens, from the teacher's workers to the gradient, against float64 models with full logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_async.errors import TrainingError
from skyrl_async.rollout.group_state import from_json, group_to_json
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.logprob_workers import ColumnStageWork
from skyrl_async.types import Group, LogprobModel, Trajectory
from tests.cpu.tiny_policies import VOCABULARY, advantages, assert_close, gradients, num_tokens, write_policy
from tests.cpu.tiny_policies import varied_trajectories as trajectories
from tests.cpu.training.test_fsdp_backend import make

__all__ = ["make"]
Make = Callable[..., InProcessPolicy]
TEMPERATURE = 0.7
DIVERGENCES = ["reverse_kl", "forward_kl"]
Distributions = list[tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def teacher_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("teacher"), seed=5)


def student_of(make: Make, divergence: str = "reverse_kl", **changes: object) -> InProcessPolicy:
    return make(temperature=TEMPERATURE, teacher_coef=0.3, teacher_divergence=divergence, **changes)


async def judged(make: Make, directory: Path, rows: Sequence[Trajectory], top_k: int) -> list[Trajectory]:
    """The rows with what the teacher says of them."""
    teacher = make(policy_path=str(directory), trains=False, temperature=TEMPERATURE, num_top_tokens=top_k)
    found = await teacher.logprobs_of(rows, LogprobModel.POLICY)
    return [
        replace(row, teacher_logprobs=values, teacher_top=top)
        for row, values, top in zip(rows, found.values, found.top, strict=True)
    ]


def exact_logprobs(model: torch.nn.Module, row: Trajectory) -> Tensor:
    """(N, V) float64 of all tokens in the place of each sampled one, from a plain forward of the row alone."""
    ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
    predicting = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)[len(row.prompt_token_ids) - 1 : -1]
    return predicting[torch.tensor(row.loss_mask)]


def exact(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()


def exact_divergence(student: Tensor, teacher: Tensor, top_k: int, divergence: str) -> Tensor:
    """Sum over tokens, with the K likeliest and the rest written out as the outcomes of two distributions."""
    others, total = teacher.argsort(-1, descending=True), torch.zeros((), dtype=torch.float64)
    for of_student, of_teacher, order in zip(student.exp(), teacher.exp(), others, strict=True):
        kept, rest = order[:top_k], order[top_k:]
        q = [*of_student[kept], *([of_student[rest].sum()] if len(rest) else [])]
        p = [*of_teacher[kept], *([of_teacher[rest].sum()] if len(rest) else [])]
        first, second = (q, p) if divergence == "reverse_kl" else (p, q)
        total = total + sum(a * (a / b).log() for a, b in zip(first, second, strict=True))
    return total


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY - 1, VOCABULARY, 1000])
async def test_divergence_and_gradient_are_those_of_enumerated_float64_distributions(
    make: Make, policy_directory: Path, teacher_directory: Path, top_k: int, divergence: str
) -> None:
    rows = await judged(make, teacher_directory, trajectories(5, seed=1, is_multi_turn=True), top_k)
    rows[1] = replace(rows[1], weight=0.25)
    policy = student_of(make, divergence)
    figures = await policy.forward_backward(rows, [0.0] * 5, 0)

    model, teacher = exact(policy_directory), exact(teacher_directory)
    sums = [
        exact_divergence(exact_logprobs(model, row), exact_logprobs(teacher, row).detach(), top_k, divergence)
        for row in rows
    ]
    assert figures["teacher_kl_sum"] == pytest.approx(sum(one.item() for one in sums), rel=1e-6)
    torch.stack([0.3 * row.weight * one for row, one in zip(rows, sums, strict=True)]).sum().backward()
    num = num_tokens(rows)  # a step's gradient is the mean over tokens
    found = {name: gradient / num for name, gradient in gradients(policy).items()}
    assert_close(found, {name: p.grad.float() / num for name, p in model.named_parameters()}, atol=1e-6)
    assert max(gradient.abs().max().item() for gradient in found.values()) > 1e-3


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [3, VOCABULARY])
async def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(
    make: Make, policy_directory: Path, top_k: int, divergence: str
) -> None:
    rows = await judged(make, policy_directory, trajectories(5, seed=1), top_k)
    policy = student_of(make, divergence)
    figures = await policy.forward_backward(rows, [0.0] * 5, 0)
    assert figures["teacher_kl_sum"] == pytest.approx(0.0, abs=1e-6 * num_tokens(rows))
    assert max(gradient.abs().max().item() for gradient in gradients(policy).values()) < 1e-6


@pytest.mark.parametrize("divergence", DIVERGENCES)
async def test_more_tokens_never_make_the_divergence_smaller(
    make: Make, teacher_directory: Path, divergence: str
) -> None:
    """Outcomes taken together lose what tells them apart: the log sum inequality."""
    rows, policy, found = trajectories(4, seed=2), student_of(make, divergence), list[float]()
    for top_k in (1, 2, 3, 5, 8, 20, 40, VOCABULARY):
        of_teacher = await judged(make, teacher_directory, rows, top_k)
        found.append((await policy.forward_backward(of_teacher, [0.0] * 4, 0))["teacher_kl_sum"])
    assert all(more >= fewer for fewer, more in pairwise(found)) and found[-1] > 1.1 * found[0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
async def test_steps_make_the_student_say_what_its_teacher_says(
    make: Make, teacher_directory: Path, divergence: str
) -> None:
    rows, policy = await judged(make, teacher_directory, trajectories(4, seed=2), 4), student_of(make, divergence)
    found = []
    for step in range(30):
        found.append((await policy.forward_backward(rows, [0.0] * 4, step))["teacher_kl_sum"])
        await policy.step(num_tokens(rows))
    assert found[-1] < 0.1 * found[0]


@pytest.mark.parametrize("placement", ["streamed", "small micro-batches", "padded rows", "small chunks of logits"])
async def test_losses_and_gradients_are_the_same_to_1e_6_however_rows_are_laid_out(
    make: Make, teacher_directory: Path, placement: str
) -> None:
    rows, values = await judged(make, teacher_directory, trajectories(8, seed=1), 4), advantages(8, seed=2)
    together, parts = student_of(make), [slice(0, 8)]
    whole = await together.forward_backward(rows, values, 0)
    changes = {
        "small micro-batches": {"micro_batch_tokens": 60},
        "padded rows": {"use_sample_packing": False},
        "small chunks of logits": {"logprobs_chunk_size": 7},
    }.get(placement, {})
    if changes:
        rows = await judged(lambda **settings: make(**settings, **changes), teacher_directory, rows, 4)
    else:
        parts = [slice(start, start + 2) for start in (0, 2, 4, 6)]
    policy = student_of(make, **changes)
    found = [await policy.forward_backward(rows[part], values[part], 0) for part in parts]
    for name in ("teacher_kl_sum", "loss_sum"):
        assert sum(figures[name] for figures in found) == pytest.approx(whole[name], rel=1e-6)
    expected = gradients(together)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    assert_close(gradients(policy), expected, atol=1e-6 * max(scale, 1.0))


async def test_the_teacher_gives_its_likeliest_tokens_of_sampled_places_and_the_rest_of_them(
    make: Make, teacher_directory: Path
) -> None:
    rows = trajectories(4, seed=1, is_multi_turn=True)
    rows[2] = replace(rows[2], loss_mask=np.zeros_like(rows[2].loss_mask))
    teacher = exact(teacher_directory)
    for row in await judged(make, teacher_directory, rows, 4):
        if not row.num_sampled_tokens:
            assert row.teacher_top is None
            continue
        top = row.teacher_top
        assert top is not None and (top.ids.shape, top.ids.dtype) == ((len(row.loss_mask), 4), np.int32)
        assert (top.logprobs.shape, top.logprobs.dtype) == ((len(row.loss_mask), 5), np.float32)
        likeliest = exact_logprobs(teacher, row).detach().sort(-1, descending=True)
        assert top.ids[row.loss_mask].tolist() == likeliest.indices[:, :4].tolist()
        rest = likeliest.values[:, 4:].logsumexp(-1, keepdim=True)
        expected = torch.cat([likeliest.values[:, :4], rest], -1).numpy()
        np.testing.assert_allclose(top.logprobs[row.loss_mask], expected, atol=5e-6)
        assert not top.ids[~row.loss_mask].any() and not top.logprobs[~row.loss_mask].any()


async def test_of_the_sampled_token_alone_the_mean_log_ratio_is_reported_and_no_loss(
    make: Make, teacher_directory: Path
) -> None:
    rows = await judged(make, teacher_directory, trajectories(4, seed=1), 4)
    policy = make(temperature=TEMPERATURE)
    student = (await policy.logprobs_of(rows, LogprobModel.POLICY)).values
    figures = await policy.forward_backward(rows, [0.0] * 4, 0)
    expected = sum((here - row.teacher_logprobs).sum() for here, row in zip(student, rows, strict=True))
    assert figures["teacher_kl_sum"] == pytest.approx(float(expected), rel=1e-5) and not gradients(policy)
    assert "teacher_kl_sum" not in await policy.forward_backward(trajectories(4, seed=1), [0.0] * 4, 0)


async def test_rows_without_the_teachers_tokens_are_refused(make: Make) -> None:
    with pytest.raises(TrainingError, match=r"distillation.top_k needs trajectories with teacher_top, .*; some have"):
        await student_of(make).forward_backward(trajectories(2, seed=1), [0.0] * 2, 0)


async def test_a_group_from_a_checkpoint_gets_the_same_columns_from_the_teacher_again(
    make: Make, teacher_directory: Path
) -> None:
    teacher = make(policy_path=str(teacher_directory), trains=False, num_top_tokens=4)
    stage = ColumnStageWork(lambda rows: teacher.logprobs_of(rows, LogprobModel.POLICY), "teacher_logprobs")
    group = Group(uid="a", admission_index=1, scheduled_version=2, trajectories=tuple(trajectories(3, seed=1)))
    whole = await stage(group)
    saved = group_to_json(whole)
    assert whole != group and not any(row.keys() & {"teacher_logprobs", "teacher_top"} for row in saved["trajectories"])
    assert await stage(from_json(Group, saved)) == whole
