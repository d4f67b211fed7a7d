"""Plays held-out prompts with the policy that the engines serve, and averages what comes of it.

Flows in: prompts and a generator. Flows out: numbers. Does not know training; may run beside it, and then says so by the versions
its tokens were sampled under.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.concurrency import run_together
from skyrl_async.rollout.generator import Generator
from skyrl_async.types import GroupRequest, Prompt, SamplingParams, Trajectory

_EVALUATION_PRIORITY = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Means over all trajectories of all prompts."""

    reward: float
    num_prompts: int
    response_tokens: float
    """Mean sampled tokens per trajectory."""
    truncated_share: float
    standard_error: float
    """Of ``reward``, over prompts."""


class Evaluator:
    """Evaluates on the first prompts of a held-out set.

    Args:
        generator: plays a prompt.
        prompts: held out of training.
        num_samples: trajectories per prompt.
        sampling: how to sample.
        max_concurrent: prompts played at once.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        max_concurrent: int,
    ) -> None:
        self._generator = generator
        self._prompts = tuple(prompts)
        self._num_samples = num_samples
        self._sampling = sampling
        self._max_concurrent = max_concurrent

    async def evaluate(self, num_prompts: int) -> EvaluationResult | None:
        """Play the first ``num_prompts`` prompts; None when there are none. Raises what the generator raises."""
        prompts = self._prompts[:num_prompts]
        if not prompts:
            return None
        places = asyncio.Semaphore(self._max_concurrent)

        async def play(index: int, prompt: Prompt) -> tuple[Trajectory, ...]:
            request = GroupRequest(
                prompt=prompt,
                num_samples=self._num_samples,
                sampling=self._sampling,
                seed=index,
                priority=_EVALUATION_PRIORITY,
                is_evaluation=True,
            )
            async with places:
                return await self._generator.generate(request)

        return _averaged(await run_together({f"evaluate-{p.uid}": play(i, p) for i, p in enumerate(prompts)}))


def _averaged(groups: Sequence[tuple[Trajectory, ...]]) -> EvaluationResult:
    rewards = [sum(t.reward for t in group) / len(group) for group in groups]
    rows = [t for group in groups for t in group]
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
    return EvaluationResult(
        reward=mean,
        num_prompts=len(groups),
        response_tokens=sum(t.num_sampled_tokens for t in rows) / len(rows),
        truncated_share=sum(t.is_truncated for t in rows) / len(rows),
        standard_error=(variance / len(rewards)) ** 0.5,
    )
