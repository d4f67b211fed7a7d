"""A run that is asked to stop: the step is finished or left, what was generated is kept, and it ends in time (virtual time)."""

import asyncio
import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState, read_state
from skyrl_async.errors import CheckpointError, GenerationError, InferenceError, NoEngineError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.runtime.shutdown import GRACE_S, ShutdownRequest, ShutdownRequested
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.protocol import Critic, Policy
from skyrl_async.types import Trajectory

LONG_TAILED = SimulationSettings(
    mean_tokens=100.0,
    sigma=1.2,
    num_steps=None,
    num_epochs=2,
    num_prompts=20,
    mini_batch_size=4,
    seconds_per_token=1e-4,
    load_seconds=0.5,
    step_seconds=1.0,
)
STEP_S = 3.0
"""Gradients, optimizer, send and load of a step whose groups are there take less."""


def trained(simulation: Simulation) -> list[tuple[int, ...]]:
    return [tuple(group[0].prompt_token_ids.tolist()) for step in simulation.policy.steps for group in step]


def stopped_after(
    seconds: float, patience_s: float, settings: SimulationSettings, directory: Path, **parts
) -> tuple[Simulation, float]:
    """A run asked to stop, and when it had ended (seconds)."""

    async def main() -> tuple[Simulation, float]:
        stop = ShutdownRequest()
        simulation = Simulation(settings, checkpoint_dir=directory, shutdown=stop, **parts)
        asyncio.get_running_loop().call_later(seconds, stop.request, patience_s)
        await simulation.trainer.run()
        assert len(asyncio.all_tasks()) == 1
        return simulation, asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def resumed(path: Path, settings: SimulationSettings) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings)
        await simulation.trainer.resume(path)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


