"""TensorBoard as a sink, through tensorboard's own event writer: neither torch nor tensorflow is loaded.

Flows in: a step and its values. Flows out: an event file.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardSink:
    """Writes scalars under ``directory``."""

    def __init__(self, directory: Path, resume_step: float | None = None) -> None:
        """Open a new event file; with ``resume_step``, its first values have TensorBoard hide what an earlier file says past that step."""
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory))
        self._resume_step = resume_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        if self._resume_step is not None and math.isfinite(self._resume_step):
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=int(self._resume_step) + 1, session_log=start))
        self._resume_step = None
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()
