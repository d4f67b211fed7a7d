"""An engine's worker that stops in the midst of a load, where a test can kill it: no clock decides how far it has come."""

import signal
from collections.abc import Mapping
from pathlib import Path

from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from skyrl_async.inference.vllm.weight_receiver import mapped_buckets
from skyrl_async.inference.vllm.weight_transfer import Handles, WorkerExtension

HALT = "halt"
"""Name of a FIFO beside the updates' directories. Where it is, a load stops after its first bucket, and says so there."""


class HaltingExtension(WorkerExtension):
    """Mixed into vLLM's worker in place of ``WorkerExtension``."""

    def load_update(self, path: str, load_bucket_bytes: int, shared: Mapping[str, Handles]) -> None:
        """The same, unless it is to halt; then the worker holds a part of either version until it is killed."""
        fifo = Path(path).parent.parent / HALT
        if not fifo.exists():
            super().load_update(path, load_bucket_bytes, shared)
            return
        initialize_layerwise_reload(self._model())
        self._model().load_weights(next(mapped_buckets(path, load_bucket_bytes)))
        fifo.write_text("one bucket is loaded")
        signal.pause()
