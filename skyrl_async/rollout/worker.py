"""Turns prompts into finished groups: one task per group in flight, admitted by the staleness manager.

Prompts come from the dataloader, groups go into the buffer. Does not know when groups are trained, nor how a generator samples. A failed
rollout is retried, then counted; too many failures end the run with the last one.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.run import Config
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.errors import ENDS_RUN, in_one_line
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import OTHERS_FAILED, EndedGroup, Outcome, RecordsSamples
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.failed_samples import FailureWatch, RolloutResult
from skyrl_async.rollout.finished_group_filter import FinishedGroupFilter
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.group_state import (
    ResumeCounts,
    RunningGroup,
    SampleState,
    SampleStates,
    admission_of,
    sampling_to_json,
)
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.rollout.sampler import GenerationClient, TokenUsage, recording_tokens_to
from skyrl_async.rollout.staleness import STALENESS_POLICIES, Admission, _AsyncStalenessManager
from skyrl_async.runtime.progress import GroupProgress, RolloutStatus
from skyrl_async.runtime.stages import Lane, StageBoard
from skyrl_async.runtime.tasks import Turns
from skyrl_async.samples import samples_of
from skyrl_async.types import Group, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


OnFailure = Callable[[Exception], Awaitable[None]]
"""Called with what ends a run, before groups in flight are cancelled."""
_COUNTS = (
    *("groups", "trajectories", "tokens", "aborts", "failed_groups", "failed_samples"),
    *("requeued_groups", "requeued_tokens", "side_tokens", "cut_short_samples", "ended_samples", "lost_samples"),
    "failed_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupInFlight:
    """A group from its admission to its end."""

    admission: Admission
    key: tuple[int, str]
    """(epoch in which its prompt was drawn, uid)."""
    prompt: Prompt
    started: float
    """Seconds on the loop's clock."""
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    sample_states: SampleStates = field(default_factory=SampleStates)
    progress: GroupProgress = field(default_factory=GroupProgress)


