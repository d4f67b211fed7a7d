"""Harnesses that come with the library: programs of other people with what a run must know of each.

    packages ──install──> programs        files, variables ──per sample──> program ──status, output──> answer or failure

Flows in: a harness's name. Flows out: a ``Harness`` that runs its program. Does not know endpoints, rewards or rows.
"""

import json
import os
import shlex
import shutil
import string
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.generators.agent.command import CommandHarness
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.harnesses.install import NpmPackages, PythonPackages, Say, environment_of
from skyrl_async.types import Message

PROGRAMS = Path(__file__).parent / "programs"
"""Programs for harnesses that are libraries, run by the Python of the harness's environment."""

_NODE_TIMEOUT_S = 30.0
_MAX_LOG_CHARS = 100_000
_COMPACT_AT = 0.9
_OF_THE_TRAINER = ("PYTHONPATH", "VIRTUAL_ENV")
"""Variables that would change which packages a program finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What a program's output says about its run."""

    answer: str | None = None
    """Its last message; None: the policy's last reply."""
    failure: str | None = None
    """Why it failed, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHarness:
    """A program, and what it needs to run unattended with the policy.

    Its command runs in the sample's working directory, where a row's column ``files`` (path -> text) has been written. ``$NAME`` in its
    variables and files is filled in from the variables of ``generators.agent.command`` and from these:

    | | |
    |---|---|
    | `HARNESS_BIN` | directory of the installed programs |
    | `HARNESS_PROMPT` | file with the task's text |
    | `HARNESS_MAX_TOKENS` | most tokens of an answer |
    | `HARNESS_COMPACT_TOKENS` | tokens of a history that is to be compacted |
    | `HOME`, `TMPDIR` | directories of the sample alone |
    """

    name: str
    packages: PythonPackages | NpmPackages
    """The first one is the program's; its version is the harness's."""
    wire: str
    """The route of the endpoint that it uses."""
    command: str
    """For ``/bin/sh``; ``generator.harness_args`` are added at its end."""
    read: Callable[[str], Transcript]
    """Reads its standard output."""
    check: tuple[str, ...]
    """Answers, one after the other, by which it writes ``hello`` to ``out.txt``; the last one ends the conversation."""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below ``HOME`` -> text."""
    node: int | None = None
    """Lowest major version of Node.js that it runs with."""
    needs: tuple[str, ...] = ()
    """Further programs, which have to be on PATH."""
    environment: str | None = None
    """Name of its environment where others use it too; None: the harness's."""

    @property
    def version(self) -> str:
        """The program's version."""
        packages = self.packages
        first = packages.packages[0] if isinstance(packages, NpmPackages) else packages.requirements[0]
        return first.replace("==", "@").rpartition("@")[2]


def install(harness: ShippedHarness, cache_dir: Path, say: Say) -> Path:
    """Return the directory of the harness's programs, which are installed where they are missing. Raises ``ConfigError``."""
    if harness.node is not None:
        _check_node(harness.name, harness.node)
    for program in harness.needs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"generator.harness={harness.name} needs {program}, which was not found: install {program}"
            )
    return environment_of(harness.environment or harness.name, harness.packages, cache_dir=cache_dir, say=say)


def shipped_harness(
    harness: ShippedHarness, bin_dir: Path, *, args: Sequence[str] = (), run_dir: Path | None = None
) -> CommandHarness:
    """Return what runs the harness.

    Args:
        bin_dir: of its programs.
        args: added to its command.
        run_dir: directory of the run, if there is one.
    """
    command = f"{harness.command} {shlex.join(args)}".rstrip()
    return CommandHarness(command, run_dir=run_dir, adapter=_Adapter(harness, bin_dir))


