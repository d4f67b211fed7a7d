"""What a rank's process has once: its default process group (gloo on CPU, NCCL beside it on CUDA) and its random state.

torch has one default group per process. Several single-rank policies in one process, as in tests, share it; the last to leave
destroys it.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

_num_members = 0
_destroy: Callable[[], None] = dist.destroy_process_group


def join(*, rank: int, num_ranks: int, store: dist.Store | None, device: torch.device, timeout_s: float) -> None:
    """Enter the default process group; the first to enter makes it.

    Args:
        rank: in [0, num_ranks).
        num_ranks: >= 1.
        store: the store where the ranks meet; None for a single rank.
        device: this rank's device.
        timeout_s: deadline of each collective call.
    """
    global _num_members
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore() if store is None else store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    assert dist.get_world_size() == num_ranks, "the default process group belongs to something else"
    _num_members += 1


def leave() -> None:
    """Undo one ``join``."""
    global _num_members
    _num_members -= 1
    if _num_members == 0 and dist.is_initialized():
        _destroy()


def destroy_by(destroy: Callable[[], None]) -> None:
    """Destroy groups by ``destroy`` from now on: a library that keeps state of the group brings its own."""
    global _destroy
    _destroy = destroy


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether a collective call failed because another rank, or the connection to it, is gone or does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("gloo/transport", "NCCL"))
    )


def seed_all(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def memory_bytes(device: torch.device) -> int:
    """Memory of a device, used or not; of the CPU, that of its machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def rng_state() -> dict[str, Any]:
    """The random state of this process as tensors and builtin values, so that it loads without unpickling code."""
    version, internal, gauss_next = random.getstate()
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [str(algorithm), [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