@pytest.mark.slow
@given(
    at=st.floats(0.1, 20.0),
    patience_s=st.sampled_from([0.0, 1.0, 10.0]),
    bound=st.integers(0, 2),
    streamed=st.booleans(),
    interval=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 3),
)
def test_contract_7_a_stopped_run_ends_in_time_and_loses_no_finished_group(
    tmp_path_factory: pytest.TempPathFactory,
    at: float,
    patience_s: float,
    bound: int,
    streamed: bool,
    interval: int,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    settings = replace(
        LONG_TAILED,
        max_staleness_steps=bound,
        stream_mini_batch=streamed,
        checkpoint_interval_steps=interval,
        seed=seed,
    )
    simulation, ended = stopped_after(at, patience_s, settings, directory)
    assert ended <= at + patience_s + STEP_S
    assert simulation.dataloader.statistics()["running"] == simulation.staleness.num_running == 0
    path = simulation.trainer.newest_checkpoint
    if path is None:
        assert simulation.workers.counts["groups"] == 0 or ended < at
        return
    saved = read_state(path)
    finished = simulation.dataloader.statistics()["finished"]
    assert len(saved.groups) == finished and saved.step == simulation.trainer.trained_version
    assert saved.totals["trained_groups"] + len(saved.groups) == simulation.workers.counts["groups"]
    assert [g.admission_index for g in saved.groups] == sorted(g.admission_index for g in saved.groups)

    again = resumed(path, replace(settings, checkpoint_interval_steps=0))
    counts = Counter([*trained(simulation)[: saved.totals["trained_groups"]], *trained(again)])
    assert set(counts.values()) == {2} and len(counts) == 20, "each prompt is trained once per epoch"
    assert again.trainer.totals.resumed_trajectories == sum(group.num_kept for group in saved.running)
    assert again.trainer.totals.trained_groups == 40 and again.trainer.totals.wasted_tokens == 0


@pytest.mark.parametrize("at", [2.0, 3.1, 4.7, 6.0, 8.9])
def test_contract_7_a_run_that_cannot_go_on_saves_its_state_and_ends_with_the_reason(tmp_path: Path, at: float) -> None:
    gone = InferenceError("server.max_restarts=0 are used up")
    settings = replace(LONG_TAILED, max_staleness_steps=1, checkpoint_interval_steps=1)

    async def main() -> Simulation:
        stop = ShutdownRequest()
        simulation = Simulation(settings, checkpoint_dir=tmp_path, shutdown=stop)
        asyncio.get_running_loop().call_later(at, stop.fail, gone)
        with pytest.raises(InferenceError) as raised:
            await simulation.trainer.run()
        assert raised.value is gone and asyncio.get_running_loop().time() <= at + STEP_S
        return simulation

    simulation = run_in_virtual_time(main())
    path = simulation.trainer.newest_checkpoint
    assert path is not None
    saved = read_state(path)
    assert saved.step == simulation.trainer.trained_version
    assert len(saved.groups) == simulation.dataloader.statistics()["finished"]
    again = resumed(path, settings)
    counts = Counter([*trained(simulation)[: saved.totals["trained_groups"]], *trained(again)])
    assert set(counts.values()) == {2} and len(counts) == 20, "each prompt is trained once per epoch"
    assert again.trainer.totals.wasted_tokens == 0


def test_later_failures_do_not_hide_why_a_run_cannot_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        stop = ShutdownRequest()

        class FailsWithIt(ModelledGenerator):
            async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
                stop.fail(InferenceError("the endpoint is gone"))
                raise NoEngineError("no engine")

        simulation = Simulation(LONG_TAILED, checkpoint_dir=tmp_path, shutdown=stop, generator_over=FailsWithIt)
        with pytest.raises(InferenceError, match="the endpoint is gone"):
            await simulation.trainer.run()

    run_in_virtual_time(main())


class OneHangs(ModelledGenerator):
    """The rollout of p3 never ends."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if request.prompt.uid == "p3" and not request.is_evaluation:
            await asyncio.Event().wait()
        return await super().generate(request)


def test_a_step_that_lacks_a_group_is_left_and_what_was_accumulated_is_kept(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=0, num_prompts=4, num_epochs=1)
    simulation, ended = stopped_after(30.0, 5.0, settings, tmp_path, generator_over=OneHangs)
    assert ended == 35.0
    assert len(simulation.policy.steps[0]) == 3, "gradients of three groups were accumulated"
    path = simulation.trainer.newest_checkpoint
    assert path is not None and path.name == "global_step_0"
    ledger = json.loads((path / "trainer_state.json").read_text())["dataloader"]["ledger"]["epochs"]["0"]
    assert sorted(ledger["finished"]) == ["p0", "p1", "p2"] and ledger["trained"] == []
    again = resumed(path, settings)
    kept = [group.trajectories for group in read_state(path).groups]
    assert [group for step in again.policy.steps for group in step if group[0].prompt_token_ids[1] != ord("3")] == kept
    assert Counter(map(len, again.policy.steps))[4] == 1


def test_a_step_whose_groups_come_in_time_is_finished(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=0, sigma=0.0, stream_mini_batch=False)
    half_way, _ = stopped_after(0.6, 60.0, settings, tmp_path)
    assert half_way.trainer.served_version == 1 and half_way.trainer.newest_checkpoint == tmp_path / "global_step_1"


def test_a_checkpoint_just_written_is_not_written_again(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=0, checkpoint_interval_steps=1)
    writes = []

    async def main() -> None:
        stop = ShutdownRequest()
        simulation = Simulation(settings, checkpoint_dir=tmp_path, shutdown=stop)

        class StopsWhileSaving(ModelledPolicy):
            async def save(self, directory: Path) -> None:
                writes.append(directory)
                stop.request(10.0)
                await super().save(directory)

        simulation.trainer._saver.policy = StopsWhileSaving()
        await simulation.trainer.run()
        assert simulation.trainer.served_version == 1

    run_in_virtual_time(main())
    assert len(writes) == 1


@pytest.mark.parametrize("at", [0.5, 3.0, 6.0])
def test_evaluations_are_cut_short_whether_before_beside_or_after_training(tmp_path: Path, at: float) -> None:
    """They take 8 s each here, training 6 s."""
    settings = replace(
        LONG_TAILED,
        sigma=0.0,
        mean_tokens=10.0,
        num_steps=4,
        num_epochs=None,
        num_eval_prompts=4,
        eval_interval_steps=1,
    )

    class SlowEvaluations(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.is_evaluation:
                await asyncio.sleep(8.0)
            return await super().generate(request)

    simulation, ended = stopped_after(
        at + (8.0 if at > 1 else 0), 1.0, settings, tmp_path, generator_over=SlowEvaluations
    )
    assert ended <= at + 8.0 + 1.0 + STEP_S
    assert simulation.trainer.reward_after is None
    assert (simulation.trainer.newest_checkpoint is None) == (at < 1), "nothing was trained yet"
    assert simulation.trainer.is_complete == (simulation.trainer.served_version == 4), (
        "then the policy is still exported"
    )


class NoRoomPolicy(ModelledPolicy):
    """The disk is full for some of its checkpoints."""

    def __init__(self, full: set[int]) -> None:
        super().__init__()
        self.full = full
        self.num_saves = 0

    async def save(self, directory: Path) -> None:
        self.num_saves += 1
        if self.num_saves in self.full:
            raise CheckpointError("No space left on device")
        await super().save(directory)


def run_with(policy: ModelledPolicy, settings: SimulationSettings, directory: Path) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, checkpoint_dir=directory)
        simulation.trainer._saver.policy = policy
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def test_a_run_that_is_killed_right_after_a_checkpoint_has_the_record_of_its_step(tmp_path: Path) -> None:
    """Resumed from there it would never write it."""

    async def main() -> Simulation:
        settings = replace(LONG_TAILED, num_steps=6, num_epochs=None, checkpoint_interval_steps=2)
        simulation = Simulation(settings, checkpoint_dir=tmp_path)
        checkpointer = simulation.trainer._saver.checkpointer
        write = checkpointer.try_write

        async def write_and_die(policy: Policy, state: TrainerState, critic: Critic | None) -> None:
            await write(policy, state, critic)
            raise RuntimeError("killed")

        checkpointer.try_write = write_and_die
        with pytest.raises(RuntimeError, match="killed"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]
    records = [(step, values) for step, values in simulation.logged if "reward/mean" in values]
    assert [step for step, _ in records] == [1, 2]
    saved = read_state(tmp_path / "global_step_2").totals
    assert sum(values["generate/tokens"] for _, values in records) == saved["generated_tokens"], (
        "each token in one record"
    )


def test_a_checkpoint_that_fails_is_one_warning_and_a_figure_and_the_next_one_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(LONG_TAILED, num_steps=6, num_epochs=None, checkpoint_interval_steps=2)
    simulation = run_with(NoRoomPolicy({2}), settings, tmp_path)
    assert simulation.trainer.served_version == 6
    failures = {step: values["checkpoint/failures"] for step, values in simulation.logged}
    assert failures == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"the checkpoint of step 4 could not be written to {tmp_path}: No space left on device; earlier checkpoints stay"
    ]
    assert {p.name for p in tmp_path.glob("global_step_*")} == {"global_step_2", "global_step_6"}
    assert simulation.trainer.checkpoint_failure is None


def test_a_last_checkpoint_that_fails_is_known_when_the_run_has_ended(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, num_steps=5, num_epochs=None, checkpoint_interval_steps=2)
    simulation = run_with(NoRoomPolicy({3}), settings, tmp_path)
    assert simulation.trainer.served_version == 5
    assert "No space left" in str(simulation.trainer.checkpoint_failure)
    latest = Checkpointer(tmp_path, max_to_keep=0).usable()
    assert latest is not None and latest.state.step == 4


def test_a_wait_ends_when_its_patience_does_and_a_timeout_of_its_own_stays_one() -> None:
    async def ended(stop: ShutdownRequest, *, wait_for_step: bool, timeout_s: float | None = None) -> tuple[str, float]:
        try:
            async with stop.interruptible(wait_for_step=wait_for_step), asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        except (ShutdownRequested, TimeoutError) as error:
            return type(error).__name__, asyncio.get_running_loop().time()
        raise AssertionError

    async def main() -> None:
        stop, loop = ShutdownRequest(), asyncio.get_running_loop()
        loop.call_later(5.0, stop.request, 10.0)
        loop.call_later(7.0, stop.request, 100.0)
        waits = (
            ended(stop, wait_for_step=False, timeout_s=1.0),
            ended(stop, wait_for_step=False),
            ended(stop, wait_for_step=True),
            ended(stop, wait_for_step=True, timeout_s=14.0),
        )
        outcomes = [
            ("TimeoutError", 1.0),
            ("ShutdownRequested", 5.0),
            ("ShutdownRequested", 15.0),
            ("TimeoutError", 14.0),
        ]
        assert await asyncio.gather(*waits) == outcomes
        assert await ended(stop, wait_for_step=True) == ("ShutdownRequested", 15.0), "nothing new begins"

    run_in_virtual_time(main())


def test_what_is_begun_after_a_stop_has_its_grace_and_what_was_begun_before_has_it_from_then_on() -> None:
    async def main() -> None:
        stop, loop = ShutdownRequest(), asyncio.get_running_loop()

        async def ended() -> float:
            with pytest.raises(ShutdownRequested):
                async with stop.interruptible(grace_s=GRACE_S):
                    await asyncio.Event().wait()
            return loop.time()

        loop.call_later(5.0, stop.request, 10.0)
        assert await ended() == 5.0 + GRACE_S
        await asyncio.sleep(100.0)
        assert await ended() == 105.0 + 2 * GRACE_S

    run_in_virtual_time(main())


class FreezesIn(FaultyEngine):
    """Is stopped in the midst of its third call of a method."""

    def __init__(self, engine: ModelledEngine, method: str) -> None:
        super().__init__(engine)
        self.has_frozen = asyncio.Event()
        call, num_calls = getattr(engine, method), itertools.count(1)

        async def freezing(*arguments: object) -> object:
            if next(num_calls) == 3:
                self.freeze()
                self.has_frozen.set()
            return await call(*arguments)

        setattr(engine, method, freezing)


FREEZING = replace(
    LONG_TAILED,
    num_engines=2,
    num_epochs=None,
    mean_tokens=1000.0,
    stage_seconds=0.1,
    max_staleness_steps=3,
    engine_wait_s=None,
)
"""There is always something in flight."""


@pytest.mark.parametrize("method", ["stage_weights", "pause", "load_weights", "resume", "partial_outputs"])
def test_a_stop_while_an_engine_is_frozen_saves_and_ends_in_time(method: str, tmp_path: Path) -> None:
    settings = replace(FREEZING, checkpoint_interval_steps=1 if method == "partial_outputs" else 0)

    async def main() -> None:
        stop, engines, loop = ShutdownRequest(), [], asyncio.get_running_loop()

        def around(model: ModelledEngine) -> FaultyEngine:
            engines.append(FreezesIn(model, method) if model.name == "engine-0" else FaultyEngine(model))
            return engines[-1]

        simulation = Simulation(settings, checkpoint_dir=tmp_path, shutdown=stop, engine_around=around)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(simulation.trainer.run())
            await engines[0].has_frozen.wait()
            await asyncio.sleep(3.0)
            assert not running.done()
            stop.request(5.0)
            asked = loop.time()
        assert loop.time() <= asked + 5.0 + 2 * GRACE_S + STEP_S
        newest = simulation.trainer.newest_checkpoint
        assert newest is not None and read_state(newest).step == simulation.trainer.trained_version > 0

    run_in_virtual_time(main())


@pytest.mark.parametrize("method", ["stage_weights", "pause", "load_weights", "resume"])
def test_a_second_signal_ends_a_run_with_a_frozen_engine_at_once(method: str) -> None:
    """Before or after the first one has run out of patience."""

    async def main(patience_s: float) -> None:
        stop, engines, loop = ShutdownRequest(), [], asyncio.get_running_loop()

        def around(model: ModelledEngine) -> FaultyEngine:
            engines.append(FreezesIn(model, method) if model.name == "engine-0" else FaultyEngine(model))
            return engines[-1]

        simulation = Simulation(FREEZING, shutdown=stop, engine_around=around)
        running = asyncio.ensure_future(simulation.trainer.run())
        await engines[0].has_frozen.wait()
        await asyncio.sleep(3.0)
        stop.request(patience_s)
        await asyncio.sleep(1.0)
        running.cancel()
        cancelled = loop.time()
        await asyncio.wait([running])
        assert loop.time() <= cancelled + GRACE_S

    run_in_virtual_time(main(30.0))
    run_in_virtual_time(main(0.5))


class Failing(ModelledGenerator):
    """Fails from the 20th call on, in training or in evaluation."""

    def __init__(self, sampler: InferenceEngineClient, error: BaseException, *, is_evaluation: bool) -> None:
        super().__init__(sampler)
        self.error = error
        self.is_evaluation = is_evaluation
        self.num_calls = 0

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        self.num_calls += request.is_evaluation == self.is_evaluation
        if request.is_evaluation == self.is_evaluation and self.num_calls > 20:
            raise self.error
        return await super().generate(request)


CRASHES = ("worker", "exiting worker", "all engines", "evaluation", "publisher", "policy", "checkpointer")


@pytest.mark.parametrize("kind", CRASHES)
def test_contract_8_a_crash_of_any_task_ends_the_run_with_that_error_and_no_task_left(
    tmp_path: Path, kind: str
) -> None:
    """And with every prompt that was running given back."""
    root = NoEngineError("root") if kind == "all engines" else ZeroDivisionError("root")
    is_evaluation = kind == "evaluation"
    settings = replace(
        LONG_TAILED,
        num_eval_prompts=12,
        eval_interval_steps=1,
        checkpoint_interval_steps=3,
        max_failed_fraction=0.1,
        num_epochs=None,
    )

    async def fail(*arguments: object, **named: object) -> None:
        raise root

    def generator_over(client: InferenceEngineClient) -> ModelledGenerator:
        if kind not in ("worker", "exiting worker", "all engines", "evaluation"):
            return ModelledGenerator(client)
        error = SystemExit(0) if kind == "exiting worker" else root
        return Failing(client, error, is_evaluation=is_evaluation)

    async def main() -> tuple[BaseException, Simulation]:
        simulation = Simulation(settings, checkpoint_dir=tmp_path, generator_over=generator_over)
        loop = asyncio.get_running_loop()
        if kind == "publisher":
            loop.call_later(9.0, setattr, simulation.publisher, "load", fail)
        if kind == "policy":
            loop.call_later(9.0, setattr, simulation.policy, "step", fail)
        if kind == "checkpointer":
            simulation.policy.save = fail  # type: ignore[method-assign]
        try:
            await simulation.trainer.run()
        except Exception as error:
            assert len(asyncio.all_tasks()) == 1
            return error, simulation
        raise AssertionError("the run went on")

    error, simulation = run_in_virtual_time(main())
    if kind in ("worker", "exiting worker"):
        said = "ZeroDivisionError: root" if kind == "worker" else r"called sys.exit\(0\) in the rollout of p"
        assert isinstance(error, GenerationError) and re.search(said, str(error))
    elif kind == "evaluation":
        assert isinstance(error, GenerationError) and "all 12 evaluation rollouts failed" in str(error)
        assert error.__cause__ is root
    else:
        assert error is root
    assert simulation.staleness.num_running == simulation.dataloader.statistics()["running"] == 0


def test_a_stop_while_no_engine_can_take_a_trained_step_saves_it(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, num_engines=1, engine_wait_s=None, checkpoint_interval_steps=0)

    async def main() -> Simulation:
        stop = ShutdownRequest()
        simulation = Simulation(settings, checkpoint_dir=tmp_path, shutdown=stop)
        loop, load = asyncio.get_running_loop(), simulation.publisher.load

        async def no_engine_is_there():
            if simulation.trainer.served_version == 2:
                loop.call_later(50.0, stop.request, 10.0)
                await asyncio.Event().wait()
            return await load()

        simulation.publisher.load = no_engine_is_there
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert (simulation.trainer.served_version, simulation.trainer.trained_version) == (2, 4), (
        "a step is made beside the load"
    )
    newest = simulation.trainer.newest_checkpoint
    assert newest is not None
    saved = read_state(newest)
    assert saved.step == 4
    assert saved.totals["trained_groups"] == 4 * settings.mini_batch_size
    assert [step for step, values in simulation.logged if "policy/grad_norm" in values] == [1, 2, 3, 4]

    async def go_on() -> Simulation:
        resumed = Simulation(settings, checkpoint_dir=tmp_path)
        await resumed.trainer.resume(newest)
        await resumed.trainer.run()
        return resumed

    assert run_in_virtual_time(go_on()).trainer.totals.trained_groups == 2 * settings.num_prompts


def test_a_stop_during_the_log_prob_probe_of_a_published_version_skips_the_probe_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(LONG_TAILED, logprob_probe_interval_steps=1, sigma=0.0)

    async def main() -> Simulation:
        stop = ShutdownRequest()
        simulation = Simulation(settings, checkpoint_dir=tmp_path, shutdown=stop)

        async def check(version: int, *, is_first: bool = False) -> dict[str, float]:
            if not is_first:
                stop.request(1.0)
                await asyncio.Event().wait()
            return {}

        simulation.publisher.verifier.check = check
        await simulation.trainer.run()
        return simulation

    assert run_in_virtual_time(main()).trainer.served_version == 1
    assert "step 1 is trained and not published" not in caplog.text
