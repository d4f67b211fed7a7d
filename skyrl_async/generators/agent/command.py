"""Harnesses that are programs: a command line, run once per sample in its own process session.

Flows in: tasks. Flows out: the program's answer, or an error with the end of its output. The program needs nothing of this package: it
finds the endpoint and the task in its environment, and the task on its standard input too. This is no sandbox: the program has this
user's rights, but gets neither this process's environment nor any key but its session's. If this process is killed, a guard ends the
programs; the next run in the same directory ends programs that the guard missed.

| variable | |
|---|---|
| `OPENAI_BASE_URL`, `OPENAI_API_BASE`, `OPENAI_API_KEY`, `OPENAI_MODEL` | the session at the endpoint, with `/v1` |
| `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `ANTHROPIC_MODEL` | the same without `/v1` |
| `SKYRL_TASK_FILE` | JSON: `uid`, `messages`, `extras`, `sample_index`, `is_evaluation` |
| `SKYRL_RESULT_FILE` | may be written: JSON `{"output": "..."}`, the answer to be judged, in place of the last reply or what is printed |
| `SKYRL_MAX_MODEL_LEN` | tokens of the policy's context, prompt and answer together |
| `SKYRL_RUN_DIR`, `SKYRL_RUN_PROCESS` | the run, by which its agents are found after it was killed |
| `PASSED`, `LC_*`, `AGENT_*` | as in this process |
"""

import asyncio
import json
import os
import re
import shlex
import stat
import sys
import uuid
import weakref
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from skyrl_async.config.schema.generator import AgentAnswer
from skyrl_async.errors import GenerationError, InvalidResultError
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.generators.agent.processes import end_guard, kill_agent, start_guard
from skyrl_async.runtime.daemon_threads import DaemonThreads

