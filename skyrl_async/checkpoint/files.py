"""The files of one checkpoint: listed with sizes and checksums, synced to disk, and verified before they are read.

    manifest.json    {"policy/policy.json": {"bytes": 812, "crc32": "7a01c2f4"}, ...}

Does not know what the files hold.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_async.checkpoint.columns_file import ColumnsWriter
from skyrl_async.errors import CheckpointError
from skyrl_async.weights.formats import crc32_of_file, sync

MANIFEST = "manifest.json"


def write_manifest(directory: Path, *, check: Callable[[], None] = lambda: None) -> None:
    """List every file below ``directory`` in its manifest and sync all of it to disk.

    Args:
        check: called between pieces of work; may raise to end it.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        check()
        entries[str(path.relative_to(directory))] = {"bytes": path.stat().st_size, "crc32": _crc32(path, check)}
    write_json(directory / MANIFEST, entries)
    for path in (*directory.rglob("*"), directory):
        check()
        sync(path)


def verify(directory: Path) -> None:
    """Raise ``CheckpointError``, saying what is wrong, unless every file has its size and checksum."""
    entries = read_json(directory, MANIFEST)
    try:
        expected = {str(name): (int(entry["bytes"]), str(entry["crc32"])) for name, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory} is damaged: {MANIFEST} lists no files ({error!r})") from error
    for name, (num_bytes, _) in expected.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} is incomplete: {name} is missing; resume from another one")
        if file.stat().st_size != num_bytes:
            raise CheckpointError(
                f"checkpoint {directory} is damaged: {name} has {file.stat().st_size} bytes, expected {num_bytes}"
            )
    for name, (_, crc32) in expected.items():
        try:
            found = _crc32(directory / name)
        except OSError as error:
            raise _unreadable(directory, name, error) from error
        if found != crc32:
            raise CheckpointError(
                f"checkpoint {directory} is damaged: {name} has the checksum {found}, expected {crc32}"
            )


def read_json(directory: Path, name: str) -> Any:
    """Read one file. Raises ``CheckpointError`` when it is missing or not JSON."""
    try:
        return json.loads((directory / name).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {directory} is incomplete: {name} is missing; resume from another one"
        ) from error
    except OSError as error:
        raise _unreadable(directory, name, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {name} is not JSON ({error}); resume from another one"
        ) from error


def _unreadable(directory: Path, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory} cannot be read: {name}: {error.strerror}; see to the disk, or resume from another one"
    )


def write_json(path: Path, value: Any) -> None:
    """Write JSON without syncing, a value at a time, so that other threads run meanwhile."""
    with path.open("w", encoding="ascii") as file:
        file.writelines(json.JSONEncoder().iterencode(value))


def write_json_list(path: Path, values: Iterable[Any], columns: ColumnsWriter) -> None:
    """``write_json`` of a list that is never there as a whole. Numpy columns in it go to the file of ``columns``."""
    encoder = json.JSONEncoder(default=lambda v: v.item() if isinstance(v, np.generic) else columns.add(v))
    with path.open("w", encoding="ascii") as file:
        for i, value in enumerate(values):
            file.write(", " if i else "[")
            file.writelines(encoder.iterencode(value))
        file.write("]" if file.tell() else "[]")


def _crc32(path: Path, check: Callable[[], None] = lambda: None) -> str:
    return f"{crc32_of_file(path, check=check):08x}"
