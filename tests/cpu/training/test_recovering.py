"""Workers that die: whatever is asked of a policy and whenever they die, its answers and weights are those of workers that live.

The workers here are a model whose weights are the list of what was done to them, so that nothing done twice or left out escapes;
then torch in this process. Real processes are killed in ``test_policy_workers``.
"""

import asyncio
import json
import logging
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState
from skyrl_async.columns import repeated
from skyrl_async.errors import (
    CheckpointError,
    DeadlineError,
    PolicyError,
    TrainingError,
    WeightsLostError,
    WeightsTransferError,
    WorkerDiedError,
)
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import Policy, SharedWeights
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.journal import CallJournal
from skyrl_async.training.workers.recovering import RecoveringPolicy
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate
from skyrl_async.weights.transfer_group import GroupPlace
from tests.cpu.tiny_policies import export_weights, write_policy
from tests.cpu.tiny_policies import varied_trajectories as trajectories
from tests.patience import PATIENCE_S


def one_row(number: int) -> list[Trajectory]:
    row = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(number,),
        loss_mask=(1,),
        logprobs=(-1.0 / (number + 1),),
        versions=(0,),
        reward=0.0,
    )
    return [row]


class FailureScript:
    """Says when workers die: at the calls of these numbers, counted over all workers, before the call has an effect or after it."""

    def __init__(self, deaths: Sequence[tuple[int, bool]] = (), *, hangs: bool = False) -> None:
        self.deaths = dict(deaths)
        self.hangs = hangs
        self.num_calls = 0
        self.num_open = self.most_open = 0

    def fail_if_due(self, *, is_after: bool) -> None:
        if not is_after:
            self.num_calls += 1
        if self.deaths.get(self.num_calls) is is_after:
            died = f"policy-worker-1 died in call {self.num_calls}"
            raise DeadlineError(died) if self.hangs else WorkerDiedError(died)


class ModelledWorkers:
    """A ``Policy`` whose weights say what was done to them; dead after its first error, as a group of processes is."""

    def __init__(self, script: FailureScript) -> None:
        self.script = script
        self.weights: list[Any] = []
        self.gradients: list[Any] = []
        self.copy = ""
        self.is_dead = self.is_closed = False
        script.num_open += 1
        script.most_open = max(script.most_open, script.num_open)

    async def call(self, act: Any) -> Any:
        assert not self.is_closed and not self.is_dead
        try:
            self.script.fail_if_due(is_after=False)
            answer = act()
            self.script.fail_if_due(is_after=True)
        except (WorkerDiedError, DeadlineError):
            self.is_dead = True
            raise
        return answer

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        def act() -> dict[str, float]:
            row = trajectories[0]
            self.gradients.append([row.response_token_ids.tolist(), row.logprobs.tolist(), version])
            return {"num_tokens": float(len(self.gradients))}

        return await self.call(act)

    async def step(self, num_tokens: float, lr_scale: float = 1.0) -> dict[str, float]:
        def act() -> dict[str, float]:
            self.weights.append([self.gradients, num_tokens])
            self.gradients = []
            return {"grad_norm": float(len(self.weights)), "lr": 1.0}

        return await self.call(act)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self.call(lambda: [float(len(self.weights))])

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        return await self.call(lambda: RowLogprobs(values=((-1.0,),), version=len(self.weights)))

    async def gather_weights(self, version: int) -> int:
        def act() -> int:
            self.copy = json.dumps(self.weights)
            return len(self.copy)

        return await self.call(act)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        def act() -> WeightUpdate:
            return WeightUpdate(version=version, path=self.copy, manifest={}, num_bytes=0)

        return await self.call(act)

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        if self.is_dead:
            raise WorkerDiedError("they are dead")
        place = GroupPlace(
            host="h", port=1, name="n", num_members=1 + num_receivers, backend=backend, timeout_s=timeout_s
        )
        return await self.call(lambda: place)

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        await self.call(lambda: None)

    async def share_weights(self, version: int) -> SharedWeights:
        return await self.call(lambda: {"gpu": {self.copy: {}}})

    async def unshare_weights(self) -> None:
        if self.is_dead:
            raise WorkerDiedError("they are dead")
        await self.call(lambda: None)

    async def save(self, directory: Path) -> None:
        def act() -> None:
            directory.mkdir(parents=True)
            (directory / "weights").write_text(json.dumps(self.weights))

        await self.call(act)

    async def load(self, directory: Path) -> None:
        def act() -> None:
            self.weights, self.gradients = json.loads((directory / "weights").read_text()), []

        await self.call(act)

    async def export_hf(self, directory: Path) -> None:
        await self.call(lambda: None)

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.script.num_open -= 1


