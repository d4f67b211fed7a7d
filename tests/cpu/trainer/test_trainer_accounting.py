"""What becomes of groups, prompts, tokens and seconds when rollouts fail, engines die and runs are resumed, in virtual time."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.data.ledger import UidState
from skyrl_async.errors import GenerationError, NoEngineError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Trajectory

LONG_TAILED = SimulationSettings(
    mean_tokens=100.0, sigma=1.2, num_steps=10, seconds_per_token=1e-4, load_seconds=0.5, step_seconds=1.0
)


def simulate(settings: SimulationSettings, resume_from: Path | None = None, **parts) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings, **parts)
        if resume_from is not None:
            await simulation.trainer.resume(resume_from)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


def logged(simulation: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in simulation.logged if name in values]


def states(simulation: Simulation) -> dict[str, float]:
    return simulation.dataloader.statistics()


class Failing(ModelledGenerator):
    """Fails with some probability, at once or when all is sampled; never in evaluations."""

    def __init__(self, sampler: InferenceEngineClient, probability: float, seed: int) -> None:
        super().__init__(sampler)
        self.probability = probability
        self.rng = random.Random(seed)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        dice = self.rng.random()
        if dice < self.probability / 2:
            raise RuntimeError("failed at once")
        trajectories = await super().generate(request)
        if dice < self.probability:
            raise RuntimeError("failed at the end")
        return trajectories


@pytest.mark.slow
@given(
    seed=st.integers(0, 20),
    probability=st.sampled_from([0.0, 0.1, 0.3]),
    bound=st.integers(0, 3),
    deaths=st.lists(st.floats(0.0, 60.0), max_size=2),
    num_workers=st.sampled_from([None, 8, 11]),
    deterministic=st.booleans(),
    has_steps=st.booleans(),
)
def test_contract_1_and_2_under_failures_and_deaths_each_uid_is_in_one_state_and_the_bound_holds(
    seed: int,
    probability: float,
    bound: int,
    deaths: list[float],
    num_workers: int | None,
    deterministic: bool,
    has_steps: bool,
) -> None:
    settings = replace(
        LONG_TAILED,
        num_engines=3,
        max_staleness_steps=bound,
        num_workers=num_workers if bound else None,
        num_steps=6 if has_steps else None,
        num_epochs=None if has_steps else 2,
        num_prompts=21,
        max_retries=1,
        max_failed_fraction=1.0,
        deterministic=deterministic,
        seed=seed,
    )

    async def main() -> Simulation:
        simulation = Simulation(settings, generator_over=lambda c: Failing(c, probability, seed))

        async def die(at: float, index: int) -> None:
            await asyncio.sleep(at)
            simulation.engines[index].kill()

        async with asyncio.TaskGroup() as tasks:
            for index, at in enumerate(deaths):
                tasks.create_task(die(at, index))
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    totals, ended = simulation.trainer.totals, states(simulation)
    assert totals.groups_over_bound == 0
    assert simulation.staleness.num_running == 0 and ended["running"] == 0
    assert ended["trained_total"] == totals.trained_groups == sum(len(step) for step in simulation.policy.steps)
    assert ended["failed_total"] == totals.failed_groups
    assert ended["finished"] == len(simulation.buffer) == 0
    if has_steps:
        assert totals.trained_groups == 6 * settings.mini_batch_size, "a failed group is replaced"
    else:
        assert ended["trained_total"] + ended["failed_total"] == 2 * 21, "an epoch's end loses nobody"


def test_no_group_is_admitted_for_one_whose_failure_ends_the_run_and_the_others_are_requeued() -> None:
    class OneDies(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.priority == 3:
                await asyncio.sleep(0.1)
                raise RuntimeError("boom")
            return await super().generate(request)

    async def main() -> Simulation:
        simulation = Simulation(replace(LONG_TAILED, max_failed_fraction=0.0), generator_over=OneDies)
        with pytest.raises(GenerationError, match="1 of the last .* groups failed.*boom"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.staleness.num_running == 0
    assert states(simulation)["running"] == 0
    assert simulation.staleness.next_index == 24, (
        "else prompts after prompts could fail while open tokens are collected"
    )


def test_requeued_prompts_are_drawn_again_in_their_order() -> None:
    async def main() -> tuple[list[str], list[str]]:
        simulation = Simulation(LONG_TAILED)
        generating = asyncio.ensure_future(simulation.workers.run())
        await asyncio.sleep(0)
        first = simulation.dataloader._ledger.uids(0, UidState.RUNNING)
        generating.cancel()
        await asyncio.wait([generating])
        await simulation.workers.requeue()
        drawn = [await simulation.dataloader.get_next_non_consumed_data() for _ in first]
        order = Simulation(LONG_TAILED).dataloader
        return [key[1] for key, _ in drawn], [(await order.get_next_non_consumed_data())[0][1] for _ in first]

    again, expected = run_in_virtual_time(main())
    assert again == expected


def test_a_generator_that_turns_its_cancellation_into_an_error_is_still_cancelled() -> None:
    class Stubborn(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                raise ConnectionError("the request was interrupted") from None

    async def main() -> Simulation:
        settings = replace(LONG_TAILED, max_retries=5, mean_tokens=1e5)
        simulation = Simulation(settings, generator_over=Stubborn)
        generating = asyncio.ensure_future(simulation.workers.run())
        await asyncio.sleep(1.0)
        generating.cancel()
        await asyncio.wait([generating])
        assert generating.cancelled()
        assert asyncio.get_running_loop().time() == 1.0
        await simulation.workers.requeue()
        return simulation

    simulation = run_in_virtual_time(main())
    assert states(simulation)["running"] == states(simulation)["failed"] == 0


def test_a_generator_that_cancels_itself_has_failed_and_is_named() -> None:
    class Cancelling(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            raise asyncio.CancelledError

    with pytest.raises(GenerationError, match="the generator cancelled the rollout of p"):
        simulate(LONG_TAILED, generator_over=Cancelling)


class AlwaysFailing(ModelledGenerator):
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        raise RuntimeError(f"no answer for {request.prompt.uid}")


class Mismatched(ModelledGenerator):
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        columns = {"response_token_ids": (2, 3), "loss_mask": (1, 1), "versions": (0, 0)}
        return (Trajectory(prompt_token_ids=(1,), logprobs=(-1.0,), reward=1.0, **columns),)  # type: ignore[arg-type]


def test_a_generator_that_returns_mismatched_lengths_ends_the_run_with_what_differs() -> None:
    with pytest.raises(GenerationError, match=r"trajectory\.logprobs has 1 entries for 2 response tokens"):
        simulate(LONG_TAILED, generator_over=Mismatched)


def test_contract_8_a_run_of_few_prompts_that_all_fail_is_an_error_and_not_a_run_without_steps() -> None:
    settings = replace(LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=4, max_failed_fraction=1.0)
    with pytest.raises(GenerationError, match="all of the 4 groups failed; .*no answer for p"):
        simulate(settings, generator_over=AlwaysFailing)


@pytest.mark.parametrize(("limit", "num_failed"), [(0.0, 1), (0.25, 3)])
def test_contract_8_the_run_stops_as_soon_as_the_limit_is_certain_to_be_passed(limit: float, num_failed: int) -> None:
    with pytest.raises(GenerationError, match=f"{num_failed} of the last {num_failed} groups failed"):
        simulate(replace(LONG_TAILED, max_failed_fraction=limit), generator_over=AlwaysFailing)


@pytest.mark.slow
@given(
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    batch_sizes=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    num_workers=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(["wait", "window", "mask", "resample", "allow"]),
    interval=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_contract_7_a_run_resumes_with_another_batch_size_bound_or_number_of_workers(
    tmp_path_factory: pytest.TempPathFactory,
    bounds: tuple[int, int],
    batch_sizes: tuple[int, int],
    num_workers: int | None,
    policy: str,
    interval: int,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    before = replace(
        LONG_TAILED,
        max_staleness_steps=bounds[0],
        mini_batch_size=batch_sizes[0],
        staleness_policy=policy,
        num_steps=4,
        num_epochs=2,
        num_prompts=23,
        checkpoint_interval_steps=interval,
        seed=seed,
    )
    simulate(before, checkpoint_dir=directory)
    after = replace(
        before,
        max_staleness_steps=bounds[1],
        mini_batch_size=batch_sizes[1],
        num_workers=num_workers,
        num_steps=None,
        checkpoint_interval_steps=0,
    )
    for step in (interval, 4):
        simulation = simulate(after, directory / f"global_step_{step}")
        ended = states(simulation)
        assert simulation.trainer.totals.trained_groups == ended["trained_total"] == 2 * 23
        if policy in ("wait", "window", "resample"):
            most = bounds[1] + simulation.staleness.window_steps
            assert max(logged(simulation, "async/staleness_max"), default=0) <= most


def test_contract_1_a_group_requeued_when_all_data_was_drawn_is_drawn_again_and_trained() -> None:
    """At the end nothing is generated any more; what waits in the buffer is overtaken by the steps made of what is before it."""
    num_requeued = 0
    for seed in range(4):
        simulation = simulate(
            SimulationSettings(
                staleness_policy="resample",
                max_staleness_steps=1,
                num_steps=None,
                num_epochs=1,
                num_prompts=31,
                mini_batch_size=4,
                sigma=1.2,
                step_seconds=20,
                load_seconds=0.1,
                seed=seed,
            )
        )
        assert states(simulation)["trained_total"] == 31
        assert max(logged(simulation, "async/staleness_max")) <= 1
        num_requeued += simulation.trainer.totals.requeued_groups
    assert num_requeued > 0


def test_contract_7_with_the_same_settings_every_finished_group_is_resumed(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, checkpoint_interval_steps=1, step_seconds=30.0)
    simulate(settings, checkpoint_dir=tmp_path)

    async def main(step: int) -> tuple[int, int]:
        simulation = Simulation(settings)
        await simulation.trainer.resume(tmp_path / f"global_step_{step}")
        return len(simulation.buffer), simulation.trainer.totals.wasted_tokens

    outcomes = [run_in_virtual_time(main(step)) for step in range(1, 10)]
    assert any(num_groups > 0 for num_groups, _ in outcomes)
    assert all(wasted == 0 for _, wasted in outcomes)


def test_finished_groups_that_a_resumed_run_cannot_use_are_counted_as_wasted(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, num_steps=None, num_epochs=1, step_seconds=30.0, checkpoint_interval_steps=3)
    whole = simulate(settings, checkpoint_dir=tmp_path)
    resumed = simulate(replace(settings, max_staleness_steps=0), tmp_path / "global_step_3")
    assert whole.trainer.totals.wasted_tokens == 0
    totals = resumed.trainer.totals
    assert totals.wasted_tokens > 0
    assert totals.generated_tokens == totals.trained_tokens + totals.wasted_tokens
    assert logged(resumed, "async/wasted_tokens")[-1] == totals.summary()["wasted_tokens"] == totals.wasted_tokens


def test_tokens_of_generations_that_were_cut_off_and_of_their_groups_are_counted_as_wasted() -> None:
    settings = replace(
        LONG_TAILED, num_steps=None, num_epochs=1, num_prompts=32, rollout_timeout_s=3.0, max_failed_fraction=1.0
    )
    simulation = simulate(settings)
    assert simulation.trainer.totals.failed_groups > 0
    in_finished_samples = simulation.workers.counts["abandoned_tokens"] - simulation.client.num_abandoned_tokens
    assert simulation.client.num_abandoned_tokens > 0 and in_finished_samples > 0
    assert simulation.trainer.totals.wasted_tokens == simulation.client.num_abandoned_tokens + in_finished_samples


class FailsAtItsEnd(ModelledGenerator):
    """Of samples that are all sampled some fail, and some are abandoned."""

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        row = await super()._one(request, index, seed)
        if seed % 12 == 0:
            raise RuntimeError("the environment broke")
        return replace(row, is_abandoned=True, loss_mask=np.zeros_like(row.loss_mask)) if seed % 12 == 1 else row


@pytest.mark.parametrize("policy", OnFailedSamples)
def test_every_sampled_token_is_trained_or_counted_as_wasted_whatever_becomes_of_its_sample(
    policy: OnFailedSamples,
) -> None:
    settings = replace(
        LONG_TAILED,
        num_steps=None,
        num_epochs=1,
        num_prompts=32,
        group_size=4,
        max_retries=1,
        max_failed_fraction=1.0,
        on_failed_samples=policy,
    )
    simulation = simulate(settings, generator_over=FailsAtItsEnd)
    totals = simulation.trainer.totals
    assert totals.wasted_tokens > 0
    num_sampled = sum(engine.num_sampled_tokens for engine in simulation.engines)
    assert totals.trained_tokens + totals.wasted_tokens == num_sampled


def test_contract_7_a_resumed_run_counts_every_token_and_trajectory_once(tmp_path: Path) -> None:
    settings = replace(LONG_TAILED, max_staleness_steps=0, deterministic=True, num_steps=6, checkpoint_interval_steps=2)
    whole = simulate(settings, checkpoint_dir=tmp_path).trainer.totals
    again = simulate(settings, tmp_path / "global_step_4").trainer.totals
    for name in ("generated_tokens", "generated_trajectories", "trained_tokens", "trained_groups", "failed_groups"):
        assert getattr(again, name) == getattr(whole, name), name
    assert again.generated_tokens == again.trained_tokens > 0


def test_tokens_logged_with_the_steps_add_up_to_the_total() -> None:
    simulation = simulate(LONG_TAILED)
    totals = simulation.trainer.totals
    assert sum(logged(simulation, "generate/tokens")) == totals.generated_tokens == totals.trained_tokens
    assert max(logged(simulation, "generate/tokens_per_second")) < 2 * 24 * LONG_TAILED.tokens_per_second
    assert sum(logged(simulation, "timing/step")) == pytest.approx(totals.training_seconds)
    idle = sum(logged(simulation, "timing/wait_for_groups"))
    assert totals.summary()["trainer_idle_frac"] == pytest.approx(idle / totals.training_seconds)


def test_contract_2_the_cost_of_the_bound_is_logged_and_summarised() -> None:
    simulation = simulate(replace(LONG_TAILED, max_staleness_steps=1))
    summary = simulation.trainer.totals.summary()
    for name in ("over_bound_frac", "wasted_tokens", "length_ratio"):
        assert len(logged(simulation, f"async/{name}")) == 10
        assert name in summary
    assert sum(logged(simulation, "timing/wait_for_staleness")) == pytest.approx(summary["staleness_wait_seconds"])


def test_contract_2_the_length_ratio_shows_that_short_answers_are_trained_first() -> None:
    simulation = simulate(replace(LONG_TAILED, staleness_policy="allow", max_staleness_steps=3))
    ratios = logged(simulation, "async/length_ratio")
    assert min(ratios) < 1.0
    assert ratios[-1] == simulation.trainer.totals.summary()["length_ratio"] == pytest.approx(1.0)


def test_waiting_for_the_order_of_admission_is_not_waiting_for_the_bound() -> None:
    simulation = simulate(replace(LONG_TAILED, deterministic=True))
    assert simulation.buffer.held_seconds > 0
    assert simulation.trainer.totals.staleness_wait_seconds == 0


class FailingEvaluations(ModelledGenerator):
    """Evaluation rollouts of chosen uids fail a number of times."""

    def __init__(self, sampler: InferenceEngineClient, uids: set[str], times: int) -> None:
        super().__init__(sampler)
        self.left = dict.fromkeys(uids, times)
        self.tries: Counter[str] = Counter()

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        if request.is_evaluation:
            self.tries[request.prompt.uid] += 1
            if self.left.get(request.prompt.uid, 0) > 0:
                self.left[request.prompt.uid] -= 1
                raise RuntimeError(f"no answer for {request.prompt.uid}")
        return await super().generate(request)


EVALUATED = replace(LONG_TAILED, num_eval_prompts=4, eval_interval_steps=3, max_retries=1)


def test_a_failed_evaluation_rollout_is_tried_again() -> None:
    simulation = simulate(EVALUATED, generator_over=lambda c: FailingEvaluations(c, {"p1", "p2"}, 1))
    assert logged(simulation, "eval/failed_prompts") == [0.0] * 5
    assert simulation.trainer.totals.reward_before is not None and simulation.trainer.reward_after is not None


def test_an_evaluation_rollout_that_fails_for_good_is_counted_and_left_out() -> None:
    simulation = simulate(EVALUATED, generator_over=lambda c: FailingEvaluations(c, {"p1"}, 99))
    assert logged(simulation, "eval/failed_prompts") == [1.0] * 5
    assert len(logged(simulation, "reward/eval")) == 5
    assert simulation.trainer.totals.trained_groups == 10 * EVALUATED.mini_batch_size


def test_an_evaluation_of_which_every_rollout_fails_is_an_error() -> None:
    with pytest.raises(GenerationError, match=r"all 4 evaluation rollouts failed; the last one .*no answer for p"):
        simulate(EVALUATED, generator_over=lambda c: FailingEvaluations(c, {"p0", "p1", "p2", "p3"}, 99))


def test_an_evaluation_rollout_that_hangs_fails_at_its_deadline() -> None:
    class Hanging(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.is_evaluation and request.prompt.uid == "p2":
                await asyncio.Event().wait()
            return await super().generate(request)

    simulation = simulate(replace(EVALUATED, rollout_timeout_s=100.0), generator_over=Hanging)
    assert set(logged(simulation, "eval/failed_prompts")) == {1.0}


def test_the_death_of_every_engine_during_an_evaluation_is_no_failed_rollout() -> None:
    async def main() -> None:
        simulation = Simulation(replace(EVALUATED, max_retries=3))

        async def kill() -> None:
            await asyncio.sleep(0.6)
            for engine in simulation.engines:
                engine.kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            with pytest.raises(NoEngineError):
                await simulation.trainer.run()

    run_in_virtual_time(main())


def test_evaluation_tokens_are_those_sampled_and_an_evaluation_still_running_at_the_end_is_waited_for() -> None:
    class SlowEvaluations(ModelledGenerator):
        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            trajectories = await super().generate(request)
            if request.is_evaluation:
                await asyncio.sleep(1000.0)
            return trajectories

    settings = replace(EVALUATED, eval_interval_steps=9, num_steps=10)
    simulation = simulate(settings, generator_over=SlowEvaluations)
    assert [step for step, values in simulation.logged if "reward/eval" in values] == [0, 9, 10]
    totals = simulation.trainer.totals
    assert totals.evaluation_tokens == 4 * sum(logged(simulation, "eval/response_tokens_mean"))
    delivered = simulation.client.statistics()["tokens_total"]
    assert totals.generated_tokens + totals.evaluation_tokens == delivered


@pytest.mark.slow
@given(seed=st.integers(0, 5), kill_at=st.floats(1.0, 80.0))
def test_contract_7_a_kill_at_any_moment_and_a_resume_train_each_uid_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kill_at: float
) -> None:
    directory = tmp_path_factory.mktemp("run")
    settings = replace(
        LONG_TAILED, num_steps=None, num_epochs=2, num_prompts=30, checkpoint_interval_steps=1, seed=seed
    )

    async def killed() -> None:
        simulation = Simulation(settings, checkpoint_dir=directory)
        running = asyncio.ensure_future(simulation.trainer.run())
        await asyncio.wait([running], timeout=kill_at)
        running.cancel()
        await asyncio.wait([running])
        assert simulation.staleness.num_running == states(simulation)["running"] == 0
        assert simulation.client.statistics()["running_requests"] == 0
        assert not any(engine._calls for engine in simulation.engines)

    run_in_virtual_time(killed())
    usable = Checkpointer(directory, max_to_keep=0).usable()
    latest = None if usable is None else usable.path
    again = simulate(replace(settings, checkpoint_interval_steps=0), latest)
    assert states(again)["trained_total"] == again.trainer.totals.trained_groups == 60
    assert again.trainer.totals.groups_over_bound == 0
