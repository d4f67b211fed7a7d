"""Writes and reads a run's checkpoints: complete or not there at all (contract 7).

    <run>/checkpoints/global_step_40/{policy/, critic/, trainer_state.json, groups.json, running_groups.json,
                                      columns.arrow, manifest.json}
    <run>/checkpoints/latest_ckpt_global_step.txt        written last

A directory appears by one rename, after everything in it was synced to disk. A kill at any moment leaves every checkpoint that was
there: a checkpoint that is written again is moved aside until its successor is in place, and moved back by the next reader otherwise.
Does not know what the state means.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from skyrl_async.checkpoint.columns_file import ColumnsWriter, read_columns, with_columns
from skyrl_async.checkpoint.files import read_json, verify, write_json, write_json_list, write_manifest
from skyrl_async.columns import fields_of
from skyrl_async.errors import CheckpointError
from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.rollout.group_state import RunningGroup, from_json, group_to_json, running_to_json
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.training.protocol import Critic, Policy
from skyrl_async.types import Group
from skyrl_async.weights.formats import sync

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 7
LATEST = "latest_ckpt_global_step.txt"
_COLUMNS = "columns.arrow"
"""What has one value per token in ``groups.json`` and ``running_groups.json``."""
_FILES = ("groups", "running")
"""Fields of the state that have their own file."""
_PREFIX = "global_step_"
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the trainer needs to continue."""

    step: int
    """Completed optimizer steps."""
    next_admission_index: int
    """Groups admitted so far."""
    dataloader: dict[str, Any]
    """State of the dataloader and its ledger."""
    totals: dict[str, Any]
    """Totals that the summary reports over the whole run."""
    groups: tuple[Group, ...]
    """Finished groups that are not trained yet, oldest admitted first."""
    running: tuple[RunningGroup, ...] = ()
    """Admitted groups that are not finished, oldest first."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty in the reward at the next step; None if none follows a target."""
    prompt_rewards: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Uid -> sum of what its earlier samples earned and their number, both decayed; empty if no baseline is made of them."""
    num_recorded: int = 0
    """Rows of the record of samples."""
    filtered_in_a_row: dict[str, int] = field(default_factory=dict)
    """Consecutive groups filtered for equal rewards, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """A checkpoint that can be resumed."""

    path: Path
    state: TrainerState
    refused: tuple[str, ...]
    """What is wrong with each newer checkpoint that was passed over."""


