"""Plays held-out prompts with the policy that the engines serve, and averages what comes of it.

Flows in: prompts and a generator. Flows out: numbers. Does not know training; may run beside it, and then says so by the versions
its tokens were sampled under.
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
    """Means over all trajectories of all prompts that could be played."""

    reward: float
    standard_error: float
    """Of ``reward``, over prompts."""
    response_tokens: float
    """Mean sampled tokens per trajectory."""
    truncated_frac: float
    num_tokens: int
    """Sampled in all."""
    num_prompts: int
    num_failed: int
    """Prompts left out because their rollouts failed."""
    versions: tuple[int, int]
    """Policy versions that the oldest and the newest token were sampled under."""

    def values(self) -> dict[str, float]:
        """By metric name."""
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
        generator: plays a prompt.
        prompts: held out of training.
        num_samples: trajectories per prompt.
        sampling: how to sample.
        max_concurrent: prompts played at once.
        max_retries: times a failed rollout is tried again.
        timeout_s: deadline of one try.
        backoff: between tries.
        deadlines: of the tries, see ``RolloutRetrier``.
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
        """Play the first ``num_prompts`` prompts; None when there are none.

        ``priority`` is of the requests: that of a group admitted now keeps both them and training from waiting for ever.

        A prompt whose rollouts fail is counted and left out. Raises ``GenerationError`` when all of them fail, and
        ``NoEngineError``.
        """
        prompts = self._prompts[:num_prompts]
        if not prompts:
            return None
        places = asyncio.Semaphore(self._max_concurrent)
        failures: list[tuple[Prompt, Exception]] = []

        async def play(index: int, prompt: Prompt) -> tuple[Trajectory, ...]:
            async with places:
                try:
                    return await self._retrier.generate(self._request(index, prompt, priority))
                except NoEngineError:
                    raise
                except Exception as error:
                    logger.error("evaluation of %s failed for good: %r", prompt.uid, error)
                    failures.append((prompt, error))
                    return ()

        played = await run_together({f"evaluate-{p.uid}": play(i, p) for i, p in enumerate(prompts)})
        if len(failures) == len(prompts):
            prompt, error = failures[-1]
            raise GenerationError(
                f"all {len(prompts)} evaluation rollouts failed; the last one ({prompt.uid}): {type(error).__name__}: {error}"
            ) from error
        return _averaged([group for group in played if group], len(failures))

    def statuses(self) -> list[list[RolloutStatus]]:
        """What each prompt being played is doing, the oldest first."""
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
    played = [sample for samples in by_prompt for sample in samples]
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
    num_tokens = sum(sample.num_sampled_tokens for sample in played)
    versions = {version for group in groups for row in group for version in row.versions} - {ENVIRONMENT_VERSION}
    return EvaluationResult(
        reward=mean,
        standard_error=(variance / len(rewards)) ** 0.5,
        response_tokens=num_tokens / len(played),
        truncated_frac=sum(sample.is_truncated for sample in played) / len(played),
        num_tokens=num_tokens,
        num_prompts=len(groups),
        num_failed=num_failed,
        versions=(min(versions, default=0), max(versions, default=0)),
    )
