"""Puts a run's state into checkpoints, and restores it.

Knows neither files nor when a checkpoint is due.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState, read_state, require_critic
from skyrl_async.errors import CheckpointError
from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.rollout.group_state import OpenGroup, RunningGroup, admission_of
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.shutdown import GRACE_S, ShutdownRequested
from skyrl_async.trainer.run import Run
from skyrl_async.training.protocol import Critic, Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class RunSaver:
    """Saves and restores the parts of one run."""

    run: Run
    """The parts, besides the policy."""
    policy: Policy
    """Its weights and its optimizer are a part of each checkpoint."""
    critic: Critic | None
    """The same of the critic; None: there is none."""
    checkpointer: Checkpointer | None
    """None writes nothing."""
    step_advantages: StepAdvantages
    """Holds the KL coefficient, where that follows a target, and what earlier samples of prompts earned."""
    newest: Path | None = field(default=None, init=False)
    """The checkpoint written or restored last."""
    step: int | None = field(default=None, init=False)
    """Its step."""
    _known: tuple[int, int, int] = field(default=(0, 0, 0), init=False)

    @property
    def num_failures(self) -> int:
        """Checkpoints that could not be written."""
        return self.checkpointer.num_failures if self.checkpointer is not None else 0

    async def restore(self, checkpoint: Path, evaluated_versions: Collection[int]) -> None:
        """Restore every part as it was when the checkpoint was taken. Raises ``CheckpointError``.

        Groups that no longer fit, because the mini-batch size or the staleness bound has changed, are drawn again. The newest of the
        ``evaluated_versions`` up to the checkpoint's counts as evaluated, though the checkpoint may be older than the evaluation.
        """
        reading = DaemonThreads("checkpoint")  # no exit waits for a disk that hangs
        state = await asyncio.get_running_loop().run_in_executor(reading, read_state, checkpoint)
        if state.step % (num_steps := self.run.config.trainer.steps_per_batch):
            raise CheckpointError(
                f"checkpoint {checkpoint} is of step {state.step}, inside of a batch of {num_steps} optimizer steps: resume with the "
                "trainer.train_batch_size and trainer.update_epochs_per_batch that wrote it"
            )
        if self.critic is not None:
            require_critic(checkpoint)
        await self.policy.load(checkpoint / "policy")
        if self.critic is not None:
            await self.critic.load(checkpoint / "critic")
        await self.run.dataloader.load_state_from_checkpoint(state.dataloader)
        self.run.recorder.totals = totals = RunTotals(**state.totals)
        known = (version for version in evaluated_versions if version <= state.step)
        totals.evaluated_version = max([totals.evaluated_version, *known])
        has_evaluated = totals.evaluated_version > 0 or totals.reward_before is not None
        self.run.recorder.record.restore(state.num_recorded, totals.evaluated_version if has_evaluated else -1)
        self.step_advantages.restore(state.kl_coef, state.prompt_rewards)
        self.run.dataloader.check_running([(group.epoch, group.uid) for group in state.running])
        admissions = await self.run.staleness.load_state_from_checkpoint(
            state.step,
            state.next_admission_index,
            [admission_of(group) for group in state.groups],
            running=[admission_of(group) for group in state.running],
            holds_bound=self.run.staleness_policy.bounds_groups,
        )
        restored = {admission.index for admission in admissions}
        running = [group for group in state.running if group.admission_index in restored]
        self.run.workers.restore(running, num_succeeded=totals.trained_groups + len(state.groups))
        for group in state.groups:
            if group.admission_index in restored:
                await self.run.workers.finished_groups.put(group)
        self.run.workers.finished_groups.restore(state.filtered_in_a_row)
        open_groups: tuple[OpenGroup, ...] = (*state.groups, *state.running)
        dropped = [group for group in open_groups if group.admission_index not in restored]
        for lost in sorted(dropped, key=lambda group: -group.admission_index):
            await self.run.dataloader.requeue((lost.epoch, lost.uid))
        num_dropped_tokens = sum(
            group.num_wasted_tokens if isinstance(group, Group) else group.num_sampled_tokens for group in dropped
        )
        totals.wasted_tokens += num_dropped_tokens
        self.newest, self.step = checkpoint, state.step
        self._known = self._progress(state.step, self.run.workers.running_groups())
        logger.info(
            "resumed %s: %d finished groups wait to be trained; %s; %d groups no longer fit and are drawn again (%d tokens lost)",
            *(checkpoint.name, len(restored) - len(running), _outlook(running), len(dropped), num_dropped_tokens),
        )

    async def write(self, *, unless_known: bool = False, on_taken: Callable[[], None] = lambda: None) -> None:
        """Write the state after the last optimizer step.

        It is taken in one step of the event loop, whatever else runs: tokens sampled later are sampled again when it is resumed. A
        full disk does not end the run.

        Args:
            unless_known: write nothing where the last checkpoint holds all there is.
            on_taken: called when the state is taken, before any of it is written.
        """
        if self.checkpointer is None:
            on_taken()
            return
        await self.collect_open_tokens()
        on_taken()
        self.run.recorder.count_generation()
        state = self._state()
        progress = self._progress(state.step, state.running)
        if unless_known and progress == self._known:
            return
        await self.run.recorder.flush()  # or a resumed run would lack rows and lines
        path = await self.checkpointer.try_write(self.policy, state, self.critic)
        if path is not None:
            self.newest, self.step, self._known = path, state.step, progress
            logger.info("wrote %s", path)

    async def collect_open_tokens(self) -> None:
        """Collect the tokens of open generations from the engines; once a shutdown is requested, only while they answer in time."""
        with suppress(ShutdownRequested):
            async with self.run.shutdown.interruptible(grace_s=GRACE_S):
                await self.run.workers.collect_open_tokens()

    def _state(self) -> TrainerState:
        groups = (*self.run.groups_in_step, *self.run.buffer.snapshot())
        return TrainerState(
            step=self.run.staleness.trained_version,
            next_admission_index=self.run.staleness.next_index,
            dataloader=self.run.dataloader.state_for_checkpoint(),
            groups=tuple(sorted(groups, key=lambda group: group.admission_index)),
            running=self.run.workers.running_groups(),
            totals=asdict(self.run.recorder.totals),
            kl_coef=self.step_advantages.kl_coef,
            prompt_rewards=self.step_advantages.prompt_rewards,
            num_recorded=self.run.recorder.record.num_rows,
            filtered_in_a_row=self.run.workers.finished_groups.filtered_in_a_row,
        )

    def _progress(self, step: int, running: Sequence[RunningGroup]) -> tuple[int, int, int]:
        """Steps, finished groups, and tokens of running groups: a checkpoint is worth writing when one of them has changed."""
        return step, self.run.workers.counts["groups"], sum(group.num_sampled_tokens for group in running)


def _outlook(running: Sequence[RunningGroup]) -> str:
    """What becomes of the samples of restored groups, for the log."""
    num_samples = sum(group.num_samples for group in running)
    num_kept = sum(group.num_kept for group in running)
    num_tokens = sum(sample.num_tokens for group in running for sample in group.samples.values() if sample.is_kept)
    num_lost = sum(group.num_sampled_tokens for group in running) - num_tokens
    return (
        f"of {num_samples} trajectories in {len(running)} running groups {num_kept} go on after {num_tokens} tokens, "
        f"{num_samples - num_kept} begin anew ({num_lost} tokens lost)"
    )