CALLS = ("gradients", "gradients", "step", "logprobs", "recompute", "export", "save", "save in vain", "load")


async def drive(policy: Any, calls: Sequence[str], directory: Path, checkpoint_written: Any) -> list[Any]:
    """Make the calls, as a trainer that keeps one checkpoint does; returns all answers, the weights at the end last."""
    answers: list[Any] = []
    latest: Path | None = None
    for number, call in enumerate(calls):
        if call == "gradients":
            answers.append(await policy.forward_backward(one_row(number), [0.1 * number], number))
        elif call == "step":
            answers.append(await policy.step(float(number)))
        elif call == "logprobs":
            answers.append(await policy.logprobs([1, 2]))
        elif call == "recompute":
            answers.append(await policy.logprobs_of(one_row(number), LogprobModel.POLICY))
        elif call == "export":
            answers.append(await export_weights(policy, number, directory, 1))
        elif call.startswith("save"):
            partial, final = directory / "partial" / "policy", directory / f"checkpoint-{number}"
            shutil.rmtree(partial.parent, ignore_errors=True)
            await policy.save(partial)
            if call == "save":
                partial.parent.rename(final)
                checkpoint_written(final / "policy")
                if latest is not None:
                    shutil.rmtree(latest)
                latest = final
        elif latest is not None:
            await policy.load(latest / "policy")
    await policy.step(1.0)
    answers.append(await export_weights(policy, 0, directory, 1))
    return answers


def answers_of(
    calls: Sequence[str], script: FailureScript, *, max_restarts: int, max_journal_bytes: int = 1 << 20
) -> tuple[list[Any], RecoveringPolicy]:
    async def start() -> Policy:
        workers = ModelledWorkers(script)
        try:
            script.fail_if_due(is_after=False)
            script.fail_if_due(is_after=True)
        except (WorkerDiedError, DeadlineError):
            await workers.close()
            raise
        return workers

    async def main() -> tuple[list[Any], RecoveringPolicy]:
        with tempfile.TemporaryDirectory() as directory:
            policy = await RecoveringPolicy(
                start,
                max_restarts=max_restarts,
                directory=Path(directory) / "recovery",
                max_journal_bytes=max_journal_bytes,
            ).started()
            try:
                answers = await drive(policy, calls, Path(directory), policy.checkpoint_written)
            finally:
                await policy.close()
                assert script.num_open == 0 and script.most_open == 1
                assert not (Path(directory) / "recovery").exists()
            return answers, policy

    return asyncio.run(main())


def undisturbed(calls: Sequence[str]) -> list[Any]:
    async def main() -> list[Any]:
        with tempfile.TemporaryDirectory() as directory:
            return await drive(ModelledWorkers(FailureScript()), calls, Path(directory), lambda path: None)

    return asyncio.run(main())


@pytest.mark.slow
@given(
    calls=st.lists(st.sampled_from(CALLS), max_size=14),
    deaths=st.dictionaries(st.integers(2, 40), st.booleans(), max_size=6),
    hangs=st.booleans(),
    max_journal_bytes=st.sampled_from([0, 500, 1 << 20]),
)
def test_any_calls_and_any_deaths_give_the_answers_and_weights_of_workers_that_live(
    calls: list[str], deaths: dict[int, bool], hangs: bool, max_journal_bytes: int
) -> None:
    script = FailureScript(list(deaths.items()), hangs=hangs)
    answers, policy = answers_of(calls, script, max_restarts=len(deaths), max_journal_bytes=max_journal_bytes)
    assert answers == undisturbed(calls)
    assert policy.num_restarts == sum(number <= script.num_calls for number in deaths)


