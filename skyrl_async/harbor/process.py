"""The process that plays Harbor's trials, in a Python environment of its own: installed and started here, asked by lines of JSON.

Flows in: descriptions of trials. Flows out: how each ended. ``runner/serve.py`` is the other side. Does not know sessions or rewards.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import skyrl_async
from skyrl_async.errors import ConfigError, EnvironmentFailedError, GenerationError
from skyrl_async.generators.agent.command import passed_environment
from skyrl_async.harnesses.install import Say, environment_of
from skyrl_async.harnesses.terminus_2 import HARBOR

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
_MAX_LINE_BYTES = 16 << 20
_TAIL_BYTES = 2000
_READY = b'{"ready"'
"""Begins the runner's first line."""
_VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}
"""The runner's environment: without it, it asks the internet for prices, and tells of its use."""
_NAMES = """
import json
from harbor.models.agent.name import AgentName
from harbor.models.environment_type import EnvironmentType
print(json.dumps([sorted(AgentName.values()), sorted(kind.value for kind in EnvironmentType)]))
"""
_BOOT = """
import importlib.util, runpy, sys
place = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("skyrl_async", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["skyrl_async"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module("skyrl_async.harbor.runner.serve", run_name="__main__", alter_sys=True)
"""
"""Lets Harbor's Python import this package, and nothing else of this process's environment."""


def harbor_python(given: str | None, *, cache_dir: Path, say: Say) -> Path:
    """Return the Python that plays trials: the given one, or that of an environment that is made where it is missing.

    Raises ``ConfigError``.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    return environment_of("harbor", HARBOR, cache_dir=cache_dir, say=say) / "python"


def check_names(python: Path, agent: str, environment: str) -> None:
    """Raise ``ConfigError`` unless Harbor knows the agent and the environment, or cannot be asked."""
    agents, environments = _known_names(python)
    kinds = (
        ("generator.harness", agent, agents),
        ("generator.harbor.environment", environment, ["local", *environments]),
    )
    for key, name, known in kinds:
        if name not in known and ":" not in name:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key} must be one of {', '.join(known)} with task=harbor, got {name!r}{hint}")


def _known_names(python: Path) -> tuple[list[str], list[str]]:
    """Harbor's agents and environments."""
    expected = f"generator.harbor.python must be a Python with Harbor, got {python}"
    try:
        asked = subprocess.run([str(python), "-c", _NAMES], capture_output=True, text=True, timeout=_START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{expected}: it did not answer within {_START_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise ConfigError(f"{expected}: {error}") from error
    if asked.returncode != 0:
        raise ConfigError(f"{expected}: {''.join(asked.stderr.strip().splitlines()[-1:])}")
    last = "".join(asked.stdout.strip().splitlines()[-1:])  # libraries may write before
    try:
        agents, environments = json.loads(last)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{expected}: its answer is {last[:200]!r}") from error
    return agents, environments


class TrialProcess:
    """The process, and the tasks that wait for its trials."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.has_ended = False
        self._reading = asyncio.create_task(self._read(), name="harbor-runner")

    @classmethod
    async def start(cls, python: Path, max_agents: int | None, marks: Mapping[str, str]) -> "TrialProcess":
        """Start the process, and wait until it is ready. Raises ``GenerationError`` with what it wrote."""
        place = str(Path(str(skyrl_async.__file__)).parent)
        environment = {**passed_environment(), **marks, **_VARIABLES}
        environment.pop("PYTHONPATH", None)
        with contextlib.ExitStack() as files:
            log = files.enter_context(tempfile.TemporaryFile())
            process = await cls._spawn([str(python), "-c", _BOOT, place, str(max_agents or 0)], environment, log)
            files.pop_all()
            return cls(process, log)

    @staticmethod
    async def _spawn(argv: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise GenerationError(f"Harbor's Python could not be started: {error}") from error
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while line := await process.stdout.readline():
                    if line.startswith(_READY):  # libraries may write before
                        break
        except TimeoutError as error:
            process.kill()
            raise GenerationError(f"Harbor was not ready within {_START_TIMEOUT_S:g} s: {_tail(log)}") from error
        except BaseException:
            process.kill()
            raise
        if not line:
            raise GenerationError(f"Harbor could not be loaded by {argv[0]}: {_tail(log)}")
        logger.info("harbor %s plays trials", json.loads(line)["version"])
        return process

    async def play(self, trial: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the trial ended. A cancellation cancels it. Raises ``EnvironmentFailedError`` if the process dies."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "trial": trial})
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Let the process end its trials; kill it if it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has died: the reader tells those who wait
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        """Hand out answers until the process's output ends, then fail those who still wait."""
        assert self._process.stdout is not None
        with self._log:
            words = ""
            try:
                async for line in self._process.stdout:
                    found = json.loads(line)
                    if (answer := self._waiting.get(found["id"])) is not None and not answer.done():
                        answer.set_result(found)
            except ValueError as error:  # too long a line, or none of JSON
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                words = f"its answer could not be read: {error}"
            self.has_ended = True
            words = words or _tail(self._log)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EnvironmentFailedError(f"Harbor's process ended: {words}"))


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
