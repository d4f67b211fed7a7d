"""A file of records, each there whole or not at all: where the disk takes none, they are dropped, and the run goes on.

Flows in: records as text. Flows out: a file. Does not know what a record means.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)


def free_path(path: Path) -> Path:
    """``path``, or where something is there, the next one: ``trace.json``, ``trace-2.json``, and so on."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


class RecordFile:
    """Appends to ``path``; written through at once, so that it survives ``kill -9``.

    Args:
        path: of the file.
        begin: makes the file ready; until that is asked for, or there is a record, it stays as it was.
    """

    def __init__(self, path: Path, begin: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._begin = begin
        self._file: FileIO | None = None
        self._is_failing = False

    def begin(self) -> None:
        """Have the file ready for the first record."""
        self.append("")

    def append(self, record: str) -> bool:
        """Whether the record is in the file. The first of several failures is a warning."""
        try:
            self._append(record)
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s cannot be written (%s): lines are lost until it can", self._path, error.strerror)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()

    def _append(self, record: str) -> None:
        """All of it or nothing."""
        if self._file is None:
            self._begin()
            self._file = FileIO(self._path, "ab")
        begin = self._file.tell()
        rest = memoryview(record.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
                self._file.seek(begin)
            raise