@given(deaths=st.sets(st.integers(2, 9), min_size=1), max_restarts=st.integers(0, 3))
def test_more_deaths_than_restarts_end_with_the_error_of_the_call(deaths: set[int], max_restarts: int) -> None:
    script = FailureScript(
        [(number, False) for number in range(2, 100)] if len(deaths) > 4 else [(n, True) for n in deaths]
    )
    calls = ["gradients", "step", "logprobs", "gradients", "step", "export", "logprobs"]
    if len(script.deaths) <= max_restarts:
        assert answers_of(calls, script, max_restarts=max_restarts)[0] == undisturbed(calls)
        return
    with pytest.raises(WorkerDiedError, match=r"policy-worker-1 died in call \d+; not restarted: ") as caught:
        answers_of(calls, script, max_restarts=max_restarts)
    assert f"trainer.max_restarts={max_restarts}" in str(caught.value)
    assert "trainer.resume_mode=latest" in str(caught.value)


class Scripted:
    """A policy in front of ``ModelledWorkers`` without deaths, with one method replaced."""

    def __init__(self, **methods: Any) -> None:
        self.methods = methods
        self.starts = 0

    async def start(self) -> Any:
        self.starts += 1
        workers = ModelledWorkers(FailureScript())
        for name, method in self.methods.items():
            setattr(workers, name, method)
        return workers


async def started(scripted: Scripted, directory: Path, **changes: Any) -> RecoveringPolicy:
    values = {"max_restarts": 3, "directory": directory / "recovery", **changes}
    return await RecoveringPolicy(scripted.start, **values).started()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (TrainingError("the gradient norm is nan"), "step"),
        (CheckpointError("is of another model"), "step"),
        (ValueError("advantages"), "step"),
        (TrainingError("rank 1 has no memory left"), "gather_weights"),
        (TrainingError("rank 1 has no memory left"), "export_hf"),
    ],
)
async def test_what_new_workers_cannot_mend_is_raised_at_once_and_nothing_is_saved_afterwards(
    tmp_path: Path, error: Exception, name: str
) -> None:
    async def fail(*arguments: Any) -> None:
        raise error

    scripted = Scripted(**{name: fail})
    policy = await started(scripted, tmp_path)
    await policy.save(tmp_path / "before")
    with pytest.raises(type(error), match=str(error)):
        await getattr(policy, name)(*([tmp_path] if name == "export_hf" else [1]))
    assert scripted.starts == 1 and policy.num_restarts == 0
    with pytest.raises(TrainingError, match="the policy workers have failed, and what they hold is not saved"):
        await policy.save(tmp_path / "after")
    assert not (tmp_path / "after").exists()


async def test_a_copy_that_is_lost_after_another_step_is_not_sent_and_the_policy_can_still_be_saved(
    tmp_path: Path,
) -> None:
    policy = await started(Scripted(), tmp_path)
    await policy.gather_weights(1)
    await policy.step(1)
    assert isinstance(policy._workers, ModelledWorkers)
    policy._workers.script.deaths[policy._workers.script.num_calls + 1] = False
    with pytest.raises(WeightsLostError, match="the copy of version 1 is gone"):
        await policy.send_weights(1, tmp_path, 1)
    await policy.save(tmp_path / "after")
    await policy.close()


async def test_the_loop_runs_while_a_saved_policy_that_is_needed_no_more_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, ended, rmtree = list[threading.Thread](), threading.Event(), shutil.rmtree

    def slow(path: Path, ignore_errors: bool = False) -> None:
        threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            ended.wait(timeout=PATIENCE_S)
        rmtree(path, ignore_errors=ignore_errors)

    policy = await started(Scripted(), tmp_path)
    own = tmp_path / "recovery" / "policy-1"
    own.mkdir(parents=True)
    (own / "weights").write_text("of an earlier step")
    monkeypatch.setattr(shutil, "rmtree", slow)
    await policy.save(tmp_path / "saved")
    policy.checkpoint_written(tmp_path / "saved")
    assert (own / "weights").exists() and threading.main_thread() not in threads
    await policy.close()
    assert not (tmp_path / "recovery").exists(), "at the end it is gone, whatever a thread does"
    ended.set()