PASSED = (
    *("CONDA_PREFIX", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH"),
    *("PYTHONPATH", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ"),
    *("USER", "VIRTUAL_ENV"),
)
"""Variables of this process passed to a harness, beside ``LC_*`` and ``AGENT_*`` (for a harness's own settings)."""

SHELL = "/bin/sh"
_RUN_DIR = "SKYRL_RUN_DIR"
_PASSED_PREFIXES = ("LC_", "AGENT_")
_PATH_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PLAIN_FILE_NAME = re.compile(r"(?<!\S)(?=\S*[./])[\w./@%+:,-]+(?!\S)")
_TASK_FIELDS = ("uid", "messages", "extras", "sample_index", "is_evaluation")
_MAX_RESULT_BYTES = 16 * 2**20
_NUM_TAIL_BYTES = 4096
_NUM_TAIL_LINES = 15
_REAP_TIMEOUT_S = 5.0


class Adapter(Protocol):
    """What is known of one program beside its command line."""

    def prepare(self, environment: Mapping[str, str], task: AgentTask, directory: Path) -> Mapping[str, str]:
        """Write the program's files below ``directory``, which is empty; returns variables that are added to its ``environment``."""

    def result(self, status: int, stdout: str, stderr: str) -> AgentResult:
        """What the program has done; ``stderr`` is the end of it. Raises ``GenerationError`` if it failed."""


class CommandHarness:
    """Runs a command line with ``/bin/sh -c`` in the task's working directory, and ends all its processes with it.

    A shell lets a command use its variables (``mini --model openai/$OPENAI_MODEL``); nothing of a task is put into the command.
    Words that name files below the launch directory (``python agent.py``) are made absolute, because the agent runs elsewhere;
    quoted words stay.
    """

    def __init__(
        self,
        command: str,
        *,
        launch_dir: Path | None = None,
        run_dir: Path | None = None,
        answer: AgentAnswer = AgentAnswer.last_message,
        adapter: Adapter | None = None,
    ) -> None:
        """
        Args:
            command: for a POSIX shell.
            launch_dir: directory of the command's files; None is this process's.
            run_dir: directory of the run; a resumed run finds left agents by it, with ``end_agents_of``.
            answer: whether the program's output is its answer where it leaves no result.
            adapter: of a program that is known; None: any program, which may write a result.
        """
        self._command = with_absolute_files(command, launch_dir or Path.cwd())
        self._marks = {"SKYRL_RUN_PROCESS": uuid.uuid4().hex}
        if run_dir is not None:
            self._marks[_RUN_DIR] = str(run_dir.absolute())
        self._is_guarded = False
        self._ending = DaemonThreads("end of an agent")
        self._answer = answer
        self._adapter = adapter

    async def run(self, task: AgentTask) -> AgentResult:
        """Raises ``GenerationError`` if the program cannot be started, exits with another status than 0 or leaves an invalid result.
        All its processes are killed at its end, and by a cancellation."""
        self._guard()
        directory = task.working_dir.absolute() / ".skyrl"
        task_file, result_file = directory / "task.json", directory / "result.json"
        _write_task(task, task_file)
        environment = agent_environment(task, task_file, result_file) | self._marks
        if self._adapter is not None:
            environment |= self._adapter.prepare(environment, task, directory)
        with (
            task_file.open("rb") as stdin,
            (directory / "stdout.log").open("w+b") as stdout,
            (directory / "stderr.log").open("w+b") as stderr,
        ):
            status = await self._run_program(task.working_dir, environment, stdin, stdout, stderr)
            if self._adapter is not None:
                written = (_printed(stdout), _output_tail(stderr))
                return self._adapter.result(status, *(text.replace(task.api_key, "<key>") for text in written))
            if status != 0:
                words = _output_tail(stderr) or _output_tail(stdout)
                raise GenerationError(
                    f"{_exit_message(status)} {words.replace(task.api_key, '<key>') or 'and wrote nothing'}"
                )
            output = _read_output(result_file)
            if output is None and self._answer is AgentAnswer.stdout:
                output = _printed(stdout)
        return AgentResult(output=output)

    async def close(self) -> None:
        """Nothing outlives a task."""

    def _guard(self) -> None:
        """Start a guard. Its mark is not the run's directory: a slow guard must not end the agents of the resumed run."""
        if self._is_guarded:
            return
        self._is_guarded = True
        if (guard := start_guard(f"SKYRL_RUN_PROCESS={self._marks['SKYRL_RUN_PROCESS']}")) is not None:
            weakref.finalize(self, end_guard, guard)

    async def _run_program(
        self, working_dir: Path, environment: Mapping[str, str], stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO
    ) -> int:
        """Return the exit status; none of the program's processes is left afterwards."""
        process: Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                SHELL,
                "-c",
                self._command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=working_dir,
                env=environment,
                start_new_session=True,
            )
            return await process.wait()
        except OSError as error:
            raise GenerationError(f"the agent's shell could not be started in {working_dir}: {error}") from error
        finally:
            # In a thread, because it looks at every process of the machine; a second cancellation does not stop it.
            found = (process.pid if process else None, f"SKYRL_TASK_FILE={environment['SKYRL_TASK_FILE']}")
            await asyncio.wait([asyncio.get_running_loop().run_in_executor(self._ending, kill_agent, *found)])
            if process is not None:
                await _reap(process)


def end_agents_of(run_dir: Path) -> int:
    """Kill the remaining agents of an ended run in ``run_dir``; returns the number of processes."""
    return kill_agent(None, f"{_RUN_DIR}={run_dir.absolute()}")


async def _reap(process: Process) -> None:
    """Wait for the end of a killed process, which the kernel delays only during I/O."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REAP_TIMEOUT_S):
            await process.wait()


def with_absolute_files(command: str, launch_dir: Path) -> str:
    """Make absolute the plain words of ``command`` that have a dot or a slash and name a file below ``launch_dir``."""

    def absolute(word: re.Match[str]) -> str:
        path = launch_dir / word[0]
        is_file = not word[0].startswith("/") and path.is_file()
        return shlex.quote(os.path.abspath(path)) if is_file else word[0]

    return _PLAIN_FILE_NAME.sub(absolute, command)


def agent_environment(task: AgentTask, task_file: Path, result_file: Path) -> dict[str, str]:
    """The whole environment of a program."""
    return {
        **passed_environment(),
        **session_variables(task),
        "SKYRL_TASK_FILE": str(task_file),
        "SKYRL_RESULT_FILE": str(result_file),
    }


def session_variables(task: AgentTask) -> dict[str, str]:
    """The variables by which a program finds the task's session."""
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "ANTHROPIC_MODEL": task.model,
        "SKYRL_MAX_MODEL_LEN": str(task.max_model_len),
    }


