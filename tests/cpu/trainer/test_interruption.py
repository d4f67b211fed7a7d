"""Stragglers go on across weight updates whatever they are doing, and others are generated meanwhile; in virtual time.

The generator is the real one for environments, over the real client; a tool's call takes virtual seconds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import ENVIRONMENT_VERSION, PauseMode, Prompt, SamplingParams, Trajectory, WeightUpdate
from tests.cpu.tiny_chat import RENDERER, TOKENIZER

TOKENS_PER_SECOND = 10.0
TURN_TOKENS = 40
"""4 seconds."""
TOOL_SECONDS = 3.0
NUM_TURNS = 2


class SlowTool(BaseTextEnv):
    """Each action runs a tool, whose call keeps a thread busy for ``TOOL_SECONDS``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_actions = 0

    def step(self, action: str) -> dict[str, Any]:
        self.num_actions += 1
        is_done = self.num_actions == NUM_TURNS
        answer = [] if is_done else [{"role": "user", "content": "again"}]
        return {"observations": answer, "reward": 1.0, "done": is_done, "metadata": {}}


class VirtualThreads(Executor):
    """Every ``step`` takes ``TOOL_SECONDS`` of the loop's time, everything else none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        is_step = any(getattr(one, "__name__", "") == "step" for one in (call, *args))
        seconds = TOOL_SECONDS if is_step else 0.0
        asyncio.get_running_loop().call_later(seconds, lambda: future.set_result(call(*args, **kwargs)))
        return future


@pytest.fixture(autouse=True)
def virtual_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_async.generators.gym.environment.DaemonThreads", VirtualThreads)


def gym(client: InferenceEngineClient) -> GymGenerator:
    return GymGenerator(client, RENDERER, lambda name, extras: SlowTool())


def play(pause_at: float, pause_seconds: float, mode: PauseMode) -> tuple[Trajectory, float]:
    """One episode, with one weight update meanwhile; the row, and when it was complete."""

    async def main() -> tuple[Trajectory, float]:
        engine = ModelledEngine(
            "e0",
            num_tokens_of=lambda prompt, seed: TURN_TOKENS,
            tokens_per_second=TOKENS_PER_SECOND,
            half_speed_requests=1e9,
            load_seconds=pause_seconds,
        )
        client = InferenceEngineClient([engine], tokenizer=TOKENIZER, max_model_len=10_000)

        async def update_weights() -> None:
            await asyncio.sleep(pause_at)
            await engine.pause(mode)
            await engine.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0))
            await engine.resume()

        prompt = Prompt(uid="p", messages=({"role": "user", "content": "hello"},), env_class="slow")
        request = GroupRequest(prompt=prompt, num_samples=1, sampling=SamplingParams(max_tokens=100))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(update_weights())
            (row,) = await gym(client).generate(request)
        return row, asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def sampled_versions(row: Trajectory) -> list[int]:
    """Of the tokens of all turns, the environment's left out."""
    for mask, version in zip(row.loss_mask, row.versions, strict=True):
        assert (version == ENVIRONMENT_VERSION) == (mask == 0)
    return [version for version, mask in zip(row.versions, row.loss_mask, strict=True) if mask]


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize(
    ("pause_at", "num_before", "delay"),
    [
        pytest.param(1.5, 15, 0.5, id="inside the first generation"),
        pytest.param(5.0, 40, 0.0, id="inside a tool call"),
        pytest.param(6.75, 40, 0.25, id="between turns: the tool answers during the update"),
        pytest.param(8.0, 50, 0.5, id="inside the second generation"),
    ],
)
def test_an_episode_goes_on_across_an_update_with_its_tokens_and_their_versions(
    mode: PauseMode, pause_at: float, num_before: int, delay: float
) -> None:
    row, finished_at = play(pause_at, 0.5, mode)
    undisturbed, _ = play(1e6, 0.5, mode)
    assert sampled_versions(row) == [0] * num_before + [1] * (NUM_TURNS * TURN_TOKENS - num_before)
    assert row.response_token_ids.tolist() == undisturbed.response_token_ids.tolist(), (
        "nothing was sampled again, nothing tokenized again"
    )
    assert row.num_turns == NUM_TURNS and row.reward == NUM_TURNS
    in_generation = num_before % TURN_TOKENS != 0
    assert row.num_aborts == (mode is PauseMode.ABORT and in_generation)
    undelayed = NUM_TURNS * (TURN_TOKENS / TOKENS_PER_SECOND + TOOL_SECONDS)
    assert finished_at == pytest.approx(undelayed + delay)