async def test_when_no_restart_is_left_nothing_is_kept_for_one(tmp_path: Path) -> None:
    script = FailureScript([(5, False)])

    async def start() -> Any:
        return ModelledWorkers(script)

    policy = await RecoveringPolicy(
        start, max_restarts=1, directory=tmp_path / "recovery", max_journal_bytes=0
    ).started()

    async def train() -> None:
        await policy.forward_backward(one_row(1), [1.0], 0)
        await policy.step(1)

    await train()  # and a save, in place of the calls
    await policy.forward_backward(one_row(1), [1.0], 0)
    assert len(policy._journal) == 1 and (tmp_path / "recovery" / "policy-1").exists()
    await policy.step(1)
    assert policy.num_restarts == 1
    for _ in range(3):
        await train()
    assert len(policy._journal) == policy._journal.num_bytes == 0
    assert not [*(tmp_path / "recovery").iterdir()]
    await policy.save(tmp_path / "saved")
    policy.checkpoint_written(tmp_path / "saved")
    await train()
    assert len(policy._journal) == 0
    script.deaths[script.num_calls + 1] = False
    with pytest.raises(WorkerDiedError, match="not restarted: trainer.max_restarts=1 are used up"):
        await train()


@pytest.mark.parametrize("error", [TrainingError, DeadlineError, PolicyError])
async def test_a_first_start_that_fails_of_anything_but_a_death_is_not_tried_again(
    tmp_path: Path, error: type[Exception]
) -> None:
    calls = []

    async def start() -> Policy:
        calls.append("start")
        raise error("policy-worker-0 cannot start")

    with pytest.raises(error, match="^policy-worker-0 cannot start$"):
        await RecoveringPolicy(start, max_restarts=3, directory=tmp_path / "recovery").started()
    assert calls == ["start"]


async def test_workers_that_die_while_they_come_up_at_first_are_replaced_and_that_counts(tmp_path: Path) -> None:
    async def started_after(num_deaths: int) -> RecoveringPolicy:
        deaths = iter(range(num_deaths))

        async def start() -> ModelledWorkers:
            if next(deaths, None) is not None:
                raise WorkerDiedError("policy-worker-0 died in boot")
            return ModelledWorkers(FailureScript())

        return await RecoveringPolicy(start, max_restarts=3, directory=tmp_path / "recovery").started()

    assert (await started_after(3)).num_restarts == 3
    with pytest.raises(WorkerDiedError, match="died in boot; not restarted: trainer.max_restarts=3 are used up"):
        await started_after(4)


