"""Samples that are trials of Harbor: environment up, agent, verifier, reward, environment down.

    AgentTask ──line of JSON──> runner (Harbor's own Python) ──> environment, agent ──HTTP──> endpoint
                                      └──> verifier ──line of JSON──> AgentResult with the reward

Flows in: tasks with the address and the key of their sessions. Flows out: rewards and logs. One runner process plays all trials of a run,
and is started again if it dies. Does not know how Harbor plays.
"""

import asyncio
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_async.config.schema.generator import GeneratorConfig, HarborConfig
from skyrl_async.errors import EnvironmentFailedError, GenerationError
from skyrl_async.generators.agent.generator import DIRECTORY_MARK
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward
from skyrl_async.harbor.process import TrialProcess, check_names, harbor_python
from skyrl_async.harbor.tasks import TASK_COLUMN
from skyrl_async.harnesses.install import Say
from skyrl_async.harnesses.registry import HARNESSES
from skyrl_async.harnesses.shipped import install
from skyrl_async.types import Prompt

logger = logging.getLogger(__name__)

OTHER_STAGES_S = 3600.0
"""Longest time beside the agent's. Harbor keeps its own limits of set-up (task.toml) and verifier; this one is for a runner that hangs."""
_SHIPPED = ("codex",)
"""Harbor's agents that run in the environment, with the programs of the shipped harness of that name."""
_OF_ENVIRONMENT = ("environment_setup", "agent_setup")


class VerifierReward:
    """A ``RewardSource`` for what a trial left without a reward: a verifier has judged all others."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises ``GenerationError``."""
        raise GenerationError(f"the verifier of {prompt.uid} gave no reward: {episode.failure}")


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
        self._runner: TrialProcess | None = None
        self._starting = asyncio.Lock()

    async def run(self, task: AgentTask) -> AgentResult:
        """Play a trial.

        Raises ``EnvironmentFailedError`` if its environment could not be made or was lost, and ``GenerationError`` if agent or verifier
        failed without a reward.
        """
        runner = await self._started(task.working_dir.parent)
        found = await runner.play(self._trial(task))
        metrics = {f"timing/{stage}": seconds for stage, seconds in found["seconds"].items()}
        metrics["agent/timeouts"] = float(found["is_late"])  # it is judged for what it did
        if (failure := found["failure"]) is not None:
            stage, words = failure["stage"], f"{failure['type']}: {_without_names(failure['message'], task)}"
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

    async def _started(self, directory: Path) -> TrialProcess:
        async with self._starting:
            if self._runner is None or self._runner.has_ended:
                self._runner = await TrialProcess.start(
                    self._python, self._max_agents, self._marks | {DIRECTORY_MARK: str(directory)}
                )
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


def check_harbor(settings: GeneratorConfig, cache_dir: Path, say: Say) -> None:
    """Install Harbor where it is missing. Raises ``ConfigError`` for an agent or an environment that it does not know."""
    python = harbor_python(settings.harbor.python, cache_dir=cache_dir, say=say)
    check_names(python, str(settings.harness), settings.harbor.environment)


def harbor_harness(
    settings: GeneratorConfig, cache_dir: Path, run_dir: Path | None
) -> tuple[HarborTrials, GeneratorConfig]:
    """Return the harness, and the settings of the generator that runs it: its limits are of whole trials, the runner's of agents."""
    harbor, agent = settings.harbor, settings.harness
    assert agent is not None
    if harbor.environment == "local" and agent in _SHIPPED:
        harbor = _with_programs(harbor, agent, cache_dir)
    trials = HarborTrials(
        harbor,
        agent,
        harbor_python(harbor.python, cache_dir=cache_dir, say=logger.info),
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


def _with_programs(settings: HarborConfig, name: str, cache_dir: Path) -> HarborConfig:
    """The settings with the harness's programs in every sandbox: Harbor would install them there from the internet."""
    bin_dir = install(HARNESSES[name], cache_dir, logger.info)
    places = {
        bin_dir.parent.parent: "/opt/harness",
        Path(str(shutil.which("node"))).resolve().parent.parent: "/opt/node",
    }
    kwargs = {
        "read_only": [(str(place), target) for place, target in places.items() if not place.is_relative_to("/usr")],
        "path_prefix": "/opt/harness/node_modules/.bin:/opt/node/bin:",
    }
    return replace(
        settings,
        environment_kwargs=kwargs | settings.environment_kwargs,
        agent_kwargs={"skip_install": True} | settings.agent_kwargs,
    )


def _without_names(message: str, task: AgentTask) -> str:
    """The message without what differs from trial to trial, so that equal reasons are counted together."""
    return re.sub(rf"{re.escape(str(task.working_dir.absolute()))}/[\w.-]+", "the trial", message)


def _endpoint_variables(task: AgentTask) -> dict[str, str]:
    root = task.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": task.api_key,
    }
