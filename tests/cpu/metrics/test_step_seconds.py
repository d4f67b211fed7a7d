"""Steps take what they say, in virtual time: every second of the training loop is in one of them, or in a checkpoint."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_async.rollout.preparation import Prepare
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.workers.logprob_workers import ColumnStageWork
from skyrl_async.training.workers.recovering import RecoveringPolicy
from skyrl_async.types import LogprobModel

JOB = SimulationSettings(mini_batch_size=4, num_steps=12, mean_tokens=300.0, num_prompts=200, seconds_per_token=1e-3)
SLOW_LOAD = replace(JOB, load_seconds=20.0, max_staleness_steps=4)


def seconds(simulation: Simulation, name: str) -> list[float]:
    """Of each step that has it."""
    return [values[f"timing/{name}"] for _, values in simulation.logged if f"timing/{name}" in values]


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, gather_seconds=5.0, max_staleness_steps=0),
        *(
            pytest.param(job, marks=pytest.mark.slow)
            for job in (
                replace(JOB, gather_seconds=5.0),
                SLOW_LOAD,
                replace(SLOW_LOAD, publish_every_steps=3),
                replace(SLOW_LOAD, checkpoint_interval_steps=2),
            )
        ),
        replace(SLOW_LOAD, publish_every_steps=3, checkpoint_interval_steps=4, step_seconds=0.5),
    ],
)
def test_steps_and_checkpoints_add_up_to_the_time_from_the_beginning_to_the_last_copy(
    job: SimulationSettings, tmp_path: Path
) -> None:
    async def main() -> None:
        simulation, loop = Simulation(job, checkpoint_dir=tmp_path), asyncio.get_running_loop()
        gather, save, run = simulation.publisher.gather, simulation.policy.save, simulation.workers.run
        moments: list[float] = []

        async def running(**how: Any) -> None:
            moments.append(loop.time())
            await run(**how)

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
        simulation = Simulation(replace(SLOW_LOAD, publish_every_steps=3, gather_seconds=2.0, step_seconds=0.5))
        await simulation.trainer.run()
        names = ("wait_for_groups", "wait_for_publish", "forward_backward", "optimizer_step", "gather")
        for _, values in simulation.logged:
            if "timing/step" in values:
                parts = sum(values.get(f"timing/{name}", 0.0) for name in names)
                assert parts == pytest.approx(values["timing/step"])

    run_in_virtual_time(main())


def test_waiting_for_log_probs_that_policy_workers_compute_is_no_training(tmp_path: Path) -> None:
    """They answer one call at a time."""
    computing = dict.fromkeys(("forward_backward", "step", "logprobs_of"), 0.0)

    def on_the_same_workers(policy: ModelledPolicy) -> dict[str, Prepare]:
        loop = asyncio.get_running_loop()

        def timed(name: str) -> Callable[..., Awaitable[Any]]:
            call = getattr(policy, name)

            async def timed_call(*arguments: Any) -> Any:
                started = loop.time()
                answer = await call(*arguments)
                computing[name] += loop.time() - started
                return answer

            return timed_call

        workers = SimpleNamespace(**{name: timed(name) for name in computing})
        recovering = RecoveringPolicy(None, max_restarts=0, directory=tmp_path, max_journal_bytes=1)  # type: ignore[arg-type]
        recovering._workers = workers  # type: ignore[assignment]
        policy.forward_backward, policy.step = recovering.forward_backward, recovering.step  # type: ignore[method-assign]
        return {"ref_logp": ColumnStageWork(lambda t: recovering.logprobs_of(t, LogprobModel.REF), "ref_logprobs")}

    async def main() -> Simulation:
        job = replace(JOB, num_engines=4, step_seconds=0.2, max_staleness_steps=4)
        simulation = Simulation(job, prepare_with=on_the_same_workers)
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert sum(seconds(simulation, "forward_backward")) == pytest.approx(computing["forward_backward"])
    assert sum(seconds(simulation, "optimizer_step")) == pytest.approx(computing["step"])
    assert simulation.trainer.totals.train_seconds == pytest.approx(computing["forward_backward"] + computing["step"])
    assert 0 < sum(seconds(simulation, "wait_for_devices")) < computing["logprobs_of"]
    assert not any("policy/wait_seconds" in values for _, values in simulation.logged)
