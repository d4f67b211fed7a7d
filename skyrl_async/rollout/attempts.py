"""Plays a group with a deadline, and again when a try fails: for training and evaluation alike.

Flows in: a generator and requests. Flows out: trajectories that keep a generator's promises, or the last try's error. Does not
know what a failure means to who asked.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from skyrl_async.concurrency import first_failure
from skyrl_async.errors import DeadlineError, GenerationError, NoEngineError
from skyrl_async.rollout.generator import Generator
from skyrl_async.types import GroupRequest, Trajectory

logger = logging.getLogger(__name__)


class Attempts:
    """A ``Generator`` over another one that may fail, hang or return something else than it should.

    Args:
        generator: plays a group.
        max_retries: times a failed rollout is tried again, >= 0.
        timeout_s: deadline of one try.
    """

    def __init__(self, generator: Generator, *, max_retries: int, timeout_s: float) -> None:
        self._generator = generator
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self.num_retries = 0

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """The trajectories of the first try that succeeds. Raises the last one's error; ``NoEngineError`` at once."""
        for num_left in range(self._max_retries, 0, -1):
            try:
                return await self._try(request)
            except NoEngineError:
                raise
            except Exception as error:
                self.num_retries += 1
                logger.warning("rollout of %s failed, %d more tries: %r", request.prompt.uid, num_left, error)
        return await self._try(request)

    async def _try(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """One try, in a task of its own: whatever the generator makes of a cancellation, the caller is cancelled by it."""
        outcome: list[Sequence[Trajectory] | Exception] = []

        async def play() -> None:
            try:
                outcome.append(await self._generator.generate(request))
            except Exception as error:
                outcome.append(error)

        uid = request.prompt.uid
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(play(), name=f"rollout-{uid}")
        except TimeoutError as error:
            raise DeadlineError(
                f"the rollout of {uid} took longer than generator.rollout_timeout_s={self._timeout_s:g}"
            ) from error
        if not outcome:
            raise GenerationError(
                f"the generator cancelled the rollout of {uid} by itself; it must raise an error instead"
            )
        (result,) = outcome
        if isinstance(result, ExceptionGroup):
            raise first_failure(result) from result
        if isinstance(result, Exception):
            raise result
        return _checked(result, request)


def _check_samples(trajectories: Sequence[Trajectory], request: GroupRequest) -> None:
    """Either one row per sample, or rows that say which sample they are of; a sample without a row was abandoned early."""
    indices = {t.sample_index for t in trajectories}
    if indices == {None} or not indices:
        if len(trajectories) != request.num_samples:
            raise GenerationError(
                f"the generator returned {len(trajectories)} trajectories for {request.prompt.uid}, expected "
                f"{request.num_samples}"
            )
        return
    unknown = [index for index in indices if index is None or not 0 <= index < request.num_samples]
    if unknown:
        raise GenerationError(
            f"the generator returned a trajectory of sample_index {unknown[0]} for {request.prompt.uid}, expected all of them "
            f"in [0, {request.num_samples}) or none set"
        )


def _checked(trajectories: Sequence[Trajectory], request: GroupRequest) -> tuple[Trajectory, ...]:
    _check_samples(trajectories, request)
    if not request.is_evaluation and not any(t.num_sampled_tokens for t in trajectories):
        raise GenerationError(
            f"the generator returned no sampled token for {request.prompt.uid}: every loss mask is empty"
        )
    if not all(math.isfinite(t.reward) for t in trajectories):
        raise GenerationError(f"the generator returned a reward that is not a finite number for {request.prompt.uid}")
    return tuple(trajectories)
