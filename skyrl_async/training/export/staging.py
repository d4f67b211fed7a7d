"""Weights on their way out of a rank: copied to memory, and written to a file from there.

    gathered tensors ──copying──> copies on the rank's device ──share──> handles ──> engines on that device load ──> unshare
          └──copy──> staging memory ──write, in any thread──> one safetensors file

Training goes on once the copies are made. The next copy reuses the staging memory. Tensors keep their dtype. Knows neither
models nor engines.
"""

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from skyrl_async.errors import TrainingError, WeightsWriteError
from skyrl_async.training.protocol import SharedWeights
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.formats import TORCH_NAMES
from skyrl_async.weights.shared_tensor import SharedTensor, device_key

logger = logging.getLogger(__name__)

Copies = dict[str, SharedTensor]

_DTYPE_CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items()}
_ALIGNMENT_BYTES = 64
"""Where the first tensor begins in the file is a multiple of this, a cache line: engines compute on the mapped file."""


class Staging:
    """The newest copy of the weights. ``copy`` and ``write`` may run in different threads; each waits for the other."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._version: int | None = None
        self._lock = threading.Lock()

    def copy(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> int:
        """Copy ``parameters`` (consumed once, one after the other); returns their bytes.

        Raises ``TrainingError`` for a dtype that safetensors does not know.
        """
        with self._lock:
            self._version = None
            copies: dict[str, Tensor] = {}
            for name, tensor in parameters:
                if tensor.dtype not in _DTYPE_CODES:
                    raise TrainingError(
                        f"{name} cannot be published: its dtype must be one that safetensors knows, got {tensor.dtype}; "
                        "convert it where the policy is made"
                    )
                copies[name] = _copy(tensor, self._tensors.pop(name, None))
            self._tensors = copies
            self._version = version
            return _num_bytes(copies)

    def write(self, version: int, directory: Path, bucket_bytes: int, name: str | None = None) -> WeightUpdate:
        """Write the copy as ``directory/name``, by default ``v<version>.safetensors``, at most ``bucket_bytes`` (>= 1) at a time.

        Raises:
            TrainingError: the copy is of another version.
            WeightsWriteError: there is no room or no permission. No file is left.
        """
        with self._lock:
            if version != self._version:
                raise TrainingError(f"version {version} cannot be sent: what was gathered is version {self._version}")
            tensors = aligned_order(self._tensors)
            path = directory / (name or f"v{version:06d}.safetensors")
            crc32 = write_safetensors(tensors, path, bucket_bytes=bucket_bytes)
            return WeightUpdate(
                version=version,
                path=str(path),
                manifest={n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()},
                num_bytes=_num_bytes(tensors),
                crc32=crc32,
            )


class DeviceCopies:
    """Copies of the published weights on a rank's own device, for engines that run there: they load them without a transfer over the bus.

    There are two sets at most: the newest, and the one that engines may be reading. The methods may be called from different threads.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._newest: Copies = {}
        self._newest_version: int | None = None
        self._shared: Copies = {}
        self._lock = threading.Lock()

    def copying(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copy each of ``parameters`` and yield it. The copies are of use once the last is yielded.

        If the device has no room for all, logs a warning and keeps none: engines then load the published file.
        """
        with self._lock:
            self._drop_newest()
        copies: Copies = {}
        has_room = True
        try:
            for name, tensor in parameters:
                if has_room:
                    has_room = self._copy(version, name, tensor, copies)
                yield name, tensor
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except BaseException:
            _close(copies)
            raise
        if has_room:
            with self._lock:
                self._newest, self._newest_version = copies, version

    def _copy(self, version: int, name: str, tensor: Tensor, copies: Copies) -> bool:
        """Add a copy to ``copies``; if there is no room, close them all and return False."""
        try:
            copies[name] = SharedTensor(tensor, device=self._device)
        except (torch.OutOfMemoryError, OSError) as error:
            logger.warning(
                "version %d is not shared on the device: after %d MiB of copies there was no room for another %d MiB (%s); engines load it "
                "from shared memory. Give engines less memory (engine.gpu_memory_utilization), or set weight_sync.transfer=shm",
                version,
                sum(copy.nbytes for copy in copies.values()) >> 20,
                tensor.nbytes >> 20,
                error,
            )
            _close(copies)
            return False
        return True

    def share(self, version: int) -> SharedWeights:
        """The handles of the copies of ``version``, valid until ``unshare``; empty if there are none."""
        with self._lock:
            if self._newest_version != version:
                return {}
            _close(self._shared)
            self._shared, self._newest, self._newest_version = self._newest, {}, None
            try:
                return {device_key(self._device): {name: copy.handle() for name, copy in self._shared.items()}}
            except RuntimeError as error:  # CUDA has no handles for some memory, such as expandable segments
                logger.warning("version %d cannot be shared: %s; engines load it from shared memory", version, error)
                _close(self._shared)
                return {}

    def unshare(self) -> None:
        """Free the shared copies, once nobody reads them. Idempotent."""
        with self._lock:
            _close(self._shared)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Free all copies."""
        self.unshare()
        with self._lock:
            self._drop_newest()

    def _drop_newest(self) -> None:
        _close(self._newest)
        self._newest_version = None


def _close(copies: Copies) -> None:
    while copies:
        copies.popitem()[1].close()


def _copy(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Copy into the memory of ``before`` if that fits, into new memory otherwise."""
    if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
        before = torch.empty(tensor.shape, dtype=tensor.dtype)
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


def write_safetensors(
    tensors: Mapping[str, Tensor], path: Path, *, bucket_bytes: int = 1 << 30, is_synced: bool = False
) -> int:
    """Write a safetensors file under a temporary name, then rename it; its directory is made if missing.

    Returns the CRC-32 of its bytes, computed from the memory they come from.

    Args:
        tensors: on CPU, contiguous.
        path: of the file.
        bucket_bytes: most bytes written at a time, >= 1.
        is_synced: whether it is on disk on return.

    Raises:
        WeightsWriteError: there is no room or no permission. No file is left.
    """
    full = (tensor for tensor in tensors.values() if tensor.numel())
    contents = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in full]
    temporary = path.with_name(f".{path.name}.tmp")
    crc32 = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb", buffering=0) as file:
            for content in (memoryview(_header(tensors)), *contents):
                for start in range(0, len(content), bucket_bytes):
                    bucket = content[start : start + bucket_bytes]
                    _write_all(file.fileno(), bucket)
                    crc32 = zlib.crc32(bucket, crc32)
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        return crc32
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise WeightsWriteError(
            f"cannot write {_num_bytes(tensors)} bytes of weights to {path}: {error}; make room there or choose another directory"
        ) from error


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes, although one call may write fewer. Other threads run meanwhile."""
    while content:
        content = content[os.write(descriptor, content) :]
