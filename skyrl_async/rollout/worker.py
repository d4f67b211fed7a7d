"""Turns prompts into finished groups: one task per group in flight, admitted by the staleness manager.

Flows in: prompts from the dataloader. Flows out: groups into the buffer. Does not know what is trained when, nor how a generator
samples. A rollout that fails is tried again, then counted; too many failures, and the last one ends the run.
"""

import asyncio
import logging
import math
import random
from collections import deque
from dataclasses import dataclass

from skyrl_async.concurrency import first_failure
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.data.ledger import Key
from skyrl_async.errors import DeadlineError, GenerationError, NoEngineError
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.staleness import Admission, _AsyncStalenessManager
from skyrl_async.types import Group, GroupRequest, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

_FAILURE_WINDOW = 100
_MIN_GROUPS_BEFORE_STOP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How groups are generated and when failures end the run."""

    num_samples: int
    """Trajectories per group."""
    sampling: SamplingParams
    """Per generation call."""
    seed: int
    """Base of the seed of each group."""
    max_retries: int
    """Times a failed rollout is tried again."""
    max_failed_fraction: float
    """Share of failed groups, of the last 100, past which the run stops."""
    timeout_s: float
    """Deadline of one try."""


class GenerationWorkers:
    """Keeps as many groups in flight as the staleness manager admits.

    Args:
        dataloader: gives prompts, and is told what became of them.
        staleness: admits.
        buffer: takes finished groups; closed when the data has ended.
        generator: plays a group.
        settings: see ``RolloutSettings``.
        trace: one span per group.
    """

    def __init__(
        self,
        *,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        buffer: GroupBuffer,
        generator: Generator,
        settings: RolloutSettings,
        trace: Trace,
    ) -> None:
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._generator = generator
        self._settings = settings
        self._trace = trace
        self._outcomes: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self.counts = {"groups": 0, "failed_groups": 0, "retries": 0, "tokens": 0, "aborts": 0}
        self.running_uids: dict[int, tuple[str, float]] = {}

    async def run(self) -> None:
        """Consumes prompts, produces finished groups, waits for admission; unblocked by versions and ending groups.

        Returns when the data has ended and every group with it; the buffer is closed then. Cancellation gives every running
        prompt back to the dataloader. Raises ``GenerationError`` when too many rollouts failed.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                admission = await self._staleness.acquire_submission_slot()
                drawn = await self._dataloader.get_next_non_consumed_data()
                if drawn is None:
                    await self._staleness.on_rollout_rejected(admission)
                    break
                key, prompt = drawn
                tasks.create_task(self._play(admission, key, prompt), name=f"group-{admission.index}-{prompt.uid}")
        self._buffer.close()

    def stuck(self) -> str:
        """The groups in flight with their seconds, oldest first, for a log line."""
        now = asyncio.get_running_loop().time()
        oldest = sorted(self.running_uids.values(), key=lambda started: started[1])[:5]
        return ", ".join(f"{uid} (generating for {now - since:.0f} s)" for uid, since in oldest) or "no group in flight"

    async def _play(self, admission: Admission, key: Key, prompt: Prompt) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.running_uids[admission.index] = (prompt.uid, started)
        try:
            with self._trace.span("group", track="generation", uid=prompt.uid, version=admission.scheduled_version):
                trajectories = await self._generate_with_retries(admission, prompt)
        except (asyncio.CancelledError, NoEngineError):
            await self._dataloader.give_back(key)
            await self._staleness.on_rollout_rejected(admission)
            raise
        except Exception as error:
            await self._dataloader.mark_failed_uid(key)
            await self._staleness.on_rollout_rejected(admission)
            self._buffer.notify()
            self._count_failure(prompt, error)
            return
        finally:
            del self.running_uids[admission.index]
        self._outcomes.append(True)
        self.counts["groups"] += 1
        self.counts["tokens"] += sum(t.num_sampled_tokens for t in trajectories)
        self.counts["aborts"] += sum(t.num_aborts for t in trajectories)
        await self._dataloader.mark_finished_uid(key)
        await self._staleness.on_rollout_accepted(admission)
        self._buffer.put(
            Group(
                uid=prompt.uid,
                epoch=key[0],
                admission_index=admission.index,
                scheduled_version=admission.scheduled_version,
                trajectories=trajectories,
                generation_seconds=loop.time() - started,
            )
        )

    async def _generate_with_retries(self, admission: Admission, prompt: Prompt) -> tuple[Trajectory, ...]:
        settings = self._settings
        request = GroupRequest(
            prompt=prompt,
            num_samples=settings.num_samples,
            sampling=settings.sampling,
            seed=random.Random(f"{settings.seed}-{admission.index}").getrandbits(31),
            priority=admission.index,
        )
        for num_failures in range(settings.max_retries + 1):
            try:
                return _checked(await self._generate_once(request), request)
            except NoEngineError:
                raise
            except Exception as error:
                if num_failures == settings.max_retries:
                    raise
                self.counts["retries"] += 1
                logger.warning("rollout of %s failed, trying again: %r", prompt.uid, error)
        raise AssertionError("unreachable")

    async def _generate_once(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        timeout_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await self._generator.generate(request)
        except ExceptionGroup as failures:
            raise first_failure(failures) from failures
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(
                f"the rollout of {request.prompt.uid} took longer than generator.rollout_timeout_s={timeout_s:g}"
            ) from error

    def _count_failure(self, prompt: Prompt, error: Exception) -> None:
        self.counts["failed_groups"] += 1
        self._outcomes.append(False)
        logger.error("rollout of %s failed for good: %r", prompt.uid, error)
        num_failed, num_recent = self._outcomes.count(False), len(self._outcomes)
        limit = self._settings.max_failed_fraction
        if num_recent >= _MIN_GROUPS_BEFORE_STOP and num_failed > limit * num_recent:
            raise GenerationError(
                f"{num_failed} of the last {num_recent} groups failed, more than generator.max_failed_fraction={limit:g}; "
                f"the last one ({prompt.uid}): {type(error).__name__}: {error}"
            ) from error


def _checked(trajectories: tuple[Trajectory, ...], request: GroupRequest) -> tuple[Trajectory, ...]:
    if len(trajectories) != request.num_samples:
        raise GenerationError(
            f"the generator returned {len(trajectories)} trajectories for {request.prompt.uid}, expected {request.num_samples}"
        )
    if not any(t.num_sampled_tokens for t in trajectories):
        raise GenerationError(
            f"the generator returned no sampled token for {request.prompt.uid}: every loss mask is empty"
        )
    if not all(math.isfinite(t.reward) for t in trajectories):
        raise GenerationError(f"the generator returned a reward that is not a finite number for {request.prompt.uid}")
    return tuple(trajectories)