class _Adapter:
    """Implements ``generators.agent.command.Adapter``."""

    def __init__(self, harness: ShippedHarness, bin_dir: Path) -> None:
        self._harness = harness
        self._bin_dir = bin_dir

    def prepare(self, environment: Mapping[str, str], task: AgentTask, directory: Path) -> Mapping[str, str]:
        home, tmp, prompt = directory / "home", directory / "tmp", directory / "prompt.txt"
        for made in (home, tmp):
            made.mkdir(mode=0o700)
        (directory / ".gitignore").write_text("*\n")  # the agent's work may be a repository
        prompt.write_text(prompt_text(task.messages), encoding="utf-8")
        added = {
            "HOME": str(home),
            "TMPDIR": str(tmp),
            "HARNESS_BIN": str(self._bin_dir),
            "HARNESS_PROMPT": str(prompt),
            **limits_of(task),
            **dict.fromkeys(_OF_THE_TRAINER, ""),
        }
        known = {**environment, **added}
        added |= {name: filled(text, known) for name, text in self._harness.variables.items()}
        _write_files(home, {name: filled(text, known) for name, text in self._harness.files.items()})
        _write_files(task.working_dir, task.extras.get("files") or {})
        return added

    def result(self, status: int, stdout: str, stderr: str) -> AgentResult:
        found = self._harness.read(stdout)
        if status != 0 or found.failure is not None:
            words = found.failure or stderr or stdout.strip()[-1000:] or "it wrote nothing"
            raise GenerationError(f"{self._harness.name} ended with status {status}: {words}")
        return AgentResult(output=found.answer, logs={"transcript": stdout[-_MAX_LOG_CHARS:]})


def prompt_text(messages: Sequence[Message]) -> str:
    """The task as one text: programs take no conversation. A system message comes first, as in the prompt."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [str(part.get("text", "")) for part in parts]
    return "\n\n".join(filter(None, texts))


def tool_call(name: str, **arguments: object) -> str:
    """A call as the chat template of tiny policies has it, and many others: hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def limits_of(task: AgentTask) -> dict[str, str]:
    """Variables of the answers' and the history's length."""
    max_tokens = min(task.sampling.max_tokens, task.max_model_len // 4)
    return {
        "HARNESS_MAX_TOKENS": str(max_tokens),
        "HARNESS_COMPACT_TOKENS": str(int(_COMPACT_AT * (task.max_model_len - max_tokens))),
    }


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with ``$NAME`` replaced where the name is known."""
    return string.Template(text).safe_substitute(values)


def json_lines(stdout: str) -> Iterator[dict[str, Any]]:
    """The objects among the lines of a program's output."""
    for line in stdout.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def read_result_line(stdout: str) -> Transcript:
    """Read the last line of type ``result``, as Claude Code and Qwen Code write it."""
    results = [line for line in json_lines(stdout) if line.get("type") == "result"]
    if not results:
        return Transcript(failure=stdout.strip()[-1000:] or "it wrote no result")
    last = results[-1]
    words = last.get("result")
    if last.get("is_error"):
        error = last.get("error")
        reason = error.get("message") if isinstance(error, dict) else error
        return Transcript(failure=str(words or reason or last.get("subtype")))
    return Transcript(answer=words if isinstance(words, str) else None)


def _write_files(directory: Path, files: Mapping[str, str | None]) -> None:
    """Write path -> text below ``directory``. Raises ``GenerationError`` for a path that leaves it.

    A row of a Parquet file has the paths of all rows; null is a file of another row.
    """
    for name, text in files.items():
        if text is None:
            continue
        path = Path(os.path.normpath(directory / name))
        if not path.is_relative_to(directory) or not isinstance(text, str):
            raise GenerationError(f"a row's files must be texts by paths below the working directory, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _check_node(name: str, lowest: int) -> None:
    """Raise ``ConfigError`` unless Node.js is there in a version that serves."""
    node = shutil.which("node")
    advice = f"generator.harness={name} needs Node.js {lowest} or newer: see https://nodejs.org"
    if node is None:
        raise ConfigError(f"{advice}; node was not found")
    asked = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=_NODE_TIMEOUT_S)
    major = asked.stdout.strip().removeprefix("v").partition(".")[0]
    if not major.isdigit() or int(major) < lowest:
        raise ConfigError(f"{advice}; {node} is {asked.stdout.strip() or 'broken'}")
