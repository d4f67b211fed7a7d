"""A directory in this machine's shared memory that is gone with its process, however that ends.

Flows in: where shared memory is. Flows out: an empty directory. While its process lives, the kernel holds a lock (flock) on it, which
processes in other containers see too; what nobody holds was left by one that was killed, and is removed by whoever comes next.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "skyrl_async-"


def shared_memory() -> Path:
    """Where files are in memory; a temporary directory where a machine has no such place."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@contextlib.contextmanager
def directory_in_memory(root: Path) -> Iterator[Path]:
    """A directory below ``root``, named after this process and deleted at the end. Removes what killed processes left."""
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left, wait=False):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        directory = _locked_directory(root, stack)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _locked_directory(root: Path, stack: contextlib.ExitStack) -> Path:
    """Another process may take one that is not locked yet for left over, and remove it: then another is made."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        try:
            stack.enter_context(_locked(directory, wait=True))
        except FileNotFoundError:
            continue
        except OSError:  # a file system without locks
            return directory
        if directory.exists():
            return directory


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool) -> Iterator[None]:
    """Raises ``OSError`` where it is held by another process and ``wait`` is false, and where there are no locks."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
