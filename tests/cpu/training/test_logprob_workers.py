"""Modelled workers that only compute log-probs: new ones replace the dead, at the same version. test_policy_workers has them as actors."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.composition.logprobs import forward_settings, training_settings
from skyrl_async.errors import DeadlineError, TrainingError, WorkerDiedError
from skyrl_async.training.workers import logprob_workers
from skyrl_async.training.workers.logprob_workers import ColumnStageWork, LogprobWorkers
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory, WeightUpdate
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_policies import varied_trajectories as trajectories

POLICY, REF = LogprobModel.POLICY, LogprobModel.REF


def test_their_forward_is_the_policy_workers_own_whatever_the_keys_say() -> None:
    asked = {
        "use_sample_packing": False,
        "logprobs_chunk_size": 64,
        "micro_batch_tokens": 512,
        "mixed_precision": True,
    }
    others = ("policy.trust_remote_code=true", "trainer.deterministic=true")
    config = config_of(*(f"training.{key}={value}" for key, value in asked.items()), *others)
    policy, forward = training_settings(config, Path("policy"), 1), forward_settings(config, "policy")
    for name in (*asked, "policy_path", "trust_remote_code", "device", "temperature", "is_deterministic"):
        assert getattr(forward, name) == getattr(policy, name), name
    assert policy.is_deterministic and not forward_settings(config_of(), "policy").is_deterministic


def update(version: int, file: Path = Path()) -> WeightUpdate:
    return WeightUpdate(version=version, path=str(file), manifest={}, num_bytes=0)


def is_there(update: WeightUpdate) -> bool:
    return Path(update.path).exists()


class ModelledForward:
    """Answers minus its version as the log-prob of every token. Dies at the calls of these numbers, counted over all workers."""

    def __init__(self, deaths: Sequence[int], log: list[str], error: type[Exception] = WorkerDiedError) -> None:
        self.deaths = deaths
        self.log = log
        self.error = error
        self.version = 0

    def fail_if_due(self, call: str) -> None:
        self.log.append(call)
        if len(self.log) in self.deaths:
            raise self.error(f"logp-worker-0 died in {call}")

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        assert model is POLICY
        self.fail_if_due("logprobs_of")
        values = tuple((float(-self.version),) * len(row.response_token_ids) for row in trajectories)
        return RowLogprobs(values=values, version=self.version)

    async def load_weights(self, update: WeightUpdate) -> None:
        self.fail_if_due("load_weights")
        if not is_there(update):
            raise TrainingError(f"the weights of version {update.version} cannot be read")
        self.version = update.version

    async def close(self) -> None:
        self.log.append("close")


async def refusing() -> ModelledForward:
    class Refusing(ModelledForward):
        async def load_weights(self, update: WeightUpdate) -> None:
            raise TrainingError(f"version {update.version} is of another model")

    return Refusing([], [])


async def started(
    deaths: Sequence[int], log: list[str], *, max_restarts: int, error: type[Exception] = WorkerDiedError
) -> LogprobWorkers:
    async def start() -> ModelledForward:
        log.append("start")
        return ModelledForward(deaths, log, error)

    return await LogprobWorkers(start, max_restarts=max_restarts).started()


@pytest.mark.parametrize("error", [WorkerDiedError, DeadlineError])
async def test_dead_workers_are_replaced_by_some_at_the_version_they_had(error: type[Exception]) -> None:
    log: list[str] = []
    workers = await started([4, 10], log, max_restarts=2, error=error)
    rows = trajectories(2, seed=1)
    await workers.load_weights(update(7))
    assert (await workers.logprobs_of(rows)).version == 7
    assert (await workers.logprobs_of(rows)).version == 7
    assert log[3:8] == ["logprobs_of", "close", "start", "load_weights", "logprobs_of"]
    await workers.load_weights(update(8))
    assert (await workers.logprobs_of(rows)).version == 8
    assert workers.num_restarts == 2
    await workers.close()
    await workers.close()
    assert log.count("start") == log.count("close") == 3


async def test_workers_that_die_while_they_come_up_at_first_are_replaced_and_that_counts() -> None:
    async def started_after(num_deaths: int) -> LogprobWorkers:
        deaths = iter(range(num_deaths))

        async def start() -> ModelledForward:
            if next(deaths, None) is not None:
                raise WorkerDiedError("logp-worker-0 died in boot")
            return ModelledForward([], [])

        return await LogprobWorkers(start, max_restarts=2).started()

    assert (await started_after(2)).num_restarts == 2
    with pytest.raises(WorkerDiedError, match=r"died in boot; not restarted: trainer.max_restarts=2 are used up"):
        await started_after(3)


async def test_workers_that_die_more_often_than_allowed_end_the_call_by_name() -> None:
    log: list[str] = []
    workers = await started(range(2, 99), log, max_restarts=2)
    with pytest.raises(
        WorkerDiedError, match=r"logp-worker-0 died in logprobs_of; not restarted: .*max_restarts=2 are"
    ):
        await workers.logprobs_of(trajectories(1, seed=1))
    await workers.close()
    assert log.count("start") == log.count("close") == 3


async def test_a_version_being_loaded_by_workers_that_die_is_loaded_by_the_next() -> None:
    log: list[str] = []
    workers = await started([3], log, max_restarts=1)
    await workers.load_weights(update(4))
    assert log == ["start", "load_weights"]
    await workers.load_weights(update(5))
    assert (await workers.logprobs_of(trajectories(1, seed=1))).version == 5
    await workers.close()


async def test_workers_that_die_with_the_newest_version_on_its_way_are_replaced_by_some_at_that_version(
    tmp_path: Path,
) -> None:
    log: list[str] = []
    workers = await started([3], log, max_restarts=1)
    four, five = tmp_path / "4", tmp_path / "5"
    four.touch()
    five.touch()
    await workers.load_weights(update(4, four))
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(workers.logprobs_of(trajectories(1, seed=1)))
        tasks.create_task(workers.load_weights(update(5, five)))
        four.unlink()  # engines serve 5
    assert dying.result().version == 5
    assert log[2:6] == ["logprobs_of", "close", "start", "load_weights"]
    await workers.close()


async def test_a_version_whose_files_made_room_for_the_next_is_left_out(tmp_path: Path) -> None:
    workers = await started([], [], max_restarts=0)
    await workers.load_weights(update(4, tmp_path / "gone"))
    assert (await workers.logprobs_of(trajectories(1, seed=1))).version == 0
    (tmp_path / "cut off").touch()
    with pytest.raises(TrainingError, match="of another model"):
        await (await LogprobWorkers(refusing, max_restarts=0).started()).load_weights(update(5, tmp_path / "cut off"))
    await workers.close()


async def test_new_workers_wait_for_a_version_that_is_there(tmp_path: Path) -> None:
    log: list[str] = []
    workers = await started([3], log, max_restarts=1)
    four, five = tmp_path / "4", tmp_path / "5"
    four.touch()
    await workers.load_weights(update(4, four))
    four.unlink()
    asked = asyncio.create_task(workers.logprobs_of(trajectories(1, seed=1)))
    for _ in range(50):
        await asyncio.sleep(0)
    assert log[-2:] == ["start", "load_weights"]
    assert not asked.done()
    five.touch()
    await workers.load_weights(update(5, five))
    assert (await asked).version == 5
    await workers.close()


async def test_new_workers_for_which_no_version_comes_end_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_workers, "_NEWER_VERSION_TIMEOUT_S", 0.01)
    workers = await started([3], [], max_restarts=1)
    (tmp_path / "4").touch()
    await workers.load_weights(update(4, tmp_path / "4"))
    (tmp_path / "4").unlink()
    with pytest.raises(TrainingError, match="the files of version 4 are gone, and no newer one came in 0.01 s"):
        await workers.logprobs_of(trajectories(1, seed=1))
    await workers.close()


async def test_calls_made_at_once_run_one_after_the_other_new_versions_included() -> None:
    log: list[str] = []
    workers = await started([], log, max_restarts=0)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(workers.logprobs_of(trajectories(1, seed=seed))) for seed in range(3)]
        tasks.create_task(workers.load_weights(update(1)))
        late = tasks.create_task(workers.logprobs_of(trajectories(1, seed=4)))
    assert [task.result().version for task in asked] == [0, 0, 0]
    assert late.result().version == 1
    await workers.close()


class TestStageWork:
    def group(self, rows: Sequence[Trajectory]) -> Group:
        return Group(uid="a", admission_index=3, scheduled_version=1, trajectories=tuple(rows))

    async def test_it_fills_in_what_rows_lack_and_keeps_what_they_have(self) -> None:
        first, second, third = trajectories(3, seed=1)
        kept = replace(second, old_logprobs=second.logprobs, old_version=2)
        asked: list[Trajectory] = []

        async def compute(rows: Sequence[Trajectory]) -> RowLogprobs:
            asked.extend(rows)
            return RowLogprobs(values=tuple(row.logprobs[::-1] for row in rows), version=5)

        group = self.group([first, kept, third])
        old = await ColumnStageWork(compute, "old_logprobs", "old_version")(group)
        assert asked == [first, third]
        assert old.trajectories == (
            replace(first, old_logprobs=first.logprobs[::-1], old_version=5),
            kept,
            replace(third, old_logprobs=third.logprobs[::-1], old_version=5),
        )
        assert (old.uid, old.admission_index, old.scheduled_version) == ("a", 3, 1)
        both = await ColumnStageWork(compute, "ref_logprobs")(old)
        assert both.trajectories == tuple(replace(row, ref_logprobs=row.logprobs[::-1]) for row in old.trajectories)
        assert [row.old_version for row in both.trajectories] == [5, 2, 5]

    async def test_a_group_that_lacks_nothing_is_returned_as_it_is(self) -> None:
        async def compute(rows: Sequence[Trajectory]) -> RowLogprobs:
            raise AssertionError("nothing is to be computed")

        (row,) = trajectories(1, seed=1)
        group = self.group([replace(row, ref_logprobs=row.logprobs)])
        assert await ColumnStageWork(compute, "ref_logprobs")(group) is group
