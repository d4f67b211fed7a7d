"""Simulated runs of which wake-ups and bytes are counted; without vLLM, which a process that only counts would import for seconds."""

import asyncio
import gc
import random
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import VirtualTimeLoop
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import PauseMode, Trajectory


class CountingLoop(VirtualTimeLoop):
    """Counts what it is asked to run: every wake-up of a task is one callback, and so is every timer."""

    num_callbacks = 0

    def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.num_callbacks += 1
        return super().call_soon(*args, **kwargs)

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.num_callbacks += 1
        return super().call_at(*args, **kwargs)


class TimedGenerator:
    """Plays a group in some virtual seconds, without engines: what is left is the control plane."""

    def __init__(self, client: InferenceEngineClient) -> None:
        pass

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        await asyncio.sleep(random.Random(request.seed).random())
        answer = Trajectory(
            prompt_token_ids=(1,), response_token_ids=(2,), loss_mask=(1,), logprobs=(-1.0,), versions=(0,), reward=1.0
        )
        return (answer,) * request.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A simulated run that has ended."""

    simulation: Simulation
    num_callbacks: int


def simulate(
    num_workers: int,
    num_groups: int,
    *,
    num_prompts: int | None = None,
    sigma: float = 0.8,
    generator_over: Callable[[InferenceEngineClient], Any] = ModelledGenerator,
) -> Run:
    """Train on so many groups, two mini-batches of them in flight, in one epoch unless there are fewer prompts."""
    settings = SimulationSettings(
        mini_batch_size=num_workers // 2,
        max_staleness_steps=2,
        num_workers=num_workers,
        num_steps=num_groups // (num_workers // 2),
        num_prompts=num_prompts or num_groups,
        group_size=1,
        mean_tokens=8,
        sigma=sigma,
        pause_mode=PauseMode.KEEP,
    )

    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=generator_over)
        simulation.policy.steps = deque([[]], maxlen=1)  # it would remember every group
        await simulation.trainer.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return simulation

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        simulation = runner.run(main())
        loop = runner.get_loop()
    assert isinstance(loop, CountingLoop)
    totals = simulation.trainer.totals
    assert (totals.trained_groups, totals.groups_over_bound) == (num_groups, 0)
    assert simulation.staleness.num_running == len(simulation.buffer) == 0
    assert simulation.client.statistics()["running_requests"] == 0
    return Run(simulation=simulation, num_callbacks=loop.num_callbacks)


def bytes_held(num_groups: int) -> tuple[int, int]:
    """By a run, at most and in the end."""
    gc.collect()
    tracemalloc.start()
    run = simulate(40, num_groups, num_prompts=200, sigma=0.0)
    run.simulation.logged.clear()
    gc.collect()
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most, now
