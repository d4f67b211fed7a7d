"""Held-out prompts: what is asked for them, and what becomes of failures."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.config.schema.generator import GeneratorConfig, SamplingConfig
from skyrl_async.config.schema.run import Config, EvaluationConfig
from skyrl_async.errors import GenerationError
from skyrl_async.record.ended import OTHERS_FAILED, CountsSamples, RecordsSamples
from skyrl_async.record.files import DIRECTORY, read_samples
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.rollout.generator import GroupRequest, keeps_samples
from skyrl_async.trainer.validation import Evaluator
from skyrl_async.types import ENVIRONMENT_VERSION, Prompt, Trajectory


class Player:
    """Rewards a prompt by its uid, in one row per sample; refuses those it is told to."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.requests: list[GroupRequest] = []

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        self.requests.append(request)
        if request.prompt.uid in self.refused:
            raise ValueError("refused")
        row = Trajectory(
            prompt_token_ids=(1,),
            response_token_ids=(2, 3),
            loss_mask=(1, 1),
            logprobs=(-1.0, -1.0),
            versions=(0, 0),
            reward=float(request.prompt.uid),
        )
        return (row,) * request.num_samples


def evaluator(
    player: Player, num_prompts: int = 4, *, record: RecordsSamples | None = None, max_retries: int = 0
) -> Evaluator:
    config = Config(
        generator=GeneratorConfig(max_retries=max_retries, retry_backoff_s=0.0, rollout_timeout_s=5),
        evaluation=EvaluationConfig(
            n_samples_per_prompt=2, max_concurrent=2, sampling=SamplingConfig(max_tokens=8, temperature=0.5)
        ),
    )
    prompts = [Prompt(uid=str(i), messages=(), env_class="e") for i in range(num_prompts)]
    return Evaluator(config, player, prompts, record or CountsSamples())


async def test_requests_of_an_evaluation_have_the_priority_of_groups_admitted_now() -> None:
    player = Player()
    result = await evaluator(player).evaluate(3, version=0, priority=17)
    assert result is not None and result.reward == 1.0 and result.num_prompts == 3 and result.num_tokens == 12
    assert {(request.priority, request.is_evaluation) for request in player.requests} == {(17, True)}


async def test_no_more_prompts_are_evaluated_at_once_than_configured() -> None:
    class Slow(Player):
        num_open = most_open = 0

        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            await asyncio.sleep(0)
            self.num_open -= 1
            return await super().generate(request)

    player = Slow()
    await evaluator(player, num_prompts=7).evaluate(7, version=0)
    assert (player.most_open, len(player.requests)) == (2, 7)


async def test_the_versions_of_an_evaluation_are_those_of_sampled_tokens() -> None:
    class Environment(Player):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            rows = await super().generate(request)
            return tuple(replace(row, loss_mask=(1, 0), versions=(7, ENVIRONMENT_VERSION)) for row in rows)

    result = await evaluator(Environment()).evaluate(4, version=0)
    assert result is not None and result.versions == (7, 7)


async def test_a_prompt_that_fails_is_left_out_and_counted() -> None:
    result = await evaluator(Player("0", "3")).evaluate(4, version=0)
    assert result is not None and result.reward == 1.5 and result.num_failed == 2


async def test_samples_of_a_prompt_that_fails_are_recorded_as_far_as_they_came(tmp_path: Path) -> None:
    class Torn(Player):
        @keeps_samples
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            rows = await super().generate(request)
            for index in request.indices:
                request.sample_states.fail(index, rows[:1], f"try {len(self.requests)}")
            if len(self.requests) == 2:
                request.sample_states.finish(0, rows[:1])
            raise ValueError("torn")

    record = SampleRecord(tmp_path / DIRECTORY)
    with pytest.raises(GenerationError, match="torn"):
        await evaluator(Torn(), num_prompts=1, record=record, max_retries=1).evaluate(1, version=0)
    record.close()
    rows = read_samples(tmp_path).to_pylist()
    found = [(row["sample"], row["outcome"], row["reason"], row["num_sampled_tokens"]) for row in rows]
    assert found == [(0, "held_out", OTHERS_FAILED, 2), (1, "failed", "try 2", 0)]


async def test_when_all_prompts_fail_the_error_names_the_last_failure() -> None:
    with pytest.raises(
        GenerationError, match=r"all 1 evaluation rollouts failed; the last one \(0\): ValueError: refused"
    ):
        await evaluator(Player("0")).evaluate(1, version=0)
