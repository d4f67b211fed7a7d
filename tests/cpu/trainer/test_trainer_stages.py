"""The stages of the real trainer over modelled engines, in virtual time: what overlaps, in which order, and how it ends."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.advantages import AdvantageEstimator
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.composition.algorithms import Advantages
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.trainer import Schedule, TrainerConfig
from skyrl_async.errors import ConfigError, GenerationError, PublishError
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.stages import StageState
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group, Trajectory
from tests.cpu.advantage_columns import numbers
from tests.cpu.documented_metrics import DOCUMENTED_METRICS

SLOW_PUBLISH = SimulationSettings(
    mean_tokens=100.0,
    sigma=0.8,
    num_steps=12,
    mini_batch_size=4,
    seconds_per_token=1e-3,
    send_seconds=1.0,
    load_seconds=0.5,
    step_seconds=0.5,
)


def events_of(simulation: Simulation) -> list[tuple[str, int, float, float]]:
    """(what, version, begin, end) of each forward, optimizer step and phase of a publish, from now on."""
    events: list[tuple[str, int, float, float]] = []
    policy, publisher = simulation.policy, simulation.publisher
    loop = asyncio.get_running_loop()

    def timed(what: str, call: Callable[..., Awaitable[Any]], version_of: Callable[[Any, Any], int]) -> Callable:
        async def timed_call(*arguments: Any) -> Any:
            begin = loop.time()
            result = await call(*arguments)
            events.append((what, version_of(arguments, result), begin, loop.time()))
            return result

        return timed_call

    policy.forward_backward = timed("forward", policy.forward_backward, lambda given, _: given[2])
    policy.step = timed("step", policy.step, lambda *_: len(policy.steps) - 1)
    publisher.gather = timed("gather", publisher.gather, lambda given, _: given[0])
    publisher.send = timed("send", publisher.send, lambda given, _: given[0])
    publisher.load = timed("load", publisher.load, lambda _, times: times.version)
    return events


def spans_of(what: str, events: list[tuple[str, int, float, float]]) -> dict[int, tuple[float, float]]:
    """Version -> (begin, end)."""
    return {version: (begin, end) for name, version, begin, end in events if name == what}


def run(settings: SimulationSettings, **parts) -> tuple[Simulation, list[tuple[str, int, float, float]]]:
    async def main():
        simulation = Simulation(settings, **parts)
        events = events_of(simulation)
        await simulation.trainer.run()
        return simulation, events

    return run_in_virtual_time(main())


@pytest.mark.slow
@given(bound=st.integers(0, 3), sigma=st.sampled_from([0.0, 0.8]), every=st.integers(1, 4), streamed=st.booleans())
def test_each_step_is_trained_then_published_and_only_then_sampled_from(
    bound: int, sigma: float, every: int, streamed: bool
) -> None:
    every = min(every, bound + 1)
    settings = replace(
        SLOW_PUBLISH, max_staleness_steps=bound, sigma=sigma, publish_every_steps=every, stream_mini_batch=streamed
    )
    simulation, events = run(settings)
    stepped, gathered, sent, loaded = (spans_of(what, events) for what in ("step", "gather", "send", "load"))
    assert sorted(stepped) == list(range(1, settings.num_steps + 1))
    assert sorted(gathered) == sorted({0, *range(every, settings.num_steps + 1, every), settings.num_steps})
    assert gathered.keys() == sent.keys() == loaded.keys()
    for version, (begin, end) in gathered.items():
        if version:
            assert stepped[version][1] <= begin
        assert end <= sent[version][0] and sent[version][1] <= loaded[version][0]
        assert stepped.get(version + 1, (end, end))[0] >= end, "weights changed while they were gathered"
    for before, after in pairwise(sorted(loaded)):
        assert sent[before][1] <= gathered[after][0], "its copy was overwritten"
        assert loaded[before][1] <= loaded[after][0]
    for version, (begin, _) in stepped.items():
        newest = max((v for v, (_, end) in loaded.items() if end <= begin), default=0)
        assert version - newest <= max(every, 1) + 1, "more than a step ahead of what is being loaded"
    for step, groups in enumerate(simulation.policy.steps):
        begins = [begin for what, version, begin, _ in events if (what, version) == ("forward", step)]
        for begin, group in zip(begins, groups, strict=True):
            assert all(loaded[v][1] <= begin for row in group for v in row.versions.distinct)
    assert simulation.trainer.totals.staleness_max <= bound
    assert simulation.trainer.served_version == simulation.trainer.trained_version == settings.num_steps


def test_the_next_step_is_worked_on_while_engines_get_the_last_one() -> None:
    simulation, events = run(SLOW_PUBLISH)
    gathered, loaded = spans_of("gather", events), spans_of("load", events)
    overlapping = [
        version
        for what, version, begin, _ in events
        if what == "forward" and gathered[version][1] <= begin < loaded[version][1]
    ]
    assert len(set(overlapping)) > SLOW_PUBLISH.num_steps / 2
    waited = [
        values["timing/wait_for_publish"] for _, values in simulation.logged if "timing/wait_for_publish" in values
    ]
    assert len(waited) == SLOW_PUBLISH.num_steps and sum(waited) > 0


def test_a_send_holds_up_the_next_optimizer_step_and_a_load_the_beginning_of_the_third() -> None:
    """Groups are there long before; of a step 0.5 s are gradients, 0.5 s the optimizer; a publish takes 1 s to send, 4 s to load."""
    job = replace(
        SLOW_PUBLISH,
        sigma=0.0,
        mean_tokens=10.0,
        max_staleness_steps=6,
        publish_every_steps=3,
        seconds_per_token=0.5 / (4 * 2 * 10),
        load_seconds=4.0,
    )
    simulation, events = run(job)
    stepped, sent, loaded = (spans_of(what, events) for what in ("step", "send", "load"))
    beside = [v for v in loaded if v + 1 in stepped and loaded[v][0] <= stepped[v + 1][0] < loaded[v][1]]
    assert beside == [3, 6, 9], "the step after is made while engines load"
    assert all(stepped[v + 1][0] >= sent[v][1] for v in sent if v + 1 in stepped)
    waited = {step: values["timing/wait_for_publish"] for step, values in simulation.logged if "policy/lr" in values}
    of_send, of_load = [waited[v] for v in (4, 7, 10)], [waited[v] for v in (6, 9, 12)]
    assert of_send == pytest.approx([0.5] * 3, abs=0.05), "of 1 s to send, half is training"
    assert of_load == pytest.approx([2.5] * 3, abs=0.05), (
        "of 5 s until engines have it, two steps of 1 s and that half are training"
    )
    assert sum(waited.values()) == pytest.approx(sum(of_send + of_load))


def test_unpublished_steps_count_for_the_lag_of_the_engines() -> None:
    async def main() -> None:
        simulation = Simulation(replace(SLOW_PUBLISH, max_staleness_steps=3, publish_every_steps=3))
        seen = []
        step = simulation.policy.step

        async def noting(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            values = await step(num_tokens, *lr_scale)
            seen.append(max(lag.steps for lag in simulation.publisher.lags().values()))
            return values

        simulation.policy.step = noting
        await simulation.trainer.run()
        assert max(seen) >= 2, "the lag before the step that follows two unpublished ones"

    run_in_virtual_time(main())


def test_publishing_every_third_step_costs_less_time_and_holds_the_bound() -> None:
    job = replace(SLOW_PUBLISH, max_staleness_steps=3, send_seconds=3.0)
    often, _ = run(job)
    seldom, _ = run(replace(job, publish_every_steps=3))
    assert len(seldom.trainer.totals.pauses) < len(often.trainer.totals.pauses) / 2
    assert seldom.trainer.totals.training_seconds < 0.9 * often.trainer.totals.training_seconds
    assert seldom.trainer.totals.groups_over_bound == 0
    versions = {v for step in seldom.policy.steps for group in step for row in group for v in row.versions.distinct}
    assert all(version % 3 == 0 for version in versions)


def test_publishing_more_seldom_than_the_bound_allows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer.publish_every_steps must be between 1 and max_staleness_steps \+ 1 \(2\)"
    ):
        TrainerConfig(max_staleness_steps=1, publish_every_steps=3)


def test_groups_are_prepared_while_others_train_and_in_time() -> None:
    prepared: list[int] = []

    async def ref_logp(group: Group) -> Group:
        assert numbers(group.advantages) == (0.5, 0.5), "the reward stage comes first"
        await asyncio.sleep(0.3)
        prepared.append(group.admission_index)
        return group

    simulation, _ = run(
        SLOW_PUBLISH,
        advantages=Advantages(
            of_stage=AdvantageEstimator(compute=lambda rewards: [0.5] * len(rewards)), of_step=StepAdvantages()
        ),
        prepare_with=lambda _: {"ref_logp": ref_logp},
    )
    inline = sum(0.3 for _ in prepared)
    plain, _ = run(SLOW_PUBLISH)
    extra = simulation.trainer.totals.training_seconds - plain.trainer.totals.training_seconds
    assert len(prepared) == 48 and extra < 0.5 * inline
    shares = [values["stage/ref_logp/processing_frac"] for _, values in simulation.logged if "trainer/epoch" in values]
    assert max(shares) > 0.2 and all(0 <= share <= 1 for share in shares)


def test_a_group_being_prepared_is_in_the_checkpoint_and_trained_once(tmp_path: Path) -> None:
    settings = replace(SLOW_PUBLISH, num_steps=None, num_epochs=2, num_prompts=20, checkpoint_interval_steps=3)

    async def slowly(group: Group) -> Group:
        await asyncio.sleep(2.0)
        return group

    async def begin() -> None:
        simulation = Simulation(settings, checkpoint_dir=tmp_path, prepare_with=lambda _: {"ref_logp": slowly})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(simulation.trainer.run(), timeout=35)
        checkpoint = Checkpointer(tmp_path, max_to_keep=0).usable()
        assert checkpoint.state.groups, "this test needs groups that wait to be trained"
        assert all(group.advantages == () for group in checkpoint.state.groups)

    async def go_on() -> Simulation:
        simulation = Simulation(settings, prepare_with=lambda _: {"ref_logp": slowly})
        found = Checkpointer(tmp_path, max_to_keep=0).usable()
        await simulation.trainer.resume(found.path)
        await simulation.trainer.run()
        return simulation

    run_in_virtual_time(begin())
    simulation = run_in_virtual_time(go_on())
    assert simulation.dataloader.statistics()["trained_total"] == 40
    trained = Counter(tuple(group[0].prompt_token_ids.tolist()) for step in simulation.policy.steps for group in step)
    assert sum(trained.values()) == 40 - 3 * settings.mini_batch_size and max(trained.values()) <= 2


def test_an_error_in_a_stage_ends_the_run_with_its_cause() -> None:
    def refuse(rewards: Sequence[float]) -> Sequence[float]:
        raise ZeroDivisionError("no spread")

    async def main() -> None:
        simulation = Simulation(
            SLOW_PUBLISH, advantages=Advantages(of_stage=AdvantageEstimator(compute=refuse), of_step=StepAdvantages())
        )
        with pytest.raises(ZeroDivisionError, match="no spread"):
            await simulation.trainer.run()
        states = {status.name: status for status in simulation.trainer.stages()}
        assert states["reward"].state is StageState.ERROR and states["reward"].item.startswith("p")
        assert all(status.state is not StageState.ERROR for name, status in states.items() if name != "reward")

    run_in_virtual_time(main())


@pytest.mark.parametrize("stage", ["dataloader", "ref_logp", "train", "param_update", "validation"])
def test_an_error_in_any_other_stage_ends_the_run_with_its_cause_too(stage: str) -> None:
    async def fail(*_: object, **__: object) -> Any:
        raise ZeroDivisionError(stage)

    async def main() -> None:
        simulation = Simulation(
            replace(SLOW_PUBLISH, eval_interval_steps=2, num_eval_prompts=2, eval_before_train=False),
            prepare_with=lambda policy: {"ref_logp": fail} if stage == "ref_logp" else {},
        )
        if stage == "dataloader":
            simulation.dataloader.get_next_non_consumed_data = fail  # type: ignore[method-assign]
        elif stage == "train":
            simulation.policy.step = fail  # type: ignore[method-assign]
        elif stage == "param_update":
            send = simulation.policy.send_weights
            simulation.policy.send_weights = (  # type: ignore[method-assign]
                lambda version, *others: fail() if version else send(version, *others)
            )
        elif stage == "validation":
            simulation.trainer._validation._evaluator.evaluate = fail  # type: ignore[union-attr,method-assign]
        with pytest.raises(ZeroDivisionError, match=stage):
            await simulation.trainer.run()
        in_error = [status.name for status in simulation.trainer.stages() if status.state is StageState.ERROR]
        assert in_error == [stage]

    run_in_virtual_time(main())


@pytest.mark.parametrize("is_wanted", [True, False])
def test_held_out_prompts_are_evaluated_before_and_after_training_where_configured(is_wanted: bool) -> None:
    simulation, _ = run(
        replace(
            SLOW_PUBLISH,
            num_eval_prompts=3,
            eval_before_train=is_wanted,
            eval_at_end=is_wanted,
        )
    )
    evaluated = [step for step, values in simulation.logged if "reward/eval" in values]
    assert evaluated == ([0, 12] if is_wanted else [])
    assert (
        (simulation.trainer.first_evaluation is not None) is (simulation.trainer.reward_after is not None) is is_wanted
    )


@pytest.mark.parametrize(("bound", "interval"), [(0, 1), (0, 2), (2, 1), (2, 2)])
def test_a_last_version_that_is_due_is_evaluated_once_also_where_the_data_s_end_makes_it_the_last(
    bound: int, interval: int
) -> None:
    job = replace(SLOW_PUBLISH, max_staleness_steps=bound, eval_interval_steps=interval, num_eval_prompts=3)
    of_data = replace(job, num_steps=None, num_epochs=1, num_prompts=16)
    for ending in (replace(job, num_steps=4), of_data, replace(of_data, eval_at_end=False)):
        simulation, _ = run(ending)
        evaluated = [step for step, values in simulation.logged if "reward/eval" in values]
        assert evaluated == list(range(0, 5, interval))


def test_every_stage_is_done_when_the_data_has_ended() -> None:
    simulation, _ = run(replace(SLOW_PUBLISH, num_steps=None, num_epochs=1, num_prompts=18))
    assert [(status.name, status.state) for status in simulation.trainer.stages()] == [
        (name, StageState.DONE)
        for name in ("dataloader", "generate", "rollout", "reward", "train", "param_update", "validation")
    ]


def test_every_step_logs_the_state_of_each_stage_and_how_it_spent_its_time() -> None:
    simulation, _ = run(replace(SLOW_PUBLISH, eval_interval_steps=4, num_eval_prompts=4))
    steps = [values for _, values in simulation.logged if "trainer/epoch" in values]
    assert len(steps) == SLOW_PUBLISH.num_steps
    for values in steps:
        for name in ("dataloader", "generate", "rollout", "reward", "train", "param_update", "validation"):
            shares = [v for key, v in values.items() if key.startswith(f"stage/{name}/") and key.endswith("_frac")]
            assert len(shares) == 3 and sum(shares) <= 1 + 1e-9
    assert sum(values["stage/validation/items"] for values in steps) == 3, "before training, and of versions 4 and 8"
    assert {"stage/<name>/state", "stage/<name>/processing_frac"} <= DOCUMENTED_METRICS


def test_the_step_whose_publish_fails_is_in_the_metrics_all_the_same() -> None:
    async def main() -> list[int]:
        simulation = Simulation(SLOW_PUBLISH)
        send = simulation.publisher.send

        async def failing(version: int):
            if version == 5:
                raise PublishError("no room")
            return await send(version)

        simulation.publisher.send = failing
        with pytest.raises(PublishError, match="no room"):
            await simulation.trainer.run()
        return [step for step, values in simulation.logged if "policy/grad_norm" in values]

    assert run_in_virtual_time(main()) == [1, 2, 3, 4, 5]


def test_a_publish_that_fails_beside_an_optimizer_step_cuts_it_not_off_and_the_step_is_saved(tmp_path: Path) -> None:
    async def main() -> None:
        job = replace(SLOW_PUBLISH, sigma=0.0, step_seconds=5.0, send_seconds=0.1, checkpoint_interval_steps=100)
        simulation = Simulation(job, checkpoint_dir=tmp_path)
        load, loop, step = simulation.publisher.load, asyncio.get_running_loop(), simulation.policy.step
        stepping = asyncio.Event()

        async def told(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            stepping.set()
            return await step(num_tokens, *lr_scale)

        async def failing() -> object:
            if simulation.trainer.served_version == 2:
                stepping.clear()
                await stepping.wait()
                await asyncio.sleep(1.0)
                loop.call_later(3.9, lambda: failed_at.append(len(simulation.policy.steps)))
                raise PublishError("refused")
            return await load()

        failed_at: list[int] = []
        simulation.policy.step, simulation.publisher.load = told, failing
        with pytest.raises(PublishError, match="refused"):
            await simulation.trainer.run()
        assert failed_at == [4], "the step went on after the failure"
        assert (simulation.trainer.served_version, simulation.trainer.trained_version) == (2, 4)
        checkpoint = Checkpointer(tmp_path, max_to_keep=0).usable()
        assert checkpoint is not None and checkpoint.state.step == 4

    run_in_virtual_time(main())


def test_a_version_whose_copy_is_lost_is_made_up_for_by_the_next() -> None:
    async def main() -> None:
        simulation = Simulation(replace(SLOW_PUBLISH, max_staleness_steps=3, publish_every_steps=3))
        send, loaded = simulation.publisher.send, []
        notify = simulation.staleness.notify_capacity_change

        async def losing(version: int) -> bool:
            return version != 3 and await send(version)

        async def noting(version: int) -> None:
            loaded.append(version)
            await notify(version)

        simulation.publisher.send, simulation.staleness.notify_capacity_change = losing, noting
        await simulation.trainer.run()
        assert loaded == [4, 6, 9, 12]

    run_in_virtual_time(main())


def test_a_failing_rollout_is_the_rollout_stages_error() -> None:
    async def main() -> None:
        class Refusing:
            async def generate(self, request):
                raise RuntimeError("no")

        simulation = Simulation(replace(SLOW_PUBLISH, max_failed_fraction=0.0), generator_over=lambda _: Refusing())
        with pytest.raises(GenerationError):
            await simulation.trainer.run()
        states = {status.name: status.state for status in simulation.trainer.stages()}
        assert states["rollout"] is StageState.ERROR

    run_in_virtual_time(main())


ONE_STEP_OFF = replace(
    SLOW_PUBLISH,
    is_one_step_off=True,
    max_staleness_steps=1,
    stream_mini_batch=False,
    send_seconds=0.2,
    load_seconds=0.1,
)


@pytest.mark.slow
@given(
    sigma=st.sampled_from([0.0, 0.8, 1.5]),
    seconds_per_token=st.sampled_from([1e-4, 1e-3, 1e-2]),
    seed=st.integers(0, 3),
)
def test_one_step_off_generates_the_next_whole_batch_while_this_one_trains_and_changes_weights_between(
    sigma: float, seconds_per_token: float, seed: int
) -> None:
    simulation, events = run(replace(ONE_STEP_OFF, sigma=sigma, seconds_per_token=seconds_per_token, seed=seed))
    for step, groups in enumerate(simulation.policy.steps[:-1]):
        assert len(groups) == ONE_STEP_OFF.mini_batch_size
        assert {v for group in groups for row in group for v in row.versions.distinct} == {max(0, step - 1)}
        assert all(row.num_aborts == 0 for group in groups for row in group), "weights changed in flight"
    assert simulation.trainer.totals.staleness_max == 1
    assert sorted(spans_of("load", events)) == list(range(ONE_STEP_OFF.num_steps + 1))


def test_one_step_off_takes_the_longer_of_generating_and_training_and_sync_their_sum() -> None:
    settings = replace(ONE_STEP_OFF, sigma=0.0, num_steps=10, half_speed_requests=1e9)
    overlapped, _ = run(settings)
    synchronous, _ = run(replace(settings, is_one_step_off=False, max_staleness_steps=0))
    generate, tokens = 1.0, 4 * 2 * 100
    train = tokens * settings.seconds_per_token + settings.step_seconds
    publish = settings.send_seconds + settings.load_seconds
    expected = 10 * (generate + train + publish) - publish
    assert synchronous.trainer.totals.training_seconds == pytest.approx(expected, rel=0.02)
    # Version 1 is published when batch 2 is generated and batch 1 trained; then batch 3 is generated while batch 2 trains.
    expected = generate + 10 * train + 9 * publish
    assert overlapped.trainer.totals.training_seconds <= expected * 1.02
    assert overlapped.trainer.totals.training_seconds < 0.8 * synchronous.trainer.totals.training_seconds


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ({}, 4),
        ({"schedule": Schedule.sync}, 0),
        ({"schedule": Schedule.one_step_off}, 1),
        ({"generate_ahead_steps": 2}, 2),
        ({"generate_ahead_steps": 1, "schedule": Schedule.one_step_off}, 1),
        ({"max_staleness_steps": 3, "generate_ahead_steps": 3}, 3),
    ],
)
def test_the_schedule_says_the_bound_where_none_is_given(overrides: dict, bound: int) -> None:
    assert TrainerConfig(**overrides).staleness_bound == bound
    words = [
        f"trainer.{key}={value.name if isinstance(value, Schedule) else value}" for key, value in overrides.items()
    ]
    assert from_overrides(*words).trainer.staleness_bound == bound


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"schedule": Schedule.sync, "max_staleness_steps": 4},
            r"trainer.max_staleness_steps must be left out, or 0, when trainer.schedule=sync \(fully_async takes any\), got 4",
        ),
        (
            {"schedule": Schedule.one_step_off, "generate_ahead_steps": 2},
            "trainer.generate_ahead_steps must be left out, or 1, when trainer.schedule=one_step_off",
        ),
        (
            {"max_staleness_steps": 4, "generate_ahead_steps": 2},
            r"trainer.generate_ahead_steps must be left out, or equal to trainer.max_staleness_steps \(4\)",
        ),
        ({"generate_ahead_steps": -1}, "trainer.generate_ahead_steps must be >= 0 or null, got -1"),
    ],
)
def test_a_bound_that_contradicts_the_schedule_is_refused(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**overrides)


VALIDATING = replace(SLOW_PUBLISH, eval_interval_steps=3, num_eval_prompts=12, max_staleness_steps=2, send_seconds=0.0)


def evaluations_of(simulation: Simulation) -> list[tuple[int, float, float]]:
    return [(s, v["eval/version_min"], v["eval/version_max"]) for s, v in simulation.logged if "reward/eval" in v]


def test_held_out_prompts_are_evaluated_under_one_version_while_training_goes_on() -> None:
    simulation, events = run(VALIDATING)
    found = evaluations_of(simulation)
    assert [step for step, _, _ in found] == [0, 3, 6, 9, 12]
    assert all(step == oldest == newest for step, oldest, newest in found)
    beside = [
        values["stage/validation/processing_frac"] for _, values in simulation.logged if "trainer/epoch" in values
    ]
    assert max(beside) > 0.3 and len([what for what, *_ in events if what == "step"]) == VALIDATING.num_steps
    assert simulation.trainer.throughput_beside_validation is not None


@pytest.mark.slow
def test_without_pinning_versions_change_under_an_evaluation() -> None:
    simulation, _ = run(replace(VALIDATING, pins_eval_version=False))
    assert any(oldest < newest for _, oldest, newest in evaluations_of(simulation))
    pinned, _ = run(VALIDATING)
    assert simulation.trainer.totals.training_seconds <= pinned.trainer.totals.training_seconds


class LateEvaluations(ModelledGenerator):
    """Held-out prompts are thought about for long before the first token."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if request.is_evaluation:
            await asyncio.sleep(100.0)
        return await super().generate(request)


