"""Dynamic sampling: full mini-batches of groups with a signal, in virtual time; what is filtered is counted and replaced."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.checkpoint.files import write_manifest
from skyrl_async.config.load import from_overrides
from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.console import cells
from skyrl_async.rollout.finished_group_filter import NoSignal, no_signal
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Trajectory
from tests.cpu.advantage_columns import one_token_row as row

FILTERING = SimulationSettings(
    mini_batch_size=4,
    mean_tokens=60.0,
    sigma=1.2,
    num_steps=6,
    num_prompts=40,
    seconds_per_token=1e-4,
    load_seconds=0.5,
    step_seconds=1.0,
    sample_full_batch=True,
)


class SomeConstant(ModelledGenerator):
    """Groups have a signal with some probability, drawn from the seed of their admission; the others are all 0, all 1 or all 0.5."""

    def __init__(self, sampler: InferenceEngineClient, share: float) -> None:
        super().__init__(sampler)
        self.share = share

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        rows = await super().generate(request)
        drawn = random.Random(f"{request.prompt.uid}-{request.seed}")
        if drawn.random() < self.share:
            return rows
        reward = drawn.choice([0.0, 1.0, 0.5])
        return tuple(replace(row, reward=reward) for row in rows)


def simulate(settings: SimulationSettings, share: float, resume_from: Path | None = None, **parts) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=lambda c: SomeConstant(c, share), **parts)
        if resume_from is not None:
            await simulation.trainer.resume(resume_from)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def logged(simulation: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in simulation.logged if name in values]


def trained(simulation: Simulation) -> list[list[tuple[Trajectory, ...]]]:
    return [step for step in simulation.policy.steps if step]


def uid(group: tuple[Trajectory, ...]) -> str:
    return "".join(map(chr, group[0].prompt_token_ids.tolist()))


@pytest.mark.slow
@given(
    share=st.sampled_from([0.15, 0.5, 0.9]),
    bound=st.integers(0, 3),
    policy=st.sampled_from(["wait", "window", "mask", "resample", "allow"]),
    streamed=st.booleans(),
    deterministic=st.booleans(),
    schedule=st.sampled_from(["fully_async", "late publishes", "one_step_off"]),
    limits_buffered=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_mini_batch_is_full_of_groups_with_a_signal_whatever_the_policy_and_the_schedule(
    share: float,
    bound: int,
    policy: str,
    streamed: bool,
    deterministic: bool,
    schedule: str,
    limits_buffered: bool,
    seed: int,
) -> None:
    is_one_step_off = schedule == "one_step_off"
    job = replace(
        FILTERING,
        staleness_policy=policy,
        max_staleness_steps=1 if is_one_step_off else bound,
        stream_mini_batch=streamed and not is_one_step_off,
        is_one_step_off=is_one_step_off,
        count_buffered_as_in_flight=limits_buffered and not is_one_step_off,
        publish_every_steps=bound + 1 if schedule == "late publishes" else 1,
        deterministic=deterministic and policy in ("wait", "allow"),
        num_epochs=50,
        seed=seed,
    )
    simulation = simulate(job, share)
    steps, states, totals = trained(simulation), simulation.dataloader.statistics(), simulation.trainer.totals
    assert [len(step) for step in steps] == [4] * 6
    assert all({row.reward for row in group} == {0.0, 1.0} for step in steps for group in step)
    assert states["trained_total"] == totals.trained_groups == 24
    assert states["filtered_total"] == totals.filtered_groups == sum(totals.filtered_by.values())
    assert simulation.staleness.num_running == states["running"] == states["finished"] == 0
    if policy in ("wait", "window", "resample"):
        assert totals.groups_over_bound == 0
    if policy == "mask":
        assert max(logged(simulation, "async/token_lag_max")) <= job.max_staleness_steps
    assert max(logged(simulation, "reward/zero_variance_frac")) == 0


@pytest.mark.slow
@given(share=st.sampled_from([0.2, 0.6]), bound=st.integers(0, 3), seed=st.integers(0, 5))
def test_contract_1_in_each_epoch_every_prompt_is_trained_or_filtered_and_the_data_s_end_loses_none(
    share: float, bound: int, seed: int
) -> None:
    job = replace(FILTERING, max_staleness_steps=bound, num_steps=None, num_epochs=3, num_prompts=21, seed=seed)
    simulation = simulate(job, share)
    states, totals = simulation.dataloader.statistics(), simulation.trainer.totals
    assert states["trained_total"] + states["filtered_total"] == 3 * 21
    assert [len(step) for step in trained(simulation)][:-1] == [4] * (totals.steps - 1), "but for where the data ends"
    assert totals.generated_tokens == totals.trained_tokens + totals.wasted_tokens
    assert totals.groups_over_bound == 0


@pytest.mark.slow
@given(
    kill_at=st.floats(1.0, 40.0),
    policy=st.sampled_from(["wait", "allow", "resample"]),
    bound=st.integers(0, 3),
    seed=st.integers(0, 5),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_contract_7_a_killed_and_resumed_run_trains_or_filters_each_prompt_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, kill_at: float, policy: str, bound: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    job = replace(
        FILTERING,
        num_steps=None,
        num_epochs=2,
        num_prompts=30,
        max_staleness_steps=bound,
        staleness_policy=policy,
        checkpoint_interval_steps=1,
        seed=seed,
    )

    async def killed() -> list[list[tuple[Trajectory, ...]]]:
        simulation = Simulation(job, checkpoint_dir=directory, generator_over=lambda c: SomeConstant(c, 0.5))
        running = asyncio.ensure_future(simulation.trainer.run())
        await asyncio.wait([running], timeout=kill_at)
        running.cancel()
        await asyncio.wait([running])
        return trained(simulation)

    before = run_in_virtual_time(killed())
    usable = Checkpointer(directory, max_to_keep=0).usable()
    again = simulate(replace(job, checkpoint_interval_steps=0), 0.5, None if usable is None else usable.path)
    steps = before[: 0 if usable is None else usable.state.step] + trained(again)
    times = Counter(uid(group) for step in steps for group in step)
    states = again.dataloader.statistics()
    assert max(times.values()) <= 2
    assert states["trained_total"] == times.total() == 60 - states["filtered_total"]
    if policy != "resample":  # it filters groups past the bound, too, where no group is left to draw again
        assert states["filtered_total"] == again.trainer.totals.filtered_groups


def test_contract_3_staleness_zero_trains_what_a_plain_loop_of_draw_until_full_trains() -> None:
    job = replace(FILTERING, max_staleness_steps=0, deterministic=True)
    asynchronous = simulate(job, 0.4)

    async def plain_loop() -> list[list[str]]:
        simulation = Simulation(job, generator_over=lambda c: SomeConstant(c, 0.4))
        steps = []
        for _ in range(job.num_steps):
            step: list[str] = []
            while len(step) < job.mini_batch_size:
                admission = await simulation.staleness.acquire_submission_slot()
                key, prompt = await simulation.dataloader.get_next_non_consumed_data()
                rows = (await simulation.workers.generate(admission, prompt)).trajectories
                await simulation.dataloader.mark_finished_uid(key)
                await simulation.staleness.on_rollout_accepted(admission)
                if no_signal(rows, 0.0) is None:
                    await simulation.staleness.on_rollout_trained(admission.index)
                    step.append(uid(rows))
                else:
                    await simulation.staleness.on_rollout_filtered(admission)
            steps.append(step)
            await simulation.publisher.publish(simulation.staleness.served_version + 1)
            await simulation.staleness.notify_capacity_change(simulation.staleness.served_version + 1)
        return steps

    assert [[uid(group) for group in step] for step in trained(asynchronous)] == run_in_virtual_time(plain_loop())


@pytest.mark.slow
@given(
    tokens_per_second=st.floats(20.0, 500.0),
    seconds_per_token=st.floats(0.0, 5e-3),
    load_seconds=st.floats(0.0, 5.0),
    step_seconds=st.floats(0.0, 20.0),
    bound=st.integers(0, 3),
    share=st.sampled_from([0.4, 1.0]),
    publish_every=st.integers(1, 2),
)
def test_with_weights_that_change_between_batches_what_is_trained_does_not_depend_on_how_long_anything_takes(
    tokens_per_second: float,
    seconds_per_token: float,
    load_seconds: float,
    step_seconds: float,
    bound: int,
    share: float,
    publish_every: int,
) -> None:
    """Not even which groups are filtered: prompts, admissions and every token's version are the same."""
    job = replace(
        FILTERING,
        deterministic=True,
        max_staleness_steps=bound,
        publish_every_steps=min(publish_every, bound + 1),
        num_epochs=20,
    )
    times = {
        "tokens_per_second": tokens_per_second,
        "seconds_per_token": seconds_per_token,
        "load_seconds": load_seconds,
        "step_seconds": step_seconds,
    }
    runs = []
    for settings_of_run in (job, replace(job, **times)):
        rows: list[tuple] = []

        record = KeptGroups()
        simulate(settings_of_run, share, record=record)
        rows += [(step, g.uid, g.epoch, g.admission_index, g.scheduled_version) for step, g in record.trained]
        rows += [row.versions for _, g in record.trained for row in g.trajectories]
        runs.append(rows)
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_places_of_filtered_groups_are_refilled_while_generation_goes_on() -> None:
    """Half the groups are filtered: twice as much is generated, beside training, in much less than twice the time."""
    job = replace(FILTERING, num_steps=20, seconds_per_token=5e-3)
    seconds = {share: sum(logged(simulate(job, share), "timing/step")) for share in (1.0, 0.5)}
    assert seconds[0.5] < 1.3 * seconds[1.0]


