"""Weights on their way out of rank 0: copied to memory, written to a file from there, and sent to engines on other machines.

    gathered tensors ──copy──> staging memory ──write, in any thread──> one safetensors file ──send──> engines that cannot map the file

Training goes on once the copy is made. The next copy reuses its memory. float32 tensors are copied in the dtype that engines serve, all
others in their own. Knows neither models nor engines.
"""

import json
import mmap
import os
import threading
import uuid
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_async.errors import TrainingError, WeightsTransferError, WeightsWriteError
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.formats import TORCH_NAMES
from skyrl_async.weights.transfer_group import GroupPlace, TransferGroup, open_store

_DTYPE_CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items()}
_ALIGNMENT_BYTES = 64
"""Where the first tensor begins in the file is a multiple of this, a cache line: engines compute on the mapped file."""


class Staging:
    """The newest copy of the weights. ``copy`` and ``write`` may run in different threads; each waits for the other."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._version: int | None = None
        self._lock = threading.Lock()

    def copy(self, version: int, parameters: Iterable[tuple[str, Tensor]], *, serve_dtype: torch.dtype) -> int:
        """Copy ``parameters`` (consumed once, one after the other); returns their bytes.

        Raises ``TrainingError`` for a dtype that safetensors does not know.
        """
        with self._lock:
            self._version = None
            copies: dict[str, Tensor] = {}
            for name, tensor in parameters:
                dtype = published_dtype(tensor, serve_dtype)
                if dtype not in _DTYPE_CODES:
                    raise TrainingError(
                        f"{name} cannot be published: its dtype must be one that safetensors knows, got {tensor.dtype}; "
                        "convert it where the policy is made"
                    )
                copies[name] = _copy(tensor, dtype, self._tensors.pop(name, None))
            self._tensors = copies
            self._version = version
            return sum(tensor.nbytes for tensor in copies.values())

    def write(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write the copy as ``directory/v<version>.safetensors``, at most ``bucket_bytes`` (>= 1) at a time.

        Raises:
            TrainingError: the copy is of another version.
            WeightsWriteError: there is no room or no permission. No file is left.
        """
        with self._lock:
            if version != self._version:
                raise TrainingError(f"version {version} cannot be sent: what was gathered is version {self._version}")
            tensors = aligned_order(self._tensors)
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            path = directory / f"v{version:06d}.safetensors"
            try:
                crc32 = _write_file(tensors, path, bucket_bytes)
            except OSError as error:
                raise WeightsWriteError(
                    f"cannot write {num_bytes} bytes of weights to {path}: {error}; make room there or choose another directory"
                ) from error
            return WeightUpdate(
                version=version,
                chunks=({"path": str(path)},),
                manifest={n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()},
                num_bytes=num_bytes,
                crc32=crc32,
            )


def published_dtype(tensor: Tensor, serve_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is published: ``serve_dtype`` for float32, its own otherwise."""
    return serve_dtype if tensor.dtype == torch.float32 else tensor.dtype


def _copy(tensor: Tensor, dtype: torch.dtype, before: Tensor | None) -> Tensor:
    """Copy into the memory of ``before`` if that fits, into new memory otherwise."""
    if before is None or before.shape != tensor.shape or before.dtype != dtype:
        before = torch.empty(tensor.shape, dtype=dtype)
    return before.copy_(tensor)


def aligned_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The widest dtypes first, so that each tensor begins at a multiple of its dtype's size; otherwise in the given order."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The safetensors header of tensors that follow each other without gaps."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": _DTYPE_CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_file(tensors: Mapping[str, Tensor], path: Path, bucket_bytes: int) -> int:
    """Write the file under a temporary name, then rename it. Returns the CRC-32 of its bytes, computed from the memory they come from."""
    full = (tensor for tensor in tensors.values() if tensor.numel())
    contents = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in full]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    crc32 = 0
    try:
        with temporary.open("wb", buffering=0) as file:
            for content in (memoryview(_header(tensors)), *contents):
                for start in range(0, len(content), bucket_bytes):
                    bucket = content[start : start + bucket_bytes]
                    _write_all(file.fileno(), bucket)
                    crc32 = zlib.crc32(bucket, crc32)
        os.replace(temporary, path)
        return crc32
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes, although one call may write fewer. Other threads run meanwhile."""
    while content:
        content = content[os.write(descriptor, content) :]


class WeightSender:
    """Rank 0's end of a broadcast: sends the file of a published version to the other members of a group, one group at a time.

    It sends any version whose file is in this machine's shared memory, whichever process wrote it.

    Args:
        device: this rank's; with NCCL, buckets pass through it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: dist.TCPStore | None = None
        self._host = ""
        self._place: GroupPlace | None = None
        self._group: TransferGroup | None = None

    def open(self, host: str, *, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """Leave the current group and say where the next one meets: at ``host``, an address of this machine. The first ``send`` waits
        for its members.
        """
        self.close()
        if self._store is None or host != self._host:
            self._store, self._host = open_store(host), host
        self._place = GroupPlace(
            host=host,
            port=self._store.port,
            name=uuid.uuid4().hex,
            num_members=1 + num_receivers,
            backend=backend,
            timeout_s=timeout_s,
        )
        return self._place

    def send(self, path: Path, bucket_bytes: int) -> None:
        """Send a file, ``bucket_bytes`` (>= 1) at a time; returns when the last bucket has left.

        Raises:
            WeightsTransferError: a receiver is gone or did not answer in time. The group is left then; open another one. Also if this
                process opened none.
        """
        if (place := self._place) is None:
            raise WeightsTransferError(f"{path} was not sent: no group was opened in this process")
        try:
            if self._group is None:
                self._group = TransferGroup(place, rank=0, device=self._device, store=self._store)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
                content = torch.frombuffer(memory, dtype=torch.uint8)
                try:
                    self._group.send(content, bucket_bytes)
                finally:
                    del content  # or the mapping could not be closed
        except (RuntimeError, OSError) as error:
            self.close()
            raise WeightsTransferError(f"{path} did not get to {place.num_members - 1} engines: {error}") from error

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group, self._place = self._group, None, None
        if group is not None:
            group.leave()
