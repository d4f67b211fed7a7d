"""Directories in shared memory, one per version that is sent: whether the weights fit there, and how they are deleted.

Deleting takes as long as writing, since the kernel frees memory only about as fast as it is written. Threads do it while the loop goes on.
"""

import asyncio
import itertools
import os
import shutil
from functools import partial
from pathlib import Path

from skyrl_async.errors import ConfigError
from skyrl_async.runtime.daemon_threads import DaemonThreads


class WeightFiles:
    """Makes and deletes the directories. Those made are gone after ``close``.

    Args:
        root: holds the directories; made if missing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()
        self._threads = DaemonThreads("weight-files")
        self._deletions: dict[Path, asyncio.Future[None] | None] = {}
        """Directory -> its deletion, if that has begun."""

    async def new_directory(self, version: int) -> Path:
        """A directory for ``version``, not made yet. Waits until deleted ones have freed their memory."""
        await self.deleted()
        directory = self._root / f"{version:06d}-{next(self._numbers)}"
        self._deletions[directory] = None
        return directory

    def delete(self, directory: Path) -> None:
        """Begin to delete a directory. Cancellations do not stop it, and ``close`` finishes it."""
        if directory.exists():
            delete = partial(shutil.rmtree, directory, ignore_errors=True)
            self._deletions[directory] = asyncio.get_running_loop().run_in_executor(self._threads, delete)

    async def deleted(self) -> None:
        """Wait until running deletions have ended."""
        if running := [deletion for deletion in self._deletions.values() if deletion is not None]:
            await asyncio.wait(running)
        self._deletions = {path: deletion for path, deletion in self._deletions.items() if path.exists()}

    def close(self) -> None:
        """Delete all directories now, also those that a thread has begun to delete. Idempotent."""
        for directory in self._deletions:
            shutil.rmtree(directory, ignore_errors=True)


def require_shm_capacity(directory: Path, num_bytes: int, *, double_buffer: bool) -> None:
    """Raise ``ConfigError``, with the sizes and what to set, unless the versions held fit into the file system of ``directory``.

    With a double buffer these are two: the version served, which an engine that joins or rolls back loads, and the next one. A run sends no
    version before the one before it is loaded.

    Args:
        directory: where versions are written; it may not exist yet.
        num_bytes: size of one version.
        double_buffer: whether two are held.
    """
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    status = os.statvfs(place)
    num_free = status.f_bavail * status.f_frsize
    num_versions = 1 + double_buffer
    if num_versions * num_bytes <= num_free:
        return
    needed, free, one = (f"{size / 2**20:,.0f} MiB" for size in (num_versions * num_bytes, num_free, num_bytes))
    found = f"{needed} are needed in {place}, {free} are free"
    advice = "make room there (a container's --shm-size), or publish smaller weights (policy.dtype=bfloat16)"
    if double_buffer:
        raise ConfigError(
            f"weight_sync.double_buffer must be false, got true: {num_versions} versions of the weights do not fit ({found}); "
            f"with false {one} do, or {advice}"
        )
    raise ConfigError(
        f"the weights do not fit into shared memory, even with weight_sync.double_buffer=false: {found}; {advice}"
    )
