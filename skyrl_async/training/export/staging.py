"""A policy's weights, copied to memory of their own so that training can go on, and written from there for the engines to load.

    gathered tensors ──take──> staging ──write, bucket by bucket, in any thread──> one safetensors file, whole when its name exists

Flows in: full tensors under their Hugging Face names. Flows out: ``WeightUpdate``. Each tensor keeps its dtype but for float32 ones,
which take the dtype that is served. Knows neither models nor engines. The memory is used again by the next copy.
"""

import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from skyrl_async.errors import TrainingError, WeightsWriteError
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.safetensors_dtypes import TORCH_NAMES

_DTYPE_CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items()}
_ALIGNMENT_BYTES = 64
"""Of the first tensor in the file: a cache line, so that engines can compute on what they map."""


class Staging:
    """Holds the newest copy only. ``take`` and ``write`` may be called from different threads; each waits for the other."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._version: int | None = None
        self._turn = threading.Lock()

    def take(self, version: int, parameters: Iterable[tuple[str, Tensor]], *, serve_dtype: torch.dtype) -> int:
        """Copy ``parameters`` (consumed once, one after the other); returns their bytes.

        Raises ``TrainingError`` for a dtype that safetensors does not know.
        """
        with self._turn:
            self._version = None
            taken: dict[str, Tensor] = {}
            for name, tensor in parameters:
                dtype = published_dtype(tensor, serve_dtype)
                if dtype not in _DTYPE_CODES:
                    raise TrainingError(
                        f"{name} cannot be published: its dtype must be one that safetensors knows, got {tensor.dtype}; "
                        "convert it where the policy is made"
                    )
                taken[name] = _copy(tensor, dtype, self._tensors.pop(name, None))
            self._tensors = taken
            self._version = version
            return sum(tensor.nbytes for tensor in taken.values())

    def write(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write the copy as ``directory/v<version>.safetensors``, at most ``bucket_bytes`` (>= 1) at a time.

        Raises:
            TrainingError: the copy is of another version.
            WeightsWriteError: there is no room, or no permission; then nothing is left of it.
        """
        with self._turn:
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
    """What a tensor is published in: its own dtype, but for float32."""
    return serve_dtype if tensor.dtype == torch.float32 else tensor.dtype


def _copy(tensor: Tensor, dtype: torch.dtype, before: Tensor | None) -> Tensor:
    """To memory of this process's own: that of ``before`` where it fits."""
    if before is None or before.shape != tensor.shape or before.dtype != dtype:
        before = torch.empty(tensor.shape, dtype=dtype)
    return before.copy_(tensor)


def aligned_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The widest dtypes first, so that each tensor begins at a multiple of its dtype's size; otherwise as they come."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
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


def buckets_of(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[memoryview]]:
    """The tensors' bytes in order, in buckets of ``bucket_bytes`` (the last may be smaller); one may span several buckets."""
    bucket: list[memoryview] = []
    num_free = bucket_bytes
    for tensor in tensors:
        left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
        while left:
            piece, left = left[:num_free], left[num_free:]
            bucket.append(piece)
            num_free -= len(piece)
            if num_free == 0:
                yield bucket
                bucket, num_free = [], bucket_bytes
    if bucket:
        yield bucket


def _write_file(tensors: Mapping[str, Tensor], path: Path, bucket_bytes: int) -> int:
    """Returns the CRC-32 of all that is written, taken of the memory that it is written from."""
    header = memoryview(header_of(tensors))
    crc32 = zlib.crc32(header)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), header)
            for bucket in buckets_of(tensors.values(), bucket_bytes):
                for piece in bucket:
                    _write_all(file.fileno(), piece)
                    crc32 = zlib.crc32(piece, crc32)
        os.replace(temporary, path)
        return crc32
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, piece: memoryview) -> None:
    """The kernel may take less than it is given. Other threads run meanwhile."""
    while piece:
        piece = piece[os.write(descriptor, piece) :]
