"""Samples that are trials of Harbor: environment up, agent, verifier, reward, environment down.

    AgentTask ──line of JSON──> runner (Harbor's own Python) ──> environment, agent ──HTTP──> endpoint
                                      └──> verifier ──line of JSON──> AgentResult with the reward

Flows in: tasks with the address and the key of their sessions. Flows out: rewards and logs. One runner process plays all trials of a run,
and is started again if it dies. Does not know how Harbor plays.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import skyrl_async
from skyrl_async.config.schema.generator import GeneratorConfig, HarborConfig
from skyrl_async.errors import EnvironmentFailedError, GenerationError
from skyrl_async.generators.agent.command import passed_environment
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.harbor.tasks import TASK_COLUMN

logger = logging.getLogger(__name__)

OTHER_STAGES_S = 3600.0
"""Longest time beside the agent's. Harbor keeps its own limits of set-up (task.toml) and verifier; this one is for a runner that hangs."""
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
_MAX_LINE_BYTES = 16 << 20
_TAIL_BYTES = 2000
_OF_ENVIRONMENT = ("environment_setup", "agent_setup")
_VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}
"""Of the runner: or it asks the internet for prices, and tells of its use."""
_BOOT = """
import importlib.util, runpy, sys
place = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("skyrl_async", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["skyrl_async"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module("skyrl_async.harbor.runner.serve", run_name="__main__", alter_sys=True)
"""
"""Lets Harbor's Python import this package, and nothing else of this process's environment."""


class HarborTrials:
    """A ``Harness`` whose runs are trials."""

    def __init__(
        self,
        settings: HarborConfig,
        agent: str,
        python: Path,
        *,
        agent_timeout_s: float,
        max_agents: int | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """
        Args:
            settings: of ``generator.harbor``.
            agent: Harbor's name of it, or ``module:Class``.
            python: of an environment that Harbor is installed in.
            agent_timeout_s: longest run of the agent; a task may ask for less.
            max_agents: agents that run at once; None: no limit.
            run_dir: directory of the run, by which a resumed run finds processes that were left.
        """
        self._settings = settings
        self._agent = agent
        self._python = python
        self._agent_timeout_s = agent_timeout_s
        self._max_agents = max_agents
        self._marks = {} if run_dir is None else {"SKYRL_RUN_DIR": str(run_dir.absolute())}
        self._runner: _Runner | None = None
        self._starting = asyncio.Lock()

    async def run(self, task: AgentTask) -> AgentResult:
        """Play a trial.

        Raises ``EnvironmentFailedError`` if its environment could not be made or was lost, and ``GenerationError`` if agent or verifier
        failed without a reward.
        """
        runner = await self._started()
        found = await runner.play(self._trial(task))
        metrics = {f"timing/{stage}": seconds for stage, seconds in found["seconds"].items()}
        if (failure := found["failure"]) is not None:
            stage, words = failure["stage"], f"{failure['type']}: {failure['message']}"
            kind = EnvironmentFailedError if stage in _OF_ENVIRONMENT else GenerationError
            raise kind(f"the trial failed in its {stage.replace('_', ' ')}: {words}")
        rewards = found["rewards"]
        if rewards is None:
            raise GenerationError("the trial ended without a reward")
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards))
        others = {f"reward/{name}": float(value) for name, value in rewards.items() if name != "reward"}
        return AgentResult(reward=float(reward), metrics=metrics | others, logs=found["logs"])

    async def close(self) -> None:
        """End the runner with all trials that still run."""
        async with self._starting:
            if self._runner is not None:
                await self._runner.close()

    async def _started(self) -> "_Runner":
        async with self._starting:
            if self._runner is None or self._runner.has_ended:
                self._runner = await _Runner.start(self._python, self._max_agents, self._marks)
            return self._runner

    def _trial(self, task: AgentTask) -> dict[str, Any]:
        place = task.working_dir.absolute()
        (place / "base").mkdir()
        url = urlsplit(task.base_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        kwargs = dict(self._settings.environment_kwargs)
        if self._settings.environment == "local":
            kwargs |= {"base": str(place / "base"), "forwarded": [(port, url.hostname, port)]}
        name = {"import_path": self._agent} if ":" in self._agent else {"name": self._agent}
        return {
            "task": task.extras[TASK_COLUMN],
            "trials_dir": str(place),
            "environment": self._settings.environment,
            "environment_kwargs": kwargs,
            "agent": {
                **name,
                "model_name": f"openai/{task.model}",
                "base_url": task.base_url,
                "kwargs": dict(self._settings.agent_kwargs),
                "env": _endpoint_variables(task),
                "max_timeout_sec": self._agent_timeout_s,
            },
        }


def harbor_harness(settings: GeneratorConfig, run_dir: Path | None) -> tuple[HarborTrials, GeneratorConfig]:
    """Return the harness, and the settings of the generator that runs it: its limits are of whole trials, the runner's of agents."""
    harbor, agent = settings.harbor, settings.harness
    assert agent is not None
    trials = HarborTrials(
        harbor,
        agent,
        Path(str(harbor.python)),
        agent_timeout_s=settings.agent_timeout_s,
        max_agents=settings.max_concurrent_agents,
        run_dir=run_dir,
    )
    of_trials = replace(
        settings,
        max_concurrent_agents=harbor.max_environments,
        agent_timeout_s=settings.agent_timeout_s + OTHER_STAGES_S,
    )
    return trials, of_trials


def _endpoint_variables(task: AgentTask) -> dict[str, str]:
    root = task.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": task.api_key,
    }


class _Runner:
    """The process that plays trials, and the tasks that wait for them."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.has_ended = False
        self._reading = asyncio.create_task(self._read(), name="harbor-runner")

    @classmethod
    async def start(cls, python: Path, max_agents: int | None, marks: Mapping[str, str]) -> "_Runner":
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
                line = await process.stdout.readline()
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
            async for line in self._process.stdout:
                found = json.loads(line)
                if (answer := self._waiting.get(found["id"])) is not None and not answer.done():
                    answer.set_result(found)
            self.has_ended = True
            words = _tail(self._log)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EnvironmentFailedError(f"Harbor's process ended: {words}"))


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
