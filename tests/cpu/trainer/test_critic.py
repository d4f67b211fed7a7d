"""Training with a critic, bit for bit: the real loop, FSDP2 policy and critic, and the publisher over the deterministic engine."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.errors import CheckpointError
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import OPTIONAL_COLUMNS, Trajectory
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
JOB = Job(estimator="gae")
ALL_COLUMNS = Job(estimator="tests.cpu.own_algorithms:weighed_gae", training={"teacher_coef": 0.1})
"""Values, and weights of tokens; a teacher's likeliest tokens."""
AdvantagesOf = Callable[[Trajectory, np.ndarray], np.ndarray]
GAMMA, LAMBDA = 1.0, 0.9


def gae(row: Trajectory, values: np.ndarray) -> np.ndarray:
    """(T,) float64, token by token; the whole reward comes with the last one."""
    advantages, next_value, next_advantage = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        reward = row.reward if t == len(values) - 1 else 0.0
        next_advantage = reward + GAMMA * next_value - float(values[t]) + GAMMA * LAMBDA * next_advantage
        next_value = float(values[t])
        advantages[t] = next_advantage
    return advantages


def turn_gae(row: Trajectory, values: np.ndarray) -> np.ndarray:
    """(T,) float64: an answer is one turn."""
    return np.full(len(values), row.reward - float(values[0]))


async def valued(
    critic: InProcessPolicy, rows: Sequence[Trajectory], advantages_of: AdvantagesOf = gae
) -> tuple[list[Trajectory], list[np.ndarray], list[np.ndarray]]:
    """The rows with values, their advantages, and what values are trained towards, (T,) float32 each."""
    values = (await critic.values_of(rows)).values
    columns = [advantages_of(row, of_row) for row, of_row in zip(rows, values, strict=True)]
    returns = [of_row.astype(np.float64) + column for of_row, column in zip(values, columns, strict=True)]
    rows = [replace(row, values=of_row) for row, of_row in zip(rows, values, strict=True)]
    return rows, [column.astype(np.float32) for column in columns], [column.astype(np.float32) for column in returns]


def plain_loop(job: Job, policy_dir: Path, directory: Path) -> Outcome:
    """Generate a mini-batch, value it, train both models on it group by group, publish."""

    async def main() -> Outcome:
        running = build(job, policy_dir, directory)
        policy, critic = running.policy, running.critic
        advantages_of = turn_gae if job.estimator == "turn_gae" else gae
        losses: list[float] = []
        await running.publisher.publish(0)
        for step in range(NUM_STEPS):
            drawn = [await running.dataloader.get_next_non_consumed_data() for _ in range(3)]
            loss, num_tokens, num_values = 0.0, 0, 0
            generate = running.workers._retrier.generate
            groups = [await generate(request(prompt, 3 * step + i)) for i, (_, prompt) in enumerate(drawn)]
            for rows in groups:
                rows, advantages, returns = await valued(critic, rows, advantages_of)
                loss += (await policy.forward_backward(rows, advantages, step))["loss_sum"]
                num_tokens += sum(row.num_sampled_tokens for row in rows)
                if advantages_of is turn_gae:  # one value per turn
                    rows = [replace(row, loss_mask=np.arange(len(row.loss_mask)) == 0) for row in rows]
                await critic.forward_backward(rows, returns, step)
                num_values += sum(row.num_sampled_tokens for row in rows)
            await policy.step(num_tokens)
            await critic.step(num_values)
            losses.append(loss / num_tokens)
            await running.publisher.publish(step + 1)
        outcome = Outcome(losses, await running.engine.checksum(), checksum_of(critic))
        await policy.close()
        await critic.close()
        return outcome

    return run_in_virtual_time(main())


