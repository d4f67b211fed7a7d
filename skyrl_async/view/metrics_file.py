"""The figures in a ``metrics.jsonl`` that grows, as one column per metric."""

import itertools
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl_async.metrics.alarms import engine_figures

MAX_POINTS = 2000
"""Longest series. The figures of a longer one are means over neighbouring steps."""

_FIGURE = (float, int, type(None))


class _Line(msgspec.Struct):
    """What each line must have."""

    step: float
    engines: dict[str, dict[str, Any]] | None = None


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
        self.problem: str | None = None
        """Which line is no JSON object with a step, if any but an incomplete last one is not. What is right in the file is read."""
        self._index: dict[int, int] = {}
        self._columns: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._not_finite: set[tuple[str, int]] = set()
        """(metric, index of the step) of what is ``null`` in the file."""

    @property
    def steps(self) -> list[int]:
        """Steps, in the order of their first lines: ascending."""
        return list(self._index)

    @property
    def names(self) -> list[str]:
        """Metrics that any step has."""
        return sorted(self._columns)

    def read(self) -> None:
        """Take in new lines, but for an incomplete last one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
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
            known = msgspec.convert(row, _Line)
        except (msgspec.DecodeError, ValueError) as error:
            self.problem = self.problem or (
                f"{self._path} is damaged, or not of skyrl_async: line {self.num_lines} is no line of metrics ({error}); "
                "take it out"
            )
            return
        index = self._index.setdefault(int(known.step), len(self._index))
        for name, value in itertools.chain(row.items(), engine_figures(known.engines or {}).items()):
            if isinstance(value, _FIGURE):
                column = self._columns[name]
                if index == len(column):  # nearly always, and in a third of the time
                    column.append(math.nan if value is None else value)
                else:
                    column.extend(itertools.repeat(math.nan, index + 1 - len(column)))
                    if name == "time_s" and not math.isnan(column[index]):
                        continue  # an evaluation or a checkpoint of the step ends later
                    column[index] = math.nan if value is None else value
                if value is None:
                    self._not_finite.add((name, index))

    def rows(self, num: int, may_have: Callable[[str], bool] = lambda name: True) -> list[dict[str, float]]:
        """The figures of the last ``num`` steps that have such names; NaN for one that was not finite."""
        first = max(0, len(self._index) - num)
        columns = [(name, column) for name, column in self._columns.items() if may_have(name)]
        return [
            {
                name: column[i]
                for name, column in columns
                if i < len(column) and (column[i] == column[i] or (name, i) in self._not_finite)
            }
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
        first = max(0, int(np.sum(places < begin)) - 1)
        last = len(places) - int(np.sum(places > end)) + 1
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
