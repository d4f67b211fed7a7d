"""Several optimizer steps per batch, bit for bit: the real loop, FSDP2 policy and publisher over the deterministic engine."""

from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.algorithms.estimators.outcome import grpo_advantages
from skyrl_async.algorithms.guard import Guard
from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.config.load import from_overrides
from skyrl_async.errors import ConfigError
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings
from tests.cpu.quick_config import config_of
from tests.cpu.trainer.test_critic import ALL_COLUMNS, valued
from tests.cpu.trainer.test_deterministic_run import (
    NUM_STEPS,
    STOPPED,
    Job,
    Outcome,
    Running,
    build,
    checksum_of,
    policy_dir,
    request,
    train,
)

__all__ = ["policy_dir"]
JOB = Job(max_staleness_steps=3, stream_mini_batch=False, num_mini_batches=2, num_epochs=2)


def plain_loop(job: Job, policy_dir: Path, directory: Path) -> Outcome:
    """Generate a batch of two mini-batches, value it, pass over it twice with a step of both models for each mini-batch, publish."""

    async def main() -> Outcome:
        running = build(job, policy_dir, directory)
        policy, critic, losses, version = running.policy, running.critic, [], 0
        await running.publisher.publish(0)
        for batch in range(NUM_STEPS):
            drawn = [await running.dataloader.get_next_non_consumed_data() for _ in range(6)]
            generate = running.workers._retrier.generate
            groups = [await generate(request(prompt, 6 * batch + i)) for i, (_, prompt) in enumerate(drawn)]
            loss = num_passed = 0.0
            batch: list[Any] = [(rows, grpo_advantages([row.reward for row in rows]), None) for rows in groups]
            if critic is not None:
                batch = [await valued(critic, rows) for rows in groups]
            for mini in (batch[:3], batch[3:]) * 2:
                num_tokens = 0
                for rows, advantages, returns in mini:
                    loss += (await policy.forward_backward(rows, advantages, version))["loss_sum"]
                    num_tokens += sum(row.num_sampled_tokens for row in rows)
                    if critic is not None:
                        await critic.forward_backward(rows, returns, version)
                await policy.step(num_tokens)
                if critic is not None:
                    await critic.step(num_tokens)
                num_passed += num_tokens
            version += 4
            losses.append(loss / num_passed)
            await running.publisher.publish(version)
        outcome = Outcome(losses, await running.engine.checksum(), checksum_of(critic))
        for model in filter(None, (policy, critic)):
            await model.close()
        return outcome

    return run_in_virtual_time(main())


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_contract_3_at_the_least_bound_a_batch_is_trained_as_in_a_plain_loop_bit_for_bit(
    policy_dir: Path, tmp_path: Path, estimator: str
) -> None:
    job, runs = replace(JOB, estimator=estimator), list[Running]()
    found = train(job, policy_dir, tmp_path / "a", runs.append)
    assert found == plain_loop(job, policy_dir, tmp_path / "b")
    models = filter(None, (runs[0].policy, runs[0].critic))
    assert {model._rank._backend.version for model in models} == {4 * NUM_STEPS}, "both have taken every step"
    steps = [values for values in runs[0].logged if "policy/loss" in values]
    assert len({values["policy/loss"] for values in steps}) == NUM_STEPS
    # Groups are counted once, each at the last of the batch's four optimizer steps; the policy's means are over all passes.
    assert [values["async/staleness_max"] for values in steps] == [3.0] * NUM_STEPS
    assert all(values["async/over_bound_frac"] == 0 for values in steps)
    assert all(0 < values["policy/is_ratio_mean"] < 2 for values in steps)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [Job(), ALL_COLUMNS], ids=["constant advantages", "columns of every kind"])
