"""The state of a model and its optimizer on disk, in parts that any number of ranks read, whichever backend wrote them.

    directory/{state/ (torch's distributed checkpoint: model, optimizer), scheduler.pt}

Nested dictionaries of ``DTensor``s and tensors go to files and back. Knows nothing of which rank holds what.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from skyrl_async.errors import CheckpointError, TrainingError
from skyrl_async.training import rank_process

_STATE_DIRECTORY = "state"
_SCHEDULER_FILE = "scheduler.pt"


def save_state(value: Any, path: Path) -> None:
    """Like ``torch.save``, but on a full disk raises ``OSError`` with the system's reason, not "unexpected pos"."""
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getvalue())


def write_state(directory: Path, state: dict[str, Any], num_steps: int) -> None:
    """Write ``state`` and the number of completed steps under ``directory``, synced to disk. Collective.

    Raises ``OSError``; or, on every rank if one fails, torch's ``CheckpointException``, which is no ``Exception``.
    """
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory / _STATE_DIRECTORY, sync_files=True))
    if dist.get_rank() == 0:
        save_state({"num_completed_steps": num_steps}, directory / _SCHEDULER_FILE)


def read_state(directory: Path, state: dict[str, Any]) -> int:
    """Fill the tensors of ``state`` with those saved under the same names; returns the number of completed steps. Collective.

    Raises ``TrainingError`` if the state cannot be read.
    """
    path = directory / _STATE_DIRECTORY
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if rank_process.is_lost_peer(failure):
                raise failure from error
        reasons = "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in error.failures.items())
        raise TrainingError(f"cannot read {path}: {reasons}") from error
    return int(torch.load(directory / _SCHEDULER_FILE, weights_only=True)["num_completed_steps"])


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """A failure of the block on one rank becomes a ``CheckpointError`` on all. On return every rank has finished the block. Collective."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = error
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failure is None else _reason(failure, dist.get_rank()))
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if failed or failure is not None:
        raise CheckpointError(failed[0] if failed else repr(failure)) from failure


def _reason(failure: BaseException, rank: int) -> str | None:
    """The first line of the error beneath torch's, which every rank gets if one fails; None if another rank failed."""
    if isinstance(failure, CheckpointException):
        if rank not in failure.failures:
            return None
        failure, _ = failure.failures[rank]
    return f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else 'no reason'}"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint holds beside the parameters; equal on every rank."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer.detach()
