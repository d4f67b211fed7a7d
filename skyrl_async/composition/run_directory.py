"""What a run goes on from, and what becomes of the record of another one in its directory.

    <run>/set_aside_1/{metrics.jsonl, trained_groups.jsonl, ...}    of what was begun again, or went back to an earlier step
    <run>/checkpoints/set_aside_1/global_step_40                    of what went back

Flows in: the configuration, and a run's directory. Flows out: the checkpoint to resume, or a refusal. No record of a run is lost by
it, whatever is asked for. Does not know what a checkpoint holds.
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
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from skyrl_async.checkpoint.checkpointer import Checkpointer, Usable, read_state
from skyrl_async.config.load import to_yaml
from skyrl_async.config.schema.run import Config, ResumeMode
from skyrl_async.errors import CheckpointError, ConfigError
from skyrl_async.metrics.tracker import read_rows

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
        _write(
            file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        yield


def _write(handle: int, text: str) -> None:
    """A full disk keeps no run from its directory."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


_UNSAID = {"trainer.resume_mode", "trainer.resume_path", "trainer.output_dir", "server.api_key"}
"""How a run is continued, not what it is; and a secret."""


class RunConfigFile:
    """``config.yaml`` of a run directory.

    Args:
        run_dir: exists.
        config: checked.
        step: of the checkpoint that the run goes on from, None for a new run: its configuration is written at once.
    """

    def __init__(self, run_dir: Path, config: Config, step: int | None) -> None:
        self._path = run_dir / "config.yaml"
        # As a remark: a bound that nobody set must not stand against another schedule, which has its own.
        self._text = f"# the staleness bound is {config.trainer.staleness_bound}\n{to_yaml(config)}"
        self._is_of_the_run = not config.trainer.eval_only
        self._step = step
        if step is None or not self._path.exists():
            write_private(self._path, self._text)

    def changes(self) -> list[str]:
        """What differs from the run so far, as ``training.lr=0.0008 (was 0.0003)``; nothing where its configuration cannot be read."""
        try:
            before = dict(_values(yaml.safe_load(self._path.read_text())))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return []
        now = dict(_values(yaml.safe_load(self._text)))
        return [
            f"{key}={value} (was {before[key]})"
            for key, value in now.items()
            if key in before and value != before[key] and key not in _UNSAID
        ]

    def replace(self) -> None:
        """The run was taken up: from now on this is its configuration. The one before stays, named by the step up to which it held."""
        if self._step is None or not self._is_of_the_run:
            return
        if self.changes():
            write_private(self._path.with_name(f"config_to_step_{self._step}.yaml"), self._path.read_text())
        arriving = self._path.with_name("config.yaml.new")
        write_private(arriving, self._text)
        arriving.replace(self._path)  # at no moment there is none


def _values(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _values(value, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, tree


_LOGS = ("metrics.jsonl", "trained_groups.jsonl")
_RECORD = (*_LOGS, "config.yaml", "tensorboard")
"""What a run leaves before its end, beside checkpoints."""


def checkpoint_to_resume(config: Config, run_dir: Path) -> Usable | None:
    """Return what the run goes on from, None for one that begins.

    Raises ``ConfigError`` when a run is in the directory that is not to be continued so, ``CheckpointError`` for damage.
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
        with suppress(OSError):
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
    """Set aside what does not belong to the run that begins at ``start``; returns a sentence about it, None where there is nothing.

    Raises ``CheckpointError`` where files cannot be moved.
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
    """There is no checkpoint."""
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
    """A checkpoint of another run is resumed; one that was begun with it and wrote none of its own may be begun again."""
    if _has_checkpoints(run_dir) or _has_finished(run_dir) or (is_evaluation and _has_steps(run_dir)):
        raise ConfigError(
            f"trainer.output_dir={run_dir} already holds a run, and trainer.resume_path={given.path} is none of its checkpoints; choose "
            "another trainer.output_dir, or continue the run there with trainer.resume_mode=latest"
        )


def _begin_again(run_dir: Path) -> str | None:
    """Move the record of a run that was ended before its first checkpoint."""
    if not _has_steps(run_dir):
        return None
    aside = run_dir / _free_name(run_dir)
    aside.mkdir()
    for name in _RECORD:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    return f"{run_dir} holds a run that was ended before its first checkpoint: it begins again, and its record so far is kept in {aside}"


def _go_back(run_dir: Path, step: int) -> str | None:
    """Keep what comes after ``step``, where that is not the newest checkpoint."""
    checkpointer, name = _checkpointer(run_dir), _free_name(run_dir)
    if not checkpointer.has_newer(step):
        return None
    aside = run_dir / name
    aside.mkdir()
    for log in _LOGS:
        if (run_dir / log).exists():
            shutil.copyfile(run_dir / log, aside / log)
    moved = checkpointer.go_back(step, name)
    return (
        f"the run goes back to step {step}: {', '.join(path.name for path in moved)} and the record so far are kept in "
        f"{moved[0].parent} and {aside}"
    )


def _is_own(checkpoint: Usable, run_dir: Path) -> bool:
    """Whether it is one of the run's in the directory; what was set aside there is of another course of it."""
    own = run_dir / "checkpoints" / f"global_step_{checkpoint.state.step}"
    return checkpoint.path.resolve() == own.resolve()


def _has_checkpoints(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("global_step_*"))


def _has_steps(run_dir: Path) -> bool:
    try:
        return any(row["step"] > 0 for row in read_rows(run_dir / "metrics.jsonl"))
    except CheckpointError:
        return True  # damaged; it is kept all the same


def _has_finished(run_dir: Path) -> bool:
    return (run_dir / "summary.json").exists()


def _free_name(run_dir: Path) -> str:
    names = (f"set_aside_{number}" for number in itertools.count(1))
    return next(name for name in names if not any((d / name).exists() for d in (run_dir, run_dir / "checkpoints")))


def _checkpointer(run_dir: Path) -> Checkpointer:
    return Checkpointer(run_dir / "checkpoints", max_to_keep=0)