STRAGGLER = "p7"
SETTINGS = SimulationSettings(
    max_staleness_steps=2,
    num_steps=12,
    mean_tokens=100.0,
    sigma=0.3,
    step_seconds=0.5,
    load_seconds=0.1,
    num_engines=1,
)


class OneIsLong(ModelledEngine):
    """Answers to one prompt are 15 times as long as others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        length = self.num_tokens_of
        straggler = tuple(ord(c) for c in STRAGGLER)
        self.num_tokens_of = lambda prompt, seed: 1500 if prompt == straggler else length(prompt, seed)


def run_with_straggler(monkeypatch: pytest.MonkeyPatch, settings: SimulationSettings, **parts: Any) -> Simulation:
    monkeypatch.setattr("skyrl_async.simulator.run.ModelledEngine", OneIsLong)

    async def main() -> Simulation:
        simulation = Simulation(settings, **parts)
        simulation.workers._sampling = SamplingParams(max_tokens=10_000)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def rows_of(simulation: Simulation, uid: str) -> list[tuple[int, Trajectory]]:
    """(version trained at, row)."""
    prompt = [ord(c) for c in uid]
    return [
        (version, row)
        for version, step in enumerate(simulation.policy.steps)
        for group in step
        for row in group
        if row.prompt_token_ids.tolist() == prompt
    ]


def test_a_straggler_keeps_its_tokens_across_every_update_until_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = run_with_straggler(monkeypatch, SETTINGS)
    trained = rows_of(simulation, STRAGGLER)
    assert trained
    for version, row in trained:
        assert row.response_token_ids.tolist() == [i % 100 for i in range(1500)]
        assert list(row.versions) == sorted(row.versions)
        assert len(row.versions.distinct) == row.num_aborts + 1 == SETTINGS.max_staleness_steps + 1
        assert version - next(iter(row.versions)) == SETTINGS.max_staleness_steps
    assert simulation.trainer.totals.wasted_tokens == 0
    assert simulation.trainer.totals.bound_cost.costliest(1)[0][0] == STRAGGLER


def test_with_mask_the_fresh_part_of_a_straggler_is_trained_and_the_old_part_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = run_with_straggler(monkeypatch, replace(SETTINGS, staleness_policy="mask", num_steps=40))
    trained = rows_of(simulation, STRAGGLER)
    assert trained and simulation.trainer.totals.masked_tokens > 0
    for version, row in trained:
        assert version - next(iter(row.versions)) > SETTINGS.max_staleness_steps
        for is_trained, sampled_under in zip(row.loss_mask, row.versions, strict=True):
            assert is_trained == (version - sampled_under <= SETTINGS.max_staleness_steps)
        assert 0 < row.num_sampled_tokens < len(row.loss_mask)


def test_while_a_straggler_runs_admission_tops_up_beyond_the_batch_until_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is waited for, every group that the capacity rule allows has been admitted, the engine never standing idle."""
    admitted_at_end: list[tuple[int, int]] = []

    class Watching(ModelledGenerator):
        num_admitted = 0

        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            Watching.num_admitted += 1
            trajectories = await super().generate(request)
            if request.prompt.uid == STRAGGLER:
                admitted_at_end.append((self._sampler.policy_version, Watching.num_admitted))
            return trajectories

    simulation = run_with_straggler(monkeypatch, SETTINGS, generator_over=Watching)
    size, bound = SETTINGS.mini_batch_size, SETTINGS.max_staleness_steps
    assert admitted_at_end
    for version, num_admitted in admitted_at_end:
        assert version >= bound, "steps went on without it"
        assert num_admitted == min((bound + 1 + version) * size, SETTINGS.num_steps * size)
    busy = [values["async/running_groups"] for _, values in simulation.logged if "async/running_groups" in values]
    assert max(busy[:-bound]) > size, "more are in flight than a batch needs"


def test_a_straggler_in_a_slow_tool_is_trained_with_the_versions_of_its_turns() -> None:
    settings = replace(SETTINGS, num_steps=6, group_size=1, mini_batch_size=4, mean_tokens=20.0, num_engines=2)

    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=gym)
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    rows = [row for step in simulation.policy.steps for group in step for row in group]
    assert len(rows) == 24 and any(len(set(sampled_versions(row))) > 1 for row in rows)
    assert any(row.num_aborts == 0 and len(set(sampled_versions(row))) > 1 for row in rows), (
        "updated inside a tool call"
    )
    for row in rows:
        assert sampled_versions(row) == sorted(sampled_versions(row)) and row.num_turns == NUM_TURNS
