"""Two ranks as Ray actors over gloo, compared with one rank in this process."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load, load_file

from skyrl_async.errors import CheckpointError, DeadlineError, TrainingError, WorkerDiedError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.heartbeat import DEFAULT
from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import LOGPROBS
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.logprob_workers import LogprobWorkers
from skyrl_async.training.workers.policy_workers import PolicyWorkers, environment_of
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import LogprobModel, PauseMode
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_async.weights.shared_tensor import opened
from skyrl_async.weights.transfer_group import GLOO
from tests.cpu import tiny_policies
from tests.cpu.tiny_policies import (
    VOCABULARY,
    advantages,
    assert_close,
    export_weights,
    num_tokens,
    trajectories,
    varied_trajectories,
    weights,
)
from tests.cpu.training.test_logprobs import as_lists
from tests.cpu.training.test_logprobs import assert_close as assert_close_rows
from tests.patience import PATIENCE_S
from tests.transfer_checks import Receiver, mixed_tensors, published

pytestmark = pytest.mark.slow
POLICY, REF = LogprobModel.POLICY, LogprobModel.REF
train = partial(tiny_policies.train, has_idle_group=True)


def settings_with_policy(directory: Path) -> TrainingSettings:
    """Settings of a policy that is written under the directory. One pair of actors serves all tests, so that they share weights too."""
    policy_path = str(tiny_policies.write_policy(directory))
    return TrainingSettings(
        policy_path=policy_path,
        lr=1e-3,
        num_warmup_steps=2,
        logprobs_chunk_size=8,
        temperature=0.7,
        shares_weights=True,
        has_reference=True,
        kl_estimator="k3",
        kl_coef=0.3,
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainingSettings:
    return settings_with_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def started(
    ray_session: None, settings: TrainingSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PolicyWorkers, Path]]:
    """Two ranks, and a checkpoint of their first state."""
    checkpoint = tmp_path_factory.mktemp("first") / "checkpoint"

    async def start() -> PolicyWorkers:
        workers = await PolicyWorkers.start(settings, num_workers=2, call_timeout_s=120.0)
        await workers.save(checkpoint)
        return workers

    workers = asyncio.run(start())
    yield workers, checkpoint
    asyncio.run(workers.close())


@pytest.fixture
async def two_ranks(started: tuple[PolicyWorkers, Path]) -> PolicyWorkers:
    """Two ranks in their first state."""
    workers, checkpoint = started
    await workers.load(checkpoint)
    return workers


@pytest.fixture
def one_rank(settings: TrainingSettings) -> Iterator[InProcessPolicy]:
    """It makes all logits of a micro-batch at once."""
    policy = InProcessPolicy(replace(settings, logprobs_chunk_size=1024))
    yield policy
    asyncio.run(policy.close())


def same_figures(here: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> bool:
    return all(a == pytest.approx(b, rel=1e-4, abs=1e-5) for a, b in zip(here, there, strict=True))


def test_workers_on_cuda_find_what_repeating_kernels_need_in_their_environment() -> None:
    on_cuda = TrainingSettings(policy_path="", device="cuda", is_deterministic=True)
    assert environment_of(on_cuda) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert environment_of(replace(on_cuda, is_deterministic=False)) == {}
    assert environment_of(replace(on_cuda, device="cpu")) == {"OMP_NUM_THREADS": "1"}


async def test_ranks_wait_for_each_other_for_longer_than_a_call_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_each(method: str, arguments: Sequence[tuple[object, ...]]) -> None:
        PolicyRank(TrainingSettings(policy_path="")).start(*arguments[0])  # type: ignore[arg-type]

    def join(*, timeout_s: float, **_: object) -> None:
        raise InterruptedError(f"they wait for {timeout_s:g} s")

    monkeypatch.setattr(rank_process, "join", join)
    workers = PolicyWorkers(TrainingSettings(policy_path=""), {"policy-worker-0": None}, 7200.0, DEFAULT)
    monkeypatch.setattr(workers, "_call_each", call_each)
    with pytest.raises(InterruptedError, match="they wait for 7260 s"):
        await workers._rendezvous(["node"], None)


def test_kernels_repeat_before_nccl_is_asked_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(**_: object) -> None:
        raise InterruptedError(f"deterministic: {torch.are_deterministic_algorithms_enabled()}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(rank_process, "join", join)
    for is_deterministic in (False, True):
        rank = PolicyRank(TrainingSettings(policy_path="", device="cuda", is_deterministic=is_deterministic))
        try:
            with pytest.raises(InterruptedError, match=f"deterministic: {is_deterministic}"):
                rank.start()
        finally:
            torch.use_deterministic_algorithms(False)


async def test_two_ranks_give_the_figures_and_weights_of_one(
    two_ranks: PolicyWorkers, one_rank: InProcessPolicy, tmp_path: Path
) -> None:
    here = await train(two_ranks, first_step=0, num_steps=2)
    there = await train(one_rank, first_step=0, num_steps=2)
    assert same_figures(here, there)
    assert_close(await weights(two_ranks, tmp_path / "two"), await weights(one_rank, tmp_path / "one"), atol=1e-5)
    ids = list(range(20))
    assert await two_ranks.logprobs(ids) == pytest.approx(await one_rank.logprobs(ids), abs=1e-4)


async def test_a_checkpoint_of_two_ranks_continues_on_one(
    two_ranks: PolicyWorkers, one_rank: InProcessPolicy, tmp_path: Path
) -> None:
    await train(two_ranks, first_step=0, num_steps=2)
    await two_ranks.save(tmp_path / "checkpoint")
    saved = await weights(two_ranks, tmp_path / "saved")
    await one_rank.load(tmp_path / "checkpoint")
    assert_close(await weights(one_rank, tmp_path / "loaded"), saved, atol=0.0)
    here = await train(two_ranks, first_step=2, num_steps=2)
    there = await train(one_rank, first_step=2, num_steps=2)
    assert same_figures(here, there)
    assert_close(await weights(two_ranks, tmp_path / "two"), await weights(one_rank, tmp_path / "one"), atol=1e-5)


async def test_a_checkpoint_of_one_rank_continues_on_two(
    two_ranks: PolicyWorkers, one_rank: InProcessPolicy, tmp_path: Path
) -> None:
    await train(one_rank, first_step=0, num_steps=2)
    await one_rank.save(tmp_path / "checkpoint")
    await two_ranks.load(tmp_path / "checkpoint")
    here = await train(two_ranks, first_step=2, num_steps=2)
    there = await train(one_rank, first_step=2, num_steps=2)
    assert same_figures(here, there)
    assert_close(await weights(two_ranks, tmp_path / "two"), await weights(one_rank, tmp_path / "one"), atol=1e-5)


async def test_numbers_that_are_not_finite_stop_every_rank_and_change_nothing(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    before = await weights(two_ranks, tmp_path / "before")
    rows = trajectories(4, seed=1)
    with pytest.raises(TrainingError, match=r"the loss of \d rows at version 0 is nan on rank \d"):
        await two_ranks.forward_backward(rows, [float("nan"), 1.0, 1.0, 1.0], 0)
    with pytest.raises(TrainingError, match="the gradient norm is nan over 10 tokens"):
        await two_ranks.step(10)
    assert_close(await weights(two_ranks, tmp_path / "after"), before, atol=0.0)
    await train(two_ranks, first_step=0, num_steps=1)


async def test_errors_raised_on_purpose_in_a_worker_arrive_as_themselves(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="has no policy.json"):
        await two_ranks.load(tmp_path / "nowhere")


async def test_an_export_by_two_ranks_is_complete(two_ranks: PolicyWorkers, tmp_path: Path) -> None:
    await two_ranks.export_hf(tmp_path / "hf")
    assert_close(load_file(tmp_path / "hf" / "model.safetensors"), await weights(two_ranks, tmp_path / "w"), atol=0.0)


async def test_what_one_rank_cannot_write_fails_every_rank_and_none_is_left_waiting(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint" / "rng_1.pt").mkdir(parents=True)
    (tmp_path / "other" / "scheduler.pt").mkdir(parents=True)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="rank 1: IsADirectoryError: .*rng_1.pt"):
        await two_ranks.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="rank 0: IsADirectoryError: .*scheduler.pt"):
        await two_ranks.save(tmp_path / "other")
    with pytest.raises(TrainingError, match="cannot write .* File exists"):
        await export_weights(two_ranks, 0, tmp_path / "file", 1 << 30)
    with pytest.raises(TrainingError, match="failed in export_hf: FileExistsError"):
        await two_ranks.export_hf(tmp_path / "file")
    await train(two_ranks, first_step=0, num_steps=1)
    await two_ranks.save(tmp_path / "whole")
    (shard,) = (tmp_path / "whole" / "state").glob("__1_*")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"cannot be read: cannot read .*state: rank \d: "):
        await two_ranks.load(tmp_path / "whole")
    await two_ranks.logprobs([1, 2])


async def test_a_call_past_its_deadline_is_named(ray_session: None, settings: TrainingSettings) -> None:
    with pytest.raises(DeadlineError, match=r"did not finish boot within training.step_timeout_s=0.01"):
        await PolicyWorkers.start(settings, num_workers=1, call_timeout_s=0.01)


async def test_a_worker_answers_heartbeats_while_it_works(two_ranks: PolicyWorkers, tmp_path: Path) -> None:
    """It is blocked in a file that nobody reads."""
    os.mkfifo(tmp_path / "rng_1.pt")
    async with asyncio.TaskGroup() as tasks:
        saving = tasks.create_task(two_ranks.save(tmp_path))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await ray.get_actor(two_ranks.names[1]).ping.remote()
        assert not saving.done()
        reader = os.open(tmp_path / "rng_1.pt", os.O_RDONLY | os.O_NONBLOCK)
        await saving
    os.close(reader)


def held_back(directory: Path, version: int) -> Path:
    """A FIFO in place of the file that is to be written: whoever writes it waits until somebody reads."""
    directory.mkdir(parents=True)
    os.mkfifo(fifo := directory / f".v{version:06d}.safetensors.tmp")
    return fifo


async def test_training_goes_on_while_weights_are_sent_and_what_is_sent_is_what_was_gathered(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    before = await weights(two_ranks, tmp_path / "before")
    await two_ranks.gather_weights(5)
    fifo = held_back(tmp_path / "sent", 5)
    sending = asyncio.ensure_future(two_ranks.send_weights(5, fifo.parent, 1000))
    await train(two_ranks, first_step=0, num_steps=1)
    assert not sending.done()
    content = await asyncio.to_thread(fifo.read_bytes)
    assert (await sending).num_bytes == sum(tensor.nbytes for tensor in before.values())
    assert_close(load(content), before, atol=0.0)
    after = await weights(two_ranks, tmp_path / "after")
    assert any(not torch.equal(after[name], before[name]) for name in before)


async def test_training_goes_on_while_a_file_is_broadcast_in_a_group_beside_that_of_the_ranks(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    receiver, path = Receiver(), published(tmp_path, mixed_tensors())
    receiver.connect(await two_ranks.open_transfer(1, GLOO, PATIENCE_S), 1)
    sending = asyncio.ensure_future(two_ranks.broadcast_weights(path, 1000))
    await train(two_ranks, first_step=0, num_steps=1)
    assert not sending.done(), "its receiver has not come yet"
    receiver.begin(path)
    await sending
    own = await asyncio.to_thread(receiver.answer)
    assert await asyncio.to_thread(Path(own).read_bytes) == await asyncio.to_thread(path.read_bytes)
    receiver.end()


async def test_what_ranks_share_is_what_was_gathered_although_training_went_on(
    two_ranks: PolicyWorkers, tmp_path: Path
) -> None:
    await two_ranks.gather_weights(5)
    update = await two_ranks.send_weights(5, tmp_path, 1 << 20)
    await train(two_ranks, first_step=0, num_steps=1)
    shared = await two_ranks.share_weights(5)
    found = {name: opened(handle, torch.device("cpu")) for name, handle in shared["cpu"].items()}
    assert_close(found, load_file(update.path), atol=0.0)
    await two_ranks.unshare_weights()
    assert await two_ranks.share_weights(5) == {}


async def test_log_probs_and_losses_are_those_of_one_rank_and_of_workers_of_their_own_also_after_one_is_killed(
    two_ranks: PolicyWorkers, one_rank: InProcessPolicy, settings: TrainingSettings, tmp_path: Path
) -> None:
    rows, values = trajectories(5, seed=1), advantages(5, seed=2)
    groups: list[PolicyWorkers] = []

    async def start() -> PolicyWorkers:
        apart = replace(settings, trains=False, has_reference=False, shares_weights=False)
        groups.append(await PolicyWorkers.start(apart, num_workers=1, call_timeout_s=120.0, worker_name="logp-worker"))
        return groups[-1]

    apart = await LogprobWorkers(start, max_restarts=1).started()
    reference = await apart.logprobs_of(rows)
    for version in range(2):
        found, figures = [await policy.forward_backward(rows, values, version) for policy in (two_ranks, one_rank)]
        assert same_figures([found], [figures]) and (version == 0 or found["ref_kl_sum"] > 0)
        for policy in (two_ranks, one_rank):
            await policy.step(num_tokens(rows))
    expected, here = await one_rank.logprobs_of(rows, POLICY), await two_ranks.logprobs_of(rows, POLICY)
    assert expected.version == here.version == 2
    assert_close_rows(here.values, expected.values, tolerance=1e-4)
    for frozen in (await two_ranks.logprobs_of(rows, REF), await one_rank.logprobs_of(rows, REF)):
        assert_close_rows(frozen.values, reference.values, tolerance=1e-6)

    await apart.load_weights(await export_weights(two_ranks, 2, tmp_path / "v2", 8192))
    version, recomputed = as_lists(await apart.logprobs_of(rows))
    assert version == 2
    assert_close_rows(recomputed, here.values, tolerance=1e-6)
    ray.kill(ray.get_actor(groups[0].names[0]))
    while apart.num_restarts == 0:  # Ray kills when it gets to it: a call or two may still be answered
        assert as_lists(await apart.logprobs_of(rows)) == (2, recomputed)
    await apart.close()


@pytest.mark.parametrize("use_sample_packing", [True, False])
async def test_what_a_step_trains_on_comes_back_with_the_log_probs_it_had(
    settings: TrainingSettings, use_sample_packing: bool
) -> None:
    more = replace(settings, returns_logprobs=True, micro_batch_tokens=32, use_sample_packing=use_sample_packing)
    policy = InProcessPolicy(more)
    *rows, last = varied_trajectories(6, seed=1, is_multi_turn=True)
    rows.append(replace(last, loss_mask=[False] * len(last.response_token_ids)))  # nothing of it is trained
    before = await policy.logprobs_of(rows, POLICY)
    found = (await policy.forward_backward(rows, advantages(6, seed=2), 0))[LOGPROBS]
    assert_close_rows(found, before.values, tolerance=1e-6)
    assert all(not values[~row.loss_mask].any() for row, values in zip(rows, found, strict=True))
    await policy.step(num_tokens(rows))
    after = (await policy.forward_backward(rows, [0.0] * 6, 1))[LOGPROBS]
    assert_close_rows(after, (await policy.logprobs_of(rows, POLICY)).values, tolerance=1e-6)
    await policy.close()


async def test_a_rank_that_fails_is_named_and_one_killed_while_it_sends_leaves_the_engine_on_the_old_version(
    ray_session: None, settings: TrainingSettings, tmp_path: Path
) -> None:
    workers = await PolicyWorkers.start(settings, num_workers=1, call_timeout_s=120.0)
    engine = DeterministicEngine("engine-0", settings.policy_path)
    publisher = WeightPublisher(
        client=InferenceEngineClient([engine], max_model_len=64),
        policy=workers,
        directory=tmp_path,
        bucket_bytes=1000,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, lambda: 0.0),
    )
    with pytest.raises(TrainingError, match=r"policy-worker-0-\w+ failed in logprobs: IndexError"):
        await workers.logprobs([0, VOCABULARY + 1])
    await publisher.publish(1)
    (old,) = tmp_path.rglob("*.safetensors")  # noqa: ASYNC240
    checksum = await engine.checksum()
    pid = await ray.get_actor(workers.names[0]).__ray_call__.remote(lambda rank: os.getpid())
    await publisher.gather(2)
    fifo = held_back(tmp_path / "000002-2", 2)
    sending = asyncio.ensure_future(publisher.send(2))
    with await asyncio.to_thread(fifo.open, "rb") as written:
        await asyncio.to_thread(written.read, 10)  # it is in the midst of it
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"policy-worker-0-\w+ died in send_weights"):
            await sending
    assert await publisher.load() is None
    assert await engine.version() == 1 and await engine.checksum() == checksum
    await publisher._files.deleted()  # a thread removes what was written of it
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [old], "no part of the new one"  # noqa: ASYNC240
    with pytest.raises(WorkerDiedError, match=r"policy-worker-0-\w+ died in step \(The actor "):
        await workers.step(1)
    await workers.close()
    await workers.close()


async def test_what_one_rank_cannot_write_fails_on_all_and_they_go_on(two_ranks: PolicyWorkers, tmp_path: Path) -> None:
    """Nobody is left waiting for the one that failed."""
    for name in ("rng_1.pt", "state/__1_0.distcp", "scheduler.pt", "policy.json"):
        (tmp_path / name / name).mkdir(parents=True)  # where a file is to be written
        with pytest.raises(CheckpointError, match=f"rank {int('_1' in name)}: IsADirectoryError: .*{name}"):
            await two_ranks.save(tmp_path / name)
        await two_ranks.save(tmp_path / "whole" / name)
