"""Effective sample sizes against their formula, and what a step says whose every token is masked."""

import logging
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.algorithms.off_policy import sample_size_figures
from skyrl_async.algorithms.settings import CorrectionSettings
from skyrl_async.columns import repeated
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.metrics.step import StepFigures, effective_shares
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import CountsSamples
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Group
from tests.cpu.algorithms.test_off_policy import random_rows
from tests.cpu.tiny_policies import num_tokens, write_policy
from tests.cpu.tiny_policies import varied_trajectories as trajectories

CPU = torch.device("cpu")


def size(weights: list[float]) -> float:
    return sum(weights) ** 2 / sum(w * w for w in weights)


def shares_of(parts: list[MicroBatch], ratios: list[float]) -> dict[str, float]:
    """Of tokens whose log-ratios are given, over micro-batches."""
    rest = iter(ratios)
    figures = []
    for batch in parts:
        shift = torch.tensor(list(islice(rest, len(batch.versions))), dtype=torch.float64)
        figures.append(sample_size_figures(batch.behavior_logprobs.double() + shift, batch, 3 - batch.versions))
    return effective_shares(merge_figures(figures))


def test_it_is_the_square_of_the_sum_over_the_sum_of_squares_per_token_row_and_lag_however_rows_are_split() -> None:
    rows = random_rows(5)
    tokens = [(index, 3 - version) for index, row in enumerate(rows) for version in row.trajectory.versions]
    ratios = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0)).tolist()
    by_row = [
        math.exp(sum(r for r, (row, _) in zip(ratios, tokens, strict=True) if row == i)) for i in range(len(rows))
    ]
    expected = {
        "policy/ess": size([math.exp(r) for r in ratios]) / len(tokens),
        "policy/sequence_ess": size(by_row) / len(rows),
    }
    for lag in {lag for _, lag in tokens}:
        weights = [math.exp(r) for r, (_, of) in zip(ratios, tokens, strict=True) if of == lag]
        expected[f"policy/lag{lag}_ess"] = size(weights) / len(weights)
    whole, split = (
        [collate(rows, CPU, is_packed=False)],
        [collate(rows[:3], CPU, is_packed=True), collate(rows[3:], CPU, is_packed=True)],
    )
    assert shares_of(whole, ratios) == pytest.approx(expected, abs=1e-6)
    assert shares_of(split, ratios) == pytest.approx(expected, abs=1e-6)


def test_fresh_tokens_are_worth_what_they_number_whatever_row_is_empty() -> None:
    rows = random_rows(1)
    empty = replace(rows[0].trajectory, loss_mask=(0,) * len(rows[0].trajectory.loss_mask))
    batch = collate(
        [Row(trajectory=empty, advantages=repeated(0.0, len(empty.response_token_ids))), *rows[1:]],
        CPU,
        is_packed=False,
    )
    shares = effective_shares(sample_size_figures(batch.behavior_logprobs, batch, torch.zeros_like(batch.versions)))
    assert shares == {"policy/ess": 1.0, "policy/sequence_ess": 1.0, "policy/lag0_ess": 1.0}


def test_answers_far_from_the_policy_are_worth_few_of_it_and_no_more_than_one_where_every_weight_is_too_small_for_a_sum() -> (
    None
):
    rows = random_rows(5, num_rows=5)
    batch = collate(rows, CPU, is_packed=True)
    lengths = [row.trajectory.num_sampled_tokens for row in rows]

    def share(log_weights: list[float]) -> float:
        of_tokens = [w / n for w, n in zip(log_weights, lengths, strict=True) for _ in range(n)]
        return shares_of([batch], of_tokens)["policy/sequence_ess"]

    off = [-40.0, -45.0, -38.0, -60.0, -41.0]
    assert share(off) == pytest.approx(size([math.exp(w + 40) for w in off]) / 5, rel=1e-4)
    assert share([w * 7 for w in off]) == pytest.approx(size([math.exp(7 * (w + 40)) for w in off]) / 5, rel=1e-3)
    assert share([w * 100 for w in off]) == 1 / 5


@pytest.mark.slow
async def test_a_mini_batch_that_is_masked_whole_steps_without_a_policy_gradient_and_is_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TrainingSettings(policy_path=str(write_policy(tmp_path / "policy")), lr=1e-2)
    policy = InProcessPolicy(replace(settings, correction=CorrectionSettings(token_mask=(0.9999999, 1.0000001))))
    rows = trajectories(3, seed=1)
    group = Group(
        uid="a",
        trajectories=tuple(rows),
        advantages=tuple(repeated(a, len(r.response_token_ids)) for a, r in zip((1.0, -1.0, 0.5), rows, strict=True)),
        scheduled_version=0,
        admission_index=0,
        generation_seconds=1.0,
    )
    figures = StepFigures(trained_version=0, max_staleness_steps=4)
    sums = await policy.forward_backward(group.trajectories, group.advantages, 0)
    figures.add_group(group, sums, denominator=sums["num_tokens"])
    values = await policy.step(figures.loss_denominator)
    await policy.close()
    assert values["grad_norm"] == 0.0 and figures.loss_denominator == num_tokens(rows)

    logged: list[dict[str, float]] = []
    recorder = Recorder(
        log=lambda step, values: logged.append(values),
        trace=Trace(None, lambda: 0.0),
        record=CountsSamples(),
        generation_counts=dict,
    )
    figures.add_seconds("step", 1.0)
    recorder.totals.add_step(figures)
    with caplog.at_level(logging.WARNING):
        recorder.log_step(figures, values, {})
    assert "step 1 has no policy gradient: off-policy corrections masked all of its" in caplog.text
    assert "widen the bounds" in caplog.text
    (line,) = logged
    assert line["policy/correction_masked"] == line["policy/correction_masked_token"] == 1.0
    assert line["policy/loss"] == line["policy/correction_weight"] == 0.0
    assert line["policy/all_masked_steps"] == recorder.totals.summary()["all_masked_steps"] == 1


def test_a_step_of_which_something_is_left_is_not_counted() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=4, sums={"correction_masked_sum": 4.0})
    assert not figures.is_all_masked, "there is not even a token"
    assert RunTotals().values()["policy/all_masked_steps"] == 0