def test_a_run_whose_groups_never_differ_stops_and_says_what_it_saw() -> None:
    with pytest.raises(GenerationError) as stopped:
        simulate(replace(FILTERING, max_filtered_in_a_row=25), 0.0)
    message = str(stopped.value)
    assert message.startswith("25 groups in a row had no difference in reward")
    assert "trainer.fully_async.max_filtered_in_a_row=25" in message
    assert all(f" x {reward}" in message for reward in ("0", "0.5", "1"))
    assert "0 had a difference and 25 had none" in message and "sample_full_batch=false" in message


@pytest.mark.parametrize("policy", ["wait", "mask", "resample", "allow"])
def test_a_run_whose_data_ends_without_any_signal_is_an_error_and_not_a_run_without_steps(policy: str) -> None:
    job = replace(FILTERING, num_epochs=2, num_prompts=7, staleness_policy=policy)
    with pytest.raises(GenerationError, match="the data ended, and no group had a difference in reward"):
        simulate(job, 0.0)


def test_a_resumed_run_goes_on_counting_groups_without_a_difference(tmp_path: Path) -> None:
    job = replace(FILTERING, num_steps=3, checkpoint_interval_steps=1, num_epochs=None, staleness_policy="allow")
    simulate(job, 0.15, checkpoint_dir=tmp_path)
    of_step = {step: read_state(tmp_path / f"global_step_{step}") for step in (1, 2, 3)}
    step, state = max(of_step.items(), key=lambda item: sum(item[1].filtered_in_a_row.values()))
    num_before = sum(state.filtered_in_a_row.values())
    assert num_before >= 2 and state.filtered_in_a_row.keys() <= {"0", "0.5", "1"}

    path, most = tmp_path / f"global_step_{step}", num_before + 30
    unlimited = replace(job, num_steps=None, max_filtered_in_a_row=most)
    with pytest.raises(GenerationError, match=f"^{most} groups in a row had no difference .* and 30 had none"):
        simulate(unlimited, 0.0, path)

    content = json.loads((path / "trainer_state.json").read_text())
    del content["filtered_in_a_row"]  # as checkpoints were before
    (path / "trainer_state.json").write_text(json.dumps(content))
    (path / "manifest.json").unlink()
    write_manifest(path)
    with pytest.raises(GenerationError, match=f"^{most} groups in a row .* and {most} had none"):
        simulate(unlimited, 0.0, path)


