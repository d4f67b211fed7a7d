"""Validation as a stage of its own: held-out prompts at one version, while training continues.

    param_update ──version──> Validation ──figures, at that version──> log
         ^                        │
         └── with ``pins_version`` the next publish waits for its end

Knows neither what is trained nor how engines get a version.
"""

import asyncio
import logging
from contextlib import suppress

from skyrl_async.runtime.shutdown import ShutdownRequested
from skyrl_async.runtime.stages import Channel, run_stage
from skyrl_async.trainer.evaluator import EvaluationResult, Evaluator
from skyrl_async.trainer.run import Run

logger = logging.getLogger(__name__)


class Validation:
    """Evaluates versions that the engines serve.

    Args:
        run: its settings say when, its recorder logs.
        evaluator: runs held-out prompts; None evaluates nothing.
    """

    def __init__(self, run: Run, evaluator: Evaluator | None) -> None:
        self._run = run
        self._settings = run.settings.validation
        self._evaluator = evaluator
        self._versions = Channel[int](1)
        self._requested_version = 0
        self._has_ended = False

    @property
    def is_done_at_the_end(self) -> bool:
        """Whether the last version is evaluated after training."""
        return self._settings.at_the_end

    def is_due(self, version: int) -> bool:
        """Whether ``version`` is to be evaluated while training continues."""
        interval = self._settings.interval_steps
        return self._evaluator is not None and bool(interval) and version % interval == 0

    def is_owed(self, version: int) -> bool:
        """Whether an evaluation due at ``version`` or before it is neither done nor requested.

        A version that was due may have been lost on its way to the engines, or a shutdown may have cut its evaluation short.
        """
        interval = self._settings.interval_steps
        if self._evaluator is None or not interval:
            return False
        newest = max(self._requested_version, self._run.recorder.totals.evaluated_version)
        return version - version % interval > newest

    async def before_training(self) -> EvaluationResult | None:
        """Evaluate the version that training begins with, if configured."""
        return await self._evaluate_alone() if self._settings.before_training else None

    async def at_the_end(self) -> EvaluationResult | None:
        """Evaluate the last version, if configured."""
        return await self._evaluate_alone() if self._settings.at_the_end else None

    async def run(self) -> None:
        """Consumes versions; produces evaluations; waits for neither training nor publishing; unblocked by ``request`` and ``close``."""

        async def evaluate(requested_version: int) -> None:
            is_another = self._run.staleness.served_version != requested_version
            if is_another and self._has_ended and self._settings.at_the_end:
                return  # the version served now is the last one: it is evaluated anyway
            await self._evaluate(self._settings.num_prompts_while_training)

        async def logged(_: None) -> None:
            pass

        await run_stage(
            self._run.board.stage("validation"),
            self._versions,
            evaluate,
            logged,
            name_of=lambda _: self._item,
            finishes=False,
        )

    def request(self, version: int) -> None:
        """Evaluate ``version``, which the engines serve; after an evaluation in progress, the version served by then."""
        self._requested_version = version
        if len(self._versions):
            logger.warning(
                "no evaluation of step %d: the one before has not begun, and will be of a later step", version
            )
            return
        self._versions.put_nowait(version)

    async def release_version(self) -> None:
        """Wait until another version may be loaded. Unblocked by the end of an evaluation that pins its version."""
        if self._settings.pins_version:
            await self._versions.join()

    def close(self) -> None:
        """No version will follow. Idempotent."""
        self._has_ended = True
        self._versions.close()

    @property
    def _item(self) -> str:
        return f"version {self._run.staleness.served_version}"

    async def _evaluate_alone(self) -> EvaluationResult | None:
        """Evaluate while nothing is trained."""
        if self._evaluator is None:
            return None
        with self._run.board.stage("validation").lane() as lane, lane.processing(self._item):
            return await self._evaluate(self._settings.num_prompts)

    async def _evaluate(self, num_prompts: int) -> EvaluationResult | None:
        """Evaluate the version served now; None where there is nothing to evaluate, or on a shutdown."""
        if self._evaluator is None:
            return None
        loop = asyncio.get_running_loop()
        step, started = self._run.staleness.served_version, loop.time()
        result: EvaluationResult | None = None
        with self._run.recorder.trace.span("evaluate", track="evaluation", step=step), suppress(ShutdownRequested):
            async with self._run.shutdown.interruptible():
                result = await self._evaluator.evaluate(num_prompts, priority=self._run.staleness.next_index)
        if result is None:
            return None
        step = max(step, result.versions[0])  # engines may have served one that the run had not acknowledged
        self._run.recorder.totals.evaluation_tokens += result.num_tokens
        self._run.recorder.totals.evaluated_version = step
        self._run.recorder.log(step, result.values() | {"timing/eval": loop.time() - started})
        return result
