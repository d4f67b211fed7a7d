"""Which version of the weights is where: complete and waiting, being loaded, served. Never a partial one.

    send ──arrived──> complete ──take──> loading ──loaded──> serving
                         └ a newer one arrived: thrown away        └ replaced: thrown away

Flows in: updates that were sent whole, and what became of their loading. Flows out: the newest to load, and those whose files are to
be deleted. Does no I/O, and knows neither engines nor policies.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.errors import ConfigError
from skyrl_async.types import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class SentUpdate:
    """A version whose buckets are all there."""

    update: WeightUpdate
    gather_seconds: float
    send_seconds: float

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.update.version


class VersionSlots:
    """Holds at most three updates, each with its files: one complete, one being loaded, one served.

    A run sends no version before the one before it is loaded: it has two of these at most, and only what is served is replaced.
    """

    def __init__(self) -> None:
        self._complete: SentUpdate | None = None
        self._loading: SentUpdate | None = None
        self._serving: WeightUpdate | None = None
        self.serving_version: int | None = None
        """What engines serve; None before the first."""

    @property
    def serving(self) -> WeightUpdate | None:
        """What engines serve, where its files are still there."""
        return self._serving

    @property
    def is_bare(self) -> bool:
        """Engines serve a version whose files are gone."""
        return self.serving_version is not None and self._serving is None

    @property
    def is_settled(self) -> bool:
        """Nothing waits to be loaded, nothing is being loaded."""
        return self._complete is None and self._loading is None

    def arrived(self, sent: SentUpdate) -> WeightUpdate | None:
        """Every bucket of a version is there. Returns what nobody will load any more, if anything."""
        before, self._complete = self._complete, sent
        if before is None:
            return None
        if before.version > sent.version:
            self._complete, before = before, sent
        return before.update

    def take(self) -> SentUpdate | None:
        """Begin to load the newest complete version; None where there is none. Nothing may be loading."""
        assert self._loading is None, "a version is being loaded"
        self._loading, self._complete = self._complete, None
        return self._loading

    def loaded(self) -> WeightUpdate | None:
        """What was taken is served everywhere. Returns the one before."""
        assert self._loading is not None, "nothing was being loaded"
        before, self._serving = self._serving, self._loading.update
        self.serving_version, self._loading = self._loading.version, None
        return before

    def put_back(self) -> WeightUpdate | None:
        """What was taken is to be loaded again, unless a newer one is complete. Returns it in that case."""
        assert self._loading is not None, "nothing was being loaded"
        failed, self._loading = self._loading, None
        return self.arrived(failed)

    def given_up(self) -> WeightUpdate | None:
        """What was taken is not served; returns it. Idempotent."""
        failed, self._loading = self._loading, None
        return None if failed is None else failed.update

    def let_go(self) -> WeightUpdate | None:
        """Keep no files of what is served: the next version is to take their place. Returns it."""
        before, self._serving = self._serving, None
        return before

    def clear(self) -> list[WeightUpdate]:
        """Everything there is, to be thrown away."""
        updates = [self.let_go(), self.given_up(), self._complete.update if self._complete is not None else None]
        self._complete = None
        return [update for update in updates if update is not None]


NUM_COPIES = {True: 2, False: 1}
"""With ``weight_sync.double_buffer``: one served (an engine that comes up, or goes back, loads it), and the next, which arrives and is
then loaded. A run sends no version before the one before it is loaded, so that there is never a third."""


def require_room(directory: Path, num_bytes: int, *, double_buffer: bool) -> None:
    """Raise ``ConfigError`` unless that many versions of ``num_bytes`` fit into the file system of ``directory``."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    status = os.statvfs(place)
    num_free = status.f_bavail * status.f_frsize
    needed = NUM_COPIES[double_buffer] * num_bytes
    if needed <= num_free:
        return
    found = f"{_mib(needed)} are needed in {place}, {_mib(num_free)} are free"
    room = "make room there (a container's --shm-size), or publish smaller weights (policy.dtype=bfloat16)"
    if double_buffer:
        raise ConfigError(
            f"weight_sync.double_buffer must be false, got true: {NUM_COPIES[True]} versions of the weights do not fit ({found}); "
            f"with false {_mib(num_bytes)} do, or {room}"
        )
    raise ConfigError(
        f"the weights do not fit into shared memory, even with weight_sync.double_buffer=false: {found}; {room}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
