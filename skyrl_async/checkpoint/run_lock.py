"""One run per directory: a lock that lives as long as its process, however that ends.

Flows in: a run's directory. Flows out: a refusal that names who is in it. The lock is the kernel's (flock) on ``run.lock``; what the
file says is for people, and stays behind.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from skyrl_async.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def only_run_in(directory: Path) -> Iterator[None]:
    """Hold the directory while inside. Raises ``ConfigError`` naming process and host when another run holds it.

    Where the file system has no locks, warns that nothing protects the directory.
    """
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"trainer.output_dir={directory} is in use by another run ({file.read().strip() or 'which has just begun'}); "
                "wait until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            logger.warning("%s has no file locks (%s): see to it that no other run uses it", directory, error.strerror)
        _write(
            file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        yield


def _write(handle: int, text: str) -> None:
    """A full disk keeps no run from its directory."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())