async def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    scripted = Scripted()
    policy = await started(scripted, tmp_path)
    await policy.save(tmp_path / "checkpoint")
    policy.checkpoint_written(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint")

    async def load(directory: Path) -> None:
        raise CheckpointError(f"checkpoint {directory} has no policy.json")

    scripted.methods["load"] = load
    workers = policy._workers
    assert isinstance(workers, ModelledWorkers)
    workers.script.deaths[workers.script.num_calls + 1] = False
    with pytest.raises(CheckpointError, match="checkpoint has no policy.json") as caught:
        await policy.step(1)
    assert isinstance(caught.value.__context__, WorkerDiedError)
    assert policy.num_restarts == 1
    await policy.close()


async def test_a_cancelled_recovery_starts_anew_and_nobody_uses_half_restored_workers(
    tmp_path: Path,
) -> None:
    script, is_replaying, is_cut_off = FailureScript(), asyncio.Event(), False

    class Slow(ModelledWorkers):
        async def step(self, num_tokens: float, lr_scale: float = 1.0) -> dict[str, float]:
            if script.num_calls > 5 and not is_cut_off:
                is_replaying.set()
                await asyncio.Event().wait()
            return await super().step(num_tokens)

    async def start() -> Policy:
        return Slow(script)

    policy = await RecoveringPolicy(start, max_restarts=3, directory=tmp_path / "recovery").started()
    for number in range(2):
        await policy.forward_backward(one_row(number), [1.0], number)
        await policy.step(1)
    script.deaths[5] = False
    calling = asyncio.create_task(policy.forward_backward(one_row(2), [1.0], 2))
    await is_replaying.wait()
    calling.cancel()
    await asyncio.wait({calling})
    is_cut_off = True
    await policy.save(tmp_path / "checkpoint")
    assert len(json.loads((tmp_path / "checkpoint" / "weights").read_text())) == 2
    assert script.num_open == script.most_open == 1
    await policy.close()


async def test_a_full_disk_costs_the_restarts_until_the_next_checkpoint_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def save(directory: Path) -> None:
        os.makedirs(directory)
        (directory / "weights").write_text("a part")
        raise CheckpointError("rank 0: OSError: [Errno 28] No space left on device")  # as ranks say it

    async def trained() -> tuple[RecoveringPolicy, ModelledWorkers]:
        policy = await started(Scripted(save=save), tmp_path, max_journal_bytes=0, kind="critic workers")
        for _ in range(3):
            await policy.forward_backward(one_row(1), [1.0], 0)
            await policy.step(1)
        assert len(policy._journal) == 0
        await policy._own.deleted()
        assert list(policy._own.root.iterdir()) == []
        assert isinstance(policy._workers, ModelledWorkers)
        return policy, policy._workers

    policy, workers = await trained()
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "policy-1 cannot be written (rank 0: OSError: [Errno 28] No space left on device" in record.message
    assert "until there is a checkpoint, critic workers that die end the run; " in record.message
    workers.script.deaths[workers.script.num_calls + 1] = False
    with pytest.raises(WorkerDiedError, match="not restarted: no checkpoint was written since .*policy-1 could not be"):
        await policy.step(1)
    await policy.close()

    policy, workers = await trained()
    del workers.save
    await policy.save(tmp_path / "checkpoint")
    policy.checkpoint_written(tmp_path / "checkpoint")
    workers.script.deaths[workers.script.num_calls + 1] = True
    await policy.step(1)
    assert policy.num_restarts == 1
    await policy.close()


async def test_a_restart_says_who_died_where_and_how_long_it_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = await started(Scripted(), tmp_path)
    await policy.forward_backward(one_row(1), [1.0], 0)
    await policy.step(1)
    workers = policy._workers
    assert isinstance(workers, ModelledWorkers)
    workers.script.deaths[workers.script.num_calls + 1] = False
    await policy.logprobs([1, 2])
    lost, back = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert lost == (
        "policy-worker-1 died in call 3; restart 1 of at most trainer.max_restarts=3 of the policy workers, "
        "from the initial policy with 1 steps to do again"
    )
    assert back.startswith("the policy workers are back in logprobs after 0.0 s (restart 1 of at most ")
    assert back.endswith("1 steps, 2 calls done again, gradient norms differ by at most 0)")
    await policy.close()


async def test_a_cancelled_restart_leaves_no_workers(tmp_path: Path) -> None:
    is_starting, script = asyncio.Event(), FailureScript([(1, False)])

    async def start() -> Policy:
        workers = ModelledWorkers(script)
        if script.num_calls:
            try:
                is_starting.set()
                await asyncio.Event().wait()
            finally:
                await workers.close()
        return workers

    policy = await RecoveringPolicy(start, max_restarts=3, directory=tmp_path / "recovery").started()
    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(policy.step(1))
        await is_starting.wait()
        stepping.cancel()
    await policy.close()
    await policy.close()
    assert script.num_open == 0


def test_a_journal_is_cut_where_a_checkpoint_begins_and_gives_calls_back_to_the_last_bit() -> None:
    journal = CallJournal(max_bytes=300)
    assert journal.last_step == 0 and not journal.is_full
    for number in range(3):
        journal.add_gradients(one_row(number), [1 / 3], number)
    journal.add_step(3, 1.0, 0.5)
    position = journal.last_step
    journal.add_gradients(one_row(7), [-1 / 7], 1)
    assert (len(journal), journal.num_steps, position) == (5, 1, 4)
    assert journal.num_bytes > 300 and journal.is_full
    journal.cut(position)
    (call,) = journal._calls
    assert isinstance(call, bytes) and journal.num_bytes == len(call)
    assert pickle.loads(call) == (tuple(one_row(7)), (-1 / 7,), 1)
    columns = [repeated(1 / 3, 1000), repeated(0.0, 0), np.full(1000, 1 / 3, np.float32)]
    for column, num_bytes in zip(columns, (0, 0, 4000), strict=True):
        before = journal.num_bytes
        journal.add_gradients(one_row(7), [column], 1)
        kept = pickle.loads(journal._calls[-1])[1][0]  # type: ignore[arg-type]
        assert num_bytes <= journal.num_bytes - before - len(call) < num_bytes + 300
        assert np.array_equal(np.broadcast_to(np.asarray(kept, np.float32), column.shape), column)
    journal.cut(position)
    assert journal.last_step == position and len(journal) == 4
    journal.clear()
    assert len(journal) == journal.num_bytes == 0


async def test_calls_made_at_once_wait_for_one_restart(tmp_path: Path) -> None:
    policy = await started(Scripted(), tmp_path)
    await policy.step(1)
    workers = policy._workers
    assert isinstance(workers, ModelledWorkers)
    workers.script.deaths[workers.script.num_calls + 1] = False
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(policy.logprobs([1, 2])) for _ in range(3)]
    assert [answer.result() for answer in answers] == [[1.0]] * 3
    assert policy.num_restarts == 1
    await policy.close()


