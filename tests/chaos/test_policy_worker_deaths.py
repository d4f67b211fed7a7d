"""Policy workers killed and frozen: two ranks over gloo, whose successors hold the weights of ranks that were left alone, and a run's."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayTaskError

from skyrl_async.errors import TrainingError, WorkerDiedError
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.runtime.heartbeat import Heartbeat
from skyrl_async.training.workers.policy_workers import PolicyWorkers, _as_our_error
from skyrl_async.training.workers.rank_actor import ProcessAddress, end_processes, process_at
from skyrl_async.training.workers.recovering import RecoveringPolicy
from tests.cpu.test_main import FOR_EVER, NO_VLLM, SHARED, SMALL, Command, assert_ledger_is_exact, state
from tests.cpu.tiny_policies import trajectories, weights
from tests.cpu.training.test_policy_workers import settings_with_policy, train

HEARTBEAT = Heartbeat(interval_s=1.0, timeout_s=6.0)


def is_running(pid: int) -> bool:
    """Whether it is a process, and not what is left of one that its parent has not looked at yet."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class Group:
    """A policy over two ranks, and the processes of all that it ever had."""

    def __init__(self) -> None:
        self.policy: RecoveringPolicy
        self.pids: list[int] = []
        self.past: list[int] = []

    @classmethod
    async def start(cls, directory: Path) -> "Group":
        group, settings = cls(), settings_with_policy(directory / "initial")

        async def start() -> PolicyWorkers:
            assert not any(map(is_running, group.pids)), "the ones before must be gone"
            group.past += group.pids
            workers = await PolicyWorkers.start(settings, num_workers=2, call_timeout_s=600.0, heartbeat=HEARTBEAT)
            group.pids = [(await ray.get_actor(name).boot.remote()).pid for name in workers.names]
            return workers

        group.policy = await RecoveringPolicy(start, max_restarts=3, directory=directory / "recovery").started()
        return group

    async def killed_while_saving(self, directory: Path) -> None:
        """Rank 1 dies writing its last file, while the other waits for it."""
        os.mkdir(directory)
        os.mkfifo(directory / "rng_1.pt")
        reader, is_written = os.open(directory / "rng_1.pt", os.O_RDONLY | os.O_NONBLOCK), asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, is_written.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.policy.save(directory))
            await is_written.wait()
            asyncio.get_running_loop().remove_reader(reader)
            os.kill(self.pids[1], signal.SIGKILL)
        os.close(reader)


