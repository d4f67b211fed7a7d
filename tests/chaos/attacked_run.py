"""A real run as a process, with the processes it consists of by role, and what it has got done.

Flows in: overrides. Flows out: processes to attack, progress, how it ended. Does not know what is done to it.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from skyrl_async.composition.publishing import shared_memory
from tests.chaos import environment
from tests.chaos.audit import trained_groups
from tests.patience import PATIENCE_S
from tests.terminal import AS_IN_A_TERMINAL

REPOSITORY = Path(__file__).parents[2]
_MARK = "AGENT_OF_ATTACKED_RUN"
"""A name that a run hands down to its agents."""
_POLL_S = 0.2
_INTERRUPTED = 128 + signal.SIGINT
_SHUTDOWN_TIMEOUT_S = 60.0
"""The default of ``trainer.shutdown_timeout_s``."""


class Role(StrEnum):
    """What a process of a run does."""

    trainer = "trainer"
    engine = "engine"
    worker = "training worker"
    """Of the policy or the critic."""
    server = "server"
    environment = "environment"


_TITLES = {Role.engine: "ray::EngineActor", Role.worker: "ray::RankActor", Role.server: "ray::EndpointServer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What Ctrl-C left of a run."""

    exit_code: int | None
    """None where it did not end in time, and was killed."""
    seconds: float
    processes_left: tuple[str, ...]
    """Command lines."""
    shared_memory_left: tuple[str, ...]
    """Names of directories."""

    def problems(self) -> dict[str, int]:
        """What is not as it must be."""
        counts = {
            "wrong_exits": int(self.exit_code != _INTERRUPTED),
            "processes_left": len(self.processes_left),
            "shared_memory_left": len(self.shared_memory_left),
        }
        return {name: count for name, count in counts.items() if count}


class AttackedRun:
    """``python -m skyrl_async.main ...``, started again as often as needed in one run directory."""

    def __init__(self, overrides: Sequence[str], run_dir: Path) -> None:
        self._overrides = list(overrides)
        self._run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes]
        self._ids: list[int] = []
        """Of the processes that it was."""
        self.output_path = run_dir.parent / "output.log"

    def start(self, *more: str) -> None:
        """Start it, or take it up where the last checkpoint is."""
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*AS_IN_A_TERMINAL, sys.executable, "-m", "skyrl_async.main", *self._overrides, *more],
                cwd=self._run_dir.parent,
                env=os.environ | {_MARK: self._mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._ids.append(self._process.pid)

    def resume(self) -> None:
        """Take it up again."""
        self.start("trainer.resume_mode=latest")

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def step(self) -> int:
        """Optimizer steps on record."""
        groups = trained_groups(self._run_dir)
        return int(groups[-1]["step"]) if groups else 0

    def family(self) -> list[psutil.Process]:
        """Every process alive that descends from it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def find(self, role: Role, rng: random.Random) -> psutil.Process | None:
        """One of the processes of a role; None where there is none now."""
        if role is Role.trainer:
            return psutil.Process(self._process.pid)
        found = sorted((p for p in self.family() if _is_of(p, role)), key=lambda p: int(p.pid))
        return rng.choice(found) if found else None

    def wait(self, is_reached: Callable[[], bool], timeout_s: float) -> bool:
        """Whether that came true before the time was over or the run ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.exit_code is None:
            if is_reached():
                return True
            time.sleep(_POLL_S)
        return is_reached()

    def wait_until_gone(self, timeout_s: float) -> list[str]:
        """Wait for the end of every process; the command lines of those that were left, now killed."""
        _, left = psutil.wait_procs(self.family(), timeout=timeout_s)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:100])
                process.kill()
        return names

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def ending(self) -> Ending:
        """Wait for the end of an interrupted run, and see what is left; of processes, nothing is afterwards."""
        started = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_TIMEOUT_S + PATIENCE_S)
        exit_code, seconds = self.exit_code, time.monotonic() - started
        processes = self.wait_until_gone(PATIENCE_S)
        directories = [path.name for pid in self._ids for path in shared_memory().glob(f"skyrl_async-{pid}-*")]
        return Ending(
            exit_code=exit_code,
            seconds=seconds,
            processes_left=tuple(processes),
            shared_memory_left=tuple(directories),
        )

    def close(self) -> None:
        """Leave nothing running."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)


def _is_of(process: psutil.Process, role: Role) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        if role is Role.environment:
            return environment.NAME in words
        return bool(words) and words[0].startswith(_TITLES[role])
    return False