@pytest.mark.parametrize("death", [(3, False), (4, False), (4, True)])
async def test_workers_that_die_over_a_broadcast_fail_it_and_new_ones_in_their_state_open_the_next_group(
    tmp_path: Path, death: tuple[int, bool]
) -> None:
    script = FailureScript([death])

    async def start() -> Any:
        return ModelledWorkers(script)

    policy = await RecoveringPolicy(start, max_restarts=1, directory=tmp_path).started()
    await policy.forward_backward(one_row(1), [1.0], 0)
    await policy.step(1)
    place = await policy.open_transfer(2, "gloo", 5.0)  # calls 3, or 3 and again
    assert (place.num_members, place.backend, place.timeout_s) == (3, "gloo", 5.0)
    if death[0] == 4:
        with pytest.raises(WeightsTransferError, match="/file was not sent: policy-worker-1 died in call 4"):
            await policy.broadcast_weights(Path("/file"), 1)
    await policy.open_transfer(2, "gloo", 5.0)
    await policy.broadcast_weights(Path("/file"), 1)
    assert (policy.num_restarts, await policy.logprobs([1])) == (1, [1.0])
    await policy.close()


@pytest.mark.parametrize("death", [None, (4, False), (5, False), (5, True)])
async def test_what_lost_workers_shared_is_not_there_any_more_and_that_is_no_failure(
    tmp_path: Path, death: tuple[int, bool] | None
) -> None:
    """Call 4 is another one than that to share, call 5 is it."""
    script = FailureScript([] if death is None else [death])

    async def start() -> Any:
        return ModelledWorkers(script)

    policy = await RecoveringPolicy(start, max_restarts=1, directory=tmp_path).started()
    assert await policy.share_weights(1) == {}, "nothing was gathered"
    await policy.forward_backward(one_row(1), [1.0], 0)
    await policy.step(1)
    await policy.gather_weights(1)
    await policy.logprobs([1])
    shared = await policy.share_weights(1)
    assert list(shared) == ([] if death else ["gpu"])
    await policy.unshare_weights()
    await policy.open_transfer(1, "gloo", 5.0)
    assert policy.num_restarts == (death is not None)
    await policy.close()