@pytest.mark.slow
async def test_ranks_that_are_killed_or_frozen_anywhere_change_no_bit_of_the_weights(
    ray_session: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = await Group.start(tmp_path)
    policy = group.policy
    await policy.save(tmp_path / "first")
    figures = await train(policy, first_step=0, num_steps=1)
    expected_logprobs = await policy.logprobs([1, 2, 3])
    figures += await train(policy, first_step=1, num_steps=2)
    expected = await weights(policy, tmp_path / "expected")
    await policy.load(tmp_path / "first")

    assert await train(policy, first_step=0, num_steps=1) == figures[:4]
    os.kill(group.pids[0], signal.SIGKILL)  # between two calls
    assert await policy.logprobs([1, 2, 3]) == expected_logprobs
    await group.killed_while_saving(tmp_path / "second")
    policy.checkpoint_written(tmp_path / "second")
    assert policy.num_restarts == 2
    rows, values = trajectories(5, seed=1), torch.randn(5, generator=torch.Generator().manual_seed(1)).tolist()
    assert await policy.forward_backward(rows[1:], values[1:], 1) == figures[4]
    assert await policy.forward_backward(rows[:1], values[:1], 1) == figures[5]
    os.kill(group.pids[0], signal.SIGSTOP)
    assert await policy.forward_backward(rows, [0.0] * 5, 1) == figures[6]
    assert await policy.step(2 * sum(row.num_sampled_tokens for row in rows)) == figures[7]
    assert await train(policy, first_step=2, num_steps=1) == figures[8:]
    found = await weights(policy, tmp_path / "found")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert policy.num_restarts == 3

    said = [record.message for record in caplog.records if "; restart" in record.message]
    assert [message.partition("policy-worker-")[2][0] for message in said] == ["0", "1", "0"]
    assert " answered no heartbeat for 6 s in forward_backward; restart 3 of at most " in said[2]
    assert said[2].endswith(f"from {tmp_path / 'second'} with 0 steps to do again")
    assert sum("gradient norms differ by at most 0)" in record.message for record in caplog.records) == 3
    assert len(group.past) == 6
    await policy.close()
    assert not any(map(is_running, group.past + group.pids))


GAE = ("trainer.algorithm.advantage_estimator=gae", "placement.groups=[[policy,critic,generate]]")


def kill_workers(command: Command, *, spared: int = 0) -> None:
    """The policy's, which is started first, and the critic's, by kill -9."""
    children = psutil.Process(command.process.pid).children(recursive=True)
    workers = [child for child in children if "ray::RankActor" in "".join(child.cmdline())]
    assert len(workers) == 2
    for worker in sorted(workers, key=lambda worker: worker.create_time())[spared:]:
        worker.kill()


@pytest.mark.slow
def test_a_killed_critic_ends_a_run_without_restarts_and_is_replaced_beside_the_policy_in_the_one_that_resumes_it(
    tmp_path: Path,
) -> None:
    """They and the engine take turns on one device."""
    run_dir = tmp_path / "out"
    overrides = [
        *SMALL,
        *NO_VLLM,
        *SHARED,
        *GAE,
        f"trainer.output_dir={run_dir}",
        "trainer.checkpoint_interval_steps=3",
    ]
    with Command([*overrides, FOR_EVER, "trainer.max_restarts=0"], cwd=tmp_path) as command:
        command.wait_for_step(4)
        kill_workers(command, spared=1)
        ended = command.finish()
    assert ended.code == 1 and ended.orphans == ()
    assert re.match(r"error: critic-worker-0-\w+ died in \w+ \(The actor is dead because", ended.error), ended.error
    assert "not restarted: trainer.max_restarts=0 are used up. Continue with trainer.resume_mode=latest" in ended.error
    assert f"the last checkpoint is {state(run_dir)[0]}\n" in ended.error
    first, trained = state(run_dir)[1]["step"], assert_ledger_is_exact(run_dir)
    last = first + 6
    resume = [f"trainer.num_steps={last}", "trainer.resume_mode=latest"]
    with Command([*overrides, *resume], cwd=tmp_path) as command:
        command.wait_for_step(first + 2)
        kill_workers(command)
        outcome = command.finish()
    assert outcome.code == 0, outcome.stderr
    assert outcome.orphans == ()
    assert set(trained) < set(assert_ledger_is_exact(run_dir))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["policy_restarts"], summary["critic_restarts"]) == (last, 1, 1)
    assert all(f"{kind} workers restarted" in outcome.stdout for kind in ("policy", "critic"))
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert (rows[0]["trainer/restarts"], rows[-1]["trainer/restarts"]) == (0, 2)
    for kind in ("policy", "critic"):
        assert re.search(
            rf"WARNING {kind}-worker-0-\w+ died in \w+ .*; restart 1 of at most trainer.max_restarts=", outcome.stderr
        )
        assert re.search(rf"the {kind} workers are back in \w+ after [\d.]+ s .* differ by at most 0\)", outcome.stderr)
    assert "Traceback" not in ended.stderr + outcome.stderr
    assert not (run_dir / "recovery").exists()


def from_worker(cause: Exception) -> RayTaskError:
    return RayTaskError("step", "Traceback", cause)


def test_what_new_workers_can_mend_is_told_from_what_they_cannot() -> None:
    gloo = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    nccl = torch.distributed.DistBackendError("NCCL error: remote process exited")
    device = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered", 214)
    memory = torch.OutOfMemoryError("CUDA out of memory")
    on_purpose = TrainingError("the gradient norm is nan")
    died = ActorDiedError()

    def error(**failures: Exception) -> BaseException:
        return _as_our_error(failures, "step")

    both = error(worker_0=from_worker(gloo), worker_1=died)
    assert isinstance(both, WorkerDiedError) and str(both).startswith("worker_1 died in step (")
    alone = error(worker_0=from_worker(gloo), worker_1=from_worker(gloo))
    assert isinstance(alone, WorkerDiedError) and str(alone).startswith("worker_0 lost the other workers in step: ")
    assert isinstance(error(worker_0=from_worker(nccl)), WorkerDiedError)
    broken = error(worker_0=from_worker(device))
    assert isinstance(broken, WorkerDiedError) and str(broken).startswith("the device of worker_0 failed in step: ")
    for cause in (memory, IndexError("out of range"), RuntimeError("shapes differ")):
        assert type(error(worker_0=from_worker(cause))) is TrainingError
    assert error(worker_0=died, worker_1=from_worker(on_purpose)) is on_purpose


async def test_a_process_of_another_machine_or_one_that_is_gone_is_left_alone() -> None:
    here = ProcessAddress(node_id="node-1", namespace=os.readlink("/proc/self/ns/pid"), pid=os.getpid())
    assert process_at(ProcessAddress(node_id="node-2", namespace=here.namespace, pid=here.pid), here) is None
    assert process_at(ProcessAddress(node_id="node-1", namespace="pid:[1]", pid=here.pid), here) is None
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    address = ProcessAddress(node_id="node-1", namespace=here.namespace, pid=child.pid)
    process = process_at(address, here)
    assert process is not None
    os.kill(child.pid, signal.SIGSTOP)
    await end_processes({"worker": process})
    await child.wait()
    assert process_at(address, here) is None