def test_contract_7_a_killed_run_trains_the_batch_again_that_it_was_in(
    policy_dir: Path, tmp_path: Path, columns: Job
) -> None:
    job = replace(JOB, sampling=STOPPED.sampling, check_interval_steps=0)
    job = replace(job, estimator=columns.estimator, training=columns.training)
    whole = train(job, policy_dir, tmp_path / "whole")

    def in_the_second_pass(running: Running) -> None:
        step, num_steps = running.policy.step, 0

        async def dying(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 7:
                raise KeyboardInterrupt
            return await step(num_tokens, *lr_scale)

        running.policy.step = dying  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        train(replace(job, checkpoint_interval_steps=1), policy_dir, tmp_path / "killed", in_the_second_pass)
    latest = Checkpointer(tmp_path / "killed" / "checkpoints", max_to_keep=0).usable().path
    assert read_state(latest).step == 4

    def resume(running: Running) -> Awaitable[None]:
        return running.trainer.resume(latest)

    assert train(job, policy_dir, tmp_path / "resumed", resume) == replace(whole, losses=whole.losses[1:])


def test_one_step_of_a_batch_is_refused_by_its_own_sample_size_and_counted_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> tuple[list[float], list[float], float]:
        settings = SimulationSettings(
            mini_batch_size=2, train_batch_size=4, update_epochs_per_batch=2, max_staleness_steps=7, num_steps=8
        )
        simulation, scales = Simulation(settings), list[float]()
        policy, step = simulation.policy, simulation.policy.step
        forward_backward = policy.forward_backward

        async def weighing(*arguments: Any) -> dict[str, float]:
            share = 0.1 if len(policy.steps) == 3 else 1.0
            sums = {"sequence_ess_weights": 1.0, "sequence_ess_count": 1.0, "sequence_ess_squares": 1.0 / share}
            return await forward_backward(*arguments) | sums

        async def noting(denominator: float, lr_scale: float) -> dict[str, float]:
            scales.append(lr_scale)
            return await step(denominator, lr_scale)

        policy.forward_backward, policy.step = weighing, noting  # type: ignore[method-assign]
        simulation.trainer._train_stage._guard = Guard(min_ess=0.5)
        await simulation.trainer.run()
        logged = [values for _, values in simulation.logged if "policy/lr_scale" in values]
        num_groups = sum(values["stage/train/items"] for values in logged)
        return scales, [values["policy/lr_scale"] for values in logged], num_groups

    scales, logged, num_groups = run_in_virtual_time(main())
    assert scales == [1, 1, 0, 1, 1, 1, 1, 1] and logged == [0, 1]
    assert num_groups == 8, "each is counted once, in whichever passes"
    assert "step 3 is refused" in caplog.text


@pytest.mark.parametrize(("num_prompts", "expected"), [(6, [0, 1, 2, 3, 6, 7]), (8, [0, 1, 2, 3, 4, 5, 6, 7])])
def test_a_batch_that_the_data_s_end_leaves_smaller_takes_the_last_of_its_steps(
    num_prompts: int, expected: list[int]
) -> None:
    settings = SimulationSettings(
        mini_batch_size=2,
        train_batch_size=4,
        update_epochs_per_batch=2,
        max_staleness_steps=7,
        num_steps=None,
        num_prompts=num_prompts,
        num_epochs=1,
    )

    async def main() -> tuple[list[int], int]:
        simulation, trained = Simulation(settings), list[int]()
        forward_backward = simulation.policy.forward_backward

        async def noting(rows: Any, advantages: Any, version: int) -> dict[str, float]:
            trained.append(version)
            return await forward_backward(rows, advantages, version)

        simulation.policy.forward_backward = noting  # type: ignore[method-assign]
        await simulation.trainer.run()
        return sorted({*trained}), simulation.trainer.trained_version

    assert run_in_virtual_time(main()) == (expected, 8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.train_batch_size=12"], r"train_batch_size must be a multiple of .*mini_batch_size \(8\), got 12"),
        (["trainer.train_batch_size=4"], r"train_batch_size must be a multiple of .*mini_batch_size \(8\), got 4"),
        (["trainer.update_epochs_per_batch=0"], "update_epochs_per_batch must be >= 1, got 0"),
        (
            ["trainer.update_epochs_per_batch=2", "trainer.max_staleness_steps=0"],
            "max_staleness_steps must be >= 1, since a batch takes 2 optimizer steps under one published version, got 0",
        ),
        (
            ["trainer.update_epochs_per_batch=3", "trainer.num_steps=70"],
            "num_steps must be a multiple of 3, the optimizer steps of a batch, or null, got 70",
        ),
        (
            ["trainer.train_batch_size=16", "trainer.publish_every_steps=2"],
            "publish_every_steps must be 1 with batches of 2 optimizer steps",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_what_to_change(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config_of(*overrides)


def test_steps_of_the_tiny_policy_are_rounded_up_to_whole_batches_and_ones_own_are_refused() -> None:
    batch = ("engine=deterministic", "trainer.train_batch_size=16", "trainer.update_epochs_per_batch=4")
    assert from_overrides(*batch).trainer.num_steps == 72
    for own in ("trainer.num_steps=70", "trainer={num_steps:70}"):
        with pytest.raises(
            ConfigError, match="num_steps must be a multiple of 8, the optimizer steps of a batch, or null, got 70"
        ):
            from_overrides(*batch, own)


@pytest.mark.parametrize(("schedule", "bound"), [("sync", 3), ("one_step_off", 7), ("fully_async", 7)])
def test_a_schedule_gives_a_batch_of_four_steps_its_own_bound(schedule: str, bound: int) -> None:
    config = from_overrides(
        "engine=deterministic",
        f"trainer.schedule={schedule}",
        "trainer.train_batch_size=16",
        "trainer.update_epochs_per_batch=2",
        "trainer.num_steps=8",
    )
    assert config.trainer.staleness_bound == bound
    assert config.trainer.most_open_groups == 16 * (bound + 1) // 4
