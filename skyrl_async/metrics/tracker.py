"""Writes a run's records: ``metrics.jsonl``, and the metrics of other sinks such as the console.

A thread writes files, as soon as a record comes. They survive ``kill -9``, and a resumed run continues them. A record is in a file whole or
not at all.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from skyrl_async.columns import json_list
from skyrl_async.errors import CheckpointError
from skyrl_async.runtime.disk_writer import DiskWriter

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Most bytes of a file's records that wait for the disk."""


def free_path(path: Path) -> Path:
    """Return ``path`` or, if it exists, the next free one: ``evaluation.json``, ``evaluation-2.json``, and so on."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


class AppendedFile:
    """Appends texts to ``path``, unbuffered, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, text: str) -> None:
        """Append a text. Raises ``OSError``; nothing of it is in the file then."""
        begin, rest = None, memoryview(text.encode())
        try:
            self._file = self._file or FileIO(self._path, "ab")
            begin = os.fstat(self._file.fileno()).st_size
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                if self._file is not None and begin is not None:
                    self._file.truncate(begin)
            with contextlib.suppress(OSError):
                self.close()  # opened anew, the file may be well: a server that was away knows no old handles
            raise

    def close(self) -> None:
        """Close the file until the next text. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class RecordFile:
    """Appends records to ``path``, beside the event loop.

    Args:
        path: path of the file.
        begin: prepares the file before the first record, or when ``begin`` is called; until then it stays as it was.
        what: the records in messages.
    """

    def __init__(self, path: Path, begin: Callable[[], object] = lambda: None, what: str = "lines") -> None:
        self._begin: Callable[[], object] | None = begin
        self._file = AppendedFile(path)
        self._is_closed = False
        self._writer = DiskWriter(path, what, self._write, size_of=len, max_bytes=MAX_WAITING_BYTES)

    def begin(self) -> None:
        """Prepare the file for the first record; after a resume this drops records past the first new step."""
        self._writer.begin()

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a line of JSON; columns are lists in it. Never waits."""
        self.append_line(json.dumps(row, default=json_list))

    def append_line(self, line: str) -> None:
        """Append a line of text. Never waits."""
        self._writer.add(line + "\n")
        self._writer.begin()

    async def flush(self) -> None:
        """Wait until the lines so far are in the file, or have failed to get there; half a minute for a disk that hangs, once."""
        await self._writer.flush()

    def close(self) -> None:
        """Write the rest, and close the file. Idempotent. A disk that hangs is left."""
        self._is_closed = True
        self._writer.close()

    def _write(self, lines: list[str]) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None
        if lines:
            self._file.append("".join(lines))
            lines.clear()
        if self._is_closed:
            self._file.close()


class MetricsLog(RecordFile):
    """``metrics.jsonl``: ``{"step": 3, "time_s": 12.5, "reward/mean": 0.5}`` per line. NaN is null.

    The file stays as it was until ``begin`` is called or the first line is logged.

    Args:
        path: path of the file.
        resume_step: keep the lines up to that step and continue after them, in time too; None begins a new file.
        clock: returns seconds.
        notes: returns further entries of each line that no other sink gets, such as texts.
    """

    def __init__(
        self,
        path: Path,
        resume_step: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        notes: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(path, lambda: _drop_later_rows(path, resume_step))
        kept = _kept_rows(path, resume_step)
        self._clock = clock
        self._notes = notes
        self._start = clock() - (kept[-1]["time_s"] if kept else 0.0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        row: dict[str, Any] = {"step": step, "time_s": round(self._clock() - self._start, 3)}
        row |= {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self.append_row({**row, **self._notes()})


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""

    def close(self) -> None:
        """Write out what is buffered, and release resources. Idempotent."""


class Tracker:
    """Passes every step's values to all sinks, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step in all sinks. A full disk does not end the run."""
        for sink in self._sinks:
            with _failures_logged(sink, f"step {step}"):
                sink.log(step, values)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            with _failures_logged(sink, "its last lines"):
                sink.close()


@contextlib.contextmanager
def _failures_logged(sink: Sink, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("%s lost %s: %s", type(sink).__name__, what, error)


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


def _kept_rows(path: Path, resume_step: float | None) -> list[dict[str, Any]]:
    """Return the lines that a run resumed after ``resume_step`` keeps; with None it keeps nothing."""
    return [] if resume_step is None else [row for row in read_rows(path) if row["step"] <= resume_step]


def _drop_later_rows(path: Path, resume_step: float | None) -> None:
    """Drop the lines of ``path`` that are not kept."""
    kept = _kept_rows(path, resume_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(row) + "\n" for row in kept))


def replace_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
