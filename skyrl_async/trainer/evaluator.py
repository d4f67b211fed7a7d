"""Runs held-out prompts on the policy that the engines serve, and averages the results.

May run beside training: the result then names the versions that its tokens were sampled under.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.errors import GenerationError, NoEngineError
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.outages import NO_BACKOFF, Backoff, Deadlines
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.tasks import run_together
from skyrl_async.samples import samples_of
from skyrl_async.types import ENVIRONMENT_VERSION, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Means over all trajectories of all prompts whose rollouts succeeded."""

    reward: float
    standard_error: float
    """Standard error of ``reward``, over prompts."""
    response_tokens: float
    """Mean sampled tokens per trajectory."""
    truncated_frac: float
    num_tokens: int
    """Sampled tokens."""
    num_prompts: int
    num_failed: int
    """Prompts left out because their rollouts failed."""
    versions: tuple[int, int]
    """Oldest and newest policy version that a token was sampled under."""

    def values(self) -> dict[str, float]:
        """Return the values by metric name."""
        return {
            "reward/eval": self.reward,
            "reward/eval_standard_error": self.standard_error,
            "eval/response_tokens_mean": self.response_tokens,
            "eval/truncated_frac": self.truncated_frac,
            "eval/failed_prompts": float(self.num_failed),
            "eval/version_min": float(self.versions[0]),
            "eval/version_max": float(self.versions[1]),
        }


class Evaluator:
    """Evaluates on the first prompts of a held-out set.

    Args:
        generator: generates the trajectories of a prompt.
        prompts: held out of training.
        num_samples: trajectories per prompt.
        sampling: how to sample.
        max_concurrent: prompts in flight at once.
        max_retries: retries of a failed rollout.
        timeout_s: deadline of one attempt.
        backoff: wait between attempts.
        deadlines: suspends deadlines in an outage.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        max_concurrent: int,
        max_retries: int,
        timeout_s: float,
        backoff: Backoff = NO_BACKOFF,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._retrier = RolloutRetrier(
            generator, max_retries=max_retries, timeout_s=timeout_s, backoff=backoff, deadlines=deadlines
        )
        self._prompts = tuple(prompts)
        self._num_samples = num_samples
        self._sampling = sampling
        self._max_concurrent = max_concurrent

    async def evaluate(self, num_prompts: int, *, priority: int = 0) -> EvaluationResult | None:
        """Run the first ``num_prompts`` prompts; None when there are none.

        ``priority`` is the priority of the requests: with that of a group admitted now, neither they nor training starve.

        A prompt whose rollouts fail is counted and left out. Raises ``GenerationError`` when all of them fail, and
        ``NoEngineError``.
        """
        prompts = self._prompts[:num_prompts]
        if not prompts:
            return None
        slots = asyncio.Semaphore(self._max_concurrent)
        failures: list[tuple[Prompt, Exception]] = []

        async def run_rollout(index: int, prompt: Prompt) -> tuple[Trajectory, ...]:
            async with slots:
                try:
                    return await self._retrier.generate(self._request(index, prompt, priority))
                except NoEngineError:
                    raise
                except Exception as error:
                    logger.error("evaluation of %s failed for good: %r", prompt.uid, error)
                    failures.append((prompt, error))
                    return ()

        groups = await run_together({f"evaluate-{p.uid}": run_rollout(i, p) for i, p in enumerate(prompts)})
        if len(failures) == len(prompts):
            prompt, error = failures[-1]
            raise GenerationError(
                f"all {len(prompts)} evaluation rollouts failed; the last one ({prompt.uid}): {type(error).__name__}: {error}"
            ) from error
        return _averaged([group for group in groups if group], len(failures))

    def statuses(self) -> list[list[RolloutStatus]]:
        """Return what each prompt in flight is doing, the oldest first."""
        return self._retrier.statuses()

    def _request(self, index: int, prompt: Prompt, priority: int) -> GroupRequest:
        return GroupRequest(
            prompt=prompt,
            num_samples=self._num_samples,
            sampling=self._sampling,
            seed=index,
            priority=priority,
            is_evaluation=True,
        )


def _averaged(groups: Sequence[tuple[Trajectory, ...]], num_failed: int) -> EvaluationResult:
    by_prompt = [samples_of(group) for group in groups]
    rewards = [sum(s.reward for s in samples) / len(samples) for samples in by_prompt]
    every = [sample for samples in by_prompt for sample in samples]
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
    num_tokens = sum(sample.num_sampled_tokens for sample in every)
    versions = {version for group in groups for row in group for version in row.versions} - {ENVIRONMENT_VERSION}
    return EvaluationResult(
        reward=mean,
        standard_error=(variance / len(rewards)) ** 0.5,
        response_tokens=num_tokens / len(every),
        truncated_frac=sum(sample.is_truncated for sample in every) / len(every),
        num_tokens=num_tokens,
        num_prompts=len(groups),
        num_failed=num_failed,
        versions=(min(versions, default=0), max(versions, default=0)),
    )
