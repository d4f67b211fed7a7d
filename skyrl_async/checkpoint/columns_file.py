"""Columns of a checkpoint, apart from its JSON: an Arrow file, written in pieces by code that releases the interpreter.

Each row of the file is one column: a list in the field of its dtype, null in the others. JSON refers to it by ``{"__column__": row}``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.errors import CheckpointError

REFERENCE = "__column__"
DTYPES = {"i": "int32", "f": "float32", "?": "bool"}
"""numpy's character -> name of the dtype and of the file's field."""
_PIECE_VALUES, _PIECE_COLUMNS = 1 << 20, 1 << 10
"""What is written together, unless a single column is longer."""


class ColumnsWriter(AbstractContextManager["ColumnsWriter"]):
    """Writes a new file, which is whole when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._schema = pa.schema({name: pa.list_(pa.from_numpy_dtype(name)) for name in DTYPES.values()})
        self._file = path.open("wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._columns: list[NDArray[Any]] = []
        self._num_values = self._num_columns = 0

    def add(self, column: NDArray[Any]) -> dict[str, int]:
        """Write (T,) values of one of ``DTYPES``; returns the reference."""
        if not isinstance(column, np.ndarray):
            raise CheckpointError(
                f"a group can be saved with numbers, text and columns only, got {column!r} of {type(column).__name__}: look at "
                "the rewards, metrics and logs that the generator returns"
            )
        if column.ndim != 1 or column.dtype.char not in DTYPES:
            raise CheckpointError(
                f"a column must be (T,) of {', '.join(DTYPES.values())}, got {column.dtype} of shape {column.shape}"
            )
        self._columns.append(column)
        self._num_values += len(column)
        self._num_columns += 1
        if self._num_values >= _PIECE_VALUES or len(self._columns) == _PIECE_COLUMNS:
            self._flush()
        return {REFERENCE: self._num_columns - 1}

    def _flush(self) -> None:
        import pyarrow as pa

        lists = []
        of_columns = [column.dtype.char for column in self._columns]
        lengths = [len(column) for column in self._columns]
        for dtype, field in zip(DTYPES, self._schema, strict=True):
            is_own = np.array([of_column == dtype for of_column in of_columns], dtype=bool)
            offsets = np.concatenate([[0], np.cumsum(is_own * lengths)]).astype(np.int32)
            own = [column for column in self._columns if column.dtype.char == dtype]
            values = np.concatenate([np.empty(0, dtype), *own])
            content = _bits(values) if dtype == "?" else pa.py_buffer(values)
            inner = pa.Array.from_buffers(field.type.value_type, len(values), [None, content])
            places = [_bits(is_own), pa.py_buffer(offsets)]
            lists.append(pa.ListArray.from_buffers(field.type, len(is_own), places, children=[inner]))
        self._writer.write_batch(pa.record_batch(lists, schema=self._schema))
        self._columns, self._num_values = [], 0

    def __exit__(self, kind: object, *error: object) -> None:
        with self._file:
            if kind is None:
                self._flush()
                self._writer.close()


def _bits(values: NDArray[np.bool_]) -> Any:
    """Arrow's form of booleans, without ``pa.array``, which imports pandas."""
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little"))


def read_columns(path: Path) -> list[NDArray[Any]]:
    """All columns of a file, read-only, by row. Raises ``CheckpointError``."""
    import pyarrow as pa

    columns: list[NDArray[Any]] = []
    try:
        with pa.ipc.open_file(path.read_bytes()) as reader:
            for number in range(reader.num_record_batches):
                columns += _columns_of(reader.get_batch(number))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path.parent} is damaged: {path.name} is no file of columns ({error})"
        ) from error
    return columns


def _columns_of(batch: Any) -> list[NDArray[Any]]:
    found: list[NDArray[Any]] = [np.empty(0)] * batch.num_rows
    for name in DTYPES.values():
        lists = batch.column(name)
        values = lists.values.to_numpy(zero_copy_only=False)
        values.flags.writeable = False
        offsets = lists.offsets.to_numpy()
        for row in np.flatnonzero(lists.is_valid().to_numpy(zero_copy_only=False)).tolist():
            found[row] = values[offsets[row] : offsets[row + 1]]
    return found


def with_columns(value: Any, columns: Sequence[NDArray[Any]]) -> Any:
    """JSON with its references replaced. Raises ``ValueError`` for one that is not in the file."""
    match value:
        case {"__column__": row, **others} if not others:
            if type(row) is not int or not 0 <= row < len(columns):
                raise ValueError(f"{REFERENCE} is {row!r}, but the file has {len(columns)} columns")
            return columns[row]
        case Mapping():
            return {key: with_columns(inner, columns) for key, inner in value.items()}
        case list():
            return [with_columns(inner, columns) for inner in value]
    return value
