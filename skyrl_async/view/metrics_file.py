"""The figures in a ``metrics.jsonl`` that grows, as one column per metric."""

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl_async.errors import CheckpointError

MAX_POINTS = 2000
"""Longest series. The figures of a longer one are means over neighbouring steps."""


class MetricsFile:
    """Reads what was added since the last time, and all of it anew after a run went back to an earlier step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_restarts = 0
        """Times the file was read from its beginning."""
        self._begin(identity=None)

    def _begin(self, identity: tuple[int, ...] | None) -> None:
        self.num_restarts += 1
        self._identity = identity
        self._offset = self.num_lines = 0
        self._index: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}

    @property
    def steps(self) -> list[int]:
        """Steps, in the order of their first lines: ascending."""
        return list(self._index)

    @property
    def names(self) -> list[str]:
        """Metrics that any step has."""
        return sorted(self._columns)

    def read(self) -> None:
        """Take in new lines, but for an incomplete last one. Raises ``CheckpointError`` if another is no JSON object."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = self._path.stat()
            if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset:
                self._begin((found.st_dev, found.st_ino))
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self.num_lines += 1
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row: dict[str, Any] = msgspec.json.decode(line)
            step = int(row["step"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path} is damaged, or not of skyrl_async: line {self.num_lines} is no line of metrics "
                f"({f'it has no {error}' if isinstance(error, KeyError) else error}); take it out"
            ) from error
        index = self._index.setdefault(step, len(self._index))
        for engine, figures in (row.get("engines") or {}).items():
            row |= {f"engine/{engine}/{name}": value for name, value in figures.items()}
        for name, value in row.items():
            if isinstance(value, int | float):
                column = self._columns.setdefault(name, array("d"))
                column.extend(itertools.repeat(math.nan, index + 1 - len(column)))
                column[index] = value

    def rows(self, num: int) -> list[dict[str, float]]:
        """The figures of the last ``num`` steps."""
        first = max(0, len(self._index) - num)
        return [
            {name: column[i] for name, column in self._columns.items() if i < len(column) and column[i] == column[i]}
            for i in range(first, len(self._index))
        ]

    def series(
        self, names: Iterable[str], by: str = "step", begin: float = -math.inf, end: float = math.inf
    ) -> dict[str, Sequence[float]]:
        """``step``, ``time_s`` and these metrics, of equal length, NaN where a step has none; unknown metrics are left out.

        Args:
            names: the metrics.
            by: ``step`` or ``time_s``.
            begin, end: values of ``by`` between which figures are returned, with one more on either side. Fewer are returned as they are,
                many as means over neighbouring steps.
        """
        places = self._column(by) if by in self._columns else np.empty(0)
        inside = np.flatnonzero((places >= begin) & (places <= end))
        first, last = (max(0, inside[0] - 1), inside[-1] + 2) if len(inside) else (0, 0)
        stride = -(-(min(last, len(places)) - first) // MAX_POINTS) or 1
        return {
            name: _means(self._column(name)[first:last], stride).tolist()
            for name in dict.fromkeys(("step", "time_s", *names))
            if name in self._columns
        }

    def _column(self, name: str) -> NDArray[np.float64]:
        values = np.frombuffer(self._columns[name], np.float64)
        return np.concatenate([values, np.full(len(self._index) - len(values), math.nan)])


def _means(values: NDArray[np.float64], stride: int) -> NDArray[np.float64]:
    """Means of ``stride`` neighbours, leaving out NaN; NaN where there is nothing else."""
    if stride == 1:
        return values
    starts = np.arange(0, len(values), stride)
    is_known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
        return sums / np.add.reduceat(is_known, starts, dtype=np.int64)