def passed_environment() -> dict[str, str]:
    """The variables passed to programs: an allow-list, because this process's environment may hold secret keys."""
    passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(_PASSED_PREFIXES)}
    for name in _PATH_LISTS:
        if name in passed:  # its working directory is another one
            passed[name] = os.pathsep.join(os.path.abspath(part) for part in passed[name].split(os.pathsep) if part)
    # A command's "python" is the one that trains, as it would be in a shell where its environment is active.
    passed["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [passed.get("PATH")])])
    return passed


def _write_task(task: AgentTask, file: Path) -> None:
    """Make the file's directory and write the task, without the endpoint's address and key."""
    file.parent.mkdir(mode=0o700)
    described = {name: getattr(task, name) for name in _TASK_FIELDS}
    file.write_text(json.dumps(described, ensure_ascii=False, default=str), encoding="utf-8")


def _read_output(path: Path) -> str | None:
    """The answer in the result file, if there is one. The agent is not trusted: pipes and huge files are refused."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_RESULT_BYTES:
        raise InvalidResultError(f"SKYRL_RESULT_FILE must be a file of at most {_MAX_RESULT_BYTES >> 20} MiB")
    written = path.read_bytes()
    try:
        result = json.loads(written)
    except ValueError as error:
        start = written[:200].decode(errors="replace")
        raise InvalidResultError(
            f'SKYRL_RESULT_FILE must hold JSON, {{"output": "..."}}, got {start!r}: {error}'
        ) from error
    output = result.get("output") if isinstance(result, dict) else result
    if not isinstance(result, dict) or not isinstance(output, str | None):
        hint = "; rewards are given by the task, or by generator.reward" if isinstance(result, int | float) else ""
        raise InvalidResultError(f'SKYRL_RESULT_FILE must hold {{"output": "..."}}, got {str(result)[:200]}{hint}')
    return output


def _printed(stream: BinaryIO) -> str:
    """All that was printed, as text. It is read from the open file, because an agent may have replaced the path."""
    num_bytes = os.fstat(stream.fileno()).st_size
    if num_bytes > _MAX_RESULT_BYTES:
        raise InvalidResultError(f"an agent may print at most {_MAX_RESULT_BYTES >> 20} MiB, got {num_bytes} bytes")
    return os.pread(stream.fileno(), num_bytes, 0).decode(errors="replace").strip()


def _exit_message(status: int) -> str:
    if status < 0:
        return f"the agent was ended by signal {-status}"
    if status == 127:
        return "the agent ended with status 127 (a program of generator.command was not found)"
    return f"the agent ended with status {status}"


def _output_tail(stream: BinaryIO) -> str:
    """The end of the output. It is read from the open file, because an agent may have replaced the path."""
    start = max(0, os.fstat(stream.fileno()).st_size - _NUM_TAIL_BYTES)
    words = os.pread(stream.fileno(), _NUM_TAIL_BYTES, start).decode(errors="replace").strip().splitlines()
    return "\n".join(("and wrote:", *words[-_NUM_TAIL_LINES:])) if words else ""
