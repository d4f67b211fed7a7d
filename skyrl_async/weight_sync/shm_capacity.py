"""Whether the weights that a publish holds at once fit where they are put.

Flows in: a directory, the bytes of one version. Flows out: nothing, or ``ConfigError`` with the sizes and what to set.
"""

import os
from pathlib import Path

from skyrl_async.errors import ConfigError

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
