"""Runs an untrusted program in a process that can do nothing but compute, and says how it ended.

A call blocks for as long as the program runs, never longer than its deadline: call it in a thread. However the program ends, its
process is gone and its directory deleted afterwards. ``confinement`` lists what it cannot do.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.rewards import confinement

logger = logging.getLogger(__name__)

_PROGRAM = "program.py"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_REASON_CHARACTERS = 200
SETUP_S = 60.0
"""Longest time until a process has confined itself; the program's own time begins then."""

_CALLER = """
import json, os, sys, types
given = json.load(sys.stdin)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
program = sys.modules["program"] = types.ModuleType("program")
names = vars(program)
exec(compile(given["source"], "program.py", "exec"), names)
solution, name = names.get("Solution"), given["function"]
function = getattr(solution() if hasattr(solution, name) else program, name)
def plain(found):
    return found.tolist() if hasattr(found, "tolist") else json.JSONEncoder().default(found)
json.dump([function(*arguments) for arguments in given["calls"]], answers, default=plain)
answers.close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run of a program."""

    cpu_s: int = 5
    """Seconds of CPU time, of all its threads together."""
    wall_s: float = 15.0
    """Seconds until it is killed, however little it computes; not counting the start of its process."""
    memory_mb: int = 512
    """Address space, MiB."""
    output_kb: int = 256
    """Most of standard output and of standard error, KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    output: str
    """Standard output, as far as it was written."""
    error: str
    """Standard error, as far as it was written."""
    failure: str | None
    """Why it did not end by itself with exit code 0; None where it did."""


def require_sandbox() -> None:
    """Raise ``ConfigError`` where programs cannot be confined."""
    if not confinement.is_supported():
        raise ConfigError("programs of a policy are run on Linux on x86_64 or aarch64 only; use another env_class here")


def run_program(source: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run ``source`` as a Python program.

    Args:
        source: its text. It sees the packages of this interpreter.
        stdin: what it reads.
        limits: what it may use; None: the defaults.

    Raises:
        ConfigError: this machine cannot confine programs.
        GenerationError: the sandbox could not be set up, which is no fault of the program's.
    """
    require_sandbox()
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as directory:
        return _run_in(Path(directory), source, stdin, limits)


def call_function(
    source: str, function: str, calls: Sequence[Sequence[Any]], *, limits: Limits | None = None
) -> tuple[Outcome, list[Any] | None]:
    """Define what ``source`` defines and call ``function`` (or that method of its class ``Solution``) with each of ``calls``.

    The process is told arguments alone, so that it can give right results only by computing them.

    Args:
        calls: positional arguments of each call, as JSON.

    Returns:
        How it ended, and a result per call (numpy's as JSON); None where the calls did not all return JSON.
    """
    given = {"source": source, "function": function, "calls": [list(arguments) for arguments in calls]}
    outcome = run_program(_CALLER, stdin=json.dumps(given), limits=limits)
    if outcome.failure is not None:
        return outcome, None
    try:
        results = json.loads(outcome.output)
    except (ValueError, RecursionError):  # the process may write anything there, such as brackets without end
        return outcome, None
    return outcome, results if isinstance(results, list) and len(results) == len(calls) else None


def _run_in(directory: Path, source: str, stdin: str, limits: Limits) -> Outcome:
    (directory / _PROGRAM).write_text(source, encoding="utf-8", errors="replace")
    with contextlib.ExitStack() as files:
        given, output, error = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin.encode("utf-8", errors="replace"))
        given.seek(0)
        is_late = False
        with _started(directory, limits, given, output, error) as (process, status_fd):
            if is_confined := _is_confined(status_fd):
                try:
                    process.wait(limits.wall_s)
                except subprocess.TimeoutExpired:
                    is_late = True
        written, errors_written = (_read(file, limits.output_kb * 1024) for file in (output, error))
    if not is_confined:
        raise GenerationError(
            "the sandbox for a policy's program could not be set up within "
            f"{SETUP_S:g} s: exit code {process.returncode}: {_last_line(errors_written)}"
        )
    late = f"ran longer than {limits.wall_s:g} s" if is_late else None
    failure = late or _failure(process.returncode, written, errors_written, limits)
    return Outcome(output=written, error=errors_written, failure=failure)


@contextlib.contextmanager
def _started(
    directory: Path, limits: Limits, given: IO[bytes], output: IO[bytes], error: IO[bytes]
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The process that confines itself and goes on as the program, and where it says so; it is gone at the end."""
    settings = {
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.output_kb * 1024,
    }
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(confinement.__file__), json.dumps(settings), _PROGRAM, str(writing)],
                stdin=given,
                stdout=output,
                stderr=error,
                cwd=directory,
                env=_ENVIRONMENT,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        stack.callback(_end, process)
        yield process, reading


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_confined(status_fd: int) -> bool:
    """Whether the process says in time that everything holds."""
    if not select.select([status_fd], [], [], SETUP_S)[0]:
        return False
    status = os.read(status_fd, 100)
    if b"without" in status:
        logger.warning(
            "this kernel has no Landlock: programs of the policy can read and write the files that this process can"
        )
    return status.startswith(b"confined")


def _read(file: IO[bytes], num_bytes: int) -> str:
    file.seek(0)
    return file.read(num_bytes).decode("utf-8", errors="replace")


def _failure(exit_code: int, output: str, errors_written: str, limits: Limits) -> str | None:
    if len(output.encode()) >= limits.output_kb * 1024:
        return f"wrote more than {limits.output_kb} KiB"
    if exit_code == 0:
        return None
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"used more than {limits.cpu_s} s of CPU time"
    if exit_code < 0:  # most signals for real-time use have no name
        number = -exit_code
        return f"died of {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
    return f"exit code {exit_code}: {_last_line(errors_written)}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:_REASON_CHARACTERS] if lines else "no message"
