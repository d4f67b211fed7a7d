"""A generator of one's own: samples answers with the client and scores them with a plain function; no environment.

Flows in: group requests. Flows out: one trajectory per sample, with the tokens, log-probs and versions that the engines reported.
Right answers cost a little per token here, so that the policy learns to be right and brief.

    uv run -m skyrl_async.main generator.entrypoint=examples.own_generator.scored:make
"""

import asyncio
from dataclasses import replace

import numpy as np

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.schema.run import Config
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import FinishReason, Prompt, Trajectory

COST_PER_TOKEN = 0.001


def score(text: str, prompt: Prompt, num_tokens: int) -> float:
    """1 for the right digit after ``####``, less the cost of its tokens; 0 for everything else."""
    _, marker, said = text.rpartition("####")
    is_right = bool(marker) and said.strip() == prompt.extras["reward_spec"]["ground_truth"]
    return 1.0 - COST_PER_TOKEN * num_tokens if is_right else 0.0


class ScoredGenerator:
    """Implements ``skyrl_async.rollout.generator.Generator``."""

    def __init__(self, client: Sampler, renderer: ChatRenderer) -> None:
        self._client = client
        self._renderer = renderer

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """All samples of one prompt, sampled at once."""
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._answer(request, i)) for i in range(request.num_samples)]
        return tuple(task.result() for task in answers)

    async def _answer(self, request: GroupRequest, index: int) -> Trajectory:
        prompt_token_ids = self._renderer.render(request.prompt.messages)
        sampling = replace(request.sampling, seed=request.seed + index)
        answer = await self._client.generate_tokens(prompt_token_ids, sampling, priority=request.priority)
        return Trajectory(
            prompt_token_ids=answer.prompt_token_ids,
            response_token_ids=answer.token_ids,
            loss_mask=np.ones(len(answer.token_ids), np.bool_),
            logprobs=answer.logprobs,
            versions=answer.versions,
            reward=score(answer.text, request.prompt, len(answer.token_ids)),
            is_truncated=answer.finish_reason is FinishReason.LENGTH,
            num_aborts=answer.num_aborts,
        )


def make(client: Sampler, renderer: ChatRenderer, config: Config) -> ScoredGenerator:
    """What ``generator.entrypoint`` names."""
    return ScoredGenerator(client, renderer)
