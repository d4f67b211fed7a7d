"""Rows from files and directories, each with a description of its place.

A source is one of:

- a ``.jsonl`` or ``.parquet`` file;
- a directory that Hugging Face ``datasets`` saved (``Dataset.save_to_disk``);
- a directory of jsonl or parquet files, such as a snapshot of a hub's repository;
- ``DIR/train``, for the files of one split, ``DIR/train-*.parquet``.

pyarrow reads everything: ``datasets`` need not be installed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_async.errors import DatasetError

Row = Mapping[str, Any]

_JSON = (".jsonl", ".json")
_SUFFIXES = (*_JSON, ".parquet")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files of a hub's repository that say what is in the others."""
_SAVED_STATE = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
_NUMBER_OF_SHARD = re.compile(r"-\d+(-of-\d+)?$")
"""``train-00000-of-00002`` belongs to the split ``train``."""


def rows_of(source: Path) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for each row of ``source``; errors name the place. Raises ``DatasetError``."""
    if (source / _SAVED_STATE).is_file():
        yield from _saved_rows(source)
        return
    for file in files_of(source):
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)


def files_of(source: Path) -> tuple[Path, ...]:
    """Return the jsonl and parquet files of ``source``, sorted by name.

    Raises ``DatasetError`` if there are none, or files of several splits.
    """
    if source.is_file():
        if source.suffix not in _SUFFIXES:
            raise DatasetError(f"dataset file {source} must end in .jsonl or .parquet, got {source.suffix!r}")
        return (source,)
    if source.is_dir():
        return _files_in(source)
    shards = _data_files(source.parent, f"{source.name}-*") or _data_files(source.parent / "data", f"{source.name}-*")
    if not shards:
        raise DatasetError(f"dataset file {source} does not exist; check task.train_files and task.eval_files")
    return shards


def _files_in(directory: Path) -> tuple[Path, ...]:
    if (directory / _SAVED_SPLITS).is_file():
        names = _listed(directory / _SAVED_SPLITS, lambda found: [str(name) for name in found["splits"]])
        raise DatasetError(f"{directory} holds the splits {', '.join(names)}: name one of them, {directory / 'train'}")
    files = _data_files(directory, "*") or _data_files(directory / "data", "*")
    if not files:
        raise DatasetError(
            f"the directory {directory} holds no .jsonl and no .parquet file, and is none that datasets' save_to_disk wrote"
        )
    splits = sorted({_NUMBER_OF_SHARD.sub("", file.stem) for file in files})
    if len(splits) > 1:
        raise DatasetError(
            f"{directory} holds files of several names ({', '.join(splits)}), which may be splits: "
            f"name the one to be read, {files[0].parent / splits[-1]}"
        )
    return files


def _data_files(directory: Path, pattern: str) -> tuple[Path, ...]:
    files = (file for file in directory.glob(pattern) if file.suffix in _SUFFIXES and file.name not in _DESCRIPTIONS)
    return tuple(sorted(file for file in files if file.is_file()))


def _json_rows(file: Path) -> Iterator[tuple[str, Row]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file} line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DatasetError(f"{place} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{place} must be a JSON object, got {type(row).__name__}")
            yield place, row


def _saved_rows(directory: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a ``save_to_disk`` directory: Arrow streams, listed in its ``state.json``."""
    for name in _listed(directory / _SAVED_STATE, lambda found: [entry["filename"] for entry in found["_data_files"]]):
        yield from _table_rows(directory / name, _read_stream, "an Arrow stream of datasets' save_to_disk")


def _listed(file: Path, names_in: Callable[[Any], list[str]]) -> list[str]:
    """The names in a file of datasets' ``save_to_disk``. Raises ``DatasetError`` if it is none."""
    try:
        return names_in(json.loads(file.read_bytes()))
    except (ValueError, LookupError, TypeError) as error:
        raise DatasetError(
            f"{file} is none that datasets' save_to_disk wrote ({error!r}): save the dataset again, or name its files"
        ) from error


def _read_stream(file: Path) -> Any:
    from pyarrow import ipc

    with ipc.open_stream(file) as stream:
        return stream.read_all()


def _parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import parquet

    yield from _table_rows(file, parquet.read_table, "a parquet file")


def _table_rows(file: Path, read: Callable[[Path], Any], kind: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows without their null columns, like jsonl rows that lack them."""
    from pyarrow import ArrowInvalid

    try:
        table = read(file)
    except (ArrowInvalid, OSError) as error:
        raise DatasetError(f"{file} is not {kind}: {error}") from error
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{file} row {number}", {column: value for column, value in row.items() if value is not None}