@dataclass(kw_only=True, eq=False)
class GenerationWorkers:
    """Keeps as many groups in flight as the staleness manager admits."""

    dataloader: _AsyncDataloader
    """Source of prompts; records the state of each."""
    staleness: _AsyncStalenessManager
    """Admits groups."""
    buffer: GroupBuffer
    """Receives finished groups; closed when the data has ended."""
    generator: Generator
    """Generates a group."""
    client: GenerationClient
    """The inference client that the generator samples from."""
    config: Config
    """Checked."""
    trace: Trace
    """Gets one span per group."""
    board: StageBoard
    """Shows the stages dataloader, generate and rollout."""
    record: RecordsSamples
    """Takes groups that are not trained."""
    _resume_counts: ResumeCounts = field(default_factory=ResumeCounts, init=False)
    _in_flight: dict[int, _GroupInFlight] = field(default_factory=dict, init=False)
    _group_tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)
    """Accepts tasks; None before ``run``, and after its end or first failure."""
    _on_failure: OnFailure | None = field(default=None, init=False)
    _drawing: asyncio.Task[None] | None = field(default=None, init=False)
    """Draws prompts until the data has ended."""
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    abandon_reasons: deque[str] = field(default_factory=lambda: deque(maxlen=100), init=False)
    """Why the newest of the abandoned samples were, the newest last."""

    def __post_init__(self) -> None:
        settings = self.config.generator
        self._retrier = RolloutRetrier(self.generator, settings, self.client.deadlines)
        self._num_samples = settings.n_samples_per_prompt
        self._sampling = from_section(SamplingParams, settings.sampling)
        self._turns = Turns()
        self._failures = FailureWatch(settings.max_failed_fraction)
        self.finished_groups = FinishedGroupFilter(
            self.dataloader, self.staleness, self.buffer, self.config, self.record
        )

    @property
    def counts(self) -> dict[str, int]:
        """Totals so far: finished groups (trajectories, tokens, aborts, failed samples), failures, retries, requeued and filtered groups,
        abandoned tokens, and resumed samples."""
        return {
            **{name: self._counts[name] for name in _COUNTS},
            **self.finished_groups.counts,
            **asdict(self._resume_counts),
            "retries": self._retrier.num_retries,
            "abandoned_tokens": self.client.num_abandoned_tokens
            - sum(group.token_usage.num_cut_off_tokens for group in self._in_flight.values())
            + self._counts["requeued_tokens"]
            + self._counts["failed_tokens"]
            + self._retrier.num_wasted_tokens,
        }

    @property
    def failure_reasons(self) -> list[str]:
        """Why the newest failed groups failed, the newest last."""
        return list(self._failures.reasons)

    async def run(self, on_failure: OnFailure | None = None) -> None:
        """Consumes prompts, produces finished groups, waits for admission; unblocked by versions and ending groups.

        Returns after the data and the last group have ended, and closes the buffer. If groups may be requeued, it first waits until
        the trainer has taken all of them. After a cancellation or a failure the groups in flight keep their state for a checkpoint,
        until ``requeue``. Raises ``GenerationError`` if too many rollouts failed or too many groups were filtered; the other groups are
        cancelled once ``on_failure`` has returned.
        """
        self._on_failure = on_failure
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for restored in self._in_flight.values():
                    self._start(restored, self._tasks)
                self._draw()
                if STALENESS_POLICIES[self.config.trainer.staleness_policy.name].drops_groups:
                    await self._until_none_can_be_requeued()
        finally:
            self._tasks = None
        self._failures.raise_if_too_many(has_ended=True)
        self.finished_groups.raise_if_nothing_is_left()
        for name in ("dataloader", "generate", "rollout"):
            self.board.stage(name).finish()
        self.buffer.close()

    def restore(self, groups: Sequence[RunningGroup], *, num_succeeded: int) -> None:
        """Have ``run`` continue these groups of a checkpoint, in this order, before it draws prompts.

        Groups that were requested with another size or other sampling restart. ``num_succeeded``: groups that had not failed before.
        """
        self._failures.restore(num_succeeded)
        num_restarted = 0
        for group in groups:
            saved = group.samples
            if not group.has_settings(self._num_samples, self._sampling):
                saved = {index: SampleState(num_tokens=sample.num_tokens) for index, sample in saved.items()}
                num_restarted += 1
            key = group.epoch, group.uid
            self._in_flight[group.admission_index] = _GroupInFlight(
                admission=admission_of(group),
                key=key,
                prompt=self.dataloader.prompt_of(key),
                started=asyncio.get_running_loop().time() - group.generation_seconds,
                sample_states=SampleStates(saved, num_samples=self._num_samples, counts=self._resume_counts),
            )
        if num_restarted:
            logger.warning(
                "generator.n_samples_per_prompt or generator.sampling differ from the checkpoint's: its %d running groups begin anew",
                num_restarted,
            )

    def running_groups(self) -> tuple[RunningGroup, ...]:
        """The groups in flight, oldest admitted first, for a checkpoint."""
        now, sampling = asyncio.get_running_loop().time(), sampling_to_json(self._sampling)
        return tuple(
            RunningGroup(
                epoch=group.key[0],
                uid=group.prompt.uid,
                admission_index=index,
                scheduled_version=group.admission.scheduled_version,
                generation_seconds=now - group.started,
                num_samples=self._num_samples,
                sampling=sampling,
                samples=group.sample_states.snapshot(),
            )
            for index, group in sorted(self._in_flight.items())
        )

    async def collect_open_tokens(self) -> None:
        """Update open generations with all of their tokens; call this before ``running_groups``."""
        await self.client.collect_open_tokens()

    async def abort_and_requeue(self, is_dropped: Callable[[Admission], bool]) -> None:
        """Abort the groups in flight for which ``is_dropped`` is true, and requeue their prompts, the oldest first.

        Their sampled tokens are counted as requeued, with those that engines have not delivered yet. From the check to the end no
        ``await`` waits, so that none of the groups can finish meanwhile.
        """
        if any(is_dropped(group.admission) for group in self._in_flight.values()):
            await self.client.collect_open_tokens()
        dropped = [group for group in self._in_flight.values() if is_dropped(group.admission)]
        for group in dropped:
            if task := self._group_tasks.pop(group.admission.index, None):
                task.cancel()
            self._counts["requeued_tokens"] += group.token_usage.num_tokens
        await self._requeue(dropped)
        self._counts["requeued_groups"] += len(dropped)
        if dropped:
            self._draw()

    async def requeue_finished(self, group: Group) -> None:
        """Requeue the prompt of a group just taken from the buffer."""
        self._counts["requeued_groups"] += 1
        self._counts["requeued_tokens"] += group.num_wasted_tokens
        step = self.staleness.last_version + 1
        reason = "it became older than trainer.max_staleness_steps"
        self.record.add(
            EndedGroup(group=group.without_teacher_top(), outcome=Outcome.DROPPED, step=step, reason=reason)
        )
        await self.dataloader.requeue((group.epoch, group.uid))
        await self.staleness.on_rollout_filtered(admission_of(group))
        self._draw()

    def _draw(self) -> None:
        """Start groups, unless that goes on already: it ends with the data, and there may be prompts again after that."""
        if self._tasks is not None and (self._drawing is None or self._drawing.done()):
            self._drawing = self._tasks.create_task(self._start_groups(self._tasks), name="drawing")

    async def _until_none_can_be_requeued(self) -> None:
        """Wait until no group is in flight or in the buffer. Unblocked by groups that end or are taken."""
        while True:
            if busy := {task for task in (self._drawing, *self._group_tasks.values()) if task and not task.done()}:
                await asyncio.wait(busy)
            elif len(self.buffer):
                await self.buffer.emptied()
            else:
                return

    def statuses(self) -> list[list[RolloutStatus]]:
        """Activity of each group in flight, the oldest first."""
        return self._retrier.statuses()

    async def generate(
        self,
        admission: Admission,
        prompt: Prompt,
        states: SampleStates | None = None,
        progress: GroupProgress | None = None,
    ) -> RolloutResult:
        """Generate one group. Raises the error of its last try."""
        request = GroupRequest(
            prompt=prompt,
            num_samples=self._num_samples,
            sampling=self._sampling,
            seed=random.Random(f"{self.config.trainer.seed}-{admission.index}").getrandbits(31),
            priority=admission.index,
            sample_states=states or SampleStates(),
            progress=progress or GroupProgress(),
        )
        with self.trace.span("group", track="generation", uid=prompt.uid, version=admission.scheduled_version):
            return await self._retrier.run_rollout(request)

    async def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes prompts, starts a group for each, waits for admission; returns when the data has ended.

        Admissions bound the number of groups.
        """
        try:
            with self.board.stage("dataloader").lane() as lane:
                while True:
                    await self._turns.next()
                    if not await self._start_group(lane, tasks):
                        return
        except Exception as error:
            if await self._stop_all(error):
                raise

    async def _start_group(self, lane: Lane, tasks: asyncio.TaskGroup) -> bool:
        """Start the next group once it is admitted; False when the data has ended."""
        lane.wait_for_input()
        lane.process("prompt")
        lane.wait_for_output()
        admission = await self.staleness.acquire_submission_slot()
        drawn = await self.dataloader.get_next_non_consumed_data()
        if drawn is None:
            await self.staleness.on_rollout_rejected(admission)
            return False
        key, prompt = drawn
        lane.process(prompt.uid)
        started = asyncio.get_running_loop().time()
        group = _GroupInFlight(admission=admission, key=key, prompt=prompt, started=started)
        self._in_flight[admission.index] = group
        self._start(group, tasks)
        return True

    def _start(self, group: _GroupInFlight, tasks: asyncio.TaskGroup) -> None:
        index = group.admission.index
        self._group_tasks[index] = tasks.create_task(self._run_group(group), name=f"group-{index}-{group.prompt.uid}")

    async def _run_group(self, group: _GroupInFlight) -> None:
        """Generate one group, and record its success or failure; a cancelled group stays in flight."""
        board = self.board
        try:
            with board.stage("generate").lane() as generate, board.stage("rollout").lane() as rollout:
                try:
                    await self._pass_through(group, generate, rollout)
                except Exception as error:  # within the lanes: once a stage has failed, groups that have yet to begin would fail of that
                    if await self._stop_all(error):
                        raise
        finally:
            self._group_tasks.pop(group.admission.index, None)

    async def _pass_through(self, group: _GroupInFlight, generate: Lane, rollout: Lane) -> None:
        """Bring a group through both stages, whose items are the groups that did not fail."""
        uid = group.prompt.uid
        rollout.wait_for_input()
        await self._turns.next()
        try:
            with generate.processing(uid), recording_tokens_to(group.token_usage):
                result = await self.generate(group.admission, group.prompt, group.sample_states, group.progress)
        except ENDS_RUN:
            raise
        except Exception as error:
            await self._fail(group, error)
        else:
            with rollout.processing(uid):
                await self._finish(group, result)

    async def _stop_all(self, error: Exception) -> bool:
        """Whether this is the first failure, which ends every group when it is raised, and lets none begin.

        A later one is not raised: it would cut ``on_failure`` short.
        """
        if self._tasks is None:
            logger.warning("a later failure: %r", error)
            return False
        self._tasks = None
        if self._drawing is not None and self._drawing is not asyncio.current_task():
            self._drawing.cancel()
        if self._on_failure is not None:
            await self._on_failure(error)
        return True

    def _remove(self, group: _GroupInFlight) -> None:
        """The group is no longer in flight."""
        del self._in_flight[group.admission.index]
        group.sample_states.close()

    async def _finish(self, group: _GroupInFlight, result: RolloutResult) -> None:
        self._remove(group)
        await self.dataloader.mark_finished_uid(group.key)
        await self.staleness.on_rollout_accepted(group.admission)
        self._count(result)
        self._count_failed_tokens(group, result.trajectories)
        uid = group.prompt.uid
        await self.finished_groups.put(_ended(group, result.trajectories))
        num_failed, num_samples = result.num_failed, self._num_samples
        failure = result.failure if num_failed else None
        if failure:
            present = (row.sample_index for row in result.trajectories)
            self._record_failed(group, {index: () for index in present if index is not None}, failure)
            logger.error(
                "rollout of %s goes on without %d of its %d samples: %r", uid, num_failed, num_samples, failure
            )
        self._failures.count(uid, failure, share=num_failed / num_samples)

    def _count(self, result: RolloutResult) -> None:
        counts = self._counts
        counts["groups"] += 1
        counts["failed_samples"] += result.num_failed
        counts["ended_samples"] += self._num_samples
        counts["lost_samples"] += result.num_failed
        for row in result.trajectories:
            counts["tokens"] += row.num_sampled_tokens
            counts["aborts"] += row.num_aborts
        for sample in samples_of(result.trajectories):
            counts["trajectories"] += sample.is_live
            if sample.is_abandoned and (reason := sample.rows[0].logs.get("failure")):
                self.abandon_reasons.append(reason)
            counts["side_tokens"] += int(sample.rows[0].metrics.get("agent/side_tokens", 0))
            counts["cut_short_samples"] += int(sample.rows[0].metrics.get("agent/cut_short", 0))

    def _count_failed_tokens(self, group: _GroupInFlight, rows: Sequence[Trajectory]) -> None:
        """Count what was sampled of an ended group and is in none of its finished samples: they failed, or were abandoned."""
        num_sampled = max(group.token_usage.num_tokens, sum(row.num_turn_tokens for row in rows))
        self._counts["failed_tokens"] += num_sampled - sum(row.num_turn_tokens for row in rows if not row.is_abandoned)

    async def _fail(self, group: _GroupInFlight, error: Exception) -> None:
        self._remove(group)
        finished = group.sample_states.finished
        self._record_failed(group, finished, error)
        self._count_failed_tokens(group, [row for rows in finished.values() for row in rows])
        await self.dataloader.mark_failed_uid(group.key)
        await self.staleness.on_rollout_rejected(group.admission)
        self.buffer.notify()
        self._counts.update(failed_groups=1, ended_samples=self._num_samples, lost_samples=self._num_samples)
        logger.error("rollout of %s failed for good: %s", group.prompt.uid, in_one_line(error))
        self._failures.count(group.prompt.uid, error)

    def _record_failed(
        self, group: _GroupInFlight, finished: Mapping[int, Sequence[Trajectory]], error: Exception
    ) -> None:
        """Record the samples that failed, as far as they had come, and the rows of ``finished`` ones of a group that cannot be trained."""
        rows = [replace(row, sample_index=index) for index, rows in finished.items() for row in rows]
        lost = {i: rows for i, rows in group.sample_states.failed.items() if i not in finished and rows}
        rows += [row for rows_of_one in lost.values() for row in rows_of_one]
        self.record.add(
            EndedGroup(
                group=_ended(group, tuple(rows)),
                outcome=Outcome.FAILED,
                step=self.staleness.last_version + 1,
                reason=OTHERS_FAILED,
                failed=[index for index in range(self._num_samples) if index not in finished and index not in lost],
                failure=error,
            )
        )

    async def requeue(self) -> None:
        """Drop the groups in flight; their prompts are the next to be drawn, the oldest first. Idempotent."""
        await self._requeue(list(self._in_flight.values()))

    async def _requeue(self, groups: Sequence[_GroupInFlight]) -> None:
        for group in sorted(groups, key=lambda g: -g.admission.index):
            self._remove(group)
            await self.dataloader.requeue(group.key)
            await self.staleness.on_rollout_rejected(group.admission)


def _ended(group: _GroupInFlight, trajectories: tuple[Trajectory, ...]) -> Group:
    """The group with the rows of its finished samples."""
    epoch, uid = group.key
    return Group(
        uid=uid,
        epoch=epoch,
        admission_index=group.admission.index,
        scheduled_version=group.admission.scheduled_version,
        trajectories=trajectories,
        generation_seconds=asyncio.get_running_loop().time() - group.started,
        work=group.progress.work,
    )
