"""Plays one task with a shipped harness against a served policy that is scripted: what a training run does, without a model.

Flows in: a harness. Flows out: the training rows of its sample, and whether they hold all that was sampled.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import GenerationError
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.harnesses.scripted import Script, in_turn, make_app
from skyrl_async.harnesses.shipped import ShippedHarness, shipped_harness
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import Prompt, SamplingParams, Trajectory

TIMEOUT_S = 120.0
_TASK = "Write hello into the file out.txt."
_PROMPT = Prompt(uid="check", messages=({"role": "user", "content": _TASK},), env_class="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A task that was played."""

    rows: tuple[Trajectory, ...]
    num_side_tokens: int
    """Sampled in side requests, which are no rows."""
    num_sampled: int
    """All tokens that the policy sampled."""
    failure: str | None = None

    @property
    def is_sound(self) -> bool:
        """The task is solved, and every sampled token is in one row or in a side request."""
        return self.failure is None and all(row.reward == 1.0 for row in self.rows) and self._is_complete

    @property
    def _is_complete(self) -> bool:
        return self._num_trained + self.num_side_tokens == self.num_sampled

    @property
    def _num_trained(self) -> int:
        return sum(row.num_sampled_tokens for row in self.rows)

    def words(self) -> str:
        """A line about it."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        places = f"{self._num_trained} in {len(self.rows)} rows, {self.num_side_tokens} in side requests"
        verdict = "sound" if self.is_sound else "not sound"
        return f"{verdict}, reward {self.rows[0].reward:g}, {self.num_sampled} tokens sampled: {places},"


class _Written:
    """A ``RewardSource``: 1 for the file with its word."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        file = episode.working_dir / "out.txt"
        return EpisodeReward(reward=float(file.is_file() and file.read_text().strip() == "hello"))


async def play(
    harness: ShippedHarness, bin_dir: Path, script: Script | None = None, *, max_model_len: int = 100_000
) -> Played:
    """Play the task; ``script`` is what the policy says, by default what solves it."""
    key = secrets.token_urlsafe()
    app = make_app(script or in_turn(*harness.check), controller_key=key, max_model_len=max_model_len)
    sampler = app.state.serving.sampler
    async with start_server(app) as (host, port):
        generator = make_agent_generator(
            GeneratorConfig(agent_timeout_s=TIMEOUT_S),
            urls=[f"http://{host}:{port}"],
            controller_key=key,
            make_environment=make_environment,
            harness=shipped_harness(harness, bin_dir),
            reward_source=_Written(),
        )
        request = GroupRequest(prompt=_PROMPT, num_samples=1, sampling=SamplingParams(max_tokens=4096))
        try:
            rows = await generator.generate(request)
        except GenerationError as error:
            return Played(rows=(), num_side_tokens=0, num_sampled=sampler.num_sampled_tokens, failure=str(error))
        finally:
            await generator.close()
    side = int(rows[0].metrics["agent/side_tokens"])
    return Played(rows=rows, num_side_tokens=side, num_sampled=sampler.num_sampled_tokens)
