"""A thousand trials in virtual time: the real trainer, generator, sessions and endpoint; engines and environments are modelled."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.errors import EnvironmentFailedError
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.harness import AgentResult, AgentTask
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward
from skyrl_async.generators.agent.sessions import SessionPool
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Prompt
from tests.cpu.scripted_sampler import CONTROLLER_KEY, RENDERER, TOKENIZER

URL = "http://endpoint"
SETTINGS = SimulationSettings(
    mini_batch_size=4,
    group_size=5,
    max_staleness_steps=2,
    num_steps=50,
    num_prompts=200,
    num_engines=2,
    mean_tokens=60.0,
    block_tokens=64,
    seconds_per_token=0.002,
    step_seconds=2.0,
    load_seconds=0.5,
    max_retries=5,
    retry_backoff_s=1.0,
    max_retry_backoff_s=30.0,
    rollout_timeout_s=7200.0,
)
MAX_ENVIRONMENTS = 64


@dataclass(eq=False)
class ModelledTrials:
    """A ``Harness``: environments take minutes, fail, hang, or are lost on the way; agents take one to four turns."""

    app: httpx.ASGITransport
    rng: random.Random
    fates: Counter[str] = field(default_factory=Counter)
    num_up: int = 0
    most_up: int = 0

    async def run(self, task: AgentTask) -> AgentResult:
        fate = self.rng.choices(["plays", "fails", "hangs", "is lost"], [90, 6, 1, 3])[0]
        self.fates[fate] += 1
        self.num_up += 1
        self.most_up = max(self.most_up, self.num_up)
        try:
            await asyncio.sleep(self.rng.lognormvariate(4.5, 0.8))  # a median of a minute and a half
            if fate == "fails":
                raise EnvironmentFailedError("the image could not be built")
            if fate == "hangs":
                await asyncio.Event().wait()
            await self._take_turns(task, self.rng.randint(1, 4))
            if fate == "is lost":
                raise EnvironmentFailedError("the machine was lost")
            return AgentResult(reward=float(self.rng.randrange(2)))
        finally:
            self.num_up -= 1

    async def _take_turns(self, task: AgentTask, num_turns: int) -> None:
        messages = list(task.messages)
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(transport=self.app, base_url=URL, headers=headers, timeout=None) as client:
            for turn in range(num_turns):
                answer = await client.post("/v1/chat/completions", json={"messages": messages})
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]
                messages += [said, {"role": "user", "content": f"observation {turn}"}]
                await asyncio.sleep(self.rng.expovariate(1 / 5))

    async def close(self) -> None:
        """Nothing is held."""


class NoReward:
    """A ``RewardSource`` that is never asked: trials bring their rewards."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        raise AssertionError


class _Run:
    """A simulated run whose samples are modelled trials, with what it leaves."""

    def __init__(self) -> None:
        self.record = KeptGroups()
        self.trials: ModelledTrials
        self.num_open_sessions = -1

    async def play(self) -> None:
        simulation = Simulation(SETTINGS, generator_over=self._generator_over, record=self.record)
        await simulation.run()
        await self._generator.close()
        self.num_open_sessions = int(self._app.state.serving.sessions.statistics()["open_sessions"])

    def _generator_over(self, client: InferenceEngineClient) -> AgentGenerator:
        self._app = create_app(
            client,
            RENDERER,
            api_keys=[],
            controller_keys=[CONTROLLER_KEY],
            parser=AnswerParser.of(TOKENIZER),
            clock=asyncio.get_running_loop().time,
        )
        transport = httpx.ASGITransport(self._app)
        self.trials = ModelledTrials(transport, random.Random(0))
        self._generator = AgentGenerator(
            SessionPool([URL], CONTROLLER_KEY, transport=transport),
            self.trials,
            NoReward(),
            agent_timeout_s=3600.0,
            max_concurrent_agents=MAX_ENVIRONMENTS,
        )
        return self._generator


@pytest.mark.slow
def test_a_thousand_trials_hold_the_bound_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = _Run()
    run_in_virtual_time(run.play())
    groups = run.record.trained
    assert sum(run.trials.fates.values()) >= 1000 and min(run.trials.fates.values()) >= 10
    assert run.trials.most_up <= MAX_ENVIRONMENTS
    assert len({group.uid for _, group in groups}) == len(groups) == SETTINGS.num_prompts
    assert max(step - 1 - group.scheduled_version for step, group in groups) == SETTINGS.max_staleness_steps
    rows = [row for _, group in groups for row in group.trajectories]
    assert all(row.is_abandoned == (not row.num_sampled_tokens) for row in rows)
    played = sum(not row.is_abandoned for row in rows)
    assert played == run.trials.fates["plays"]  # each played trial is trained, and no environment's failure is a reward
    assert run.num_open_sessions == 0
    assert not list(tmp_path.glob("skyrl_async-*"))
