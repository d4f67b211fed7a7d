"""Logging of a run: all records of this process go to ``run.log``, this package's warnings also to standard error.

A thread writes ``run.log``, so that a disk that hangs or is full costs lines and not the run (``runtime.disk_writer``). Standard error is
looked up at each record, so that a live display can print above itself.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_async.metrics.tracker import RecordFile

SHOWN = {"is_shown": True}
"""``extra`` of a record whose content the console shows as well."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to ``sys.stderr`` as it is at the time of the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)

    @property
    def stream(self) -> object:
        return sys.stderr


class _LogFile(logging.Handler):
    """Appends records to ``path``, beside the thread that logs them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = RecordFile(path, what="lines of the log")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a wrong call in any library is no reason to end a run
            self.handleError(record)
            return
        self._file.append_line(line.encode(errors="backslashreplace").decode())

    def close(self) -> None:
        """Write the rest; a disk that hangs is left."""
        self._file.close()
        super().close()


@contextmanager
def run_logging(path: Path, level: str, *, has_console: bool = False) -> Iterator[None]:
    """Inside the block, append records from ``level`` on to ``path``, and write this package's warnings to standard error.

    With a console, records marked ``SHOWN`` go to the file alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    root, previous_level = logging.getLogger(), logging.getLogger().level
    to_file = _LogFile(path)
    to_file.setFormatter(logging.Formatter(_FORMAT))
    to_stderr = _StandardError()
    to_stderr.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    to_stderr.addFilter(lambda record: record.name.startswith("skyrl_"))
    if has_console:
        to_stderr.addFilter(lambda record: not SHOWN.keys() & record.__dict__.keys())
    root.addHandler(to_file)
    root.addHandler(to_stderr)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # else a line for every request of every session
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(previous_level)
        root.removeHandler(to_file)
        root.removeHandler(to_stderr)
        to_file.close()
