"""Files of weight updates in a worker's process: received by broadcast into memory for its engine's workers, and mapped for the model."""

import math
from collections.abc import Callable, Collection, Iterator

import torch
from safetensors import safe_open

from skyrl_async.weights.formats import TORCH_NAMES
from skyrl_async.weights.shared_tensor import MemoryFile
from skyrl_async.weights.transfer_group import GroupPlace, TransferGroup

Bucket = list[tuple[str, torch.Tensor]]
"""Tensors under Hugging Face names."""


def mapped_buckets(path: str, load_bucket_bytes: int) -> Iterator[Bucket]:
    """All tensors of a safetensors file in its order, in lists of at most so many bytes; a larger tensor goes alone.

    They are mapped, not read, so that loading copies each byte once. A bucket's pages are released with its tensors.
    """
    buckets: list[list[str]] = [[]]
    num_bytes = 0
    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            tensor = file.get_slice(name)
            num_tensor_bytes = math.prod(tensor.get_shape()) * getattr(torch, TORCH_NAMES[tensor.get_dtype()]).itemsize
            if buckets[-1] and num_bytes + num_tensor_bytes > load_bucket_bytes:
                buckets.append([])
                num_bytes = 0
            buckets[-1].append(name)
            num_bytes += num_tensor_bytes
    for names in buckets:
        with safe_open(path, framework="pt") as file:
            yield [(name, file.get_tensor(name)) for name in names]


class WeightReceiver:
    """Receives files, and holds them as long as it is told to keep them.

    Args:
        device: of this worker; with NCCL buckets pass through it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TransferGroup | None = None
        self._files: dict[str, MemoryFile] = {}

    def connect(self, place: GroupPlace, rank: int) -> None:
        """Leave the group before; the new one is joined when a file is first received."""
        if self._group is not None:
            self._group.leave()
        self._group = TransferGroup(place, rank=rank, device=self._device)

    def prepare(self, source: str, keep: Collection[str]) -> tuple[str, Callable[[], None]]:
        """Drop all files but those named in ``keep``, and make an empty one for ``source``.

        Returns its path and a function that fills it, which blocks and may run in any thread. It also frees the dropped files, which takes
        as long as filling. It raises ``RuntimeError``, ``OSError`` and ``ValueError``; then the group is left and the file incomplete.
        """
        group = self._group
        assert group is not None, "no group was connected"
        dropped = [self._files.pop(name) for name in [*self._files] if name == source or name not in keep]
        file = self._files[source] = MemoryFile()

        def fill() -> None:
            for old in dropped:
                old.close()
            try:
                group.receive(file.allocate, file.reserve)
            except BaseException:
                group.leave()
                raise

        return file.path, fill

    def close(self) -> None:
        """Leave the group and drop all files."""
        if self._group is not None:
            self._group.leave()
        while self._files:
            self._files.popitem()[1].close()
