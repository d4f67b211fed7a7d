"""An engine's worker that stops in the midst of a load, where a test can kill it: no clock decides how far it has come."""

import signal
from pathlib import Path

from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from skyrl_async.inference.vllm.weight_transfer import WorkerExtension

HALT = "halt"
"""Name of a FIFO beside the updates' directories. Where it is, a load stops after its first chunk, and says so there."""


class HaltingExtension(WorkerExtension):
    """Mixed into vLLM's worker in place of ``WorkerExtension``."""

    def load_update(self, chunks: list[dict[str, str]]) -> None:
        """The same, unless it is to halt; then the worker holds a part of either version until it is killed."""
        fifo = Path(chunks[0]["path"]).parent.parent / HALT
        if not fifo.exists():
            super().load_update(chunks)
            return
        initialize_layerwise_reload(self._model())
        self.load_chunk(chunks[0])
        fifo.write_text("one chunk is loaded")
        signal.pause()
