"""Copies of the published weights on a rank's own device, for engines that run there: they load them without a transfer over the bus.

    gathered tensors ──copying──> (also to staging)
                          └─> copies ──share──> handles ──> engines load ──> unshare

There are two sets at most: the newest, and the one that engines may be reading. Tensors are copied in the dtype that engines serve.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from skyrl_async.training.export.staging import published_dtype
from skyrl_async.weights.shared_tensor import SharedTensor, device_key

logger = logging.getLogger(__name__)

Copies = dict[str, SharedTensor]


class DeviceCopies:
    """The copies of one rank. Its methods may be called from different threads.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._newest: Copies = {}
        self._newest_version: int | None = None
        self._shared: Copies = {}
        self._lock = threading.Lock()

    def copying(
        self, version: int, parameters: Iterable[tuple[str, Tensor]], *, serve_dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Copy each of ``parameters`` and yield it. The copies are of use once the last is yielded.

        If the device has no room for all, logs a warning and keeps none: engines then load the published file.
        """
        with self._lock:
            self._drop_newest()
        copies: Copies = {}
        has_room, is_complete = True, False
        try:
            for name, tensor in parameters:
                if has_room:
                    has_room = self._copy(version, name, tensor, published_dtype(tensor, serve_dtype), copies)
                yield name, tensor
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            is_complete = has_room
        finally:
            if not is_complete:
                _close(copies)
        if is_complete:
            with self._lock:
                self._newest, self._newest_version = copies, version

    def _copy(self, version: int, name: str, tensor: Tensor, dtype: torch.dtype, copies: Copies) -> bool:
        """Add a copy to ``copies``; if there is no room, close them all and return False."""
        try:
            copies[name] = SharedTensor(tensor, dtype=dtype, device=self._device)
        except (torch.OutOfMemoryError, OSError) as error:
            logger.warning(
                "version %d is not shared on the device: after %d MiB of copies there was no room for another %d MiB (%s); engines load it "
                "from shared memory. Give engines less memory (engine.gpu_memory_utilization), or set weight_sync.transfer=shm",
                version,
                sum(copy.nbytes for copy in copies.values()) >> 20,
                tensor.nbytes >> 20,
                error,
            )
            _close(copies)
            return False
        return True

    def share(self, version: int) -> dict[str, dict[str, Any]]:
        """Name -> handle of every copy of ``version``, valid until ``unshare``; empty if there are no copies of it."""
        with self._lock:
            if self._newest_version != version:
                return {}
            _close(self._shared)
            self._shared, self._newest, self._newest_version = self._newest, {}, None
            try:
                return {name: copy.handle() for name, copy in self._shared.items()}
            except RuntimeError as error:  # CUDA has no handles for some memory, such as expandable segments
                logger.warning("version %d cannot be shared: %s; engines load it from shared memory", version, error)
                _close(self._shared)
                return {}

    def unshare(self) -> None:
        """Free the shared copies, once nobody reads them. Idempotent."""
        with self._lock:
            _close(self._shared)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Free all copies."""
        self.unshare()
        with self._lock:
            self._drop_newest()

    @property
    def key(self) -> str:
        """Names the device; equal in every process on it."""
        return device_key(self._device)

    def _drop_newest(self) -> None:
        _close(self._newest)
        self._newest_version = None


def _close(copies: Copies) -> None:
    while copies:
        copies.popitem()[1].close()
