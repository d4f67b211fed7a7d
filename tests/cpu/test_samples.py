"""Samples of several rows: what counts once, what is masked, and that weights make a session count as one."""

from dataclasses import replace

import pytest
import torch

from skyrl_async.algorithms.batching import Row, collate
from skyrl_async.columns import repeated
from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.errors import GenerationError
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.samples import live_samples_of, samples_of
from skyrl_async.types import Group, Prompt, SamplingParams, Trajectory
from tests.cpu.advantage_columns import row_advantages


def row(
    reward: float, *, sample: int | None = None, tokens: int = 2, weight: float = 1.0, abandoned: bool = False
) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * tokens,
        loss_mask=(0 if abandoned else 1,) * tokens,
        logprobs=(-0.5,) * tokens,
        versions=(0,) * tokens,
        reward=reward,
        sample_index=sample,
        weight=weight,
        is_abandoned=abandoned,
    )


def group(*rows: Trajectory) -> Group:
    return Group(uid="u", admission_index=0, scheduled_version=0, trajectories=rows)


def test_rows_without_an_index_are_samples_of_their_own() -> None:
    assert [len(sample.rows) for sample in samples_of([row(1), row(1), row(0)])] == [1, 1, 1]


def test_rows_of_one_index_are_one_sample_wherever_they_stand() -> None:
    samples = samples_of([row(1, sample=3), row(0, sample=1), row(1, sample=3)])
    assert [(len(sample.rows), sample.reward) for sample in samples] == [(2, 1), (1, 0)]


def test_an_advantage_is_computed_per_sample_and_given_to_each_of_its_rows() -> None:
    rows = [row(1, sample=0, weight=0.5), row(1, sample=0, weight=0.5), row(0, sample=1), row(0, sample=2)]
    seen: list[list[float]] = []

    def compute(rewards: list[float]) -> list[float]:
        seen.append(list(rewards))
        return [10.0, 20.0, 30.0]

    assert row_advantages(rows, compute) == [10.0, 10.0, 20.0, 30.0]  # type: ignore[arg-type]
    assert seen == [[1, 0, 0]]


def test_an_abandoned_sample_is_no_part_of_the_baseline_and_has_no_advantage() -> None:
    rows = [row(1, sample=0), row(0, sample=1, abandoned=True), row(0, sample=2)]
    assert row_advantages(rows, lambda rewards: [r - sum(rewards) / len(rewards) for r in rewards]) == [0.5, 0, -0.5]
    assert [sample.reward for sample in live_samples_of(rows)] == [1, 0]


def test_the_weight_of_a_row_scales_its_advantage_in_the_batch() -> None:
    batch = collate(
        [Row(trajectory=row(1, weight=0.25), advantages=repeated(2.0, 2))], torch.device("cpu"), is_packed=True
    )
    assert batch.advantages.tolist() == [0.5, 0.5]


def test_figures_count_samples() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=0)
    figures.add_group(
        group(
            row(1, sample=0, weight=0.5, tokens=4),
            row(1, sample=0, weight=0.5, tokens=6),
            row(0, sample=1, tokens=2),
            row(0, sample=2, abandoned=True, tokens=9),
        ),
        {},
    )
    values = figures.values()
    assert figures.num_tokens == 12
    assert values["reward/mean"] == 0.5
    assert values["generate/response_tokens_mean"] == 6
    assert values["generate/response_tokens_max"] == 10
    assert values["generate/abandoned_frac"] == pytest.approx(1 / 3)
    assert values["generate/rows_mean"] == pytest.approx(4 / 3)


def test_what_environments_and_harnesses_say_of_samples_is_averaged_over_those_that_say_it() -> None:
    figures = StepFigures(trained_version=0, max_staleness_steps=0)
    said = [{"right_turns": 3.0, "agent/failed": 0.0}, {"agent/failed": 1.0}, {"right_turns": 1.0, "agent/failed": 0.0}]
    figures.add_group(group(*(replace(row(1), metrics=metrics) for metrics in said)), {})
    values = figures.values()
    assert values["env/right_turns"] == 2.0
    assert values["agent/failed"] == pytest.approx(1 / 3)


class _Fixed:
    """Returns given rows."""

    def __init__(self, *rows: Trajectory) -> None:
        self.rows = rows

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return self.rows


def attempt(*rows: Trajectory) -> RolloutRetrier:
    return RolloutRetrier(_Fixed(*rows), GeneratorConfig(max_retries=0, rollout_timeout_s=5, retry_backoff_s=0))


REQUEST = GroupRequest(
    prompt=Prompt(uid="u", messages=(), env_class="e"), num_samples=2, sampling=SamplingParams(max_tokens=1)
)


async def test_a_sample_may_have_several_rows_or_none() -> None:
    assert len(await attempt(row(1, sample=1), row(1, sample=1), row(1, sample=1)).generate(REQUEST)) == 3


async def test_a_row_of_a_sample_that_was_not_asked_for_is_refused_by_its_index() -> None:
    with pytest.raises(GenerationError, match=r"sample_index 2 for u, expected all of them in \[0, 2\)"):
        await attempt(row(1, sample=0), row(1, sample=2)).generate(REQUEST)
    with pytest.raises(GenerationError, match="sample_index None"):
        await attempt(row(1, sample=0), row(1)).generate(REQUEST)