@dataclass(eq=False)
class Checkpointer:
    """The checkpoints of one run."""

    directory: Path
    """``<run>/checkpoints``."""
    max_to_keep: int
    """Older checkpoints are deleted; 0 keeps all."""
    on_written: Callable[[Path], None] = field(default=lambda checkpoint: None, kw_only=True)
    """Called with each new checkpoint, before older ones are deleted."""
    threads: Executor | None = field(default=None, kw_only=True)
    """Work on the files; None: daemon threads, because a disk may hang and the exit must not wait for it."""
    num_failures: int = field(default=0, init=False)
    failure: CheckpointError | None = field(default=None, init=False)
    """Why the last checkpoint was not written; None when it was."""
    _files_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held by the thread that works on the files: one that a cancellation has left behind ends first."""
    _begun: set[Path] = field(default_factory=set, init=False)
    """Partial checkpoints that a policy may still be writing into, also after a cancellation."""

    def __post_init__(self) -> None:
        self.threads = self.threads or DaemonThreads("checkpoint")

    async def try_write(self, policy: Policy, state: TrainerState, critic: Critic | None = None) -> Path | None:
        """Call ``write``; when it fails, log and count the failure and return None: the run continues without the checkpoint."""
        try:
            path = await self.write(policy, state, critic)
        except CheckpointError as error:
            self.num_failures += 1
            self.failure = error
            logger.warning("%s; earlier checkpoints stay", error)
            return None
        self.failure = None
        return path

    async def write(self, policy: Policy, state: TrainerState, critic: Critic | None = None) -> Path:
        """Write a checkpoint, move it into place, point ``latest`` at it, and delete older ones.

        Files are written and synced in a thread. Raises ``CheckpointError`` when that fails (a full disk, say), and what the policy or
        the critic raises: no part of the checkpoint is left, and earlier ones stay.
        """
        partial = self.directory / f"{_PARTIAL}{_PREFIX}{state.step}-{uuid.uuid4().hex[:8]}"
        is_abandoned = threading.Event()
        try:
            await self._in_thread(lambda: self._begin(partial))
            await policy.save(partial / "policy")
            if critic is not None:
                await critic.save(partial / "critic")
            final = await self._in_thread(lambda: self._complete(partial, state, is_abandoned))
        except Exception as error:
            await self._in_thread(lambda: self._discard(partial))
            if not isinstance(error, OSError | CheckpointError):
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {self.directory}: {reason}"
            ) from error
        except asyncio.CancelledError:
            is_abandoned.set()  # threads and the policy continue: the next write, or run, removes their files
            raise
        self.on_written(final)
        await self._in_thread(lambda: self._delete_old(state.step))
        return final

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def locked_work() -> T:
            with self._files_lock:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self.threads, locked_work)

    def _begin(self, partial: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        sync(self.directory.parent)
        self.tidy()
        self._begun.add(partial)
        partial.mkdir()

    def _complete(self, partial: Path, state: TrainerState, is_abandoned: threading.Event) -> Path:
        def check() -> None:
            if is_abandoned.is_set():
                raise CheckpointError("it was abandoned")

        # A policy saves one at a time: now that it has saved ``partial``, it writes into no earlier one.
        for left in self._begun - {partial}:
            shutil.rmtree(left, ignore_errors=True)
        self._begun = {partial}
        fields = {name: value for name, value in fields_of(state).items() if name not in _FILES}
        write_json(partial / "trainer_state.json", {"format": FORMAT, **fields})
        with ColumnsWriter(partial / _COLUMNS) as columns:
            write_json_list(partial / "groups.json", map(group_to_json, state.groups), columns)
            write_json_list(partial / "running_groups.json", map(running_to_json, state.running), columns)
        write_manifest(partial, check=check)
        check()
        pointer = self._prepare_pointer(state.step)  # everything that needs disk space comes before the renames
        final = self._move_into_place(partial, self._path(state.step))
        os.replace(pointer, self.directory / LATEST)
        sync(self.directory)
        return final

    def _discard(self, partial: Path) -> None:
        """Remove a failed checkpoint, and restore the one that it was to replace."""
        self._begun.discard(partial)
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._pointer_in_work.unlink(missing_ok=True)
            self._restore_replaced()

    def usable(self) -> Usable | None:
        """Return the newest undamaged checkpoint, None where there are no checkpoints.

        A damaged checkpoint is passed over for an older one. Raises ``CheckpointError``, naming all, when every one is damaged.
        """
        self._restore_replaced()
        refused = []
        for path in self._candidates():
            if not path.is_dir():
                refused.append(f"{self.directory / LATEST} names {path.name}, which is not there")
                continue
            try:
                return Usable(path=path, state=read_state(path), refused=tuple(refused))
            except CheckpointError as error:
                refused.append(str(error))
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used: {'; '.join(refused)}; start anew with another "
                "trainer.output_dir"
            )
        return None

    def has_newer(self, step: int) -> bool:
        """Whether there are checkpoints of later steps."""
        return any(other > step for other in self._steps())

    def go_back(self, step: int, aside: str) -> list[Path]:
        """Make ``step`` the newest checkpoint: move later ones into the folder ``aside``, and return their new paths.

        After a kill on the way, the run resumes from one of them or from ``step``.
        """
        self.tidy()
        folder = self.directory / aside
        folder.mkdir(exist_ok=True)
        later = [self._path(other) for other in reversed(self._steps()) if other > step]
        moved = [path.rename(folder / path.name) for path in later]
        os.replace(self._prepare_pointer(step), self.directory / LATEST)
        sync(self.directory)
        return moved

    def _candidates(self) -> list[Path]:
        """Return the paths to try in order: the one that ``latest`` names, then the others, newest first."""
        paths = [self._path(step) for step in reversed(self._steps())]
        pointer = self.directory / LATEST
        if not pointer.exists():
            return paths
        pointed_at = self.directory / f"{_PREFIX}{pointer.read_text(errors='replace').strip()}"
        return [pointed_at, *(path for path in paths if path != pointed_at)]

    def _path(self, step: int) -> Path:
        return self.directory / f"{_PREFIX}{step}"

    def _steps(self) -> list[int]:
        """Steps of the existing checkpoints, ascending."""
        return list(checkpoints_in(self.directory))

    def _move_into_place(self, partial: Path, final: Path) -> Path:
        """Rename to the final name; an existing checkpoint of that name is moved aside first and deleted after."""
        replaced = self.directory / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        self._begun.discard(partial)
        sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _restore_replaced(self) -> None:
        """Move back checkpoints whose successor was not moved into place."""
        for replaced in self.directory.glob(f"{_REPLACED}*"):
            final = self.directory / replaced.name.removeprefix(_REPLACED)
            if not final.exists():
                replaced.rename(final)

    def tidy(self) -> None:
        """Remove partial checkpoints of a killed run; not those that are still being written."""
        self._restore_replaced()
        self._pointer_in_work.unlink(missing_ok=True)
        for pattern in (f"{_PARTIAL}{_PREFIX}*", f"{_REPLACED}*"):
            for left in self.directory.glob(pattern):
                if left not in self._begun:
                    shutil.rmtree(left)

    @property
    def _pointer_in_work(self) -> Path:
        return self.directory / f"{_PARTIAL}{LATEST}"

    def _prepare_pointer(self, step: int) -> Path:
        self._pointer_in_work.write_text(str(step))
        sync(self._pointer_in_work)
        return self._pointer_in_work

    def _delete_old(self, newest: int) -> None:
        if not self.max_to_keep:
            return
        try:
            for step in [s for s in self._steps() if s <= newest][: -self.max_to_keep]:
                doomed = self._path(step)
                shutil.rmtree(doomed.rename(doomed.with_name(f"{_PARTIAL}{doomed.name}")))
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self.directory, error)


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Step -> path of the checkpoints in a run's ``checkpoints``, ascending."""
    steps = {path.name.removeprefix(_PREFIX): path for path in directory.glob(f"{_PREFIX}*")}
    return {int(step): steps[step] for step in sorted(filter(str.isdigit, steps), key=int)}


