"""Published files over real process groups: rank 0 in this process, receivers in processes of their own, gloo between them."""

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from skyrl_async.errors import WeightsTransferError
from skyrl_async.inference.vllm.weight_receiver import WeightReceiver
from skyrl_async.weights.transfer_group import GLOO, NCCL, GroupPlace, WeightSender, _wait_for_members
from tests.patience import PATIENCE_S
from tests.transfer_checks import Receiver, assert_what_is_sent_arrives, form_group, mixed_tensors, published

pytestmark = pytest.mark.slow
SHORT_S = 1.0
"""A timeout that is meant to pass."""


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Receiver]]:
    """Two that live, and one that a test may end."""
    receivers = [Receiver() for _ in range(3)]
    yield receivers
    for receiver in receivers:
        receiver.end()
        assert not receiver.process.is_alive()


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(torch.device("cpu"))
    yield sender
    sender.close()


def big_file(directory: Path) -> Path:
    """More than the kernel holds between two processes."""
    return published(directory, {"weight": torch.randn(32 << 20 >> 2)})


def test_every_receiver_holds_the_very_bytes_in_the_dtypes_they_had_whatever_the_bucket(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    living = receivers[:2]
    form_group(sender, living, backend=GLOO)
    assert_what_is_sent_arrives(sender, living, tmp_path)


def test_memory_is_given_back_by_the_thread_that_fills_the_next_file_and_not_where_the_engine_samples() -> None:
    receiver = WeightReceiver(torch.device("cpu"))
    nobody = GroupPlace(host="127.0.0.1", port=1, name="n", num_members=2, backend=GLOO, timeout_s=0.01)
    receiver.connect(nobody, 1)
    first = Path(receiver.prepare("first", ())[0])
    path, fill = receiver.prepare("second", ())
    assert first.exists()
    with pytest.raises(RuntimeError):
        fill()
    assert not first.exists() and Path(path).exists()
    receiver.close()
    assert not Path(path).exists()


def test_a_receiver_keeps_the_files_it_is_told_to_and_lets_go_of_the_others(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    (receiver,) = receivers[:1]
    form_group(sender, [receiver], backend=GLOO)
    paths = [published(tmp_path / str(seed), mixed_tensors(seed)) for seed in range(3)]
    own: list[str] = []
    for index, path in enumerate(paths):
        receiver.begin(path, keep=tuple(paths[max(0, index - 1) : index]))
        sender.send(path, 1 << 20)
        own.append(receiver.answer())
        held = [Path(one).read_bytes() for one in own[max(0, index - 1) :]]
        assert held == [one.read_bytes() for one in paths[max(0, index - 1) : index + 1]]
    mapped = set[int]()
    for file in Path(f"/proc/{receiver.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as connections are
            if "memfd:weights" in str(file.readlink()):
                mapped.add(file.stat().st_ino)
    assert len(mapped) == 2


def test_a_receiver_killed_in_the_middle_fails_the_others_at_once_and_they_go_on_without_it(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    survivor, victim = receivers[0], receivers[2]
    old, new = published(tmp_path / "old", mixed_tensors()), big_file(tmp_path / "new")
    form_group(sender, [survivor], backend=GLOO)
    survivor.begin(old)
    sender.send(old, 1 << 20)
    held = survivor.answer()
    form_group(sender, [survivor, victim], backend=GLOO)
    survivor.begin(new, keep=(old,))
    victim.begin_and_get(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WeightsTransferError, match="did not get to 2 engines"):
        sender.send(new, 1 << 20)
    with pytest.raises(RuntimeError):
        survivor.answer()
    assert time.monotonic() - started < PATIENCE_S / 2, "they waited for the timeout"
    assert Path(held).read_bytes() == old.read_bytes()
    form_group(sender, [survivor], backend=GLOO)
    survivor.begin(new, keep=(old,))
    sender.send(new, 1 << 20)
    assert Path(survivor.answer()).read_bytes() == new.read_bytes()


def test_a_receiver_that_stands_still_is_waited_for_as_long_as_was_said(
    sender: WeightSender, receivers: list[Receiver], tmp_path: Path
) -> None:
    survivor, frozen = receivers[:2]
    path = big_file(tmp_path)
    form_group(sender, [survivor, frozen], backend=GLOO, timeout_s=SHORT_S)
    survivor.begin(path)
    frozen.begin_and_get(signal.SIGSTOP)
    with pytest.raises(WeightsTransferError):
        sender.send(path, 1 << 20)
    frozen.go_on()
    for receiver in (survivor, frozen):
        with pytest.raises(RuntimeError):
            receiver.answer()
    form_group(sender, [survivor, frozen], backend=GLOO)
    for receiver in (survivor, frozen):
        receiver.begin(path)
    sender.send(path, 1 << 20)
    assert {Path(receiver.answer()).read_bytes() == path.read_bytes() for receiver in (survivor, frozen)} == {True}


def test_a_process_in_which_no_group_was_opened_says_so(sender: WeightSender, tmp_path: Path) -> None:
    with pytest.raises(WeightsTransferError, match="no group was opened in this process"):
        sender.send(tmp_path / "file", 1 << 20)


@pytest.mark.parametrize("backend", [GLOO, NCCL])
def test_receivers_that_never_come_are_waited_for_as_long_as_was_said(
    sender: WeightSender, tmp_path: Path, backend: str
) -> None:
    """NCCL itself, which would wait for ever, begins when all have come."""
    path = published(tmp_path, mixed_tensors())
    sender.open("127.0.0.1", num_receivers=2, backend=backend, timeout_s=SHORT_S)
    with pytest.raises(WeightsTransferError, match="did not get to 2 engines"):
        sender.send(path, 1 << 20)


def test_members_meet_whoever_comes_first() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    with ThreadPoolExecutor(3) as members:
        list(members.map(lambda rank: _wait_for_members(store, rank, 3), (2, 0, 1)))
