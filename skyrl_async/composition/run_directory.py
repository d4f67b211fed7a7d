"""What a run finds and keeps in its directory: a lock, its configuration, the checkpoint to resume, the record of an earlier run.

    <run>/run.lock, config.yaml
    <run>/set_aside_1/{metrics.jsonl, samples/, ...}    record of a run that began again, or went back to an earlier step
    <run>/checkpoints/set_aside_1/global_step_40                    a checkpoint after the step that a run went back to

No record of a run is lost, whatever is configured. The lock is the kernel's (flock) and lives as long as its process; the text in the
file is for people, and stays behind. Does not know what a checkpoint holds.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import yaml

from skyrl_async.checkpoint.checkpointer import Checkpointer, Usable, read_state
from skyrl_async.config.help import all_keys, flat
from skyrl_async.config.load import to_yaml
from skyrl_async.config.schema.run import SECRETS, Config
from skyrl_async.config.schema.trainer import ResumeMode
from skyrl_async.errors import CheckpointError, ConfigError
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.record.files import DIRECTORY as SAMPLES

logger = logging.getLogger(__name__)


LOCK = "run.lock"


_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def only_run_in(directory: Path) -> Iterator[None]:
    """Hold the directory while inside. Raises ``ConfigError`` naming process and host when another run holds it.

    Where the file system has no locks, warns that nothing protects the directory.
    """
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"trainer.output_dir={directory} is in use by another run ({file.read().strip() or 'which has just begun'}); "
                "wait until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            logger.warning("%s has no file locks (%s): see to it that no other run uses it", directory, error.strerror)
        with contextlib.suppress(OSError):  # a full disk is no reason to stop here
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
            file.flush()
        yield


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


_UNSAID = {"trainer.resume_mode", "trainer.resume_path", "trainer.output_dir", *SECRETS}
"""Keys that say how a run is continued rather than what it is, and secrets."""
_KEPT = "config_to_step_"


class RunConfigFile:
    """``config.yaml`` of a run directory.

    Args:
        run_dir: exists.
        config: checked.
        step: step of the checkpoint to resume, None for a new run: its configuration is written at once.
    """

    def __init__(self, run_dir: Path, config: Config, step: int | None) -> None:
        self._path = run_dir / "config.yaml"
        # As a comment: a derived bound must not contradict another schedule, which derives its own.
        self._text = f"# the staleness bound is {config.trainer.staleness_bound}\n{to_yaml(config)}"
        self._trains = not config.trainer.eval_only
        self._step = step
        if step is None or not self._path.exists():
            write_private(self._path, self._text)

    def changes(self) -> list[str]:
        """Return what differs from the run so far, as ``training.lr=0.0008 (was 0.0003)``; nothing where its file cannot be read."""
        return self._changes_since(self._path)

    def _changes_since(self, path: Path) -> list[str]:
        try:
            before = dict(flat(yaml.safe_load(path.read_text())))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):  # or no mapping
            return []
        now = dict(flat(yaml.safe_load(self._text)))
        compared = [key for key in now | before if key in now.keys() & before.keys() or _is_of_dictionary(key)]
        return [
            f"{key}={now.get(key)} (was {before.get(key)})"
            for key in compared
            if now.get(key) != before.get(key) and key not in _UNSAID
        ]

    def replace(self) -> None:
        """Replace the file after the run was resumed. The configuration that held up to its step is kept, named after the step.

        Those of steps that are done again are deleted: ``set_aside_records`` has copied them where the run goes back.
        """
        if self._step is None or not self._trains:
            return
        files = {path.stem.removeprefix(_KEPT): path for path in self._path.parent.glob(f"{_KEPT}*.yaml")}
        since = [files[step] for step in sorted(filter(str.isdecimal, files), key=int) if int(step) >= self._step]
        held, own = (since or [self._path])[0], self._path.with_name(f"{_KEPT}{self._step}.yaml")
        has_changed = bool(self._changes_since(held))
        if has_changed and held != own:
            write_private(own, held.read_text())
        arriving = self._path.with_name("config.yaml.new")
        write_private(arriving, self._text)
        arriving.replace(self._path)  # the file exists at every moment
        for path in since:
            if path != own or not has_changed:
                path.unlink()


def _is_of_dictionary(key: str) -> bool:
    """Whether ``key`` is in a dictionary of names that the user chose, where one run may have it and another not."""
    return any(known.is_open and key.startswith(f"{name}.") for name, known in all_keys().items())


_RECORD = ("metrics.jsonl", SAMPLES, "config.yaml", "tensorboard")
"""Files that a run writes before its end, beside checkpoints."""


def checkpoint_to_resume(config: Config, run_dir: Path) -> Usable | None:
    """Return the checkpoint to resume, None for a run that begins.

    Raises ``ConfigError`` when the directory holds a run that must not be continued this way, ``CheckpointError`` for damage.
    """
    trainer = config.trainer
    if trainer.resume_mode is ResumeMode.none:
        if (run_dir / "metrics.jsonl").exists() or _has_checkpoints(run_dir):
            raise ConfigError(
                f"trainer.output_dir={run_dir} already holds a run; choose another, or continue it with trainer.resume_mode=latest"
            )
        return None
    if trainer.resume_mode is ResumeMode.latest:
        checkpointer = _checkpointer(run_dir)
        with contextlib.suppress(OSError):
            checkpointer.tidy()
        if (newest := checkpointer.usable()) is not None:
            return newest
    if trainer.resume_path is None:
        _check_that_it_may_begin(config, run_dir)
        return None
    path = Path(trainer.resume_path).expanduser()
    given = Usable(path=path, state=read_state(path), refused=())
    if not _is_own(given, run_dir):
        _check_that_no_run_is_in(run_dir, given, is_evaluation=trainer.eval_only)
    return given


def set_aside_records(config: Config, run_dir: Path, start: Usable | None) -> str | None:
    """Set aside records that do not belong to the run that begins at ``start``; returns a sentence about it, None where there are none.

    Raises ``CheckpointError`` when files cannot be moved.
    """
    mode = config.trainer.resume_mode
    if config.trainer.eval_only or mode is ResumeMode.none:
        return None
    try:
        if start is None or not _is_own(start, run_dir):
            return _begin_again(run_dir)
        return _go_back(run_dir, start.state.step) if mode is ResumeMode.from_path else None
    except OSError as error:
        raise CheckpointError(f"what {run_dir} holds cannot be set aside: {error}") from error


def _check_that_it_may_begin(config: Config, run_dir: Path) -> None:
    """Raise ``ConfigError`` when a run without a checkpoint must not begin here."""
    missing = f"trainer.resume_mode=latest finds no checkpoint in {run_dir / 'checkpoints'}"
    export = run_dir / "policy"
    policy = f" and policy.path to {export}" if export.is_dir() else ""
    if config.trainer.eval_only:
        raise ConfigError(
            f"{missing}, and trainer.eval_only=true would evaluate the policy before training; set trainer.resume_mode=none, "
            f"trainer.output_dir to a new directory{policy or ' and policy.path to what is to be evaluated'}"
        )
    if _has_finished(run_dir):
        raise ConfigError(
            f"{missing} to continue the finished run there; set trainer.resume_mode=none, trainer.output_dir to a new directory{policy}"
        )


def _check_that_no_run_is_in(run_dir: Path, given: Usable, *, is_evaluation: bool) -> None:
    """Raise ``ConfigError`` when another run is in the directory; one that began with this checkpoint and wrote none may begin again."""
    if _has_checkpoints(run_dir) or _has_finished(run_dir) or (is_evaluation and _has_steps(run_dir)):
        raise ConfigError(
            f"trainer.output_dir={run_dir} already holds a run, and trainer.resume_path={given.path} is none of its checkpoints; choose "
            "another trainer.output_dir, or continue the run there with trainer.resume_mode=latest"
        )


def _begin_again(run_dir: Path) -> str | None:
    """Move the record of a run that ended before its first checkpoint."""
    if not _has_steps(run_dir):
        return None
    aside = run_dir / _free_name(run_dir)
    aside.mkdir()
    for name in _RECORD:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    return f"{run_dir} holds a run that was ended before its first checkpoint: it begins again, and its record so far is kept in {aside}"


def _go_back(run_dir: Path, step: int) -> str | None:
    """Set aside checkpoints and records after ``step``; None where ``step`` is the newest."""
    checkpointer, name = _checkpointer(run_dir), _free_name(run_dir)
    if not checkpointer.has_newer(step):
        return None
    aside = run_dir / name
    aside.mkdir()
    if (run_dir / "metrics.jsonl").exists():
        shutil.copyfile(run_dir / "metrics.jsonl", aside / "metrics.jsonl")
    for path in run_dir.glob("config*.yaml"):
        shutil.copy(path, aside)  # with its mode: it may hold keys
    if (run_dir / SAMPLES).exists():  # as links, because its files never change
        shutil.copytree(run_dir / SAMPLES, aside / SAMPLES, copy_function=_link_or_copy)
    moved = checkpointer.go_back(step, name)
    return (
        f"the run goes back to step {step}: {', '.join(path.name for path in moved)} and the record so far are kept in "
        f"{moved[0].parent} and {aside}"
    )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def _is_own(checkpoint: Usable, run_dir: Path) -> bool:
    """Whether it is a checkpoint of the run in the directory, and was not set aside."""
    own = run_dir / "checkpoints" / f"global_step_{checkpoint.state.step}"
    return checkpoint.path.resolve() == own.resolve()


def _has_checkpoints(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("global_step_*"))


def _has_steps(run_dir: Path) -> bool:
    try:
        return any(row["step"] > 0 for row in read_rows(run_dir / "metrics.jsonl"))
    except CheckpointError:
        return True  # damaged; kept all the same


def _has_finished(run_dir: Path) -> bool:
    return (run_dir / "summary.json").exists()


def _free_name(run_dir: Path) -> str:
    names = (f"set_aside_{number}" for number in itertools.count(1))
    return next(name for name in names if not any((d / name).exists() for d in (run_dir, run_dir / "checkpoints")))


def _checkpointer(run_dir: Path) -> Checkpointer:
    return Checkpointer(run_dir / "checkpoints", max_to_keep=0)
