"""A file of records, each written whole or not at all. If the disk is full, records are dropped and the run goes on."""

import contextlib
import itertools
import logging
from collections.abc import Callable
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)


def free_path(path: Path) -> Path:
    """Return ``path`` or, if it exists, the next free one: ``trace.json``, ``trace-2.json``, and so on."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


class RecordFile:
    """Appends to ``path``. Records are written unbuffered, so that they survive ``kill -9``.

    Args:
        path: path of the file.
        begin: prepares the file before the first record, or when ``begin`` is called; until then it stays as it was.
    """

    def __init__(self, path: Path, begin: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._begin = begin
        self._file: FileIO | None = None
        self._is_failing = False

    def begin(self) -> None:
        """Prepare the file for the first record; after a resume this drops records past the first new step."""
        self.append("")

    def append(self, record: str) -> bool:
        """Append a record; returns whether it is in the file. The first of several failures is logged."""
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
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _append(self, record: str) -> None:
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
