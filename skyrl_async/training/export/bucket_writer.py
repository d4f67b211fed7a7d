"""Named tensors in, safetensors files of bounded size out, each complete the moment its name exists.

Used by the Hugging Face export. Knows neither models nor engines.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl_async.errors import WeightsWriteError


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBuckets:
    """What ``write_buckets`` left on disk."""

    paths: tuple[Path, ...]
    """In the order of writing."""
    names: tuple[tuple[str, ...], ...]
    """Parameter names per path."""
    manifest: dict[str, tuple[str, tuple[int, ...]]]
    """Parameter name -> (dtype name, shape)."""
    num_bytes: int
    """Of all tensors."""


def write_buckets(
    parameters: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    directory: Path,
    prefix: str,
    bucket_bytes: int,
    is_synced: bool = False,
) -> WrittenBuckets:
    """Write ``parameters`` as ``<prefix>-<i:04d>.safetensors`` under ``directory``.

    Args:
        parameters: name and full tensor; consumed once, one bucket in memory at a time.
        dtype: of the written tensors; those of integers keep theirs.
        directory: made if missing.
        prefix: of the file names.
        bucket_bytes: most bytes of tensors per file, >= 1; a larger single tensor goes alone.
        is_synced: whether files must survive a crash of the machine.

    Raises:
        WeightsWriteError: a file cannot be written; then none of them is left.
    """
    paths: list[Path] = []
    names: list[tuple[str, ...]] = []
    manifest: dict[str, tuple[str, tuple[int, ...]]] = {}
    num_bytes = 0
    for left in directory.glob(f".{prefix}-*.tmp"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    for bucket in _buckets(parameters, dtype=dtype, bucket_bytes=bucket_bytes):
        path = directory / f"{prefix}-{len(paths):04d}.safetensors"
        try:
            _write_file(bucket, path, is_synced=is_synced)
        except WeightsWriteError:
            for written in paths:
                written.unlink(missing_ok=True)
            raise
        paths.append(path)
        names.append(tuple(bucket))
        for name, tensor in bucket.items():
            manifest[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            num_bytes += tensor.nbytes
    return WrittenBuckets(paths=tuple(paths), names=tuple(names), manifest=manifest, num_bytes=num_bytes)


def _buckets(
    parameters: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, parameter in parameters:
        kept = dtype if parameter.is_floating_point() else parameter.dtype
        tensor = parameter.to(device="cpu", dtype=kept).contiguous()
        if bucket and num_bytes + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = tensor
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _write_file(tensors: dict[str, Tensor], path: Path, *, is_synced: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"format": "pt"})
        if is_synced:
            sync_file(temporary)
        os.replace(temporary, path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise WeightsWriteError(
            f"cannot write {num_bytes} bytes of weights to {path}: {error}; make room there or choose another directory"
        ) from error


def sync_file(path: Path) -> None:
    """Force a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
