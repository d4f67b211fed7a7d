"""Plays a group with a deadline, and what failed of it again after a while: for training and evaluation alike.

Flows in: a generator and requests. Flows out: trajectories that keep a generator's promises, or the last try's error. Does not
know what a failure means to who asked.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from skyrl_async.errors import DeadlineError, GenerationError, NoEngineError
from skyrl_async.rollout.failed_samples import CollectedGroup, OnFailedSamples, RolloutResult
from skyrl_async.rollout.generator import Generator, GroupRequest, does_keep_samples
from skyrl_async.rollout.sampler import record_wasted
from skyrl_async.runtime.outages import NO_BACKOFF, Backoff, Deadlines
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.types import Trajectory

logger = logging.getLogger(__name__)

_MAX_NAMED = 3
"""Samples that the error of a missed deadline names."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rollout:
    """A group being played."""

    request: GroupRequest
    started: float
    """Seconds on the loop's clock."""

    def statuses(self) -> list[RolloutStatus]:
        return self.request.progress.statuses(self.request.prompt.uid, self.started)


class RolloutRetrier:
    """A ``Generator`` over another one that may fail, hang or return something else than it should.

    Args:
        generator: plays a group.
        max_retries: times a failed rollout is tried again, >= 0; ``DROP`` never does.
        timeout_s: deadline of one try.
        on_failed_samples: what to do with a group of which only some samples failed; one of an evaluation has to be whole.
        backoff: between tries.
        deadlines: stand still while nothing can be sampled; what fails in an outage is tried again once that is over, and counts as no
            try. None: there is none.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_retries: int,
        timeout_s: float,
        on_failed_samples: OnFailedSamples = OnFailedSamples.TRAIN_REST,
        backoff: Backoff = NO_BACKOFF,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._generator = generator
        self._deadlines = deadlines or Deadlines()
        self._max_retries = 0 if on_failed_samples is OnFailedSamples.DROP else max_retries
        self._timeout_s = timeout_s
        self._on_lost_samples = on_failed_samples
        self._backoff = backoff
        self._in_flight: dict[_Rollout, None] = {}
        self.num_retries = 0
        self.num_wasted_tokens = 0
        """Of finished samples whose group failed."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """The trajectories of ``play``."""
        return (await self.play(request)).trajectories

    async def play(self, request: GroupRequest) -> RolloutResult:
        """Try until the group is whole, or the last time; only what is missing is played again.

        Raises the last try's error when the group cannot be trained; ``NoEngineError`` at once.
        """
        group, outages = CollectedGroup(request, self._on_lost_samples), self._deadlines.outages
        with self._counted(request):
            num_tries = 0
            while True:
                num_over = outages.num_over
                await self._try_into(group)
                if group.missing and outages.met_since(num_over):
                    await self._wait_out(request, group)
                    continue
                num_tries += 1
                if not group.missing or num_tries > self._max_retries:
                    break
                await self._back_off(request, group, num_tries)
        try:
            return group.finish()
        except Exception:
            self.num_wasted_tokens += group.num_tokens
            raise

    def statuses(self) -> list[list[RolloutStatus]]:
        """What each group being played is doing, the group that began first first."""
        return [rollout.statuses() for rollout in self._in_flight]

    @contextmanager
    def _counted(self, request: GroupRequest) -> Iterator[None]:
        rollout = _Rollout(request, asyncio.get_running_loop().time())
        self._in_flight[rollout] = None
        try:
            yield
        finally:
            del self._in_flight[rollout]

    async def _wait_out(self, request: GroupRequest, group: CollectedGroup) -> None:
        """Samples were lost while nothing could be sampled: wait until that is over."""
        logger.warning(
            "rollout of %s lost %d of its %d samples in an outage, and is tried again after it: %r",
            request.prompt.uid,
            len(group.missing),
            request.num_samples,
            group.failure,
        )
        request.progress.enter("waiting for the end of an outage")
        await self._deadlines.outages.wait_until_over()
        request.progress.enter("generating")

    async def _back_off(self, request: GroupRequest, group: CollectedGroup, num_tries: int) -> None:
        delay = self._backoff.seconds(num_tries - 1, request.seed)
        logger.warning(
            "rollout of %s lost %d of its %d samples, %d more tries, the next in %.1f s: %r",
            request.prompt.uid,
            len(group.missing),
            request.num_samples,
            self._max_retries - num_tries + 1,
            delay,
            group.failure,
        )
        self.num_retries += 1
        request.progress.enter("waiting for a retry")
        await asyncio.sleep(delay)
        request.progress.enter("generating")

    async def _try_into(self, group: CollectedGroup) -> None:
        """One try at what is missing; what became of it is in ``group``."""
        request = group.next_request()
        try:
            trajectories = await self._try(request)
        except NoEngineError:
            raise
        except Exception as error:
            group.add_failure(error, request.saved.finished if does_keep_samples(self._generator) else {})
            record_wasted()
        else:
            group.add_returned(trajectories)
        request.saved.forget(group.missing)

    async def _try(self, request: GroupRequest) -> Sequence[Trajectory]:
        """One try, in a task of its own: whatever the generator makes of a cancellation, the caller is cancelled by it."""
        outcome: list[Sequence[Trajectory] | Exception] = []

        uid = request.prompt.uid

        async def play() -> None:
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
                tasks.create_task(play(), name=f"rollout-{uid}")
        except TimeoutError as error:
            raise DeadlineError(
                f"the rollout of {uid} took longer than generator.rollout_timeout_s={self._timeout_s:g}:"
                f"{_named(request.progress.statuses(uid, started))}"
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


def _named(statuses: Sequence[RolloutStatus]) -> str:
    """The samples that took the longest, for the end of a message."""
    named = [f"{status.where} {status.doing}" for status in statuses[:_MAX_NAMED]]
    num_more = len(statuses) - len(named)
    return ",".join(named) + (f" and {num_more} more" if num_more else "")
