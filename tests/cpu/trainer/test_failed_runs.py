"""Runs that end by a failure outside of training: what is trained is saved, logged and exported all the same (virtual time)."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import read_state
from skyrl_async.errors import (
    GenerationError,
    InferenceError,
    NoEngineError,
    PublishError,
    StateError,
    TrainingError,
    WorkerDiedError,
)
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.rollout.worker import OnFailure
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.stages import StageState
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.workers.logprob_workers import ColumnStageWork
from skyrl_async.types import Group, Trajectory, WeightUpdate
from tests.cpu.trainer.test_shutdown import resumed, trained
from tests.cpu.training.test_teachers import teacher_that_answers

BUSY_TRAINER = SimulationSettings(
    max_staleness_steps=4,
    num_steps=200,
    num_prompts=400,
    mini_batch_size=4,
    group_size=2,
    num_engines=1,
    mean_tokens=50.0,
    sigma=0.2,
    seconds_per_token=1 / 20000,
    step_seconds=5.0,
    load_seconds=0.1,
    checkpoint_interval_steps=1000,
    max_failed_fraction=0.1,
    max_retries=0,
)
"""Nearly always in an optimizer step."""


class BreaksAt(ModelledGenerator):
    """Every rollout fails from a moment on."""

    def __init__(self, sampler: InferenceEngineClient, seconds: float) -> None:
        super().__init__(sampler)
        self.seconds = seconds

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if asyncio.get_running_loop().time() > self.seconds:
            raise RuntimeError("the tool is broken")
        return await super().generate(request)


def ended_by_a_failure(
    directory: Path, *, at: float, has_engine: bool, settings: SimulationSettings = BUSY_TRAINER
) -> tuple[Simulation, list[int]]:
    """A run whose rollouts fail, or whose only engine dies, at a moment (seconds); and the steps whose groups were logged."""
    record = KeptGroups()

    async def main() -> Simulation:
        simulation = Simulation(
            settings,
            checkpoint_dir=directory,
            generator_over=lambda client: BreaksAt(client, at if has_engine else math.inf),
            record=record,
        )
        if not has_engine:
            pool = simulation.client.pool
            asyncio.get_running_loop().call_later(at, pool.drop, simulation.client.engines[0], "killed")
        with pytest.raises(GenerationError if has_engine else NoEngineError):
            await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main()), list(dict.fromkeys(step for step, _ in record.trained))


@pytest.mark.slow
@given(at=st.floats(6.0, 40.0), has_engine=st.booleans())
def test_a_failure_in_an_optimizer_step_lets_it_end_and_saves_and_logs_it(
    tmp_path_factory: pytest.TempPathFactory, at: float, has_engine: bool
) -> None:
    simulation, steps_of_groups = ended_by_a_failure(
        tmp_path_factory.mktemp("checkpoints"), at=at, has_engine=has_engine
    )
    path = simulation.trainer.newest_checkpoint
    assert path is not None, "whatever the moment"
    step = read_state(path).step
    assert step == simulation.trainer.trained_version > 0
    logged = [step for step, values in simulation.logged if "timing/step" in values]
    assert logged == steps_of_groups == list(range(1, step + 1)), "each step of the checkpoint has its line, once"


def test_a_run_that_ends_of_failed_rollouts_saves_the_tokens_that_engines_have_sampled_for_the_others(
    tmp_path: Path,
) -> None:
    settings = replace(BUSY_TRAINER, mean_tokens=1000.0, sigma=0.0, tokens_per_second=10.0, checkpoint_interval_steps=1)

    class ThreeFail(BreaksAt):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.priority in (0, 1, 2):
                await asyncio.sleep(self.seconds)
                raise RuntimeError("the tool is broken")
            return await super().generate(request)

    async def main() -> Simulation:
        simulation = Simulation(
            settings, checkpoint_dir=tmp_path, generator_over=lambda client: ThreeFail(client, seconds=50.0)
        )
        with pytest.raises(GenerationError, match="the tool is broken"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    path = simulation.trainer.newest_checkpoint
    assert path is not None
    saved = read_state(path).running
    assert sum(group.num_sampled_tokens for group in saved) == simulation.engines[0].num_sampled_tokens > 1000


IN_BATCHES = replace(
    BUSY_TRAINER,
    train_batch_size=8,
    update_epochs_per_batch=2,
    max_staleness_steps=7,
    tokens_per_second=8.0,
    seconds_per_token=1 / 200,
    step_seconds=0.5,
)
"""Four optimizer steps per batch, nearly always between two of them: from 9.6 s to 16.3 s, and again from 18.9 s to 25.6 s."""


@pytest.mark.parametrize(("at", "step"), [(10.0, 4), (20.0, 8)])
def test_a_failure_between_the_optimizer_steps_of_a_batch_lets_the_batch_end_and_saves_it(
    tmp_path: Path, at: float, step: int
) -> None:
    simulation, steps_of_groups = ended_by_a_failure(tmp_path, at=at, has_engine=False, settings=IN_BATCHES)
    path = simulation.trainer.newest_checkpoint
    assert path is not None and read_state(path).step == step == simulation.trainer.trained_version
    assert steps_of_groups == list(range(4, step + 1, 4))


class EndsSlowly(BreaksAt):
    """Rollouts that are cancelled take their time, as agents do that are processes."""

    def __init__(self, sampler: InferenceEngineClient, seconds: float, end_s: float) -> None:
        super().__init__(sampler, seconds)
        self.end_s = end_s

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            await asyncio.sleep(self.end_s)
            raise


async def _fails(*arguments: object) -> None:
    raise RuntimeError("and that fails, too")


def _breaks(part: str, method: str) -> Callable[[Simulation, ShutdownRequest], None]:
    return lambda simulation, stop: setattr(getattr(simulation, part), method, _fails)


AFTERWARDS: dict[str, Callable[[Simulation, ShutdownRequest], None]] = {
    "nothing": lambda simulation, stop: None,
    "the engine dies": lambda simulation, stop: simulation.client.pool.drop(simulation.client.engines[0], "killed"),
    "the endpoint is given up": lambda simulation, stop: stop.fail(InferenceError("the endpoint is gone")),
    "Ctrl-C": lambda simulation, stop: stop.request(0.0),
    "publishing fails": _breaks("publisher", "send"),
    "collecting tokens fails": _breaks("workers", "collect_open_tokens"),
    "the optimizer step fails": _breaks("policy", "step"),
    "saving fails": _breaks("policy", "save"),
}
RESAMPLING = replace(
    BUSY_TRAINER, staleness_policy="resample", max_staleness_steps=1, mean_tokens=200.0, sigma=1.2, step_seconds=0.5
)
"""Groups are requeued all the time."""


@pytest.mark.slow
@given(
    run=st.sampled_from([RESAMPLING, BUSY_TRAINER]),
    at=st.floats(6.0, 40.0),
    end_s=st.sampled_from([0.0, 2.0]),
    collect_s=st.sampled_from([0.0, 0.5, 3.0]),
    what=st.sampled_from(sorted(AFTERWARDS)),
    after_s=st.floats(0.0, 6.0),
)
def test_a_run_ends_with_what_it_failed_of_first_whatever_happens_until_it_has_ended(
    tmp_path_factory: pytest.TempPathFactory,
    run: SimulationSettings,
    at: float,
    end_s: float,
    collect_s: float,
    what: str,
    after_s: float,
) -> None:
    async def main() -> Simulation:
        stop = ShutdownRequest()
        simulation = Simulation(
            run,
            checkpoint_dir=tmp_path_factory.mktemp("checkpoints"),
            generator_over=lambda client: EndsSlowly(client, at, end_s),
            shutdown=stop,
        )
        workers = simulation.workers
        collect, generate = workers.collect_open_tokens, workers.run

        async def collect_slowly() -> None:
            await asyncio.sleep(collect_s)
            await collect()

        async def generate_and_then(on_failure: OnFailure) -> None:
            async def fail(error: Exception) -> None:
                asyncio.get_running_loop().call_later(after_s, AFTERWARDS[what], simulation, stop)
                await on_failure(error)

            await generate(on_failure=fail)

        workers.collect_open_tokens = collect_slowly
        workers.run = generate_and_then  # type: ignore[method-assign,assignment]
        with pytest.raises(GenerationError, match="the tool is broken"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    if what not in ("collecting tokens fails", "the optimizer step fails", "saving fails"):
        path = simulation.trainer.newest_checkpoint
        assert path is not None and read_state(path).step == simulation.trainer.trained_version > 0


@pytest.mark.parametrize(
    ("at", "gone"),
    [
        (12.5, InferenceError("the teacher is gone")),
        (16.0, WorkerDiedError("teacher-worker-0 died")),
        (21.0, TrainingError("a row is longer than the teacher's context")),
        (21.0, ZeroDivisionError("in a function of the user's")),
    ],
    ids=["server", "worker", "row", "bug"],
)
@pytest.mark.parametrize("settings", [BUSY_TRAINER, IN_BATCHES], ids=["steps", "batches"])
def test_a_teacher_that_cannot_be_asked_ends_the_run_with_a_checkpoint_that_trains_every_group_once(
    tmp_path: Path, settings: SimulationSettings, at: float, gone: Exception
) -> None:
    async def teacher_logp(group: Group) -> Group:
        await asyncio.sleep(0.5)
        if asyncio.get_running_loop().time() > at:
            raise gone
        return group

    assert error_of_a_run(tmp_path, settings, teacher_logp, type(gone)) is gone


@pytest.mark.parametrize("settings", [BUSY_TRAINER, IN_BATCHES], ids=["steps", "batches"])
def test_a_teachers_server_that_stays_gone_ends_the_run_with_a_checkpoint_that_trains_every_group_once(
    tmp_path: Path, settings: SimulationSettings
) -> None:
    answered: list[float] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.5)
        answered.append(asyncio.get_running_loop().time())
        if answered[-1] > 12.5:
            return httpx.Response(503)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "teacher"}]})
        scores = [{str(token): {"logprob": -1.0}} for token in json.loads(request.content)["prompt"]]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, *scores[1:]]}]})

    teacher_logp = ColumnStageWork(teacher_that_answers(answer).logprobs_of, "teacher_logprobs")
    error = error_of_a_run(tmp_path, settings, teacher_logp, InferenceError)
    assert "teacher math at http://teacher/v1 has not answered for 60 s" in str(error)
    assert 72.5 < answered[-1] < 84.0, "pauses are of 10 s at most"


def error_of_a_run(
    directory: Path, settings: SimulationSettings, teacher_logp: Prepare, kind: type[Exception]
) -> Exception:
    """What ends a run whose teacher is gone, after checks of its checkpoint."""
    settings = replace(settings, num_steps=None, num_epochs=1, num_prompts=64)

    async def main() -> tuple[Simulation, Exception]:
        simulation = Simulation(
            settings, checkpoint_dir=directory, prepare_with=lambda policy: {"teacher_logp": teacher_logp}
        )
        with pytest.raises(kind) as raised:
            await simulation.trainer.run()
        in_error = [status.name for status in simulation.trainer.stages() if status.state is StageState.ERROR]
        assert in_error == ["teacher_logp"]
        return simulation, raised.value

    simulation, error = run_in_virtual_time(main())
    del simulation.policy.steps[-1]  # lacks the groups that the teacher holds; its gradients are dropped
    path = simulation.trainer.newest_checkpoint
    assert path is not None
    saved = read_state(path)
    assert saved.step == simulation.trainer.trained_version > 0
    assert len(saved.groups) == simulation.dataloader.statistics()["finished"] > 0
    again = resumed(path, settings)
    of_batches = [*trained(simulation), *trained(again)]
    assert Counter(of_batches) == dict.fromkeys(of_batches, settings.update_epochs_per_batch)
    assert len(set(of_batches)) == 64
    return error


@pytest.mark.parametrize(
    ("call", "error", "is_saved"),
    [
        ("advantages", ZeroDivisionError("in an estimator of the user's"), True),
        ("advantages", StateError("the accounts are wrong"), False),
        ("step", TrainingError("the gradient is not finite"), False),
    ],
)
def test_a_training_stage_that_fails_saves_the_last_step_unless_a_step_is_cut_off_or_the_accounts_are_wrong(
    tmp_path: Path, call: str, error: Exception, is_saved: bool
) -> None:
    settings = replace(BUSY_TRAINER, checkpoint_interval_steps=3)

    async def main() -> Simulation:
        simulation = Simulation(settings, checkpoint_dir=tmp_path)
        part, name = (
            (simulation.policy, "step") if call == "step" else (simulation.trainer._train_stage, "_with_advantages")
        )
        failing = getattr(part, name)

        def fail_in_step_5(*arguments: Any) -> Any:
            if simulation.trainer.trained_version == 4:
                raise error
            return failing(*arguments)

        setattr(part, name, fail_in_step_5)
        with pytest.raises(type(error)) as raised:
            await simulation.trainer.run()
        assert raised.value is error
        return simulation

    simulation = run_in_virtual_time(main())
    saved = simulation.trainer.newest_checkpoint
    assert saved is not None and saved.name == ("global_step_4" if is_saved else "global_step_3")
    if is_saved:
        groups = [*trained(simulation), *trained(resumed(saved, replace(settings, num_steps=8)))]
        assert len(groups) == len(set(groups)) == 8 * settings.mini_batch_size


def test_a_step_that_waits_for_a_publish_which_fails_has_its_line_too(tmp_path: Path) -> None:
    async def main() -> Simulation:
        quick = replace(BUSY_TRAINER, seconds_per_token=1 / 2000, step_seconds=0.5)
        simulation = Simulation(quick, checkpoint_dir=tmp_path)
        (engine,) = simulation.engines
        load_weights = engine.load_weights

        async def refuse_version_5(update: WeightUpdate) -> None:
            if update.version == 5:
                await asyncio.sleep(10.0)
                raise PublishError("refused")
            await load_weights(update)

        engine.load_weights = refuse_version_5  # type: ignore[method-assign]
        with pytest.raises(PublishError, match="refused version 5"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    logged = [step for step, values in simulation.logged if "timing/step" in values]
    assert logged == list(range(1, simulation.trainer.trained_version + 1)) == [1, 2, 3, 4, 5, 6]
    assert simulation.trainer.newest_checkpoint == tmp_path / "global_step_6"


def test_a_last_evaluation_that_fails_leaves_a_complete_run_and_says_so() -> None:
    class JudgeGoesDown(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.is_evaluation and simulation[0].trainer.served_version == 6:
                raise RuntimeError("the judge is down")
            return await super().generate(request)

    simulation: list[Simulation] = []

    async def main() -> None:
        settings = replace(BUSY_TRAINER, num_steps=6, num_eval_prompts=8)
        simulation.append(Simulation(settings, generator_over=JudgeGoesDown))
        await simulation[0].trainer.run()

    run_in_virtual_time(main())
    trainer = simulation[0].trainer
    assert trainer.is_complete and trainer.trained_version == 6 and trainer.reward_after is None
    assert "the judge is down" in str(trainer.evaluation_failure)
