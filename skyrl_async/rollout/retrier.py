"""Runs a group's rollout with a deadline, and retries its failed samples: for training and evaluation alike.

Returns checked trajectories, or raises the last try's error. Does not know what a failure means to the caller.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from skyrl_async.config.schema.generator import GeneratorConfig, OnFailedSamples
from skyrl_async.errors import ENDS_RUN, DeadlineError, GenerationError
from skyrl_async.rollout.failed_samples import CollectedGroup, RolloutResult
from skyrl_async.rollout.generator import Generator, GroupRequest, does_keep_samples
from skyrl_async.rollout.sampler import record_wasted
from skyrl_async.runtime.outages import Backoff, Deadlines
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.types import Trajectory

logger = logging.getLogger(__name__)

_MAX_NAMED = 3
"""Samples named in the error of a missed deadline."""


class RolloutRetrier:
    """A ``Generator`` over another one, which may fail, hang or break its contract.

    Args:
        generator: generates a group.
        config: deadline, retries and the treatment of failed samples; a group of an evaluation has to be complete.
        deadlines: stand still in outages. A failure in an outage is retried after it and does not count as a try. None: no outages.
    """

    def __init__(self, generator: Generator, config: GeneratorConfig, deadlines: Deadlines | None = None) -> None:
        self._generator = generator
        self._timeout_s = config.rollout_timeout_s
        self._on_failed_samples = config.on_failed_samples
        self._backoff = Backoff(base_s=config.retry_backoff_s, max_s=config.max_retry_backoff_s)
        self._deadlines = deadlines or Deadlines()
        self._max_retries = 0 if config.on_failed_samples is OnFailedSamples.drop else config.max_retries
        self._in_flight: dict[int, Callable[[], list[RolloutStatus]]] = {}
        self.num_retries = 0
        self.num_wasted_tokens = 0
        """Tokens of finished samples whose group failed."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return the trajectories of ``run_rollout``."""
        return (await self.run_rollout(request)).trajectories

    async def run_rollout(self, request: GroupRequest) -> RolloutResult:
        """Try until the group is complete or the retries are used up; a retry generates only the missing samples.

        Raises the last try's error if the group cannot be trained; those of ``ENDS_RUN`` at once.
        """
        group, started = CollectedGroup(request, self._on_failed_samples), asyncio.get_running_loop().time()
        self._in_flight[id(request)] = lambda: request.progress.statuses(request.prompt.uid, started)
        try:
            await self._try_until_complete(request, group)
        finally:
            del self._in_flight[id(request)]
        try:
            return group.finish()
        except Exception:
            self.num_wasted_tokens += group.num_tokens
            raise

    def statuses(self) -> list[list[RolloutStatus]]:
        """Activity of each group in flight, in order of their start."""
        return [statuses() for statuses in self._in_flight.values()]

    async def _try_until_complete(self, request: GroupRequest, group: CollectedGroup) -> None:
        """Try until no sample of ``group`` is missing or the retries are used up."""
        outages, num_tries = self._deadlines.outages, 0
        while True:
            num_over = outages.num_over
            await self._try_into(group)
            if not group.missing:
                return
            if outages.met_since(num_over):
                await self._wait_out(request, group)
                continue
            num_tries += 1
            if num_tries > self._max_retries:
                return
            await self._back_off(request, group, num_tries)

    async def _wait_out(self, request: GroupRequest, group: CollectedGroup) -> None:
        """Wait for the end of the outage in which samples failed."""
        logger.warning("%s in an outage, and is tried again after it: %s", group, group.reason)
        request.progress.enter("waiting for the end of an outage")
        await self._deadlines.outages.wait_until_over()
        request.progress.enter("generating")

    async def _back_off(self, request: GroupRequest, group: CollectedGroup, num_tries: int) -> None:
        delay, num_left = self._backoff.seconds(num_tries - 1, request.seed), self._max_retries - num_tries + 1
        logger.warning("%s, %d more tries, the next in %.1f s: %s", group, num_left, delay, group.reason)
        self.num_retries += 1
        request.progress.enter("waiting for a retry")
        await asyncio.sleep(delay)
        request.progress.enter("generating")

    async def _try_into(self, group: CollectedGroup) -> None:
        """Try to generate the missing samples, and add the result to ``group``."""
        request = group.next_request()
        try:
            trajectories = await self._try(request)
        except ENDS_RUN:
            raise
        except Exception as error:
            group.add_failure(error, request.sample_states.finished if does_keep_samples(self._generator) else {})
            record_wasted()
        else:
            group.add_returned(trajectories)
        request.sample_states.forget(group.missing)

    async def _try(self, request: GroupRequest) -> Sequence[Trajectory]:
        """Run one try, in its own task, so that a cancellation reaches the caller even if the generator swallows it."""
        outcome: list[Sequence[Trajectory] | Exception] = []
        uid = request.prompt.uid

        async def run() -> None:
            try:
                outcome.append(await self._generator.generate(request))
            except Exception as error:
                outcome.append(error)
            except SystemExit as error:  # else the process would end here, and say that all is well
                outcome.append(
                    GenerationError(f"the generator called sys.exit({error.code!r}) in the rollout of {uid}")
                )

        started = asyncio.get_running_loop().time()
        try:
            async with self._deadlines.within(self._timeout_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(run(), name=f"rollout-{uid}")
        except TimeoutError as error:
            raise DeadlineError(
                f"the rollout of {uid} took longer than generator.rollout_timeout_s={self._timeout_s:g}:"
                f"{_slowest(request.progress.statuses(uid, started))}"
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
        return result


def _slowest(statuses: Sequence[RolloutStatus]) -> str:
    """The samples that took the longest, for an error message."""
    named = [f"{status.where} {status.doing}" for status in statuses[:_MAX_NAMED]]
    num_more = len(statuses) - len(named)
    return ",".join(named) + (f" and {num_more} more" if num_more else "")
