"""Without a second buffer an engine that comes up needs the version being sent: nothing waits for engines between a send and its load."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.errors import EngineDeadError
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.simulator.run import Simulation, SimulationSettings, lognormal_length

JOB = SimulationSettings(
    double_buffer=False,
    mini_batch_size=4,
    num_steps=6,
    num_engines=1,
    mean_tokens=1000.0,
    sigma=0.5,
    step_seconds=0.5,
    send_seconds=0.5,
    load_seconds=0.2,
    engine_wait_s=900.0,
)
PINNED = replace(JOB, eval_interval_steps=2, num_eval_prompts=8)
ONE_STEP_OFF = replace(JOB, is_one_step_off=True, max_staleness_steps=1, stream_mini_batch=False)
BOOT_SECONDS = 5.0


class Mortal:
    """The engines of a run, each of which is started anew when it was killed."""

    def __init__(self, job: SimulationSettings) -> None:
        self.engines: list[FaultyEngine] = []
        self.simulation = Simulation(job, engine_around=self._around)
        self._job = job
        self._starting: set[asyncio.Task[None]] = set()

    def _around(self, engine: ModelledEngine) -> FaultyEngine:
        self.engines.append(FaultyEngine(engine))
        return self.engines[-1]

    def kill(self) -> None:
        """The oldest that lives."""
        if (engine := next((e for e in self.engines if not e.is_dead), None)) is not None:
            engine.kill()
            self.simulation.client.drop_engine(engine, EngineDeadError("killed"))
            starting = asyncio.create_task(self._start_anew(), name="boot")
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

    async def _start_anew(self) -> None:
        await asyncio.sleep(BOOT_SECONDS)
        job = self._job
        engine = ModelledEngine(
            f"engine-{len(self.engines)}",
            num_tokens_of=lognormal_length(job.mean_tokens, job.sigma, job.seed),
            load_seconds=job.load_seconds,
        )
        await self.simulation.client.add_engine(self._around(engine))


def assert_versions_are_kept_apart(simulation: Simulation, job: SimulationSettings) -> None:
    assert simulation.trainer.served_version == job.num_steps
    assert simulation.trainer.totals.staleness_max <= job.max_staleness_steps
    evaluated = [
        (step, v["eval/version_min"], v["eval/version_max"]) for step, v in simulation.logged if "reward/eval" in v
    ]
    assert all(step == oldest == newest for step, oldest, newest in evaluated)
    due = range(0, job.num_steps + 1, job.eval_interval_steps or job.num_steps)
    assert [step for step, *_ in evaluated] == (list(due) if job.num_eval_prompts else [])
    if job.is_one_step_off:
        for step, groups in enumerate(simulation.policy.steps[:-1]):
            assert {v for group in groups for row in group for v in row.versions} == {max(0, step - 1)}


@pytest.mark.slow
@pytest.mark.parametrize("job", [PINNED, ONE_STEP_OFF], ids=["a pinned evaluation", "a batch in flight"])
@pytest.mark.parametrize("after", [-0.1, 0.1, 0.6])
def test_a_death_of_the_only_engine_between_a_send_and_its_load_stops_no_run_and_mixes_no_versions(
    job: SimulationSettings, after: float
) -> None:
    """It dies in the midst of the send, in the midst of the load, and after it; it comes back with the new version."""

    async def main() -> float:
        mortal, loop = Mortal(job), asyncio.get_running_loop()
        send = mortal.simulation.publisher.send

        async def sending(version: int) -> bool:
            if version == 3:
                loop.call_later(0.5 + after, mortal.kill)
            return await send(version)

        mortal.simulation.publisher.send = sending
        await mortal.simulation.trainer.run()
        assert len(mortal.engines) == 2
        assert_versions_are_kept_apart(mortal.simulation, job)
        return loop.time()

    assert run_in_virtual_time(main()) < 400.0


@pytest.mark.slow
@given(
    job=st.sampled_from([JOB, PINNED, ONE_STEP_OFF, replace(JOB, deterministic=True)]),
    double_buffer=st.booleans(),
    num_engines=st.integers(1, 2),
    deaths=st.lists(st.floats(0.0, 120.0), min_size=1, max_size=4),
    send_seconds=st.sampled_from([0.0, 0.5, 10.0]),
    seconds_per_token=st.sampled_from([0.0, 1e-3]),
)
def test_whenever_engines_die_with_or_without_a_second_buffer_the_run_gets_on_and_versions_are_kept_apart(
    job: SimulationSettings,
    double_buffer: bool,
    num_engines: int,
    deaths: list[float],
    send_seconds: float,
    seconds_per_token: float,
) -> None:
    job = replace(
        job,
        double_buffer=double_buffer,
        num_engines=num_engines,
        send_seconds=send_seconds,
        seconds_per_token=seconds_per_token,
    )

    async def main() -> float:
        mortal, loop = Mortal(job), asyncio.get_running_loop()
        for at in deaths:
            loop.call_at(at, mortal.kill)
        await mortal.simulation.trainer.run()
        assert_versions_are_kept_apart(mortal.simulation, job)
        return loop.time()

    assert run_in_virtual_time(main()) < 900.0
