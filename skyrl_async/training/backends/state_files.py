"""The state of a model and its optimizer on disk: in parts that any number of ranks read, whichever backend wrote them.

    directory/{state/ (torch's distributed checkpoint: model, optimizer), scheduler.pt}

Flows in: nested dictionaries of ``DTensor``s and tensors. Flows out: files, or the same tensors filled. ``torch.save`` to a path says
"unexpected pos" where a disk is full; this says so. Does not know who holds what.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler

from skyrl_async.errors import CheckpointError, TrainingError
from skyrl_async.training.backends import process_group

_STATE_DIRECTORY = "state"
_SCHEDULER_FILE = "scheduler.pt"


def save_state(value: Any, path: Path) -> None:
    """Like ``torch.save``. Raises ``OSError`` with the system's reason."""
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getvalue())


def write_state(directory: Path, state: dict[str, Any], scheduler: LRScheduler) -> None:
    """Write ``state`` and the scheduler under ``directory``, synced to disk. Collective.

    Raises ``OSError`` and, on every rank where one fails, torch's ``CheckpointException``, which is no ``Exception``.
    """
    writer = dcp.FileSystemWriter(directory / _STATE_DIRECTORY, sync_files=True)
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        save_state(scheduler.state_dict(), directory / _SCHEDULER_FILE)


def read_state(directory: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` with what is under the same names. Collective.

    Raises:
        CheckpointError: there is no such state: an older version wrote DeepSpeed's in another form.
        TrainingError: it cannot be read.
    """
    path = directory / _STATE_DIRECTORY
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {directory} has no {_STATE_DIRECTORY}/: an older version wrote it with training.backend=deepspeed; train on from "
            "an export (policy.path) with trainer.resume_mode=none"
        )
    with _reading(path):
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))


def read_scheduler(directory: Path, scheduler: LRScheduler) -> None:
    """Have the scheduler stand where it was saved."""
    scheduler.load_state_dict(torch.load(directory / _SCHEDULER_FILE, weights_only=True))


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """torch tells every rank when one fails, but by what is no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if process_group.is_lost_peer(failure):
                raise failure from error
        complaints = "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in error.failures.items())
        raise TrainingError(f"cannot read {directory}: {complaints}") from error
