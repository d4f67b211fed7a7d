"""A file of records, each there whole or not at all: where the disk takes none, they are dropped, and the run goes on.

Flows in: records as text. Flows out: a file. Does not know what a record means.
"""

import contextlib
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class RecordFile:
    """Appends to ``path``; written through at once, so that it survives ``kill -9``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._is_failing = False

    def append(self, record: str) -> bool:
        """Whether the record is in the file. The first of several failures is a warning."""
        begin = self._file.tell()
        rest = memoryview(record.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
                self._file.seek(begin)
            if not self._is_failing:
                logger.warning("%s cannot be written (%s): lines are lost until it can", self._path, error.strerror)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
