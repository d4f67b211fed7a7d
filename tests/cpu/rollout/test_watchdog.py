"""What takes too long is named while it does: by uid, phase, sample, turn, engine and seconds. In virtual time."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.generator import GroupRequest, keeps_samples
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.runtime.progress import GroupProgress, RolloutStatus, report, report_engine
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Trajectory
from tests.cpu.documented_metrics import DOCUMENTED_METRICS
from tests.cpu.generators.test_gym_generator import Quiz, ScriptedSampler, request
from tests.cpu.tiny_chat import RENDERER

RUN = SimulationSettings(
    mean_tokens=100.0,
    num_steps=None,
    num_epochs=1,
    num_prompts=16,
    rollout_timeout_s=500.0,
    step_seconds=1.0,
    stall_warning_s=60.0,
)


class Hanging(ModelledGenerator):
    """Never returns for one prompt, and says nothing of it."""

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if request.prompt.uid == "p3":
            await asyncio.Event().wait()
        return await super().generate(request)


def simulate(settings: SimulationSettings, generator_over: Any = ModelledGenerator, prepare: Any = None) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=generator_over)
        if prepare is not None:
            prepare(simulation)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("watchdog")]


def test_contract_8_a_hung_rollout_is_named_in_the_log_less_often_the_longer_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulation = simulate(RUN, Hanging)
    assert simulation.dataloader.statistics()["trained_total"] == 15
    named = [line for line in warnings(caplog) if "p3 (generating for" in line]
    assert [int(line.partition("p3 (generating for ")[2].partition(" s")[0]) for line in named[:3]] == [60, 120, 240]
    assert len(named) <= 6
    assert named[0].startswith("longer than trainer.stall_warning_s=60: ")


def test_contract_8_what_is_stuck_is_in_the_metrics_although_no_step_ends() -> None:
    simulation = simulate(RUN, Hanging)
    names = ("async/stuck_rollouts", "timing/oldest_rollout")
    between = [values for _, values in simulation.logged if names[0] in values and "timing/step" not in values]
    assert [1.0, 480.0] in [[values[name] for name in names] for values in between]
    steps = [values for _, values in simulation.logged if "timing/step" in values]
    assert all(set(names) <= set(values) for values in steps) and set(names) <= DOCUMENTED_METRICS
    assert steps[-1]["async/stuck_rollouts"] == 0.0


def test_the_wait_for_groups_is_named_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    simulate(replace(RUN, max_staleness_steps=0, mini_batch_size=16), Hanging)
    assert any("wait_for_groups step 1 (for " in line for line in warnings(caplog))


@pytest.mark.parametrize("stage", ["send", "load", "optimizer_step", "forward_backward", "checkpoint"])
def test_contract_8_a_stage_of_the_trainer_that_hangs_for_a_while_is_named(
    stage: str, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """What it waits for has deadlines of its own; here it ends after 200 s."""

    def slow(owner: Any, name: str) -> None:
        plain, calls = getattr(owner, name), iter([0.0, 200.0, *[0.0] * 999])

        async def call(*args: Any) -> Any:
            await asyncio.sleep(next(calls))
            return await plain(*args)

        setattr(owner, name, call)

    def prepare(simulation: Simulation) -> None:
        owner, name = {
            "send": (simulation.policy, "send_weights"),
            "load": (simulation.engines[0], "load_weights"),
            "optimizer_step": (simulation.policy, "step"),
            "forward_backward": (simulation.policy, "forward_backward"),
            "checkpoint": (simulation.policy, "save"),
        }[stage]
        slow(owner, name)

    async def main() -> None:
        simulation = Simulation(replace(RUN, checkpoint_interval_steps=1), checkpoint_dir=tmp_path)
        prepare(simulation)
        await simulation.trainer.run()

    run_in_virtual_time(main())
    assert any(f"{stage} " in line and "(for " in line for line in warnings(caplog)), warnings(caplog)


def test_a_run_in_which_nothing_takes_long_is_not_disturbed(caplog: pytest.LogCaptureFixture) -> None:
    watched, plain = simulate(RUN), simulate(replace(RUN, stall_warning_s=math.inf))
    assert warnings(caplog) == []
    assert watched.policy.steps == plain.policy.steps
    assert len(watched.logged) == len(plain.logged)


def status(uid: str = "p", seconds: float = 70.0, **more: Any) -> RolloutStatus:
    return RolloutStatus(**{"uid": uid, "phase": "generating", "seconds": seconds, "total_seconds": seconds, **more})


def test_a_status_reads_like_a_sentence() -> None:
    assert str(status()) == "p (generating for 70 s)"
    full = status(sample_index=1, turn=2, engine="engine-0")
    assert str(full) == "p sample 1 turn 2 (generating on engine-0 for 70 s)"


class Watched:
    """A watchdog over what the test says is going on."""

    def __init__(self) -> None:
        self.rollouts: list[list[RolloutStatus]] = []
        self.shown: list[list[str]] = []
        self.logged: list[dict[str, float]] = []
        self.watchdog = Watchdog(
            rollouts=lambda: self.rollouts,
            stages=lambda: (),
            threshold_s=60.0,
            log=self.logged.append,
            show=lambda lines: self.shown.append(list(lines)),
        )

    def look(self, *rollouts: Sequence[RolloutStatus]) -> None:
        self.rollouts = [list(statuses) for statuses in rollouts]
        self.watchdog.check()


def test_the_log_names_five_and_counts_the_rest_while_the_console_gets_all(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.look(*[[status(f"p{i}", 100.0 - i)] for i in range(8)], [status("fresh", 3.0)])
    (line,) = warnings(caplog)
    assert line.endswith("p4 (generating for 96 s); and 3 more") and "p0 (generating for 100 s)" in line
    assert len(watched.shown[0]) == 8 and watched.logged == [
        {"timing/oldest_rollout": 100.0, "async/stuck_rollouts": 8.0}
    ]


def test_when_nothing_is_stuck_any_more_the_console_and_the_metrics_learn_it_once() -> None:
    watched = Watched()
    watched.look([status()])
    watched.look([status(seconds=1.0)])
    watched.look([])
    assert watched.shown == [["p (generating for 70 s)"], []]
    assert [values["async/stuck_rollouts"] for values in watched.logged] == [1.0, 0.0]


def test_a_phase_that_begins_anew_is_news_and_one_that_goes_on_is_not(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for seconds in (70, 130, 139, 140, 200, 270):
        watched.look([status(seconds=float(seconds))])
    assert len(warnings(caplog)) == 2
    watched.look([status(seconds=1.0)])
    watched.look([status(seconds=61.0)])
    assert len(warnings(caplog)) == 3


def test_the_failure_of_what_is_watched_is_raised_as_itself_and_ends_the_watch() -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with Watched().watchdog.watching():
                raise KeyError("mine")
        assert len(asyncio.all_tasks()) == 1

    run_in_virtual_time(main())


def test_an_episode_says_its_sample_turn_phase_and_engine() -> None:
    """Sample 0 generates on its second turn, on an engine; the environment of sample 1 hangs."""

    class Sampler(ScriptedSampler):
        async def generate_tokens(self, *args: Any, session_id: str | None = None, **kwargs: Any) -> Any:
            report_engine("engine-3")
            if str(session_id).endswith("/0") and self.requests:
                await asyncio.sleep(300)
            await asyncio.sleep(10)
            return await super().generate_tokens(*args, session_id=session_id, **kwargs)

    generator = GymGenerator(Sampler(["a", "b"]), RENDERER, lambda name, extras: Quiz())
    attempts = RolloutRetrier(generator, GeneratorConfig(max_retries=0, rollout_timeout_s=1000, retry_backoff_s=0))

    async def main() -> list[list[RolloutStatus]]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attempts.generate(request()))
            await asyncio.sleep(75)
            return attempts.statuses()

    ((found,),) = run_in_virtual_time(main())
    assert str(found) == "p sample 0 turn 2 (generating on engine-3 for 65 s)"
    assert found.total_seconds == 75.0


def test_a_rollout_that_waits_for_a_retry_says_so_and_counts_from_its_beginning() -> None:
    class Failing:
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            await asyncio.sleep(30)
            raise ValueError("no")

    attempts = RolloutRetrier(
        Failing(), GeneratorConfig(max_retries=1, rollout_timeout_s=1000, retry_backoff_s=80, max_retry_backoff_s=80)
    )

    async def main() -> list[list[RolloutStatus]]:
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(attempts.generate(request()))
            await asyncio.sleep(50)
            found = attempts.statuses()
            playing.cancel()
            return found

    ((found,),) = run_in_virtual_time(main())
    assert (found.phase, found.seconds, found.total_seconds) == ("waiting for a retry", 20.0, 50.0)


async def test_the_slowest_sample_comes_first_and_those_that_ended_are_no_longer_named() -> None:
    progress = GroupProgress()
    with progress.playing(2):
        report("in a tool", turn=4)
        with progress.playing(5):
            report("rewarding")
            assert [s.sample_index for s in progress.statuses("p", 0.0)] == [2, 5]
        (left,) = progress.statuses("p", 0.0)
        assert (left.sample_index, left.phase, left.turn) == (2, "in a tool", 4)
    report("to nobody")
    assert [s.sample_index for s in progress.statuses("p", 0.0)] == [None]


def test_a_wait_for_groups_says_when_none_is_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    """No prompt is ever admitted."""

    async def main() -> None:
        simulation = Simulation(RUN)
        simulation.staleness.acquire_submission_slot = asyncio.Event().wait  # type: ignore[assignment]
        async with asyncio.timeout(100):
            await simulation.trainer.run()

    with pytest.raises(TimeoutError):
        run_in_virtual_time(main())
    assert warnings(caplog)[0].endswith("wait_for_groups step 1 (for 60 s, none of which is in flight)")


def test_open_spans_are_the_innermost_ones_with_their_seconds_and_what_they_are_about() -> None:
    now = [0.0]
    trace = Trace(None, lambda: now[0])
    with trace.span("publish", track="training", version=3):
        now[0] = 5.0
        with trace.span("load", track="publish", version=3):
            now[0] = 12.0
            (span,) = trace.open_spans()
            assert (span.track, span.name, span.seconds, dict(span.args)) == ("publish", "load", 7.0, {"version": 3})
        (span,) = trace.open_spans()
        assert (span.name, span.seconds) == ("publish", 12.0)
    assert trace.open_spans() == ()
