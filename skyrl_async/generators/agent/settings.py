"""Makes an ``AgentGenerator`` from ``generator.*``, and checks the settings before anything starts.

Raises ``ConfigError`` with the key, the value found and what to change.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.errors import ConfigError
from skyrl_async.generators.agent.command import SHELL, CommandHarness, passed_environment, with_absolute_files
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.harness import FunctionHarness, Harness
from skyrl_async.generators.agent.reward import EnvironmentReward, FunctionReward, RewardSource
from skyrl_async.generators.agent.sessions import SessionPool
from skyrl_async.generators.gym.environment import CallThreads, EnvironmentFactory
from skyrl_async.registries import import_function
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.progress import OnCall

_CHECK_TIMEOUT_S = 10.0
_PYTHON = r"(?:[\w./@%+:,-]*/)?(?:python|pypy)[\d.]*\s+(?:-[bBdEiIOPqsSuvx]+\s+)*"
_SCRIPT = re.compile(
    rf"""\s*(?:env\s+)?(?:\w+=\S*\s+)*
    (?: uv\s+run\s+(?: --script\s+ | (?=\S+\.py\b) )
      | (?:uv\s+run\s+)? (?: {_PYTHON} | (?:\S*/)?(?:ba|da|k|z)?sh\s+(?:-[aefuvx]+\s+)* | (?:\S*/)?(?:perl|ruby)\s+ )
    )
    (?P<quote>["']?) (?P<file>[\w./~@%+,][\w./~@%+,-]*) (?P=quote) (?=[\s;&|<>]|$)""",
    re.VERBOSE,
)
"""Finds the script of a command's first program, in plain cases: after flags that take no value."""
_MODULE = re.compile(rf"\s*(?P<python>{_PYTHON})-m\s+(?P<name>[\w.]+)(?=[\s;&|<>]|$)")


def check_agent_settings(settings: GeneratorConfig) -> None:
    """Check that the harness, of which there is one, and the reward can be found; imports functions, makes ``working_dir``.

    Raises ``ConfigError``.
    """
    if settings.command is not None:
        _check_command(settings.command)
    if settings.entrypoint is not None:
        _harness_function(settings.entrypoint)
    if settings.reward is not None:
        import_function("generator.reward", settings.reward)
    if settings.working_dir is not None:
        _make_directory(Path(settings.working_dir))


def make_agent_generator(
    settings: GeneratorConfig,
    *,
    urls: Sequence[str],
    controller_key: str,
    make_environment: EnvironmentFactory,
    harness: Harness | None = None,
    reward_source: RewardSource | None = None,
    deadlines: Deadlines | None = None,
    outage_timeout_s: float = 0.0,
    run_dir: Path | None = None,
    on_call: OnCall = lambda *_: None,
) -> AgentGenerator:
    """Return a generator that runs the harness; its ``close`` releases connections and threads.

    Args:
        urls: roots of the endpoint's front ends, without ``/v1``.
        controller_key: of the endpoint.
        make_environment: called with a prompt's ``env_class`` and ``extras``.
        harness: what runs a sample; None: that of ``settings``.
        reward_source: what judges it; None: that of ``settings``.
        deadlines: stand still in outages; None: no outages.
        outage_timeout_s: how long an unanswered request to the endpoint is sent again.
        run_dir: directory of the run, if there is one.
        on_call: told of the endpoint's engine calls.

    Raises:
        ConfigError: as ``check_agent_settings`` does.
    """
    check_agent_settings(settings)
    deadlines = deadlines or Deadlines()
    if harness is None and settings.command is not None:
        harness = CommandHarness(settings.command, run_dir=run_dir, answer=settings.answer)
    elif harness is None:
        harness = FunctionHarness(_harness_function(str(settings.entrypoint)))
    threads = CallThreads("reward")
    if reward_source is None and settings.reward is not None:
        reward_source = FunctionReward(import_function("generator.reward", settings.reward), threads)
    elif reward_source is None:
        reward_source = EnvironmentReward(make_environment, threads, max_turns=settings.max_turns)
    return AgentGenerator(
        SessionPool(urls, controller_key, outages=deadlines.outages, outage_timeout_s=outage_timeout_s),
        harness,
        reward_source,
        agent_timeout_s=settings.agent_timeout_s,
        deadlines=deadlines,
        max_concurrent_agents=settings.max_concurrent_agents,
        working_dir=None if settings.working_dir is None else Path(settings.working_dir).expanduser().absolute(),
        on_call=on_call,
    )


def _check_command(command: str) -> None:
    """Check that the shell can parse the command, and that its first program and its script exist, in plain cases."""
    if not command.strip():
        raise ConfigError(f"generator.command must be a command line, got {command!r}")
    read = subprocess.run([SHELL, "-n", "-c", command], capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S)
    if read.returncode != 0:
        raise ConfigError(
            f"generator.command must be a command line for {SHELL}, got {command!r}: {read.stderr.strip()}"
        )
    launch_dir, environment = Path.cwd(), passed_environment()
    try:
        program = shlex.split(command)[0]
    except ValueError:  # a quote in a here-document
        program = "<<"
    if not set(program) & set("=$`(){}*?<>|;&#!~"):
        _check_program(program, launch_dir, environment)
    if (script := _SCRIPT.match(command)) is not None:
        _check_script(script["file"], bool(script["quote"]), launch_dir, environment["PATH"])
    if (module := _MODULE.match(command)) is not None:
        _check_module(module["python"], module["name"].partition(".")[0], launch_dir, environment)


def _check_program(program: str, launch_dir: Path, environment: Mapping[str, str]) -> None:
    file = with_absolute_files(program, launch_dir)
    if file.startswith("/") and os.path.isfile(file) and not os.access(file, os.X_OK):
        raise ConfigError(
            f"generator.command must begin with a program that may be executed, got {program!r}: chmod +x it, or name what runs it"
        )
    asked = [SHELL, "-c", 'command -v "$1"', SHELL, file]
    found = subprocess.run(asked, capture_output=True, env=environment, timeout=_CHECK_TIMEOUT_S)
    if found.returncode != 0 or os.path.isdir(file):
        raise ConfigError(f"generator.command must begin with a program that can be found, got {program!r}; see PATH")


def _check_script(script: str, is_quoted: bool, launch_dir: Path, path: str) -> None:
    """Check a script. A relative name that stays in the command is resolved in the agent's empty directory (by shells, on PATH too)."""
    file = launch_dir / (script if is_quoted else os.path.expanduser(script))
    if not os.path.exists(file) and shutil.which(script, os.F_OK, path) is None:
        raise ConfigError(f"generator.command must name a script that exists, got {script!r} (in {launch_dir})")
    is_kept = is_quoted or with_absolute_files(script, launch_dir) == script
    if os.path.exists(file) and is_kept and not script.startswith(("/", "~")):
        raise ConfigError(
            f"generator.command must name a script where agents find it, got {script!r}: they run in directories of their own; "
            f"give its absolute path, {file}"
        )


def _check_module(python: str, module: str, launch_dir: Path, environment: Mapping[str, str]) -> None:
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    asked = [*shlex.split(with_absolute_files(python, launch_dir)), "-c", program, module]
    try:
        found = subprocess.run(asked, capture_output=True, cwd="/", env=environment, timeout=_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # a slow disk is no mistake
        return
    if found.returncode == 1:
        raise ConfigError(
            f"generator.command must name a module that python finds, got {module!r}: agents run in directories of their own; "
            "install it, or set PYTHONPATH where the run is started"
        )


def _harness_function(entrypoint: str) -> Callable[..., Any]:
    function = import_function("generator.entrypoint", entrypoint)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            f"generator.entrypoint must be an async function with generator.kind=agent, got {entrypoint}, which is none: "
            "a blocking one would hold up the trainer; run it with generator.command"
        )
    return function


def _make_directory(directory: Path) -> None:
    """Make the directory, and try to make an agent's directory in it."""
    try:
        directory.expanduser().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=directory.expanduser()).cleanup()
    except OSError as error:
        raise ConfigError(
            f"generator.working_dir must be a directory that can be written to, got '{directory}': {error}"
        ) from error
