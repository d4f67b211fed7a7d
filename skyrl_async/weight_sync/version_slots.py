"""Where each version of the weights is: complete and waiting, being loaded, served. Never a partial one.

    send ──add──> complete ──start_loading──> loading ──finish_loading──> served
                     └ a newer one was added: deleted    └ the one before: deleted

A state machine: it says which files are to be deleted, and deletes none. Beside it, whether shared memory holds that many versions.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.errors import ConfigError
from skyrl_async.types import WeightUpdate

NUM_VERSIONS_HELD = {True: 2, False: 1}
"""By ``weight_sync.double_buffer``. With it: the version served, which an engine that joins or rolls back loads, and the next one. A run
sends no version before the one before it is loaded, so there is never a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentUpdate:
    """A version whose buckets are all there."""

    update: WeightUpdate
    gather_seconds: float
    send_seconds: float

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self.update.version


class VersionSlots:
    """At most three updates, each with its files: one complete, one being loaded, one served.

    A run sends no version before the one before it is loaded: it fills two of these at most, and only what is served is replaced.
    """

    def __init__(self) -> None:
        self._complete: SentUpdate | None = None
        self._loading: SentUpdate | None = None
        self.serving: WeightUpdate | None = None
        """What engines serve, while its files are there."""
        self.serving_version: int | None = None
        """What engines serve; None before the first publish."""

    @property
    def lacks_served_files(self) -> bool:
        """Whether engines serve a version whose files are gone."""
        return self.serving_version is not None and self.serving is None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be loaded and nothing is being loaded."""
        return self._complete is None and self._loading is None

    def add(self, sent: SentUpdate) -> WeightUpdate | None:
        """Keep the newer of two complete versions. Returns the older one, which nobody will load."""
        before, self._complete = self._complete, sent
        if before is None:
            return None
        if before.version > sent.version:
            self._complete, before = before, sent
        return before.update

    def start_loading(self) -> SentUpdate | None:
        """The newest complete version, which is being loaded from now on; None if there is none. Nothing else may be loading."""
        assert self._loading is None, "a version is being loaded"
        self._loading, self._complete = self._complete, None
        return self._loading

    def finish_loading(self) -> WeightUpdate | None:
        """Every engine serves the update that was loading. Returns the one served before."""
        assert self._loading is not None, "nothing was being loaded"
        before, self.serving = self.serving, self._loading.update
        self.serving_version, self._loading = self._loading.version, None
        return before

    def requeue(self) -> WeightUpdate | None:
        """Let the update that was loading be loaded again. Returns it if a newer one is complete."""
        assert self._loading is not None, "nothing was being loaded"
        failed, self._loading = self._loading, None
        return self.add(failed)

    def abort_loading(self) -> WeightUpdate | None:
        """Drop the update being loaded and return it, so that its files can be deleted. No-op if there is none."""
        failed, self._loading = self._loading, None
        return None if failed is None else failed.update

    def release_served(self) -> WeightUpdate | None:
        """Return the update served, so that its files can be deleted before the next one is written."""
        before, self.serving = self.serving, None
        return before

    def clear(self) -> list[WeightUpdate]:
        """Empty all slots, and return what was in them."""
        updates = [self.release_served(), self.abort_loading(), self._complete.update if self._complete else None]
        self._complete = None
        return [update for update in updates if update is not None]


def require_shm_capacity(directory: Path, num_bytes: int, *, double_buffer: bool) -> None:
    """Raise ``ConfigError``, with the sizes and what to set, unless the versions held fit into the file system of ``directory``.

    Args:
        directory: where versions are written; it may not exist yet.
        num_bytes: size of one version.
        double_buffer: whether two are held.
    """
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    status = os.statvfs(place)
    num_free = status.f_bavail * status.f_frsize
    needed = NUM_VERSIONS_HELD[double_buffer] * num_bytes
    if needed <= num_free:
        return
    found = f"{_mib(needed)} are needed in {place}, {_mib(num_free)} are free"
    advice = "make room there (a container's --shm-size), or publish smaller weights (policy.dtype=bfloat16)"
    if double_buffer:
        raise ConfigError(
            f"weight_sync.double_buffer must be false, got true: {NUM_VERSIONS_HELD[True]} versions of the weights do not fit ({found}); "
            f"with false {_mib(num_bytes)} do, or {advice}"
        )
    raise ConfigError(
        f"the weights do not fit into shared memory, even with weight_sync.double_buffer=false: {found}; {advice}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
