"""Writes and reads a run's checkpoints: complete or not there at all (contract 7).

    <run>/checkpoints/global_step_40/{policy/, trainer_state.json, groups.json, manifest.json}
    <run>/checkpoints/latest_ckpt_global_step.txt        written last

Flows in: the policy and the trainer's state as JSON. Flows out: directories that appear by one rename, after everything in them
was synced to disk. Does not know what the state means. A kill at any moment leaves every checkpoint that was there: one that is
written again is moved aside until its successor is in place, and moved back by who looks for it first.
"""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_async.errors import CheckpointError
from skyrl_async.training.protocol import Policy
from skyrl_async.types import Group, Trajectory

logger = logging.getLogger(__name__)

FORMAT = 2
LATEST = "latest_ckpt_global_step.txt"
_PREFIX = "global_step_"
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the trainer needs to go on."""

    step: int
    """Completed optimizer steps."""
    next_admission_index: int
    """Groups admitted so far."""
    dataloader: dict[str, Any]
    """State of the dataloader and its ledger."""
    groups: tuple[Group, ...]
    """Finished groups that are not trained yet, oldest admitted first."""
    totals: dict[str, Any]
    """Running totals that the summary reports over the whole run."""


class Checkpointer:
    """The checkpoints of one run.

    Args:
        directory: ``<run>/checkpoints``.
        max_to_keep: older ones are deleted; 0 keeps all.
    """

    def __init__(self, directory: Path, *, max_to_keep: int) -> None:
        self._directory = directory
        self._max_to_keep = max_to_keep

    async def write(self, policy: Policy, state: TrainerState) -> Path:
        """Write a checkpoint, move it into place, point ``latest`` at it, and delete what is too old."""
        self._directory.mkdir(parents=True, exist_ok=True)
        _sync(self._directory.parent)
        self._tidy()
        partial = self._directory / f"{_PARTIAL}{_PREFIX}{state.step}"
        partial.mkdir()
        await policy.save(partial / "policy")
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "groups"}
        _write_json(partial / "trainer_state.json", {"format": FORMAT, **fields})
        _write_json(partial / "groups.json", [dataclasses.asdict(group) for group in state.groups])
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        _write_json(partial / "manifest.json", {str(p.relative_to(partial)): p.stat().st_size for p in files})
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        final = self._move_into_place(partial)
        _write_text(self._directory / LATEST, str(state.step))
        self._delete_old(state.step)
        return final

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None. Raises ``CheckpointError`` when the pointer names one that is gone."""
        self._restore_replaced()
        pointer = self._directory / LATEST
        if not pointer.exists():
            steps = self._steps()
            return self._path(steps[-1]) if steps else None
        path = self._directory / f"{_PREFIX}{pointer.read_text().strip()}"
        if not path.is_dir():
            raise CheckpointError(f"{pointer} names {path.name}, which is not there; use trainer.resume_mode=from_path")
        return path

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step}"

    def _steps(self) -> list[int]:
        """Of the checkpoints there are, ascending."""
        names = [p.name.removeprefix(_PREFIX) for p in self._directory.glob(f"{_PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def _move_into_place(self, partial: Path) -> Path:
        """Rename to the final name; one of that name is kept aside until then."""
        final = self._directory / partial.name.removeprefix(_PARTIAL)
        replaced = self._directory / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _sync(self._directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _restore_replaced(self) -> None:
        """Give back its name to a checkpoint whose successor did not come into place."""
        for replaced in self._directory.glob(f"{_REPLACED}*"):
            final = self._directory / replaced.name.removeprefix(_REPLACED)
            if not final.exists():
                replaced.rename(final)

    def _tidy(self) -> None:
        """Remove what a killed run left half done."""
        self._restore_replaced()
        for pattern in (f"{_PARTIAL}{_PREFIX}*", f"{_REPLACED}*"):
            for left in self._directory.glob(pattern):
                shutil.rmtree(left)

    def _delete_old(self, newest: int) -> None:
        if not self._max_to_keep:
            return
        for step in [s for s in self._steps() if s <= newest][: -self._max_to_keep]:
            doomed = self._path(step)
            shutil.rmtree(doomed.rename(doomed.with_name(f"{_PARTIAL}{doomed.name}")))


def read_state(path: Path) -> TrainerState:
    """Read a checkpoint's trainer state, after checking that every file is there in its size.

    Raises ``CheckpointError`` naming what is missing, or the format when it is not this one.
    """
    manifest = _read_json(path, "manifest.json")
    for name, size in manifest.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: {name} is missing; resume from another one")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, expected {size}"
            )
    state = _read_json(path, "trainer_state.json")
    if (found := state.pop("format", None)) != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {found}, expected {FORMAT}: it was written by another version of skyrl_async"
        )
    groups = tuple(_group(row) for row in _read_json(path, "groups.json"))
    return TrainerState(groups=groups, **state)


def _group(row: dict[str, Any]) -> Group:
    rows = tuple(_trajectory(fields) for fields in row["trajectories"])
    return Group(**{**row, "trajectories": rows})


def _trajectory(fields: dict[str, Any]) -> Trajectory:
    """JSON has no tuples."""
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in fields.items()}
    return Trajectory(**values)


def _read_json(path: Path, name: str) -> Any:
    try:
        return json.loads((path / name).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {name} is missing; resume from another one") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is not JSON ({error})") from error


def _write_json(path: Path, value: dict[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(value))


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(_PARTIAL + path.name)
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
