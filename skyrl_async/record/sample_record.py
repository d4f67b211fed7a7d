"""Writes the samples of a run to its directory, beside the event loop.

    groups at their end ──add──> in memory ──a thread, at the end of a step──> samples/*.parquet ──many or large──> joined, thinned

A checkpoint holds the number of rows and is written after them, so that a resumed run has each row once, wherever the run was killed. A
disk that is full or hangs costs rows, never the run: a checkpoint waits half a minute for one that hangs, and later ones do not.
"""

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from skyrl_async.record.ended import EndedGroup
from skyrl_async.record.files import SamplesFile, cut, file_of, join, without_texts, write
from skyrl_async.record.table import TurnsOf, table_of
from skyrl_async.runtime.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 13
"""Memory of one token: its id, behavior log-prob, mask, and one other kind of log-probs."""
_MAX_WAITING_BYTES = 512 << 20
_JOINED_PARTS, _JOINED_BYTES = 64, 64 << 20
"""So many parts, or parts of so many bytes, become one file."""
_PIECE_ROWS = 256
_WRITE_INTERVAL_S = 1.0
"""Least time between two files: one takes some 3 ms of a processor, whatever is in it."""
_FLUSH_TIMEOUT_S, _CLOSE_TIMEOUT_S = 30.0, 10.0
"""A write of a step's rows takes seconds on a slow disk."""

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
        self._waiting: deque[_Waiting] = deque()
        self._bytes_added = self._bytes_written = 0
        """Of groups that were added, and of those that are on disk or left out; each is changed by one thread."""
        self._seen: Counter[tuple[int, str]] = Counter()
        """(step, outcome) -> groups, of the newest steps."""
        self._files: list[SamplesFile] | None = None
        """None before the first write, which cuts what a checkpoint does not know."""
        self._threads = DaemonThreads("samples")
        self._lock = threading.Lock()
        self._queued: Future[None]
        """The newest write."""
        self._is_due = False
        """Whether it has yet to begin: it will write all that is added until then."""
        self._hangs = False
        """Whether a write took too long, and still does."""
        self._is_waited_for = threading.Event()
        """Whether the newest write is: it begins at once then."""
        self._written_at = -math.inf
        self._said: set[str] = set()
        """Warnings of writes that fail, each said once until one succeeds."""
        self._has_thinned = False

    def restore(self, num_rows: int) -> None:
        """Continue after the first ``num_rows`` rows; later ones are deleted by the first write, or ``begin``."""
        self.num_rows = num_rows

    def begin(self) -> None:
        """Delete what a checkpoint does not know. Until then the files stay as they were."""
        self.end_step()

    def add(self, ended: EndedGroup) -> None:
        """Record a group. Never waits."""
        first, kind = self.num_rows, (ended.step, ended.outcome)
        self.num_rows += ended.num_rows
        if kind not in self._seen:
            self._seen = Counter({key: count for key, count in self._seen.items() if key[0] >= ended.step - 1})
        self._seen[kind] += 1
        keeps_tokens = self._groups_with_text is None or self._seen[kind] <= self._groups_with_text
        num_bytes = _num_bytes(ended)
        if self._bytes_added - self._bytes_written + num_bytes > _MAX_WAITING_BYTES:
            self._say("samples are left out: the disk does not keep up with them")
            return
        self._bytes_added += num_bytes
        self._waiting.append((first, ended, keeps_tokens))

    def end_step(self) -> None:
        """Begin to write what was added. Never waits."""
        self._begin_write()

    async def flush(self) -> None:
        """Wait until what was added is on disk, or has failed to get there; half a minute for a disk that hangs, once."""
        if self._hangs:
            return
        writing = self._begin_write(is_waited_for=True)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, writing.result, _FLUSH_TIMEOUT_S)
        except TimeoutError:
            self._hangs = not writing.done()
            self._say("samples wait: the disk hangs, and the run goes on without them")

    def close(self) -> None:
        """Write the rest. Idempotent. A disk that hangs is left."""
        try:
            self._begin_write(is_waited_for=True).result(_CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the last samples are not yet in %s: the disk hangs", self._directory)

    def _begin_write(self, *, is_waited_for: bool = False) -> Future[None]:
        """The write of all that was added so far: however long one takes, only one more waits for it."""
        if not self._is_due:
            self._is_due = True
            self._is_waited_for = threading.Event()
            self._queued = self._threads.submit(self._write_waiting, self._is_waited_for)
        if is_waited_for:
            self._is_waited_for.set()
        return self._queued

    def _write_waiting(self, is_waited_for: threading.Event) -> None:
        is_waited_for.wait(max(0.0, self._written_at + _WRITE_INTERVAL_S - time.monotonic()))
        with self._lock:
            self._is_due = False
            self._written_at = time.monotonic()
            try:
                self._write()
                self._join_and_thin()
            except OSError as error:
                self._say(f"samples cannot be written: {error.strerror or error}; they are tried again")
            except Exception:  # whatever is wrong with them, they are no reason to end a run
                logger.exception("samples are left out of %s", self._directory)
            else:
                self._said.clear()
            self._hangs = False

    def _write(self) -> None:
        if self._files is None:
            self._files = cut(self._directory, self._waiting[0][0] if self._waiting else self.num_rows)
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return
        end = taken[-1][0] + taken[-1][1].num_rows
        part = file_of(self._directory, taken[0][0], end, ".part")
        try:
            write(part, (table_of(piece, self._turns_of) for piece in _pieces(taken)))
        except OSError:
            self._waiting.extendleft(reversed(taken))
            taken = []
            raise
        finally:
            self._bytes_written += sum(_num_bytes(ended) for _, ended, _ in taken)
        self._files.append(part)

    def _join_and_thin(self) -> None:
        """Join the parts once there are many, and thin the oldest files while there are too many bytes."""
        files = self._files or []
        parts = [file for file in files if file.kind == ".part"]
        if len(parts) >= _JOINED_PARTS or sum(part.num_bytes for part in parts) >= _JOINED_BYTES:
            files[files.index(parts[0]) :] = [join(parts)]
        if math.isinf(self._max_bytes):
            return
        sizes = {file: file.num_bytes for file in files}
        while sum(sizes.values()) > self._max_bytes and len(sizes) > 1:
            oldest = next((file for file in files if not file.kind), None)
            sizes.pop(oldest or files[0])
            if oldest is None:
                files.pop(0).path.unlink()
                continue
            thinned = files[files.index(oldest)] = without_texts(oldest)
            sizes[thinned] = thinned.num_bytes
            if not self._has_thinned:
                self._has_thinned = True
                logger.warning(
                    "the samples of the run take more than trainer.samples.max_gb: the oldest lose their texts and tokens"
                )

    def _say(self, what: str) -> None:
        """Log once until writing succeeds."""
        if what not in self._said:
            logger.warning("%s (%s)", what, self._directory)
        self._said.add(what)


def _pieces(groups: list[_Waiting]) -> Iterator[list[_Waiting]]:
    """Groups of a few rows together: Arrow holds the interpreter while it converts them."""
    piece: list[_Waiting] = []
    for group in groups:
        piece.append(group)
        if sum(ended.num_rows for _, ended, _ in piece) >= _PIECE_ROWS:
            yield piece
            piece = []
    if piece:
        yield piece


def _num_bytes(ended: EndedGroup) -> int:
    rows = ended.group.trajectories
    return 1000 * ended.num_rows + _TOKEN_BYTES * sum(len(r.prompt_token_ids) + len(r.response_token_ids) for r in rows)
