"""Sinks for metrics beside ``metrics.jsonl``: Weights & Biases, and TensorBoard.

A resumed run continues its W&B run. The package wandb is an optional extra, imported when its sink is made. TensorBoard's event files are
written by tensorboard's own writer, which loads neither torch nor tensorflow.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from skyrl_async.errors import ConfigError
from skyrl_async.metrics.tracker import MAX_WAITING_BYTES
from skyrl_async.runtime.disk_writer import DiskWriter

_STEP = "trainer/step"


class WandbSink:
    """Logs to the W&B run that belongs to a run directory."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        """Start or continue the W&B run; the rules of the configuration have seen that the package is there.

        Raises ``ConfigError`` where W&B refuses, such as without a key.
        """
        import wandb

        identity = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, id=identity, dir=str(run_dir), config=dict(config), resume="allow"
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb must be false where Weights & Biases begins no run, got true: {error}; run wandb login first, or set "
                "WANDB_MODE=offline"
            ) from error
        # An evaluation that ran beside training is logged for a step already passed; W&B's own counter drops such rows.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        self._run.log({**values, _STEP: step})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class TensorBoardSink:
    """Writes TensorBoard event files under ``directory``, beside the event loop."""

    def __init__(self, directory: Path, resume_step: float | None = None) -> None:
        """Open a new event file. With ``resume_step``, TensorBoard hides the values of earlier files past that step."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventFileWriter(str(directory))
        self._resume_step = resume_step
        self._writer: DiskWriter[Event] = DiskWriter(
            directory, "TensorBoard values", self._write, size_of=Event.ByteSize, max_bytes=MAX_WAITING_BYTES
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step. Never waits."""
        if self._resume_step is not None and math.isfinite(self._resume_step):
            start = SessionLog(status=SessionLog.START)
            self._writer.add(Event(wall_time=time.time(), step=int(self._resume_step) + 1, session_log=start))
        self._resume_step = None
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.begin()

    def close(self) -> None:
        """Write out and close the event file; a disk that hangs is left."""
        if self._writer.close():
            self._file.close()

    def _write(self, events: list[Event]) -> None:
        while events:
            self._file.add_event(events[0])
            del events[0]
        self._file.flush()
