"""How the losses of tokens become one: against plain means, over any split into groups, ranks and micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.algorithms.batching import Row, collate, plan_micro_batches
from skyrl_async.algorithms.losses import make_policy_loss
from skyrl_async.algorithms.objective import Objective
from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.algorithm import LossReduction
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Group, Trajectory
from tests.cpu.tiny_run import build_policy

T = TypeVar("T")
MAX_SEQ_LEN = 50
BEHAVIOR = -1.5
RATIO_LOSS = make_policy_loss("rollout_is", LossConstants(tis_cap=1e9))


def row(num_tokens: int, *, num_masked: int = 0, weight: float = 1.0, first: int = 2) -> Trajectory:
    length = num_tokens + num_masked
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=tuple(first + i % 5 for i in range(length)),
        loss_mask=(0,) * num_masked + (1,) * num_tokens,
        logprobs=(BEHAVIOR,) * length,
        versions=(0,) * length,
        reward=0.0,
        weight=weight,
    )


def flat(lists: Sequence[Sequence[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)  # type: ignore[return-value]


def weighted_tokens(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return mean(
        [loss for of_row in losses for loss in of_row], [w for w, of in zip(weights, losses, strict=True) for _ in of]
    )


REFERENCES: dict[str, Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[float]]], Tensor]] = {
    "token_mean": lambda losses, weights: weighted_tokens(flat(losses), flat(weights)),
    "sequence_mean": lambda losses, weights: mean([x.mean() for x in flat(losses)], flat(weights)),
    "seq_mean_token_sum": lambda losses, weights: mean([x.sum() for x in flat(losses)], flat(weights)),
    "seq_mean_token_sum_norm": lambda losses, weights: mean(
        [x.sum() / MAX_SEQ_LEN for x in flat(losses)], flat(weights)
    ),
    "prompt_mean": lambda losses, weights: mean(
        [weighted_tokens(of, w) for of, w in zip(losses, weights, strict=True)], [1.0] * len(losses)
    ),
}
"""Losses of tokens by group and row, weights by group and row -> one loss: means as one writes them down, no sums divided at the end."""

lengths = st.integers(0, 6)
rows_of_a_group = st.lists(
    st.tuples(lengths, st.integers(0, 2), st.sampled_from([1.0, 0.5, 0.25])), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", [reduction.name for reduction in LossReduction])
@given(
    groups=st.lists(rows_of_a_group, min_size=1, max_size=4),
    micro_batch_tokens=st.integers(1, 40),
    num_ranks=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_any_split_into_groups_ranks_and_micro_batches_gives_the_gradient_of_the_mean(
    name: str,
    groups: list[list[tuple[int, int, float]]],
    micro_batch_tokens: int,
    num_ranks: int,
    seed: int,
) -> None:
    made = [[row(n, num_masked=m, weight=w) for n, m, w in group] for group in groups]
    trained = [[(r, index) for index, r in enumerate(group) if r.num_sampled_tokens] for group in made]
    if not any(trained):
        return
    draw = torch.Generator().manual_seed(seed)
    leaves = [
        [(BEHAVIOR + torch.randn(r.num_sampled_tokens, generator=draw) / 4).requires_grad_() for r in g] for g in made
    ]
    advantages = [[torch.randn(len(r.response_token_ids), generator=draw) for r in g] for g in made]

    objective = Objective(policy_loss=RATIO_LOSS)
    aggregation = Aggregation(name=name, max_seq_len=MAX_SEQ_LEN, splits_samples=True)
    denominator, total = 0.0, torch.zeros(())
    for group, of_group, of_leaf in zip(made, advantages, leaves, strict=True):
        weighted = aggregation(group)
        denominator += weighted.denominator
        rows = [
            (Row(trajectory=r, advantages=a.numpy()), leaf)
            for r, a, leaf in zip(weighted.trajectories, of_group, of_leaf, strict=True)
            if r.num_sampled_tokens
        ]
        plans = plan_micro_batches(
            [r.num_tokens for r, _ in rows],
            micro_batch_tokens=micro_batch_tokens,
            overhead_tokens=5,
            num_ranks=num_ranks,
            is_packed=False,
        )
        for indices in (indices for plan in plans for indices in plan if indices):
            batch = collate([rows[i][0] for i in indices], torch.device("cpu"), is_packed=False)
            total = total + objective(torch.cat([rows[i][1] for i in indices]), batch, None).total
    loss = total / denominator

    def token_losses(group: int, index: int) -> Tensor:
        leaf, of_trained = leaves[group][index], advantages[group][index][torch.tensor(made[group][index].loss_mask)]
        return -(leaf.detach() - BEHAVIOR).exp() * of_trained * leaf

    kept = [g for g, of_group in enumerate(trained) if of_group]
    expected = REFERENCES[name](
        [[token_losses(g, index) for _, index in trained[g]] for g in kept],
        [[r.weight for r, _ in trained[g]] for g in kept],
    )
    of_rows = [leaves[g][index] for g in kept for _, index in trained[g]]
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    for found, wanted in zip(torch.autograd.grad(loss, of_rows), torch.autograd.grad(expected, of_rows), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_the_mean_over_tokens_leaves_rows_as_they_are() -> None:
    rows = (row(3, weight=0.5), row(0, num_masked=2), row(4))
    weighted = Aggregation(splits_samples=True)(rows)
    assert all(found is given for found, given in zip(weighted.trajectories, rows, strict=True))
    assert weighted.denominator == 0.5 * 3 + 4


@pytest.mark.parametrize(("splits", "share"), [(False, 100 / 150), (True, 25 / 75)])
def test_tokens_in_four_rows_of_a_rewritten_history_count_as_in_one_row_or_a_quarter(
    splits: bool, share: float
) -> None:
    in_four, others = [row(25, weight=0.25)] * 4, [row(50)]
    weighted = Aggregation(splits_samples=splits)([*in_four, *others])
    of_four = sum(trained.weight * trained.num_sampled_tokens for trained in weighted.trajectories[:4])
    assert of_four / weighted.denominator == pytest.approx(share)


@pytest.mark.parametrize("name", [reduction.name for reduction in LossReduction])
def test_rows_without_a_trained_token_count_nowhere(name: str) -> None:
    aggregation = Aggregation(name=name, max_seq_len=MAX_SEQ_LEN)
    assert aggregation([row(0), row(0, num_masked=3)]).denominator == 0
    assert aggregation([row(3), row(0, num_masked=9)]).denominator == aggregation([row(3)]).denominator


def test_the_reported_loss_is_the_one_that_is_minimised() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=0)
    for loss_sum, rows in ((3.0, (row(4), row(2))), (1.0, (row(10),))):
        weighted = Aggregation(name="seq_mean_token_sum")(rows)
        group = Group(uid="p", admission_index=0, scheduled_version=0, trajectories=rows)
        figures.add_group(group, {"loss_sum": loss_sum, "entropy_sum": 8.0}, 0, weighted.denominator)
    assert figures.loss_denominator == 3
    assert figures.values()["policy/loss"] == pytest.approx(4.0 / 3)
    assert figures.values()["policy/entropy"] == 1.0


def trained_with(
    *overrides: str, generator_over: Callable[[Sampler], Generator] | None = None
) -> tuple[list[Trajectory], list[float]]:
    """The rows that the policy gets in 3 steps of 4 groups, and the denominator of each step, with these keys on the command line."""
    settings = SimulationSettings(
        mean_tokens=60.0,
        num_steps=3,
        mini_batch_size=4,
        step_seconds=0.5,
        algorithm=from_overrides(*overrides).trainer.algorithm,
    )
    denominators: list[float] = []

    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=generator_over)
        step = simulation.policy.step

        async def noted(denominator: float, *lr_scale: float) -> dict[str, float]:
            denominators.append(denominator)
            return await step(denominator, *lr_scale)

        simulation.policy.step = noted
        await simulation.trainer.run()
        return simulation

    return flat(flat(run_in_virtual_time(main()).policy.steps[:3])), denominators


def test_the_trainer_hands_the_policy_weighed_rows_and_divides_once_by_what_all_groups_add_up_to() -> None:
    rows, denominators = trained_with("trainer.algorithm.loss_reduction=sequence_mean")
    assert denominators == [4 * 2.0] * 3
    assert all(trained.weight == 1 / trained.num_sampled_tokens for trained in rows)


class RewritesHistories:
    """A generator whose samples of a group are a session of four branches, and one that has rewritten nothing."""

    def __init__(self, sampler: Sampler) -> None:
        self._generator = ModelledGenerator(sampler)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        first, second = await self._generator.generate(request)
        branches = [replace(first, sample_index=0, weight=0.25)] * 4
        return (*(replace(branch) for branch in branches), replace(second, sample_index=1))


@pytest.mark.parametrize(("value", "weight"), [("false", 1.0), ("true", 0.25)])
def test_the_key_decides_what_each_row_of_a_rewritten_history_weighs_in_the_loss(value: str, weight: float) -> None:
    key = f"trainer.algorithm.split_sample_weight={value}"
    rows, denominators = trained_with(key, generator_over=RewritesHistories)
    assert sorted(row.weight for row in rows) == sorted([weight] * 4 * 12 + [1.0] * 12)
    assert sum(denominators) == sum(row.weight * row.num_sampled_tokens for row in rows)


@pytest.mark.parametrize("name", ["sequence_mean", "seq_mean_token_sum_norm"])
async def test_a_real_policy_steps_alike_group_by_group_in_small_micro_batches_and_all_at_once(
    name: str, tmp_path: Path
) -> None:
    directory = build_policy(tmp_path / "policy")
    groups = [[row(9), row(3, num_masked=2, first=4)], [row(1, first=3), row(5, weight=0.5), row(2, weight=0.5)]]
    advantages = [[1.0, -0.5], [0.3, -1.0, 2.0]]
    aggregation = Aggregation(name=name, max_seq_len=MAX_SEQ_LEN)

    async def grad_norm(
        groups: list[list[Trajectory]], advantages: list[list[float]], micro_batch_tokens: int
    ) -> float:
        settings = TrainingSettings(
            policy_path=str(directory),
            policy_loss="rollout_is",
            loss_constants=LossConstants(tis_cap=1e9),
            micro_batch_tokens=micro_batch_tokens,
        )
        policy = InProcessPolicy(settings)
        try:
            denominator = 0.0
            for group, of_group in zip(groups, advantages, strict=True):
                weighted = aggregation(group)
                await policy.forward_backward(weighted.trajectories, of_group, 0)
                denominator += weighted.denominator
            return (await policy.step(denominator))["grad_norm"]
        finally:
            await policy.close()

    streamed = await grad_norm(groups, advantages, micro_batch_tokens=1)
    at_once = await grad_norm([flat(groups)], [flat(advantages)], micro_batch_tokens=4096)
    assert streamed == pytest.approx(at_once, rel=1e-5)
    assert streamed > 0