async def test_with_one_checkpoint_kept_there_is_always_one_to_begin_with(tmp_path: Path) -> None:
    """Also when the disk is full before the newest is in its place: the one before stays, and so do the calls since."""
    policy = await started(Scripted(), tmp_path, max_restarts=10)
    checkpointer = Checkpointer(
        tmp_path / "checkpoints", max_to_keep=1, on_written=lambda path: policy.checkpoint_written(path / "policy")
    )
    for number in range(4):
        await policy.forward_backward(one_row(number), [1.0], number)
        await policy.step(1)
        state = TrainerState(
            step=number,
            next_admission_index=0,
            dataloader={},
            groups=(),
            totals={"no JSON": object()} if number == 2 else {},
        )
        if number == 2:
            with pytest.raises(TypeError, match="not JSON serializable"):
                await checkpointer.write(policy, state)
        else:
            await checkpointer.write(policy, state)
        workers = policy._workers
        assert isinstance(workers, ModelledWorkers)
        before = json.dumps(workers.weights)
        workers.script.deaths[workers.script.num_calls + 1] = True
        await policy.export_hf(tmp_path)
        assert policy._workers is not workers and policy.num_restarts == number + 1
        update = await export_weights(policy, number, tmp_path, 1)
        assert update.path == before
        assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) == 1
    await policy.close()


class DyingPolicy:
    """Torch in this process behind a ``FailureScript``; a dead one has lost its state."""

    def __init__(self, settings: TrainingSettings, script: FailureScript) -> None:
        self.script = script
        self.policy: InProcessPolicy | None = InProcessPolicy(settings)

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            assert self.policy is not None
            try:
                self.script.fail_if_due(is_after=False)
                answer = await getattr(self.policy, name)(*arguments)
                self.script.fail_if_due(is_after=True)
            except WorkerDiedError:
                await self.close()
                raise
            return answer

        return call

    async def close(self) -> None:
        policy, self.policy = self.policy, None
        if policy is not None:
            await policy.close()


async def train(
    policy: Any, directory: Path, checkpoint_written: Any, *, is_critic: bool
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Three steps of two groups at a falling rate; a checkpoint after the first."""
    answers: list[Any] = []
    for step in range(3):
        for group in range(2):
            rows = trajectories(2, seed=2 * step + group)
            if is_critic:
                values = (await policy.values_of(rows)).values
                answers += [of_row.tolist() for of_row in values]
                rows = [replace(row, values=of_row) for row, of_row in zip(rows, values, strict=True)]
            answers.append(await policy.forward_backward(rows, [1.0, -0.5], step))
        answers.append(await policy.step(20.0))
        if step == 0:
            await policy.save(directory / "checkpoint")
            checkpoint_written(directory / "checkpoint")
        if not is_critic:
            answers.append(await policy.logprobs([1, 2, 3]))
    update = await export_weights(policy, 3, directory / "weights", 1 << 30)
    return answers, load_file(update.path)


@pytest.mark.slow
@pytest.mark.parametrize("is_critic", [False, True], ids=["policy", "critic"])
async def test_torch_weights_are_the_same_to_the_last_bit_wherever_workers_die(tmp_path: Path, is_critic: bool) -> None:
    """And so are a critic's values."""
    path = str(write_policy(tmp_path / "policy"))
    settings = TrainingSettings(policy_path=path, lr=1e-2, lr_schedule="cosine", num_steps=4, is_critic=is_critic)
    alone = FailureScript()
    alive = DyingPolicy(replace(settings), alone)
    answers, weights = await train(alive, tmp_path / "alive", lambda path: None, is_critic=is_critic)
    await alive.close()
    for number in range(alone.num_calls, 0, -3):
        script, directory = FailureScript([(number, number % 2 == 0), (number + 4, True)]), tmp_path / str(number)

        async def start(script: FailureScript = script) -> Any:
            return DyingPolicy(settings, script)

        policy = await RecoveringPolicy(start, max_restarts=3, directory=directory / "recovery").started()
        found, tensors = await train(policy, directory, policy.checkpoint_written, is_critic=is_critic)
        assert policy.num_restarts == 2
        await policy.close()
        assert found == answers
        assert tensors.keys() == weights.keys()
        assert all(torch.equal(tensors[name], weights[name]) for name in weights)
