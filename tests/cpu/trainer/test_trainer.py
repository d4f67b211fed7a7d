"""The real trainer loop, staleness manager, buffer, workers and client over modelled engines, in virtual time."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.errors import CheckpointError, DeadlineError, GenerationError, NoEngineError, PublishError
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import PauseMode, Trajectory

LONG_TAILED = SimulationSettings(
    mean_tokens=100.0, sigma=1.2, num_steps=24, seconds_per_token=1e-4, load_seconds=0.5, step_seconds=1.0
)


def simulate(settings: SimulationSettings, **parts) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, **parts)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def step_values(simulation: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in simulation.logged if name in values]


@pytest.mark.slow
@given(
    bound=st.integers(0, 4),
    sigma=st.sampled_from([0.0, 0.8, 1.5]),
    seed=st.integers(0, 3),
    mode=st.sampled_from(PauseMode),
    streamed=st.booleans(),
)
def test_contract_2_wait_trains_no_group_past_the_bound_and_drops_none(
    bound: int, sigma: float, seed: int, mode: PauseMode, streamed: bool
) -> None:
    settings = replace(
        LONG_TAILED, max_staleness_steps=bound, sigma=sigma, seed=seed, pause_mode=mode, stream_mini_batch=streamed
    )
    simulation = simulate(settings)
    assert max(step_values(simulation, "async/staleness_max")) <= bound
    assert simulation.trainer.totals.groups_over_bound == 0
    assert simulation.trainer.totals.trained_groups == settings.num_steps * settings.mini_batch_size
    assert simulation.workers.counts["groups"] == settings.num_steps * settings.mini_batch_size


def test_contract_2_allow_exceeds_the_bound_under_a_long_tail_and_counts_it() -> None:
    simulation = simulate(replace(LONG_TAILED, staleness_policy="allow", max_staleness_steps=1))
    assert simulation.trainer.totals.groups_over_bound > 0
    assert max(step_values(simulation, "async/staleness_max")) > 1
    assert any(share > 0 for share in step_values(simulation, "async/over_bound_frac"))


def test_the_wait_for_the_bound_is_counted_in_seconds() -> None:
    waiting = simulate(replace(LONG_TAILED, max_staleness_steps=1))
    allowing = simulate(replace(LONG_TAILED, max_staleness_steps=1, staleness_policy="allow"))
    assert waiting.trainer.totals.staleness_wait_seconds > 0
    assert allowing.trainer.totals.staleness_wait_seconds == 0


def test_contract_3_staleness_zero_trains_what_a_plain_loop_trains() -> None:
    """The plain loop: draw a mini-batch, generate all of it, train it in order, publish; nothing overlaps."""
    settings = SimulationSettings(max_staleness_steps=0, deterministic=True, num_steps=6, step_seconds=1.0)
    asynchronous = simulate(settings)

    async def plain_loop() -> list[list[tuple[Trajectory, ...]]]:
        simulation = Simulation(settings)
        steps = []
        for _ in range(settings.num_steps):
            admissions = [await simulation.staleness.acquire_submission_slot() for _ in range(settings.mini_batch_size)]
            drawn = [await simulation.dataloader.get_next_non_consumed_data() for _ in admissions]
            requests = [(a, key, prompt) for a, (key, prompt) in zip(admissions, drawn, strict=True)]
            groups = [(await simulation.workers.generate(a, prompt)).trajectories for a, _, prompt in requests]
            for admission, key, _ in requests:
                await simulation.dataloader.mark_finished_uid(key)
                await simulation.staleness.on_rollout_accepted(admission)
                await simulation.staleness.on_rollout_trained(admission.index)
            await simulation.dataloader.mark_consumed_uids([key for _, key, _ in requests])
            steps.append(groups)
            await simulation.publisher.publish(simulation.staleness.served_version + 1)
            await simulation.staleness.notify_capacity_change(simulation.staleness.served_version + 1)
        return steps

    assert asynchronous.policy.steps[:-1] == run_in_virtual_time(plain_loop())
    assert set(step_values(asynchronous, "async/token_lag_max")) == {0.0}


@pytest.mark.slow
@given(seed=st.integers(0, 5), num_prompts=st.integers(5, 30))
def test_contract_1_every_prompt_of_every_epoch_is_trained_once(seed: int, num_prompts: int) -> None:
    settings = replace(LONG_TAILED, num_steps=None, num_epochs=3, num_prompts=num_prompts, mini_batch_size=4, seed=seed)
    simulation = simulate(settings)
    trained = [tuple(group[0].prompt_token_ids.tolist()) for step in simulation.policy.steps for group in step]
    assert set(Counter(trained).values()) == {3} and len(set(trained)) == num_prompts
    assert simulation.dataloader.statistics()["trained_total"] == 3 * num_prompts


def test_streaming_lets_generation_and_training_overlap_even_at_staleness_zero() -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=0, seconds_per_token=5e-4)

    def seconds(streamed: bool) -> float:
        simulation = simulate(replace(settings, stream_mini_batch=streamed))
        return sum(step_values(simulation, "timing/step"))

    assert seconds(True) < 0.95 * seconds(False)


def test_tokens_of_a_group_cross_versions_and_say_so() -> None:
    simulation = simulate(LONG_TAILED)
    assert simulation.workers.counts["aborts"] > 0
    lags = step_values(simulation, "async/token_lag_mean")
    assert 0 < max(lags)
    rows = [row for step in simulation.policy.steps for group in step for row in group]
    assert any(len(row.versions.distinct) > 1 for row in rows)
    assert all(list(row.versions) == sorted(row.versions) for row in rows)


def test_deterministic_training_takes_groups_in_the_order_of_admission() -> None:
    def order(simulation: Simulation) -> list:
        return [[group[0].prompt_token_ids.tolist() for group in step] for step in simulation.policy.steps]

    streamed = simulate(replace(LONG_TAILED, deterministic=True, max_staleness_steps=2))
    whole = simulate(replace(LONG_TAILED, deterministic=True, max_staleness_steps=2, stream_mini_batch=False))
    assert order(streamed) == order(whole)


class Failing(ModelledGenerator):
    """Fails for chosen uids, a given number of times each."""

    def __init__(self, sampler, uids: set[str], times: int) -> None:
        super().__init__(sampler)
        self.left = dict.fromkeys(uids, times)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if self.left.get(request.prompt.uid, 0) > 0:
            self.left[request.prompt.uid] -= 1
            raise RuntimeError(f"no answer for {request.prompt.uid}")
        return await super().generate(request)


def test_contract_8_a_failed_rollout_is_tried_again_and_then_counted() -> None:
    settings = replace(LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=32, max_retries=1)
    once = simulate(settings, generator_over=lambda client: Failing(client, {"p3", "p5"}, 1))
    assert (once.workers.counts["retries"], once.workers.counts["failed_groups"]) == (2, 0)
    twice = simulate(settings, generator_over=lambda client: Failing(client, {"p3", "p5"}, 2))
    assert twice.workers.counts["failed_groups"] == 2
    assert twice.dataloader.statistics()["failed_total"] == 2
    assert twice.dataloader.statistics()["trained_total"] == 30


def test_contract_8_too_many_failures_stop_the_run_with_the_last_error() -> None:
    always = {f"p{i}" for i in range(64)}
    with pytest.raises(GenerationError, match="max_failed_fraction=0.5.*no answer for p"):
        simulate(LONG_TAILED, generator_over=lambda client: Failing(client, always, 9))


def test_a_run_stopped_by_too_many_failures_resumes_from_what_it_had_trained(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=64, checkpoint_interval_steps=1000)
    broken = {f"p{i}" for i in range(64)}

    class BreaksLate(Failing):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            return await (super() if request.priority >= 32 else super(Failing, self)).generate(request)

    with pytest.raises(GenerationError, match="max_failed_fraction"):
        simulate(settings, generator_over=lambda client: BreaksLate(client, broken, 9), checkpoint_dir=tmp_path)
    usable = Checkpointer(tmp_path, max_to_keep=0).usable()
    assert usable is not None and usable.state.step > 0

    async def go_on() -> None:
        simulation = Simulation(settings)
        await simulation.trainer.resume(usable.path)
        await simulation.trainer.run()
        counts = simulation.dataloader.statistics()
        assert counts["trained_total"] + counts["failed_total"] == 64
        assert simulation.trainer.totals.failed_groups == counts["failed_total"] > 0

    run_in_virtual_time(go_on())


def test_a_resumed_run_of_few_groups_ends_as_the_whole_run_does_when_one_of_them_fails(tmp_path: Path) -> None:
    settings = replace(
        LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=40, max_failed_fraction=0.1, checkpoint_interval_steps=1
    )

    class LastFailsLate(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.priority >= 39:
                await asyncio.sleep(1e5)
                raise RuntimeError("it never works")
            return await super().generate(request)

    whole = simulate(settings, generator_over=LastFailsLate, checkpoint_dir=tmp_path).dataloader.statistics()
    assert (whole["trained_total"], whole["failed_total"]) == (39, 1)
    before_the_last_step = sorted(tmp_path.glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1]))[-2]

    async def go_on() -> Simulation:
        simulation = Simulation(settings, generator_over=LastFailsLate)
        await simulation.trainer.resume(before_the_last_step)
        await simulation.trainer.run()
        return simulation

    assert run_in_virtual_time(go_on()).dataloader.statistics() == whole


def test_contract_8_a_hung_rollout_fails_by_name_and_the_run_goes_on() -> None:
    class Hanging(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.prompt.uid == "p3":
                await asyncio.Event().wait()
            return await super().generate(request)

    settings = replace(LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=32, rollout_timeout_s=5000.0)
    simulation = simulate(settings, generator_over=Hanging)
    assert simulation.workers.counts["failed_groups"] == 1
    assert simulation.dataloader.statistics()["trained_total"] == 31


def test_contract_8_a_wait_that_nothing_will_end_is_an_error_and_not_silence() -> None:
    class Hanging(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            return await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with asyncio.timeout(1e6):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_in_virtual_time(main())
    with pytest.raises(DeadlineError, match="nothing will cause"):
        run_in_virtual_time(asyncio.Event().wait())


def test_a_generator_with_a_wrong_number_of_trajectories_is_named() -> None:
    class Short(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            return (await super().generate(request))[:-1]

    with pytest.raises(GenerationError, match="returned 1 trajectories for p.*expected 2"):
        simulate(LONG_TAILED, generator_over=Short)


def test_a_failing_trainer_stops_generation_and_requeues_every_prompt() -> None:
    async def main() -> Simulation:
        simulation = Simulation(LONG_TAILED)

        async def explode(num_tokens: int, *lr_scale: float) -> dict[str, float]:
            raise RuntimeError("boom")

        simulation.policy.step = explode
        with pytest.raises(RuntimeError, match="boom"):
            await simulation.trainer.run()
        assert len(asyncio.all_tasks()) == 1
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.staleness.num_running == 0
    assert simulation.dataloader.statistics()["running"] == 0


def test_an_engine_that_dies_costs_no_group() -> None:
    async def main() -> Simulation:
        simulation = Simulation(LONG_TAILED)

        async def kill() -> None:
            await asyncio.sleep(40)
            simulation.engines[0].kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.trainer.totals.trained_groups == LONG_TAILED.num_steps * LONG_TAILED.mini_batch_size
    assert simulation.workers.counts["failed_groups"] == 0


def test_the_death_of_every_engine_ends_the_run_by_name() -> None:
    async def main() -> None:
        simulation = Simulation(replace(LONG_TAILED, num_engines=1))

        async def kill() -> None:
            await asyncio.sleep(40)
            simulation.engines[0].kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            with pytest.raises(NoEngineError, match="no inference engine"):
                await simulation.trainer.run()

    run_in_virtual_time(main())


def test_contract_5_the_pause_is_exactly_the_load_and_not_a_grace_period() -> None:
    simulation = simulate(replace(LONG_TAILED, load_seconds=0.25, send_seconds=3.0))
    assert simulation.trainer.totals.pauses == pytest.approx([0.25] * 25)
    assert step_values(simulation, "timing/send") == pytest.approx([3.0] * 24)


def test_contract_5_a_refused_publish_keeps_the_old_version_serving_everywhere() -> None:
    async def main() -> list[int]:
        simulation = Simulation(LONG_TAILED)
        await simulation.publisher.publish(1)
        simulation.engines[1].fails_next_load = PublishError
        with pytest.raises(PublishError, match="engine-1 refused version 2.*still serves version 1"):
            await simulation.publisher.publish(2)
        completions = [await engine.generate(request("r")) for engine in simulation.engines]
        assert simulation.client.policy_version == 1
        return [version for c in completions for version in c.versions.distinct]

    assert run_in_virtual_time(main()) == [1, 1]


def test_contract_5_an_engine_that_dies_while_loading_is_dropped_and_the_rest_serve_the_new_version() -> None:
    async def main() -> list[int]:
        simulation = Simulation(LONG_TAILED)
        simulation.engines[0].fails_next_load = RuntimeError
        await simulation.publisher.publish(1)
        assert [engine.name for engine in simulation.client.engines] == ["engine-1"]
        return [await simulation.engines[1].version()]

    assert run_in_virtual_time(main()) == [1]


def request(request_id: str):
    from skyrl_async.types import EngineRequest, SamplingParams

    return EngineRequest(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4))


def test_contract_7_a_resumed_run_trains_what_an_uninterrupted_one_trains(tmp_path: Path) -> None:
    settings = SimulationSettings(
        max_staleness_steps=0,
        deterministic=True,
        num_steps=8,
        num_prompts=20,
        mini_batch_size=4,
        checkpoint_interval_steps=3,
    )
    whole = simulate(settings)

    async def interrupted() -> Simulation:
        simulation = Simulation(settings, checkpoint_dir=tmp_path)

        async def die_at_step_5(num_tokens: int, *lr_scale: float) -> dict[str, float]:
            if simulation.trainer.served_version == 4:
                raise KeyboardInterrupt
            simulation.policy.steps.append([])
            return {}

        simulation.policy.step = die_at_step_5
        await simulation.trainer.run()
        return simulation

    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(interrupted())

    async def resumed() -> Simulation:
        simulation = Simulation(settings)
        await simulation.trainer.resume(Checkpointer(tmp_path, max_to_keep=0).usable().path)
        await simulation.trainer.run()
        return simulation

    again = run_in_virtual_time(resumed())

    def rows(simulation: Simulation) -> list:
        return [
            [(r.prompt_token_ids.tolist(), r.response_token_ids.tolist(), r.reward) for g in step for r in g]
            for step in simulation.policy.steps
        ]

    assert rows(again)[:-1] == rows(whole)[3:-1]
    assert again.trainer.totals.trained_groups == whole.trainer.totals.trained_groups


@pytest.mark.slow
@given(bound=st.integers(0, 3), interval=st.integers(1, 4), seed=st.integers(0, 3))
def test_contract_7_across_any_checkpoint_every_uid_is_trained_once(
    tmp_path_factory: pytest.TempPathFactory, bound: int, interval: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    settings = replace(
        LONG_TAILED,
        max_staleness_steps=bound,
        num_steps=None,
        num_epochs=2,
        num_prompts=18,
        mini_batch_size=4,
        checkpoint_interval_steps=interval,
        seed=seed,
    )
    simulate(settings, checkpoint_dir=directory)
    paths = sorted(directory.glob("global_step_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    for path in paths[:3]:

        async def resumed(path: Path = path) -> Simulation:
            simulation = Simulation(replace(settings, checkpoint_interval_steps=0))
            await simulation.trainer.resume(path)
            await simulation.trainer.run()
            return simulation

        simulation = run_in_virtual_time(resumed())
        assert simulation.dataloader.statistics()["trained_total"] == 36
        assert simulation.trainer.totals.trained_groups == 36


def test_contract_7_a_checkpoint_with_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    simulate(replace(LONG_TAILED, num_steps=2, checkpoint_interval_steps=2), checkpoint_dir=tmp_path)
    checkpoint = Checkpointer(tmp_path, max_to_keep=1).usable().path
    state = json.loads((checkpoint / "trainer_state.json").read_text())

    def resume() -> None:
        async def main() -> None:
            await Simulation(LONG_TAILED).trainer.resume(checkpoint)

        run_in_virtual_time(main())

    (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"damaged: trainer_state.json has 1 bytes"):
        resume()
    (checkpoint / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: trainer_state.json is missing"):
        resume()
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    resume()
    (checkpoint / "policy" / "model").unlink()
    with pytest.raises(CheckpointError, match="policy/model is missing"):
        resume()


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        simulation = Simulation(replace(LONG_TAILED, num_steps=6, checkpoint_interval_steps=1), checkpoint_dir=tmp_path)
        simulation.trainer._saver.checkpointer = Checkpointer(tmp_path, max_to_keep=2)
        await simulation.trainer.run()

    run_in_virtual_time(main())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "global_step_5",
        "global_step_6",
        "latest_ckpt_global_step.txt",
    ]


@pytest.mark.slow
def test_four_virtual_hours_of_thousands_of_groups_run_in_moments() -> None:
    simulation = simulate(
        SimulationSettings(
            mini_batch_size=32,
            num_steps=40,
            group_size=1,
            num_prompts=512,
            mean_tokens=400,
            tokens_per_second=1.0,
            max_staleness_steps=4,
        )
    )
    assert sum(step_values(simulation, "timing/step")) > 4 * 3600
    assert simulation.trainer.totals.groups_over_bound == 0


@pytest.mark.slow
def test_a_busy_trainer_gets_fresher_groups_in_the_same_time_when_buffered_groups_are_limited() -> None:
    """Training is the bottleneck here: whatever is generated ahead of it only ages."""
    settings = replace(LONG_TAILED, sigma=0.5, max_staleness_steps=4, num_workers=16, seconds_per_token=5e-3)
    filled = simulate(settings)
    limited = simulate(replace(settings, count_buffered_as_in_flight=True))

    def mean_staleness(simulation: Simulation) -> float:
        return simulation.trainer.totals.staleness_sum / simulation.trainer.totals.trained_groups

    assert mean_staleness(limited) < 0.7 * mean_staleness(filled)
    assert sum(step_values(limited, "timing/step")) < 1.05 * sum(step_values(filled, "timing/step"))


@pytest.mark.slow
def test_limiting_buffered_groups_costs_nothing_where_generation_is_the_bottleneck() -> None:
    def seconds(seed: int, limits: bool) -> float:
        settings = replace(
            LONG_TAILED, max_staleness_steps=4, num_workers=16, seed=seed, count_buffered_as_in_flight=limits
        )
        return sum(step_values(simulate(settings), "timing/step"))

    filled, limited = (sum(seconds(seed, limits) for seed in range(4)) for limits in (False, True))
    assert limited < 1.03 * filled
