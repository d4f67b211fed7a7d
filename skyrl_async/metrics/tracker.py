"""Numbers of a run, fanned out: always to ``metrics.jsonl``, and to whatever other sinks are handed in.

Flows in: a step and its values. Flows out: one json line per call, in a file that survives ``kill -9`` and goes on
after a resume; the same to each sink. Knows no metric by name and no trainer.
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
    """A place where numbers go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        ...

    def close(self) -> None:
        """Write out what is buffered, and release it. Idempotent."""
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
        """Begin a new file; with ``resume_step``, keep the lines up to that step and let time go on after the last.

        The file stays as it was until ``begin``, or the first line. ``notes`` are added to each line: what is no number, and goes to
        no other sink.
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
    """Hands every step's values to all sinks, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step everywhere. A disk that is full ends no run."""
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
    """The lines of a ``metrics.jsonl`` as written; an incomplete last line (a killed run's) is left out.

    Raises ``CheckpointError`` for another line that is not JSON: a run that goes on keeps the lines before.
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
    """One row of numbers per step, in the order of steps: what was logged for it in several lines joined, nulls left out."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_rows(path):
        steps.setdefault(row["step"], {}).update(
            {key: value for key, value in row.items() if isinstance(value, int | float)}
        )
    return [steps[step] for step in sorted(steps)]


def evaluated_steps(path: Path) -> list[int]:
    """Steps of which a ``metrics.jsonl`` has an evaluation."""
    return [row["step"] for row in read_rows(path) if "reward/eval" in row]


def kept_rows(path: Path, resume_step: float | None) -> list[dict[str, Any]]:
    """What a run that goes on after ``resume_step`` keeps of a file; None keeps nothing."""
    return [] if resume_step is None else [row for row in read_rows(path) if row["step"] <= resume_step]


def begin_rows(path: Path, resume_step: float | None) -> None:
    """Make ``path`` hold what is kept of it and nothing else."""
    kept = kept_rows(path, resume_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)