ENDING = replace(SLOW_PUBLISH, num_steps=None, num_epochs=1, num_prompts=20, publish_every_steps=2)
"""Five steps, of which the second and the fourth are published."""


def test_what_the_end_of_the_data_left_unpublished_waits_for_a_pinned_evaluation_too() -> None:
    job = replace(ENDING, eval_interval_steps=4, num_eval_prompts=4)
    simulation, events = run(job, generator_over=LateEvaluations)
    assert sorted(spans_of("load", events)) == [0, 2, 4, 5]
    assert evaluations_of(simulation) == [(0, 0, 0), (4, 4, 4), (5, 5, 5)]


def test_a_stop_after_a_step_whose_publish_is_not_due_does_not_publish_it(tmp_path: Path) -> None:
    """Groups of the next batch are in flight, under which weights must not change here."""

    async def main() -> None:
        stop = ShutdownRequest()
        simulation = Simulation(replace(ONE_STEP_OFF, publish_every_steps=2), checkpoint_dir=tmp_path, shutdown=stop)
        events, step = events_of(simulation), simulation.policy.step

        async def last(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            if simulation.trainer.trained_version == 2:
                stop.request(10.0)
            return await step(num_tokens, *lr_scale)

        simulation.policy.step = last
        await simulation.trainer.run()
        assert sorted(spans_of("gather", events)) == [0, 2]
        checkpoint = Checkpointer(tmp_path, max_to_keep=0).usable()
        assert checkpoint is not None and checkpoint.state.step == simulation.trainer.trained_version == 3

    run_in_virtual_time(main())


def test_a_stop_cuts_the_last_publish_short_and_saves_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        stop, loop = ShutdownRequest(), asyncio.get_running_loop()
        simulation = Simulation(ENDING, checkpoint_dir=tmp_path, shutdown=stop)
        send = simulation.publisher.send

        async def hanging(version: int) -> bool:
            if version == 5:
                loop.call_later(3.0, stop.request, 5.0)
                ends.append(loop.time() + 3.0 + 5.0)
                await asyncio.sleep(1000.0)
            return await send(version)

        ends: list[float] = []
        simulation.publisher.send = hanging
        await simulation.trainer.run()
        assert [loop.time()] == ends
        checkpoint = Checkpointer(tmp_path, max_to_keep=0).usable()
        assert checkpoint is not None and checkpoint.state.step == 5

    run_in_virtual_time(main())


def test_steps_that_are_to_be_evaluated_or_checked_are_published_whatever_else_is_due() -> None:
    job = replace(
        VALIDATING,
        publish_every_steps=3,
        eval_interval_steps=4,
        logprob_probe_interval_steps=5,
        eval_at_end=False,
    )

    async def main() -> None:
        simulation = Simulation(job)
        events, check, checked = events_of(simulation), simulation.publisher.verifier.check, []

        async def noting(version: int, *, is_first: bool) -> dict[str, float]:
            checked.append(version)
            return await check(version, is_first=is_first)

        simulation.publisher.verifier.check = noting
        await simulation.trainer.run()
        assert sorted(spans_of("load", events)) == [0, 3, 4, 5, 6, 8, 9, 10, 12]
        assert checked == [0, 5, 10]
        assert [step for step, _, _ in evaluations_of(simulation)] == [0, 4, 8, 12], "the last one, too"

    run_in_virtual_time(main())


def test_without_pinning_each_evaluation_is_logged_at_a_version_that_its_tokens_have(tmp_path: Path) -> None:
    """They take longer than two steps, and checkpoints so long that engines serve a version before the run has acknowledged it."""

    class LongEvaluations(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            trajectories = await super().generate(request)
            if request.is_evaluation:
                await asyncio.sleep(7.3 + request.seed / 10)
            return trajectories

    async def main() -> None:
        job = replace(VALIDATING, eval_interval_steps=1, pins_eval_version=False, checkpoint_interval_steps=1)
        simulation = Simulation(job, checkpoint_dir=tmp_path, generator_over=LongEvaluations)
        save = simulation.policy.save

        async def slowly(directory: Path) -> None:
            await asyncio.sleep(2.0)
            await save(directory)

        simulation.policy.save = slowly
        await simulation.trainer.run()
        found = evaluations_of(simulation)
        assert len(found) > 3 and found[0][0] == 0 and found[-1][0] == job.num_steps
        assert all(step == oldest for step, oldest, _ in found)
        assert all(before < after for (before, *_), (after, *_) in pairwise(found)), "none twice"

    run_in_virtual_time(main())


@pytest.mark.slow
@given(bound=st.integers(0, 2), every=st.integers(1, 3), sigma=st.sampled_from([0.0, 1.2]))
def test_pinned_evaluations_do_not_block_the_bound_for_ever(bound: int, every: int, sigma: float) -> None:
    simulation, _ = run(replace(VALIDATING, max_staleness_steps=bound, eval_interval_steps=every, sigma=sigma))
    assert simulation.trainer.served_version == VALIDATING.num_steps
    assert all(step == oldest == newest for step, oldest, newest in evaluations_of(simulation))
    assert simulation.trainer.totals.staleness_max <= bound


def test_a_run_that_only_validates_trains_nothing() -> None:
    async def main() -> Simulation:
        simulation = Simulation(replace(VALIDATING, eval_only=True))
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.trainer.served_version == 0 and simulation.policy.steps == [[]]
    assert simulation.trainer.first_evaluation is not None and simulation.trainer.first_evaluation.reward == 0.0
    assert [step for step, _, _ in evaluations_of(simulation)] == [0]


OWING = replace(VALIDATING, eval_interval_steps=4, publish_every_steps=1, send_seconds=1.0)


def test_an_evaluation_whose_version_was_lost_on_its_way_is_of_the_next_one() -> None:
    async def main() -> None:
        simulation = Simulation(OWING)
        send = simulation.publisher.send

        async def losing(version: int) -> bool:
            return version != 4 and await send(version)

        simulation.publisher.send = losing
        await simulation.trainer.run()
        assert evaluations_of(simulation) == [(0, 0, 0), (5, 5, 5), (8, 8, 8), (12, 12, 12)]

    run_in_virtual_time(main())


def interrupted_while_evaluating(directory: Path) -> int:
    """A run that is stopped while version 4 is evaluated; the step that it is saved at."""

    async def main() -> int:
        stop, loop = ShutdownRequest(), asyncio.get_running_loop()
        simulation = Simulation(replace(OWING, checkpoint_interval_steps=4), checkpoint_dir=directory, shutdown=stop)
        request = simulation.trainer._validation.request_if_owed

        def requested(version: int) -> None:
            request(version)
            if version == 4:
                loop.call_later(0.5, stop.request, 1.0)

        simulation.trainer._validation.request_if_owed = requested
        await simulation.trainer.run()
        assert [step for step, *_ in evaluations_of(simulation)] == [0]
        return simulation.trainer.trained_version

    return run_in_virtual_time(main())


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_evaluation_that_was_due_is_made_when_the_run_resumes(is_killed: bool, tmp_path: Path) -> None:
    """A killed one has the checkpoint that was written just before the evaluation."""
    stopped_at = interrupted_while_evaluating(tmp_path)
    step = 4 if is_killed else stopped_at

    async def evaluated(on_record: Sequence[int]) -> list[int]:
        simulation = Simulation(OWING, checkpoint_dir=tmp_path)
        await simulation.trainer.resume(tmp_path / f"global_step_{step}", evaluated_versions=on_record)
        await simulation.trainer.run()
        return [step for step, *_ in evaluations_of(simulation)]

    assert run_in_virtual_time(evaluated([0])) == [step, 8, 12]
    assert run_in_virtual_time(evaluated([0, 4, 8])) == [8, 12], "it was through, and what came after is made again"