@pytest.fixture(scope="module")
def synchronous(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """No staleness, and each model on devices of its own."""
    return train(JOB, policy_dir, tmp_path_factory.mktemp("synchronous"))


@pytest.mark.slow
@pytest.mark.parametrize("job", [JOB, Job(estimator="turn_gae")], ids=["gae", "turn_gae"])
def test_contract_3_staleness_zero_with_a_critic_gives_the_losses_and_weights_of_a_plain_loop(
    job: Job, policy_dir: Path, synchronous: Outcome, tmp_path: Path
) -> None:
    found = synchronous if job is JOB else train(job, policy_dir, tmp_path / "found")
    assert found == plain_loop(job, policy_dir, tmp_path / "plain")
    assert len(set(found.losses)) == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("beside", [("policy", "generate"), ("ref",)], ids="-".join)
def test_a_critic_that_shares_its_devices_changes_no_bit_of_the_losses_and_weights(
    policy_dir: Path, synchronous: Outcome, tmp_path: Path, beside: tuple[str, ...]
) -> None:
    shared: list[DeviceGroup] = []
    job = replace(JOB, shared_by=(("critic", *beside),))
    assert synchronous == train(job, policy_dir, tmp_path, lambda run: shared.append(run.device_groups["critic"]))
    num_leases = shared[0]._queue.statistics(now=0.0).num_leases["critic"]
    of_values, of_training = 3 * NUM_STEPS, 4 * NUM_STEPS
    if "policy" in beside:
        assert 0 < num_leases <= of_values, "the training stage's lease covers the rest"
    else:
        assert of_training < num_leases <= of_values + of_training


def columns_that_reach(running: Running) -> defaultdict[str, set[str]]:
    """Where rows go -> the columns that they bring there, as they come: to a method of a rank, or to the record."""
    found: defaultdict[str, set[str]] = defaultdict(set)

    def noting(place: str, holder: Any, method: str, rows_of: Callable[[Any], Iterable[Trajectory]]) -> None:
        call = getattr(holder, method)

        def noted(given: Any, *more: Any) -> Any:
            for row in rows_of(given):
                found[place] |= {name for name in OPTIONAL_COLUMNS if getattr(row, name) is not None}
            return call(given, *more)

        setattr(holder, method, noted)

    def dealt(micro_batches: Any) -> list[Trajectory]:
        return [row.trajectory for rows in micro_batches for row in rows]

    for name, model in (("policy", running.policy), ("critic", running.critic)):
        assert model is not None
        noting(name, model, "forward_backward", list)  # which recovering workers keep until the next checkpoint
        noting(name, model._rank, "forward_backward", lambda work: dealt(work.micro_batches))
        noting("values", model._rank, "values_of", dealt)
    noting("record", running.trainer._run.recorder.record, "add", lambda ended: ended.group.trajectories)
    return found


@pytest.mark.slow
def test_whole_mini_batches_give_both_models_the_same_bits_as_groups_one_by_one_and_each_what_it_reads(
    policy_dir: Path, tmp_path: Path
) -> None:
    figures: dict[bool, list[dict[str, float]]] = {}
    outcomes: list[Outcome] = []
    for streams in (True, False):
        reached: list[dict[str, set[str]]] = []

        def remember(running: Running, streams: bool = streams, reached: list[Any] = reached) -> None:
            figures[streams] = running.logged
            reached.append(columns_that_reach(running))

        job = replace(ALL_COLUMNS, stream_mini_batch=streams)
        outcomes.append(train(job, policy_dir, tmp_path / str(streams), remember))
        of_policy = {"teacher_logprobs", "teacher_top", "token_weights"}
        recorded = (of_policy | {"values"}) - {"teacher_top"}
        assert reached == [{"policy": of_policy, "critic": {"values"}, "values": set(), "record": recorded}]
    assert outcomes[0] == outcomes[1]
    assert [steps[-1]["policy/teacher_kl"] > 0 for steps in figures.values()] == [True, True]
    of_critic = [
        [
            {name: value for name, value in step.items() if name.startswith("critic/")}
            for step in steps
            if "critic/loss" in step
        ]
        for steps in figures.values()
    ]
    assert of_critic[0] == of_critic[1]
    losses = [step["critic/loss"] for step in of_critic[0]]
    assert len(losses) == NUM_STEPS and losses[-1] < losses[0]
    assert all(step["critic/explained_variance"] <= 1 for step in of_critic[0])


def weights_after_each_step(model: InProcessPolicy) -> list[Tensor]:
    """What the model has now, and will have after each of its steps: all its weights, one after the other."""
    backend: Any = model._rank._backend

    def now() -> Tensor:
        return torch.cat([tensor.flatten().clone() for _, tensor in backend.iter_full_params()])

    found, step = [now()], model.step

    async def noting(*arguments: float) -> dict[str, float]:
        values = await step(*arguments)
        found.append(now())
        return values

    model.step = noting  # type: ignore[method-assign]
    return found


@pytest.mark.slow
def test_in_the_warm_up_the_critic_alone_is_trained_and_afterwards_both_are(policy_dir: Path, tmp_path: Path) -> None:
    found: list[list[Tensor]] = []
    logged: list[list[dict[str, float]]] = []

    def before(running: Running) -> None:
        assert running.critic is not None
        found.extend(map(weights_after_each_step, (running.policy, running.critic)))
        logged.append(running.logged)

    given = from_overrides("trainer.algorithm.advantage_estimator=gae", "trainer.critic.warmup_steps=2").trainer.critic
    train(replace(JOB, critic_warmup_steps=given.warmup_steps), policy_dir, tmp_path, before)
    policy, critic = ([not torch.equal(*pair) for pair in pairwise(weights)] for weights in found)
    assert policy == [False, False, True]
    assert critic == [True] * NUM_STEPS
    assert [values["policy/lr_scale"] for values in logged[0] if "policy/lr_scale" in values] == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", [None, DeepSpeedConfig(zero_stage=1)], ids=["fsdp", "deepspeed"])
def test_contract_7_a_resumed_run_with_a_critic_has_the_losses_and_weights_of_one_that_was_not_killed(
    policy_dir: Path, tmp_path: Path, deepspeed: DeepSpeedConfig | None
) -> None:
    job = replace(STOPPED, estimator="gae", training={"deepspeed": deepspeed})
    whole = train(job, policy_dir, tmp_path / "whole")

    def until_step_2(running: Running) -> None:
        step = running.policy.step

        async def dying(num_tokens: float, *lr_scale: float) -> dict[str, float]:
            if running.trainer.served_version == 1:
                raise KeyboardInterrupt
            return await step(num_tokens, *lr_scale)

        running.policy.step = dying  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        train(replace(job, checkpoint_interval_steps=1), policy_dir, tmp_path / "killed", until_step_2)
    latest = Checkpointer(tmp_path / "killed" / "checkpoints", max_to_keep=0).usable().path
    assert read_state(latest).step == 1

    def resume(running: Running) -> Awaitable[None]:
        return running.trainer.resume(latest)

    assert train(job, policy_dir, tmp_path / "resumed", resume) == replace(whole, losses=whole.losses[1:])

    short = replace(job, estimator="grpo", checkpoint_interval_steps=1, num_steps=1)
    assert train(short, policy_dir, tmp_path / "without").losses
    other = Checkpointer(tmp_path / "without" / "checkpoints", max_to_keep=0).usable().path
    with pytest.raises(CheckpointError, match="has no critic"):
        train(job, policy_dir, tmp_path / "refused", lambda running: running.trainer.resume(other))
