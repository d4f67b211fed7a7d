"""Turns prompts into finished groups: one task per group in flight, admitted by the staleness manager.

Flows in: prompts from the dataloader. Flows out: groups into the buffer. Does not know when groups are trained, nor how a generator
samples. A failed rollout is retried, then counted; too many failures end the run with the last one.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.errors import NoEngineError
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.failed_samples import FailureWatch, OnFailedSamples, RolloutResult
from skyrl_async.rollout.finished_group_filter import FinishedGroupFilter, SignalFilter, SignalSettings
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.group_state import GroupInFlight, RunningGroup, admission_of
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.rollout.sample_state import ResumeCounts, SampleStates
from skyrl_async.rollout.sampler import GenerationClient, recording_tokens_to
from skyrl_async.rollout.staleness import Admission, _AsyncStalenessManager
from skyrl_async.runtime.outages import NO_BACKOFF, Backoff
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.stages import Lane, StageBoard
from skyrl_async.samples import live_samples_of, samples_of
from skyrl_async.types import Group, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


_COUNTS = (
    *("groups", "trajectories", "tokens", "aborts", "failed_groups", "failed_samples"),
    *("requeued_groups", "requeued_tokens", "side_tokens", "cut_short_samples"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of generation, and the limit of failures."""

    num_samples: int
    """Trajectories per group."""
    sampling: SamplingParams
    """For each generation call."""
    seed: int
    """Base of the groups' seeds."""
    max_retries: int
    """Retries of a failed rollout."""
    max_failed_fraction: float
    """The run stops if more than this fraction of the last 100 groups failed."""
    timeout_s: float
    """Deadline of one try, in seconds."""
    on_failed_samples: OnFailedSamples = OnFailedSamples.TRAIN_REST
    """Treatment of a group of which only some samples failed."""
    backoff: Backoff = NO_BACKOFF
    """Wait before each retry."""
    requeues_groups: bool = False
    """Untrained groups may be dropped, and their prompts requeued."""
    signal: SignalSettings | None = None
    """Filters finished groups without a learning signal; None keeps all."""
    masks_overlong: bool = False
    """Mask samples that a length limit cut."""


