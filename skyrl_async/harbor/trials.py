"""Samples that are trials of Harbor: environment up, agent, verifier, reward, environment down.

    AgentTask ──line of JSON──> runner (Harbor's own Python) ──> environment, agent ──HTTP──> endpoint
                                      └──> verifier ──line of JSON──> AgentResult with the reward

Flows in: tasks with the address and the key of their sessions. Flows out: rewards and logs. One runner process plays all trials of a run,
and is started again if it dies. Does not know how Harbor plays.
"""

import asyncio
import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_async.config.schema.generator import GeneratorConfig, HarborConfig
from skyrl_async.errors import EnvironmentFailedError, GenerationError
from skyrl_async.generators.agent.generator import DIRECTORY_MARK
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward
from skyrl_async.harbor.agents import agent_config, harbor_name, install_programs, with_programs, works_inside
from skyrl_async.harbor.process import TrialProcess, check_names, harbor_python
from skyrl_async.harbor.tasks import TASK_COLUMN
from skyrl_async.harnesses.install import Say
from skyrl_async.runtime.outages import Outages
from skyrl_async.types import Prompt

logger = logging.getLogger(__name__)

OTHER_STAGES_S = 3600.0
"""Longest time beside the agent's. Harbor keeps its own limits of set-up (task.toml) and verifier; this one is for a runner that hangs."""
_OF_ENVIRONMENT = ("environment_setup", "agent_setup")
_REWARDS_FILE = "rewards.json"
"""In a sample's directory: what the verifier gave, although the agent failed."""


class VerifierReward:
    """A ``RewardSource`` for agents that a cap of their session has stopped: what the verifier gave for their work until then."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises ``GenerationError`` if it gave nothing."""
        try:
            rewards = json.loads((episode.working_dir / _REWARDS_FILE).read_text())
        except FileNotFoundError as error:
            raise GenerationError(f"the verifier of {prompt.uid} gave no reward: {episode.failure}") from error
        return EpisodeReward(reward=reward_of(rewards, prompt.uid))


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
        outages: Outages | None = None,
    ) -> None:
        """
        Args:
            settings: of ``generator.harbor``.
            agent: Harbor's name of it, or ``module:Class``.
            python: of an environment that Harbor is installed in.
            agent_timeout_s: longest run of the agent; a task may ask for less.
            max_agents: agents that run at once; None: no limit.
            run_dir: directory of the run, by which a resumed run finds processes that were left.
            outages: in one, an agent's end by a timeout or an error is a failure: Harbor's clock goes on; None: unknown.
        """
        self._settings = settings
        self._agent = agent
        self._python = python
        self._agent_timeout_s = agent_timeout_s
        self._max_agents = max_agents
        self._marks = {} if run_dir is None else {"SKYRL_RUN_DIR": str(run_dir.absolute())}
        self._outages = outages or Outages()
        self._runner: TrialProcess | None = None
        self._starting = asyncio.Lock()

    async def run(self, task: AgentTask) -> AgentResult:
        """Play a trial.

        Raises ``EnvironmentFailedError`` if its environment could not be made or was lost, and ``GenerationError`` if agent or verifier
        failed without a reward.
        """
        num_over = self._outages.num_over
        runner = await self._started(task.working_dir.parent)
        found = await runner.play(self._trial(task))
        metrics = {f"timing/{stage}": seconds for stage, seconds in found["seconds"].items()}
        metrics["agent/timeouts"] = float(found["is_late"])  # it is judged for what it did
        metrics["agent/errors"] = float(found["has_error"])  # the same
        rewards = found["rewards"]
        failure = found["failure"]
        if failure is None and (found["is_late"] or found["has_error"]) and self._outages.met_since(num_over):
            failure = {
                "stage": "agent_execution",
                "type": "OutageError",
                "message": "the agent did not end by itself in an outage",
            }
        if failure is not None:
            stage, words = failure["stage"], f"{failure['type']}: {_without_names(failure['message'], task)}"
            kind = EnvironmentFailedError if stage in _OF_ENVIRONMENT else GenerationError
            if rewards:
                (task.working_dir / _REWARDS_FILE).write_text(json.dumps(rewards))
            raise kind(f"the trial failed in its {stage.replace('_', ' ')}: {words}")
        reward = reward_of(rewards, task.uid)
        others = {f"reward/{name}": float(value) for name, value in rewards.items() if name != "reward"}
        logs = {name: text.replace(task.api_key, "<key>") for name, text in found["logs"].items()}
        return AgentResult(reward=reward, metrics=metrics | others, logs=logs)

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
            if works_inside(self._agent):  # where there is the loopback interface alone, whatever server.host is
                task = replace(task, base_url=url._replace(netloc=f"127.0.0.1:{port}").geturl())
        agent = agent_config(self._agent, task)
        agent["kwargs"] |= self._settings.agent_kwargs
        return {
            "task": task.extras[TASK_COLUMN],
            "trials_dir": str(place),
            "environment": self._settings.environment,
            "environment_kwargs": kwargs,
            "agent": {**agent, "max_timeout_sec": self._agent_timeout_s},
        }


def check_harbor(settings: GeneratorConfig, cache_dir: Path, say: Say) -> None:
    """Install Harbor, and the agent's programs, where they are missing.

    Raises ``ConfigError``, also for an agent or an environment that Harbor does not know.
    """
    python = harbor_python(settings.harbor.python, cache_dir=cache_dir, say=say)
    agent = harbor_name(str(settings.harness))
    check_names(python, agent, settings.harbor.environment)
    if settings.harbor.environment == "local":
        install_programs(agent, cache_dir, say)


def harbor_harness(
    settings: GeneratorConfig, cache_dir: Path, run_dir: Path | None, outages: Outages | None = None
) -> tuple[HarborTrials, GeneratorConfig]:
    """Return the harness, and the settings of the generator that runs it: its limits are of whole trials, the runner's of agents."""
    harbor, agent = settings.harbor, harbor_name(str(settings.harness))
    if harbor.environment == "local" and (bin_dir := install_programs(agent, cache_dir, logger.info)) is not None:
        harbor = with_programs(harbor, agent, bin_dir)
    trials = HarborTrials(
        harbor,
        agent,
        harbor_python(harbor.python, cache_dir=cache_dir, say=logger.info),
        agent_timeout_s=settings.agent_timeout_s,
        max_agents=settings.max_concurrent_agents,
        run_dir=run_dir,
        outages=outages,
    )
    of_trials = replace(
        settings,
        max_concurrent_agents=harbor.max_environments,
        agent_timeout_s=settings.agent_timeout_s + OTHER_STAGES_S,
    )
    return trials, of_trials


def reward_of(rewards: dict[str, float] | None, uid: str) -> float:
    """The reward called ``reward``, else the mean of all. Raises ``GenerationError`` if there is none, or it is not finite."""
    if not rewards:
        raise GenerationError("the trial ended without a reward")
    reward = float(rewards.get("reward", sum(rewards.values()) / len(rewards)))
    if not math.isfinite(reward):
        raise GenerationError(
            f"the verifier of {uid} must give a finite number as reward (reward.txt or reward.json in /logs/verifier), got {rewards}"
        )
    return reward


def _without_names(message: str, task: AgentTask) -> str:
    """The message without its session's key and what else differs from trial to trial, so that equal reasons are counted together."""
    message = message.replace(task.api_key, "<key>")
    return re.sub(rf"{re.escape(str(task.working_dir.absolute()))}/[\w.-]+", "the trial", message)
