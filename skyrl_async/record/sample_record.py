"""Writes the samples of a run to its directory, beside the event loop.

    groups at their end ──add──> in memory ──a thread, at the end of a step──> samples/*.parquet ──many or large──> joined, thinned

A checkpoint holds the number of rows and is written after them, and the metrics hold an evaluation once its rows are written, so that a
resumed run has each row once, wherever the run was killed.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from skyrl_async.columns import is_repeated
from skyrl_async.record.ended import EndedGroup
from skyrl_async.record.files import Known, SamplesFile, cut, file_of, join, without_texts, write
from skyrl_async.record.table import ROW_COLUMNS, TurnsOf, table_of
from skyrl_async.runtime.disk_writer import DiskWriter

logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 512 << 20
_JOINED_PARTS, _JOINED_BYTES = 64, 64 << 20
"""So many parts, or parts of so many bytes or of half the limit, become one file: whole files can be thinned."""
_PIECE_ROWS = 256
_WRITE_INTERVAL_S = 2.0
"""Least time between two files: one takes some 3 ms of a processor, whatever is in it."""

_Waiting = tuple[int, EndedGroup, bool]
"""(number of its first row, group, whether texts and tokens are kept)."""


class SampleRecord:
    """The record of one run.

    Args:
        directory: ``<run>/samples``.
        turns_of: splits a row into turns with texts; None: texts are unknown.
        groups_with_text: groups of each outcome in a step whose texts and tokens are kept; None: all. Figures are kept of every sample.
        max_bytes: most bytes on disk. Past it the oldest files lose texts and tokens, and then, oldest first, are deleted.
    """

    def __init__(
        self,
        directory: Path,
        *,
        turns_of: TurnsOf | None = None,
        groups_with_text: int | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        # All that writing and joining use, pandas among it: half a second in which the thread would hold up the event loop.
        import pyarrow.compute
        import pyarrow.dataset
        import pyarrow.parquet  # noqa: F401

        self._directory = directory
        self._turns_of = turns_of
        self._groups_with_text = groups_with_text
        self._max_bytes = max_bytes
        self.num_rows = 0
        self._writer: DiskWriter[_Waiting] = DiskWriter(
            directory,
            "samples",
            self._write,
            size_of=_num_bytes,
            max_bytes=_MAX_WAITING_BYTES,
            interval_s=_WRITE_INTERVAL_S,
        )
        self._seen: Counter[tuple[int, str]] = Counter()
        """(step, outcome) -> groups, of the newest steps."""
        self._files: list[SamplesFile] | None = None
        """None before the first write, which deletes what is not known."""
        self._known = Known()
        self._said: set[str] = set()

    def restore(self, num_rows: int, evaluated_version: int) -> None:
        """Continue after the rows that a checkpoint and the metrics know; the others are deleted by the first write, or ``begin``.

        Raises ``CheckpointError`` for a file that cannot be read.
        """
        self._known = Known(num_rows=num_rows, evaluated_version=evaluated_version)
        self.num_rows = self._known.end_in(self._directory)

    def begin(self) -> None:
        """Delete what neither a checkpoint nor the metrics know. Until then the files stay as they were."""
        self.end_step()

    def add(self, ended: EndedGroup) -> None:
        """Record a group. Never waits."""
        first, kind = self.num_rows, (ended.step, ended.outcome)
        self.num_rows += ended.num_rows
        if kind not in self._seen:
            self._seen = Counter({key: count for key, count in self._seen.items() if key[0] >= ended.step - 1})
        self._seen[kind] += 1
        keeps_tokens = self._groups_with_text is None or self._seen[kind] <= self._groups_with_text
        self._writer.add((first, ended, keeps_tokens))

    def end_step(self) -> None:
        """Begin to write what was added. Never waits."""
        self._writer.begin()

    async def flush(self) -> None:
        """Wait until what was added is on disk, or has failed to get there; half a minute for a disk that hangs, once."""
        await self._writer.flush()

    def close(self) -> None:
        """Write the rest. Idempotent. A disk that hangs is left."""
        self._writer.close()

    def _write(self, taken: list[_Waiting]) -> None:
        if self._files is None:
            self._files = cut(self._directory, self._known)
        if taken:
            part = file_of(self._directory, taken[0][0], taken[-1][0] + taken[-1][1].num_rows, ".part")
            write(part, (table_of(piece, self._turns_of) for piece in _pieces(taken)))
            self._files.append(part)
            taken.clear()
        self._join_and_thin()

    def _join_and_thin(self) -> None:
        """Join the parts once there are many, and thin the oldest files while there are too many bytes."""
        # People delete old ones for room.
        files = self._files = [file for file in self._files or () if file.path.exists()]
        parts = [file for file in files if file.kind == ".part"]
        most_bytes = min(_JOINED_BYTES, self._max_bytes / 2)
        if len(parts) >= _JOINED_PARTS or sum(part.num_bytes for part in parts) >= most_bytes:
            files[files.index(parts[0]) :] = [join(parts)]
        if math.isinf(self._max_bytes):
            return
        sizes = {file: file.num_bytes for file in files}

        def is_thinned_next(file: SamplesFile) -> bool:
            return not file.kind and (file is not files[-1] or sizes[file] > self._max_bytes)

        while sum(sizes.values()) > self._max_bytes:
            if (oldest := next(filter(is_thinned_next, files), None)) is not None:
                del sizes[oldest]
                thinned = files[files.index(oldest)] = without_texts(oldest)
                sizes[thinned] = thinned.num_bytes
                self._warn("the oldest lose their texts and tokens")
            elif len(files) > 1:
                deleted = files.pop(0)
                del sizes[deleted]
                deleted.path.unlink()
                self._warn("the oldest are deleted")
            else:
                return

    def _warn(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("the samples of the run take more than trainer.samples.max_gb: %s", what)


def _pieces(groups: list[_Waiting]) -> Iterator[list[_Waiting]]:
    """Groups of a few rows together: Arrow holds the interpreter while it converts them."""
    for _, piece in groupby(groups, key=lambda group: (group[0] - groups[0][0]) // _PIECE_ROWS):
        yield list(piece)


def _num_bytes(waiting: _Waiting) -> int:
    _, ended, _ = waiting
    of_rows = (getattr(row, name) for row in ended.group.trajectories for name in ROW_COLUMNS)
    columns = [*of_rows, *ended.group.advantages, *ended.group.returns]
    return 1000 * ended.num_rows + sum(c.nbytes for c in columns if c is not None and not is_repeated(c))
