"""Whether the weights fit into shared memory, as often as a run holds them."""

import os
from pathlib import Path

from skyrl_async.errors import ConfigError


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
