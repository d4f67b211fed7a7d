"""Turns prompts into finished groups: one task per group in flight, admitted by the staleness manager.

Flows in: prompts from the dataloader. Flows out: groups into the buffer. Does not know what is trained when, nor how a generator
samples. A rollout that fails is tried again, then counted; too many failures, and the last one ends the run.
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
from skyrl_async.runtime.stage_board import StageBoard
from skyrl_async.runtime.stages import Lane
from skyrl_async.samples import live_samples_of, samples_of
from skyrl_async.types import Group, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


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
    on_failed_samples: OnFailedSamples = OnFailedSamples.TRAIN_REST
    """What to do with a group of which only some samples failed."""
    backoff: Backoff = NO_BACKOFF
    """Before a failed rollout is tried again."""
    requeues_groups: bool = False
    """Groups may be given up until they are trained, and their prompts drawn again."""
    signal: SignalSettings | None = None
    """Filters finished groups that teach nothing; None keeps all."""
    masks_overlong: bool = False
    """Samples that a length limit cut are not trained."""


class GenerationWorkers:
    """Keeps as many groups in flight as the staleness manager admits.

    Args:
        dataloader: gives prompts, and is told what became of them.
        staleness: admits.
        buffer: takes finished groups; closed when the data has ended.
        generator: plays a group.
        settings: see ``RolloutSettings``.
        trace: one span per group.
        client: what the generator samples through.
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
        board: StageBoard | None = None,
    ) -> None:
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._attempts = RolloutRetrier(
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
        self._board = board or StageBoard()
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
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        """Takes more tasks; None before ``run``, and from its end or first failure on."""
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._drawing: set[asyncio.Task[None]] = set()
        self._is_drawing = False
        self._counts = {
            "groups": 0,
            "trajectories": 0,
            "tokens": 0,
            "aborts": 0,
            "failed_groups": 0,
            "failed_samples": 0,
        }
        self._counts |= {"requeued_groups": 0, "requeued_tokens": 0, "side_tokens": 0, "cut_short_samples": 0}

    @property
    def counts(self) -> dict[str, int]:
        """Of finished groups (trajectories, tokens, aborts, samples they lack), failures, retries, redrawn and filtered groups, tokens
        thrown away, and what became of a checkpoint's samples, so far."""
        return {
            **self._counts,
            **self.finished_groups.counts,
            **asdict(self._resume_counts),
            "retries": self._attempts.num_retries,
            "abandoned_tokens": self._client.num_abandoned_tokens
            - sum(group.account.num_cut_off_tokens for group in self._in_flight.values())
            + self._counts["requeued_tokens"]
            + self._attempts.num_wasted_tokens,
        }

    async def run(self, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        """Consumes prompts, produces finished groups, waits for admission; unblocked by versions and ending groups.

        Returns when the data has ended and every group with it; the buffer is closed then: where groups may be redrawn, not before
        all of them are taken. What a cancellation or a failure leaves
        in flight stays as it stands, for a checkpoint, until ``requeue``. Raises ``GenerationError`` when too many rollouts failed,
        or too many groups were filtered; ``on_failure`` is told at once, before the other groups have ended.
        """
        self._on_failure = on_failure
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for taken_up in self._in_flight.values():
                    self._start(taken_up, self._tasks)
                await self._start_groups(self._tasks)
                if self._settings.requeues_groups:
                    await self._until_none_can_come_back()
        finally:
            self._tasks = None
        self._failures.raise_if_too_many(has_ended=True)
        self.finished_groups.raise_if_nothing_is_left()
        for name in ("dataloader", "generate", "rollout"):
            self._board.stage(name).finish()
        self._buffer.close()

    def restore(self, groups: Sequence[RunningGroup]) -> None:
        """Have ``run`` go on with groups of a checkpoint before it draws anything, in this order.

        Those that were asked for with another group size or other sampling begin anew.
        """
        settings = self._settings
        if others := [g.uid for g in groups if not g.has_settings(settings.num_samples, settings.sampling)]:
            logger.warning(
                "generator.n_samples_per_prompt or generator.sampling differ from the checkpoint's: its %d running groups begin anew",
                len(others),
            )
        for group in groups:
            prompt = self._dataloader.prompt_of((group.epoch, group.uid))
            self._in_flight[group.admission_index] = GroupInFlight.of_checkpoint(
                group, prompt, settings.num_samples, settings.sampling, self._resume_counts
            )

    def running_groups(self) -> tuple[RunningGroup, ...]:
        """The groups in flight, oldest admitted first, for a checkpoint."""
        num_samples, sampling = self._settings.num_samples, self._settings.sampling
        return tuple(group.for_checkpoint(num_samples, sampling) for _, group in sorted(self._in_flight.items()))

    async def collect_open_tokens(self) -> None:
        """Have open generations know all of their tokens, before ``running_groups`` looks at them."""
        await self._client.collect_open_tokens()

    async def abort_and_requeue(self, is_dropped: Callable[[Admission], bool]) -> None:
        """Abort the groups in flight of which ``is_dropped`` says so; their prompts are the next to be drawn, oldest first.

        What was sampled for them is thrown away; it is counted, with what engines have not handed over. After they were asked no
        ``await`` waits: none of the groups can finish meanwhile.
        """
        if any(is_dropped(group.admission) for group in self._in_flight.values()):
            await self._client.collect_open_tokens()
        given_up = [group for group in self._in_flight.values() if is_dropped(group.admission)]
        for group in sorted(given_up, key=lambda g: -g.admission.index):
            del self._in_flight[group.admission.index]
            if task := self._playing.pop(group.admission.index, None):
                task.cancel()
            self._counts["requeued_tokens"] += group.account.num_tokens
            group.saved.close()
            await self._dataloader.requeue(group.key)
            await self._staleness.on_rollout_rejected(group.admission)
        self._counts["requeued_groups"] += len(given_up)
        if given_up:
            self._draw_again()

    async def requeue_finished(self, group: Group) -> None:
        """Like ``abort_and_requeue``, for a group just taken from the buffer."""
        self._counts["requeued_groups"] += 1
        self._counts["requeued_tokens"] += group.num_sampled_tokens
        await self._dataloader.requeue((group.epoch, group.uid))
        await self._staleness.on_rollout_filtered(admission_of(group))
        self._draw_again()

    def _draw_again(self) -> None:
        """There are prompts again, even if the data had ended."""
        if not self._is_drawing and self._tasks is not None:
            self._is_drawing = True
            drawing = self._tasks.create_task(self._start_groups(self._tasks), name="drawing again")
            self._drawing.add(drawing)
            drawing.add_done_callback(self._drawing.discard)

    async def _until_none_can_come_back(self) -> None:
        """The data has ended: wait until no group is played and none is in the buffer. Unblocked by groups that end or are taken."""
        while True:
            if busy := {*self._drawing, *self._playing.values()}:
                await asyncio.wait(busy)
            elif len(self._buffer):
                await self._buffer.emptied()
            else:
                return

    def statuses(self) -> list[list[RolloutStatus]]:
        """What each group in flight is doing, the oldest first."""
        return self._attempts.statuses()

    async def generate(self, admission: Admission, prompt: Prompt) -> tuple[Trajectory, ...]:
        """The trajectories of one group. Raises its last try's error."""
        return (await self._generate(admission, prompt, SampleStates())).trajectories

    async def _generate(self, admission: Admission, prompt: Prompt, saved: SampleStates) -> RolloutResult:
        settings = self._settings
        request = GroupRequest(
            prompt=prompt,
            num_samples=settings.num_samples,
            sampling=settings.sampling,
            seed=random.Random(f"{settings.seed}-{admission.index}").getrandbits(31),
            priority=admission.index,
            saved=saved,
        )
        with self._trace.span("group", track="generation", uid=prompt.uid, version=admission.scheduled_version):
            return await self._attempts.play(request)

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Until the data has ended."""
        self._is_drawing = True
        try:
            with self._ending_all_on_failure(), self._board.stage("dataloader").lane() as lane:
                lane.wait_for_input()
                while group := await self._start_next(lane):
                    self._start(group, tasks)
                    lane.wait_for_input()
        finally:
            self._is_drawing = False

    def _start(self, group: GroupInFlight, tasks: asyncio.TaskGroup) -> None:
        index = group.admission.index
        self._playing[index] = tasks.create_task(self._play(group), name=group.name)

    async def _start_next(self, lane: Lane) -> GroupInFlight | None:
        """Wait for admission and draw a prompt; None when the data has ended. The credits are the channel's bound."""
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

    async def _play(self, group: GroupInFlight) -> None:
        """Generate one group and say what became of it; a cancelled one stays in flight. The stages' items are groups that did not fail."""
        uid, board = group.prompt.uid, self._board
        try:
            with (
                self._ending_all_on_failure(),
                board.stage("generate").lane() as generate,
                board.stage("rollout").lane() as rollout,
            ):
                rollout.wait_for_input()
                generate.wait_for_input()
                generate.process(uid)
                try:
                    with recording_tokens_to(group.account):
                        played = await self._generate(group.admission, group.prompt, group.saved)
                except NoEngineError:
                    raise
                except Exception as error:
                    rollout.process(uid)
                    await self._fail(group, error)
                else:
                    generate.wait_for_input()
                    rollout.process(uid)
                    await self._finish(group, played)
                    rollout.wait_for_input()
        finally:
            self._playing.pop(group.admission.index, None)

    @contextmanager
    def _ending_all_on_failure(self) -> Iterator[None]:
        """What fails inside ends every group: from then on none is started."""
        try:
            yield
        except Exception as error:
            self._tasks = None
            self._on_failure(error)
            raise

    async def _finish(self, group: GroupInFlight, played: RolloutResult) -> None:
        trajectories = played.trajectories
        del self._in_flight[group.admission.index]
        group.saved.close()
        await self._dataloader.mark_finished_uid(group.key)
        await self._staleness.on_rollout_accepted(group.admission)
        finished = Group(
            uid=group.prompt.uid,
            epoch=group.epoch,
            admission_index=group.admission.index,
            scheduled_version=group.admission.scheduled_version,
            trajectories=trajectories,
            generation_seconds=asyncio.get_running_loop().time() - group.started,
        )
        self._counts["groups"] += 1
        self._counts["trajectories"] += len(live_samples_of(trajectories))
        self._counts["tokens"] += sum(t.num_sampled_tokens for t in trajectories)
        self._counts["aborts"] += sum(t.num_aborts for t in trajectories)
        self._counts["failed_samples"] += played.num_lost
        for sample in samples_of(trajectories):
            figures = sample.rows[0].metrics
            self._counts["side_tokens"] += int(figures.get("agent/side_tokens", 0))
            self._counts["cut_short_samples"] += int(figures.get("agent/interruptible", 0))
        await self.finished_groups.put(finished)
        if played.failure is not None and played.num_lost:
            self._lose(group, played.num_lost, played.failure)
        else:
            self._failures.count_success()

    def _lose(self, group: GroupInFlight, num_lost: int, error: Exception) -> None:
        """The group is trained without some of its samples."""
        num_samples, uid = self._settings.num_samples, group.prompt.uid
        logger.error("rollout of %s goes on without %d of its %d samples: %r", uid, num_lost, num_samples, error)
        self._failures.count_failure(uid, error, share=num_lost / num_samples)
        self._failures.raise_if_too_many()

    async def _fail(self, group: GroupInFlight, error: Exception) -> None:
        del self._in_flight[group.admission.index]
        group.saved.close()
        await self._dataloader.mark_failed_uid(group.key)
        await self._staleness.on_rollout_rejected(group.admission)
        self._buffer.notify()
        self._counts["failed_groups"] += 1
        logger.error("rollout of %s failed for good: %r", group.prompt.uid, error)
        self._failures.count_failure(group.prompt.uid, error)
        self._failures.raise_if_too_many()

    async def requeue(self) -> None:
        """What is in flight will not be finished: its prompts are the next to be drawn, oldest first. Idempotent."""
        for _, group in sorted(self._in_flight.items(), reverse=True):
            group.saved.close()
            await self._dataloader.requeue(group.key)
            await self._staleness.on_rollout_rejected(group.admission)
        self._in_flight.clear()