class GenerationWorkers:
    """Keeps as many groups in flight as the staleness manager admits.

    Args:
        dataloader: source of prompts; records the state of each.
        staleness: admits groups.
        buffer: receives finished groups; closed when the data has ended.
        generator: generates a group.
        client: the inference client that the generator samples from.
        settings: plain settings.
        trace: gets one span per group.
        board: shows the stages dataloader, generate and rollout.
    """

    def __init__(
        self,
        *,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        buffer: GroupBuffer,
        generator: Generator,
        client: GenerationClient,
        settings: RolloutSettings,
        trace: Trace,
        board: StageBoard,
    ) -> None:
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._retrier = RolloutRetrier(
            generator,
            max_retries=settings.max_retries,
            timeout_s=settings.timeout_s,
            on_failed_samples=settings.on_failed_samples,
            backoff=settings.backoff,
            deadlines=client.deadlines,
        )
        self._settings = settings
        self._trace = trace
        self._client = client
        self._board = board
        self._failures = FailureWatch(settings.max_failed_fraction)
        self.finished_groups = FinishedGroupFilter(
            dataloader,
            staleness,
            buffer,
            None if settings.signal is None else SignalFilter(settings.signal),
            masks_overlong=settings.masks_overlong,
        )
        self._resume_counts = ResumeCounts()
        self._in_flight: dict[int, GroupInFlight] = {}
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        """Accepts tasks; None before ``run``, and after its end or first failure."""
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._drawing: set[asyncio.Task[None]] = set()
        self._is_drawing = False
        self._counts = dict.fromkeys(_COUNTS, 0)

    @property
    def counts(self) -> dict[str, int]:
        """Totals so far: finished groups (trajectories, tokens, aborts, failed samples), failures, retries, requeued and filtered groups,
        abandoned tokens, and resumed samples."""
        return {
            **self._counts,
            **self.finished_groups.counts,
            **asdict(self._resume_counts),
            "retries": self._retrier.num_retries,
            "abandoned_tokens": self._client.num_abandoned_tokens
            - sum(group.token_usage.num_cut_off_tokens for group in self._in_flight.values())
            + self._counts["requeued_tokens"]
            + self._retrier.num_wasted_tokens,
        }

    async def run(self, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        """Consumes prompts, produces finished groups, waits for admission; unblocked by versions and ending groups.

        Returns after the data and the last group have ended, and closes the buffer. If groups may be requeued, it first waits until
        the trainer has taken all of them. After a cancellation or a failure the groups in flight keep their state for a checkpoint,
        until ``requeue``. Raises ``GenerationError`` if too many rollouts failed or too many groups were filtered; ``on_failure`` is
        called at once, before the other groups have ended.
        """
        self._on_failure = on_failure
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for restored in self._in_flight.values():
                    self._start(restored, self._tasks)
                await self._start_groups(self._tasks)
                if self._settings.requeues_groups:
                    await self._until_none_can_be_requeued()
        finally:
            self._tasks = None
        self._failures.raise_if_too_many(has_ended=True)
        self.finished_groups.raise_if_nothing_is_left()
        for name in ("dataloader", "generate", "rollout"):
            self._board.stage(name).finish()
        self._buffer.close()

    def restore(self, groups: Sequence[RunningGroup]) -> None:
        """Have ``run`` continue these groups of a checkpoint, in this order, before it draws prompts.

        Groups that were requested with another size or other sampling restart.
        """
        settings = self._settings
        if others := [g.uid for g in groups if not g.has_settings(settings.num_samples, settings.sampling)]:
            logger.warning(
                "generator.n_samples_per_prompt or generator.sampling differ from the checkpoint's: its %d running groups begin anew",
                len(others),
            )
        for group in groups:
            prompt = self._dataloader.prompt_of((group.epoch, group.uid))
            self._in_flight[group.admission_index] = GroupInFlight.from_checkpoint(
                group, prompt, settings.num_samples, settings.sampling, self._resume_counts
            )

    def running_groups(self) -> tuple[RunningGroup, ...]:
        """The groups in flight, oldest admitted first, for a checkpoint."""
        num_samples, sampling = self._settings.num_samples, self._settings.sampling
        return tuple(group.for_checkpoint(num_samples, sampling) for _, group in sorted(self._in_flight.items()))

    async def collect_open_tokens(self) -> None:
        """Update open generations with all of their tokens; call this before ``running_groups``."""
        await self._client.collect_open_tokens()

    async def abort_and_requeue(self, is_dropped: Callable[[Admission], bool]) -> None:
        """Abort the groups in flight for which ``is_dropped`` is true, and requeue their prompts, the oldest first.

        Their sampled tokens are counted as requeued, with those that engines have not delivered yet. From the check to the end no
        ``await`` waits, so that none of the groups can finish meanwhile.
        """
        if any(is_dropped(group.admission) for group in self._in_flight.values()):
            await self._client.collect_open_tokens()
        dropped = [group for group in self._in_flight.values() if is_dropped(group.admission)]
        for group in dropped:
            if task := self._group_tasks.pop(group.admission.index, None):
                task.cancel()
            self._counts["requeued_tokens"] += group.token_usage.num_tokens
        await self._requeue(dropped)
        self._counts["requeued_groups"] += len(dropped)
        if dropped:
            self._draw_again()

    async def requeue_finished(self, group: Group) -> None:
        """Requeue the prompt of a group just taken from the buffer."""
        self._counts["requeued_groups"] += 1
        self._counts["requeued_tokens"] += group.num_sampled_tokens
        await self._dataloader.requeue((group.epoch, group.uid))
        await self._staleness.on_rollout_filtered(admission_of(group))
        self._draw_again()

    def _draw_again(self) -> None:
        """Start groups again if drawing had ended with the data: there are prompts now."""
        if not self._is_drawing and self._tasks is not None:
            self._is_drawing = True
            drawing = self._tasks.create_task(self._start_groups(self._tasks), name="drawing again")
            self._drawing.add(drawing)
            drawing.add_done_callback(self._drawing.discard)

    async def _until_none_can_be_requeued(self) -> None:
        """Wait until no group is in flight or in the buffer. Unblocked by groups that end or are taken."""
        while True:
            if busy := {*self._drawing, *self._group_tasks.values()}:
                await asyncio.wait(busy)
            elif len(self._buffer):
                await self._buffer.emptied()
            else:
                return

    def statuses(self) -> list[list[RolloutStatus]]:
        """Activity of each group in flight, the oldest first."""
        return self._retrier.statuses()

    async def generate(self, admission: Admission, prompt: Prompt) -> tuple[Trajectory, ...]:
        """Generate one group. Raises the error of its last try."""
        return (await self._generate(admission, prompt, SampleStates())).trajectories

    async def _generate(self, admission: Admission, prompt: Prompt, states: SampleStates) -> RolloutResult:
        settings = self._settings
        request = GroupRequest(
            prompt=prompt,
            num_samples=settings.num_samples,
            sampling=settings.sampling,
            seed=random.Random(f"{settings.seed}-{admission.index}").getrandbits(31),
            priority=admission.index,
            sample_states=states,
        )
        with self._trace.span("group", track="generation", uid=prompt.uid, version=admission.scheduled_version):
            return await self._retrier.run_rollout(request)

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes prompts, starts a group for each, waits for admission; returns when the data has ended."""
        self._is_drawing = True
        try:
            with self._stopping_all_on_failure(), self._board.stage("dataloader").lane() as lane:
                lane.wait_for_input()
                while group := await self._start_next(lane):
                    self._start(group, tasks)
                    lane.wait_for_input()
        finally:
            self._is_drawing = False

    def _start(self, group: GroupInFlight, tasks: asyncio.TaskGroup) -> None:
        index = group.admission.index
        self._group_tasks[index] = tasks.create_task(self._run_group(group), name=f"group-{index}-{group.prompt.uid}")

    async def _start_next(self, lane: Lane) -> GroupInFlight | None:
        """Wait for admission and draw a prompt; None when the data has ended. Admissions bound the number of groups."""
        lane.process("prompt")
        lane.wait_for_output()
        admission = await self._staleness.acquire_submission_slot()
        drawn = await self._dataloader.get_next_non_consumed_data()
        if drawn is None:
            await self._staleness.on_rollout_rejected(admission)
            return None
        key, prompt = drawn
        lane.process(prompt.uid)
        started = asyncio.get_running_loop().time()
        group = GroupInFlight(admission=admission, epoch=key[0], prompt=prompt, started=started)
        self._in_flight[admission.index] = group
        return group

    async def _run_group(self, group: GroupInFlight) -> None:
        """Generate one group, and record its success or failure; a cancelled group stays in flight.

        The items of the stages are the groups that did not fail.
        """
        uid, board = group.prompt.uid, self._board
        try:
            with (
                self._stopping_all_on_failure(),
                board.stage("generate").lane() as generate,
                board.stage("rollout").lane() as rollout,
            ):
                rollout.wait_for_input()
                generate.wait_for_input()
                generate.process(uid)
                try:
                    with recording_tokens_to(group.token_usage):
                        result = await self._generate(group.admission, group.prompt, group.sample_states)
                except NoEngineError:
                    raise
                except Exception as error:
                    rollout.process(uid)
                    await self._fail(group, error)
                else:
                    generate.wait_for_input()
                    rollout.process(uid)
                    await self._finish(group, result)
                    rollout.wait_for_input()
        finally:
            self._group_tasks.pop(group.admission.index, None)

    @contextmanager
    def _stopping_all_on_failure(self) -> Iterator[None]:
        """A failure inside ends every group, and no further one is started."""
        try:
            yield
        except Exception as error:
            self._tasks = None
            self._on_failure(error)
            raise

    async def _finish(self, group: GroupInFlight, result: RolloutResult) -> None:
        del self._in_flight[group.admission.index]
        group.sample_states.close()
        await self._dataloader.mark_finished_uid(group.key)
        await self._staleness.on_rollout_accepted(group.admission)
        self._count(result)
        finished = Group(
            uid=group.prompt.uid,
            epoch=group.epoch,
            admission_index=group.admission.index,
            scheduled_version=group.admission.scheduled_version,
            trajectories=result.trajectories,
            generation_seconds=asyncio.get_running_loop().time() - group.started,
        )
        await self.finished_groups.put(finished)
        if result.failure is None or not result.num_failed:
            self._failures.count_success()
            return
        num_samples, uid = self._settings.num_samples, group.prompt.uid
        logger.error(
            "rollout of %s goes on without %d of its %d samples: %r",
            uid,
            result.num_failed,
            num_samples,
            result.failure,
        )
        self._failures.count_failure(uid, result.failure, share=result.num_failed / num_samples)

    def _count(self, result: RolloutResult) -> None:
        counts, trajectories = self._counts, result.trajectories
        counts["groups"] += 1
        counts["trajectories"] += len(live_samples_of(trajectories))
        counts["tokens"] += sum(t.num_sampled_tokens for t in trajectories)
        counts["aborts"] += sum(t.num_aborts for t in trajectories)
        counts["failed_samples"] += result.num_failed
        for sample in samples_of(trajectories):
            figures = sample.rows[0].metrics
            counts["side_tokens"] += int(figures.get("agent/side_tokens", 0))
            counts["cut_short_samples"] += int(figures.get("agent/cut_short", 0))

    async def _fail(self, group: GroupInFlight, error: Exception) -> None:
        del self._in_flight[group.admission.index]
        group.sample_states.close()
        await self._dataloader.mark_failed_uid(group.key)
        await self._staleness.on_rollout_rejected(group.admission)
        self._buffer.notify()
        self._counts["failed_groups"] += 1
        logger.error("rollout of %s failed for good: %r", group.prompt.uid, error)
        self._failures.count_failure(group.prompt.uid, error)

    async def requeue(self) -> None:
        """Drop the groups in flight; their prompts are the next to be drawn, the oldest first. Idempotent."""
        await self._requeue(list(self._in_flight.values()))

    async def _requeue(self, groups: Sequence[GroupInFlight]) -> None:
        for group in sorted(groups, key=lambda g: -g.admission.index):
            del self._in_flight[group.admission.index]
            group.sample_states.close()
            await self._dataloader.requeue(group.key)
            await self._staleness.on_rollout_rejected(group.admission)
