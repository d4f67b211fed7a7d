"""What the transfer tests of tests/cpu and tests/gpu share: files to send, and receivers in processes of their own."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_async.inference.vllm.weight_receiver import WeightReceiver
from skyrl_async.training.export.staging import Staging
from skyrl_async.weights.transfer_group import GroupPlace, TransferGroup, WeightSender
from tests.patience import PATIENCE_S


def _obey(commands: Connection, device: torch.device) -> None:
    """A receiving process: does what it is told, and answers with the path of what it received, or the error."""
    receiver = WeightReceiver(device)
    place, rank = None, 0
    while (command := commands.recv()) is not None:
        name, *arguments = command
        try:
            if name == "connect":
                place, rank = arguments
                receiver.connect(place, rank)
                commands.send("")
            elif name == "receive":
                path, fill = receiver.prepare(*arguments)
                fill()
                commands.send(path)
            else:  # a signal that this process sends itself when it knows the size, and has received nothing else
                group = TransferGroup(place, rank=rank, device=device)
                group.receive(functools.partial(_get_signal, arguments[0]))
        except (RuntimeError, OSError, ValueError) as error:
            commands.send(error)
    receiver.close()


def _get_signal(number: signal.Signals, num_bytes: int) -> Tensor:
    os.kill(os.getpid(), number)
    return torch.empty(num_bytes, dtype=torch.uint8)


class Receiver:
    """The near end of a process that receives."""

    def __init__(self, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
        context.set_forkserver_preload([__name__])
        self._commands, far = context.Pipe()
        self.process = context.Process(target=_obey, args=(far, torch.device(device)), daemon=True)
        self.process.start()
        far.close()

    def connect(self, place: GroupPlace, rank: int) -> None:
        self._commands.send(("connect", place, rank))
        self.answer()

    def begin(self, source: Path, keep: tuple[Path, ...] = ()) -> None:
        """Receive; ``answer`` says what became of it."""
        self._commands.send(("receive", str(source), {str(path) for path in keep}))

    def begin_and_get(self, number: signal.Signals) -> None:
        """Get that signal in the middle of a transfer."""
        self._commands.send(("signal", number))

    def answer(self) -> str:
        """Where the file is."""
        assert self._commands.poll(PATIENCE_S), "no answer"
        found = self._commands.recv()
        if isinstance(found, Exception):
            raise found
        return str(found)

    def stop(self) -> None:
        """Stand still, at any moment."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        """After it was stopped."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def end(self) -> None:
        if self.process.is_alive():
            self._commands.send(None)
            self.process.join(PATIENCE_S)
        self._commands.close()


def form_group(sender: WeightSender, receivers: list[Receiver], *, backend: str, timeout_s: float = PATIENCE_S) -> None:
    place = sender.open("127.0.0.1", num_receivers=len(receivers), backend=backend, timeout_s=timeout_s)
    for rank, receiver in enumerate(receivers, 1):
        receiver.connect(place, rank)


def mixed_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor that a policy may hold, of sizes that fill no bucket evenly."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(301, 67, generator=generator),
        "half": torch.randn(33, 5, generator=generator).bfloat16(),
        "scale": torch.randn(7, generator=generator, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(11),
        "mask": torch.tensor([True, False, True]),
    }


def published(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """A file as rank 0 of the policy publishes it."""
    staging = Staging()
    staging.copy(1, tensors.items())
    return Path(staging.write(1, directory, 1 << 20).path)


def assert_what_is_sent_arrives(sender: WeightSender, receivers: Sequence[Receiver], directory: Path) -> None:
    """To the byte and in every dtype, to all of a group that is formed, whatever the bucket."""
    for index, bucket_bytes in enumerate((1 << 30, 1000, 997)):
        tensors = mixed_tensors(index)
        path = published(directory / str(index), tensors)
        for receiver in receivers:
            receiver.begin(path)
        sender.send(path, bucket_bytes)
        for own in [receiver.answer() for receiver in receivers]:
            assert Path(own).read_bytes() == path.read_bytes()
            found = load_file(own)
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
