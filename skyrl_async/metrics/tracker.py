"""Distributes the metrics of a run to sinks: ``metrics.jsonl``, and others such as the console.

``metrics.jsonl`` gets one line per call. It survives ``kill -9``, and a resumed run continues it.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from skyrl_async.errors import CheckpointError
from skyrl_async.metrics.record_file import RecordFile

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...

    def close(self) -> None:
        """Write out what is buffered, and release resources. Idempotent."""
        ...


class MetricsLog(RecordFile):
    """``metrics.jsonl``: ``{"step": 3, "time_s": 12.5, "reward/mean": 0.5}`` per line, flushed. NaN is null."""

    def __init__(
        self,
        path: Path,
        resume_step: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        notes: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Begin a new file; with ``resume_step``, keep the lines up to that step and continue the time of the last one.

        The file stays as it was until ``begin`` is called or the first line is logged. ``notes`` returns further entries of each line
        that no other sink gets, such as texts.
        """
        kept = kept_rows(path, resume_step)
        super().__init__(path, lambda: begin_rows(path, resume_step))
        self._clock = clock
        self._notes = notes
        self._start = clock() - (kept[-1]["time_s"] if kept else 0.0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        row: dict[str, Any] = {"step": step, "time_s": round(self._clock() - self._start, 3)}
        row |= {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self.append(json.dumps({**row, **self._notes()}) + "\n")


class Tracker:
    """Passes every step's values to all sinks, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step in all sinks. A full disk does not end the run."""
        for sink in self._sinks:
            try:
                sink.log(step, values)
            except OSError as error:
                logger.warning("%s lost step %d: %s", type(sink).__name__, step, error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                logger.warning("%s lost its last lines: %s", type(sink).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``. The incomplete last line of a killed run is left out.

    Raises ``CheckpointError`` if another line is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.endswith("\n") else []
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: line {number} is not JSON ({error}); take the line out, or resume with another trainer.output_dir"
            ) from error
    return rows


def read_steps(path: Path) -> list[dict[str, float]]:
    """Return one row of numbers per step, in the order of steps. Several lines of a step are joined; nulls are left out."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_rows(path):
        steps.setdefault(row["step"], {}).update(
            {key: value for key, value in row.items() if isinstance(value, int | float)}
        )
    return [steps[step] for step in sorted(steps)]


def evaluated_steps(path: Path) -> list[int]:
    """Return the steps for which a ``metrics.jsonl`` has an evaluation."""
    return [row["step"] for row in read_rows(path) if "reward/eval" in row]


def kept_rows(path: Path, resume_step: float | None) -> list[dict[str, Any]]:
    """Return the lines that a run resumed after ``resume_step`` keeps; with None it keeps nothing."""
    return [] if resume_step is None else [row for row in read_rows(path) if row["step"] <= resume_step]


def begin_rows(path: Path, resume_step: float | None) -> None:
    """Drop the lines of ``path`` that are not kept."""
    kept = kept_rows(path, resume_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)
