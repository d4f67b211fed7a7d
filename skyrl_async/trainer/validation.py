"""Held-out prompts: an evaluator runs them, and a stage of its own runs it at one version while training continues.

    param_update ──version──> Validation ──figures, at that version──> log
         ^                        │
         └── with ``pin_version`` the next publish waits for its end

Knows neither what is trained nor how engines get a version. Without ``pin_version`` a result names the versions that its tokens were
sampled under.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ENDS_RUN, GenerationError, in_one_line
from skyrl_async.record.ended import OTHERS_FAILED, EndedGroup, Outcome, RecordsSamples
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.shutdown import ShutdownRequested
from skyrl_async.runtime.stages import Channel, run_stage
from skyrl_async.runtime.tasks import run_together
from skyrl_async.samples import samples_of
from skyrl_async.trainer.run import Run
from skyrl_async.types import ENVIRONMENT_VERSION, Group, Prompt, SamplingParams, Trajectory

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
        config: checked.
        generator: generates the trajectories of a prompt.
        prompts: held out of training.
        record: takes the samples.
        deadlines: suspends deadlines in an outage.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator,
        prompts: Sequence[Prompt],
        record: RecordsSamples,
        deadlines: Deadlines | None = None,
    ) -> None:
        filled = replace(config.generator, on_failed_samples=OnFailedSamples.train_rest)
        self._retrier = RolloutRetrier(generator, filled, deadlines)
        self._prompts = tuple(prompts)
        self._record = record
        self._config = config.evaluation
        self._sampling = from_section(SamplingParams, config.evaluation.sampling)
        num_places = config.engine.num_engines * config.engine.max_num_seqs
        self._max_concurrent = config.evaluation.max_concurrent or num_places

    async def evaluate(self, num_prompts: int, *, version: int, priority: int = 0) -> EvaluationResult | None:
        """Run the first ``num_prompts`` prompts; None when there are none.

        ``version`` is the one served now, for the record. With the priority of a group admitted now, neither these requests nor
        training starve.

        A prompt whose rollouts fail is counted and left out. Raises ``GenerationError`` when all of them fail, and the errors of
        ``ENDS_RUN``.
        """
        prompts = self._prompts[:num_prompts]
        if not prompts:
            return None
        loop = asyncio.get_running_loop()
        slots = asyncio.Semaphore(self._max_concurrent)
        failures: list[tuple[Prompt, Exception]] = []

        async def run_rollout(index: int, prompt: Prompt) -> tuple[Trajectory, ...]:
            request = GroupRequest(
                prompt=prompt,
                num_samples=self._config.n_samples_per_prompt,
                sampling=self._sampling,
                seed=index,
                priority=priority,
                is_evaluation=True,
            )
            async with slots:
                started = loop.time()
                try:
                    rows = await self._retrier.generate(request)
                    self._record_ended(request, version, rows, loop.time() - started)
                    return rows
                except ENDS_RUN:
                    raise
                except Exception as error:
                    logger.error("evaluation of %s failed for good: %s", prompt.uid, in_one_line(error))
                    failures.append((prompt, error))
                    states = request.sample_states
                    played = (states.finished | states.failed).items()
                    rows = tuple(replace(row, sample_index=index) for index, rows in played for row in rows)
                    self._record_ended(request, version, rows, loop.time() - started, error)
                    return ()

        groups = await run_together({f"evaluate-{p.uid}": run_rollout(i, p) for i, p in enumerate(prompts)})
        self._record.end_step()
        if len(failures) == len(prompts):
            prompt, error = failures[-1]
            raise GenerationError(
                f"all {len(prompts)} evaluation rollouts failed; the last one ({prompt.uid}): {type(error).__name__}: {error}"
            ) from error
        return _averaged([group for group in groups if group], len(failures))

    def _record_ended(
        self,
        request: GroupRequest,
        version: int,
        rows: tuple[Trajectory, ...],
        seconds: float,
        failure: Exception | None = None,
    ) -> None:
        """Record the samples of a prompt; with a ``failure`` none of them counts, and ``rows`` are those that were finished, and what
        failed ones had sampled.
        """
        present = {row.sample_index for row in rows}
        group = Group(
            uid=request.prompt.uid,
            admission_index=-1,
            scheduled_version=version,
            trajectories=rows,
            generation_seconds=seconds,
            work=request.progress.work,
        )
        self._record.add(
            EndedGroup(
                group=group,
                outcome=Outcome.HELD_OUT,
                step=version,
                reason=None if failure is None else OTHERS_FAILED,
                failed=() if failure is None else [i for i in range(request.num_samples) if i not in present],
                failure=failure,
            )
        )

    def statuses(self) -> list[list[RolloutStatus]]:
        """Return what each prompt in flight is doing, the oldest first."""
        return self._retrier.statuses()


def _averaged(groups: Sequence[tuple[Trajectory, ...]], num_failed: int) -> EvaluationResult:
    by_prompt = [samples_of(group) for group in groups]
    rewards = [sum(s.reward for s in samples) / len(samples) for samples in by_prompt]
    every = [sample for samples in by_prompt for sample in samples]
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
    num_tokens = sum(sample.num_sampled_tokens for sample in every)
    versions = {v for group in groups for row in group for v in row.versions.distinct if v != ENVIRONMENT_VERSION}
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


class Validation:
    """Evaluates versions that the engines serve.

    Args:
        run: its configuration says when, its recorder logs.
        evaluator: runs held-out prompts; without prompts nothing is evaluated.
    """

    def __init__(self, run: Run, evaluator: Evaluator) -> None:
        self._run = run
        self._trainer, self._config = run.config.trainer, run.config.evaluation
        self._evaluator = evaluator
        self._versions = Channel[int](1)
        self._requested_version = 0
        self._has_ended = False

    def request_if_owed(self, version: int) -> None:
        """Evaluate ``version``, which the engines serve, if an evaluation due at it or before it is neither done nor requested.

        A version that was due may have been lost on its way to the engines, or a shutdown may have cut its evaluation short. After an
        evaluation in progress, the version served by then is evaluated. The last version is left to ``trainer.eval_at_end``.
        """
        interval = self._trainer.eval_interval_steps
        if not interval or (self._trainer.eval_at_end and self._is_last(version)):
            return
        if version - version % interval <= max(self._requested_version, self._run.recorder.totals.evaluated_version):
            return
        self._requested_version = version
        if len(self._versions):
            logger.warning(
                "no evaluation of step %d: the one before has not begun, and will be of a later step", version
            )
            return
        self._versions.put_nowait(version)

    def _is_last(self, version: int) -> bool:
        """Whether nothing is left to be trained after ``version``."""
        run = self._run
        has_groups = run.staleness.first_open_index() is not None or run.groups_in_step
        is_newest = version == run.staleness.trained_version
        return version == self._trainer.num_steps or (is_newest and run.dataloader.has_ended and not has_groups)

    async def run(self) -> None:
        """Consumes versions; produces evaluations; waits for neither training nor publishing; unblocked by requests and ``close``."""

        async def evaluate(_: int) -> None:
            if self._has_ended and self._trainer.eval_at_end:
                return  # the version served now is the last one: it is evaluated anyway
            await self._evaluate(self._config.num_prompts_while_training)

        stage = self._run.board.stage("validation")
        await run_stage(stage, self._versions, evaluate, name_of=lambda _: self._item, finishes=False)

    async def release_version(self) -> None:
        """Wait until another version may be loaded. Unblocked by the end of an evaluation that pins its version."""
        if self._config.pin_version:
            await self._versions.join()

    def close(self) -> None:
        """No version will follow. Idempotent."""
        self._has_ended = True
        self._versions.close()

    @property
    def _item(self) -> str:
        return f"version {self._run.staleness.served_version}"

    async def evaluate_alone(self) -> EvaluationResult | None:
        """Evaluate the version served now while nothing is trained."""
        with self._run.board.stage("validation").lane() as lane, lane.processing(self._item):
            return await self._evaluate(self._config.num_prompts)

    async def _evaluate(self, num_prompts: int) -> EvaluationResult | None:
        """Evaluate the version served now; None where there is nothing to evaluate, or on a shutdown."""
        loop = asyncio.get_running_loop()
        step, started = self._run.staleness.served_version, loop.time()
        result: EvaluationResult | None = None
        with self._run.recorder.trace.span("evaluate", track="evaluation", step=step), suppress(ShutdownRequested):
            async with self._run.shutdown.interruptible():
                result = await self._evaluator.evaluate(
                    num_prompts, version=step, priority=self._run.staleness.next_index
                )
        if result is None:
            return None
        await self._run.recorder.record.flush()  # a resumed run takes figures for a sign that the samples are there
        step = max(step, result.versions[0])  # engines may have served one that the run had not acknowledged
        self._run.recorder.totals.evaluation_tokens += result.num_tokens
        self._run.recorder.totals.evaluated_version = step
        self._run.recorder.log(step, result.values() | {"timing/eval": loop.time() - started})
        return result