def require_critic(path: Path) -> None:
    """Raise ``CheckpointError`` for a checkpoint of a run without a critic."""
    if not (path / "critic").is_dir():
        raise CheckpointError(
            f"checkpoint {path} has no critic, and this run's trainer.algorithm.advantage_estimator needs one: resume with the estimator "
            "that wrote it, or begin anew from its policy (policy.path)"
        )


def read_state(path: Path) -> TrainerState:
    """Read a checkpoint's trainer state, after verifying every file.

    Raises ``CheckpointError`` naming what is missing, unknown or different, or a format other than this one.
    """
    fields = _fields_of_this_format(path)
    verify(path)
    state: TrainerState = _as(TrainerState, path, "trainer_state.json", {**fields, "groups": [], "running": []})
    _as(RunTotals, path, "trainer_state.json", state.totals, "totals")  # refused before anything boots
    columns = read_columns(path / _COLUMNS)
    groups = _as(tuple[Group, ...], path, "groups.json", read_json(path, "groups.json"), columns=columns)
    file = "running_groups.json"
    running = _as(tuple[RunningGroup, ...], path, file, read_json(path, file), columns=columns)
    return replace(state, groups=groups, running=running)


def _as(kind: Any, path: Path, file: str, saved: Any, name: str = "", columns: Sequence[NDArray[Any]] = ()) -> Any:
    try:
        return from_json(kind, with_columns(saved, columns), name)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: in {file} {error}; resume from another one, or with the version of skyrl_async that "
            "wrote it"
        ) from error


def _fields_of_this_format(path: Path) -> dict[str, Any]:
    """Read the format before the manifest: another format may list its files otherwise."""
    try:
        fields = _as(dict[str, Any], path, "trainer_state.json", read_json(path, "trainer_state.json"))
    except CheckpointError:
        verify(path)
        raise
    if (found := fields.pop("format", None)) != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {found}, expected {FORMAT}: it was written by another version of skyrl_async"
        )
    return fields