def test_rare_signals_do_not_stop_a_run_that_finds_them() -> None:
    job = replace(FILTERING, num_steps=3, max_filtered_in_a_row=40, num_epochs=None)
    simulation = simulate(job, 0.15)
    assert simulation.trainer.totals.steps == 3
    assert simulation.trainer.totals.filtered_groups > 40


def test_finished_groups_of_a_checkpoint_made_without_it_are_filtered_when_they_are_resumed(tmp_path: Path) -> None:
    job = replace(FILTERING, num_steps=None, num_epochs=1, checkpoint_interval_steps=2, step_seconds=30.0)
    simulate(replace(job, sample_full_batch=False), 0.3, checkpoint_dir=tmp_path)
    resumed = simulate(job, 0.3, tmp_path / "global_step_2")
    assert all({row.reward for row in group} == {0.0, 1.0} for step in trained(resumed) for group in step)
    states = resumed.dataloader.statistics()
    assert states["trained_total"] + states["filtered_total"] == 40


def test_what_is_filtered_is_logged_by_what_it_had_and_shown() -> None:
    simulation = simulate(FILTERING, 0.4)
    _, last = simulation.logged[-1]
    reasons = ("all_zero", "all_one", "constant", "too_few")
    by_reason = [last[f"generate/filtered_{reason}"] for reason in reasons]
    assert sum(by_reason) == last["generate/filtered_groups"] == simulation.trainer.totals.filtered_groups > 0
    assert min(by_reason[:3]) > 0 and by_reason[3] == 0
    assert 0 < max(logged(simulation, "generate/filtered_frac")) <= 1
    assert simulation.trainer.totals.summary()["filtered_groups"] == sum(by_reason)
    assert cells({"generate/filtered_frac": 0.25, "generate/filtered_groups": 1200.0})["filtered"] == "25% (1,200)"
    assert "filtered" not in cells(simulate(replace(FILTERING, sample_full_batch=False), 0.4).logged[-1][1])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(0.0), row(1.0)], None),
        ([row(float("nan")), row(float("nan"))], None),
        ([row(0.0), row(0.0)], NoSignal.ALL_ZERO),
        ([row(1.0), row(1.0 + 1e-7)], NoSignal.ALL_ONE),
        ([row(0.3), row(0.3)], NoSignal.CONSTANT),
        ([row(0.3), row(0.3 + 1e-5)], None),
        ([row(0.0), row(1.0, is_abandoned=True)], NoSignal.TOO_FEW),
        ([row(0.0), row(0.0), row(1.0, is_abandoned=True)], NoSignal.ALL_ZERO),
        ([row(1.0, sample_index=0), row(1.0, sample_index=0)], NoSignal.TOO_FEW),
        ([], NoSignal.TOO_FEW),
    ],
)
def test_a_group_has_a_signal_where_rewards_of_its_live_samples_differ(
    rows: list[Trajectory], reason: NoSignal | None
) -> None:
    assert no_signal(rows, 1e-6) is reason


def test_the_limit_is_thirty_mini_batches_unless_it_is_said() -> None:
    default = from_overrides("trainer.fully_async.sample_full_batch=true", "trainer.policy_mini_batch_size=5")
    assert default.trainer.max_filtered_in_a_row == 150
    assert from_overrides("trainer.fully_async.max_filtered_in_a_row=0").trainer.max_filtered_in_a_row == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.fully_async.max_filtered_in_a_row=-1"], r"max_filtered_in_a_row must be >= 0 or null, got -1"),
        (
            ["trainer.fully_async.sample_full_batch=true", "generator.n_samples_per_prompt=1"],
            r"n_samples_per_prompt must be >= 2 with trainer.fully_async.sample_full_batch=true, got 1",
        ),
        (
            ["trainer.fully_async.sample_full_batch=true", "trainer.algorithm.distillation.teachers={t: /x}"],
            r"sample_full_batch must be false with .*distillation.teachers and use_rewards=false, got true: .* equal rewards",
        ),
        (["trainer.algorithm.zero_variance_filter_tol=-1"], r"zero_variance_filter_tol must be >= 0, got -1"),
    ],
)
def test_wrong_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_overrides(*overrides)
