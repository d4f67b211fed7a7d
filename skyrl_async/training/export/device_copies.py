"""A rank's copies of what is published, on its own device: engines that run there too load them without a way over the bus.

    gathered tensors ──taking──> (also to staging) ... copies ──share──> handles ──> engines load ──> give_back

Flows in: full tensors under their Hugging Face names, as they are gathered. Flows out: handles of their copies, in the dtype that is
served. There are two sets at most: the newest, and one that engines may be reading. Knows neither models nor engines.
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
    """``taking`` and the others may be called from different threads.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._newest: tuple[int, Copies] | None = None
        self._shared: Copies = {}
        self._turn = threading.Lock()

    def taking(
        self, version: int, parameters: Iterable[tuple[str, Tensor]], *, serve_dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Hand on ``parameters``, each after it was copied; the copies count when the last was handed on.

        Where the device has no room for all, none is kept, and a warning says so: engines load the published file then.
        """
        with self._turn:
            self._let_go_of_newest()
        copies: Copies = {}
        has_room, is_whole = True, False
        try:
            for name, tensor in parameters:
                if has_room:
                    has_room = self._copy(version, name, tensor, published_dtype(tensor, serve_dtype), copies)
                yield name, tensor
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            is_whole = has_room
        finally:
            if not is_whole:
                _close(copies)
        if is_whole:
            with self._turn:
                self._newest = version, copies

    def _copy(self, version: int, name: str, tensor: Tensor, dtype: torch.dtype, copies: Copies) -> bool:
        """Into ``copies``; False where there was no room."""
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
        """Name -> handle of every copy of ``version``, which stay as they are until ``give_back``; none where there are no copies of it."""
        with self._turn:
            if self._newest is None or self._newest[0] != version:
                return {}
            _close(self._shared)
            (_, self._shared), self._newest = self._newest, None
            try:
                return {name: copy.handle() for name, copy in self._shared.items()}
            except RuntimeError as error:  # such as of memory that CUDA gives no handle of (expandable segments)
                logger.warning("version %d cannot be shared: %s; engines load it from shared memory", version, error)
                _close(self._shared)
                return {}

    def close(self) -> None:
        """Give everything back."""
        self.give_back()
        with self._turn:
            self._let_go_of_newest()

    def give_back(self) -> None:
        """Nobody reads what was shared any more. Idempotent."""
        with self._turn:
            _close(self._shared)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    @property
    def key(self) -> str:
        """Of the device, for whoever asks whether it has the same."""
        return device_key(self._device)

    def _let_go_of_newest(self) -> None:
        if self._newest is not None:
            _close(self._newest[1])
        self._newest = None


def _close(copies: Copies) -> None:
    while copies:
        copies.popitem()[1].close()
