"""Steps take what they say, in virtual time: every second of the training loop is in one of them, or in a checkpoint."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings, build_simulation

JOB = SimulationSettings(mini_batch_size=4, num_steps=12, mean_tokens=300.0, num_prompts=200, seconds_per_token=1e-3)
SLOW_LOAD = replace(JOB, load_seconds=20.0, max_staleness_steps=4)


def seconds(simulation: Simulation, name: str) -> list[float]:
    """Of each step that has it."""
    return [values[f"timing/{name}"] for _, values in simulation.logged if f"timing/{name}" in values]


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, gather_seconds=5.0),
        replace(JOB, gather_seconds=5.0, max_staleness_steps=0),
        SLOW_LOAD,
        replace(SLOW_LOAD, publish_every_steps=3),
        replace(SLOW_LOAD, checkpoint_interval_steps=2),
        replace(SLOW_LOAD, publish_every_steps=3, checkpoint_interval_steps=4, step_seconds=0.5),
    ],
)
def test_steps_and_checkpoints_add_up_to_the_time_from_the_beginning_to_the_last_copy(
    job: SimulationSettings, tmp_path: Path
) -> None:
    async def main() -> None:
        simulation, loop = build_simulation(job, checkpoint_dir=tmp_path), asyncio.get_running_loop()
        gather, save, run = simulation.publisher.gather, simulation.policy.save, simulation.workers.run
        moments: list[float] = []

        async def running() -> None:
            moments.append(loop.time())
            await run()

        async def gathering(version: int) -> None:
            await gather(version)
            if version:
                moments.append(loop.time())

        async def saving(directory: Path) -> None:
            await asyncio.sleep(7.0)
            await save(directory)

        simulation.workers.run, simulation.publisher.gather, simulation.policy.save = running, gathering, saving
        await simulation.trainer.run()
        steps, checkpoints = seconds(simulation, "step"), seconds(simulation, "checkpoint")
        if job.checkpoint_interval_steps:
            assert len(checkpoints) == job.num_steps // job.checkpoint_interval_steps
            checkpoints.pop()  # of the last step, after its copy
        assert sum(steps) == pytest.approx(simulation.trainer.totals.training_seconds)
        assert sum(steps) + sum(checkpoints) == pytest.approx(moments[-1] - moments[0])
        for name in ("wait_for_publish", "gather"):
            assert all(part <= step for part, step in zip(seconds(simulation, name), steps, strict=False))

    run_in_virtual_time(main())


def test_the_parts_of_a_step_add_up_to_it() -> None:
    async def main() -> None:
        simulation = build_simulation(replace(SLOW_LOAD, publish_every_steps=3, gather_seconds=2.0, step_seconds=0.5))
        await simulation.trainer.run()
        names = ("wait_for_groups", "wait_for_publish", "forward_backward", "optimizer_step", "gather")
        for _, values in simulation.logged:
            if "timing/step" in values:
                parts = sum(values.get(f"timing/{name}", 0.0) for name in names)
                assert parts == pytest.approx(values["timing/step"])

    run_in_virtual_time(main())
