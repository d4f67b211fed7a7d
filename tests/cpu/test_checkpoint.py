"""Checkpoints: complete or not there at all, whatever the moment of a kill (contract 7)."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl_async import checkpoint as checkpoint_module
from skyrl_async.checkpoint import Checkpointer, TrainerState, read_state
from skyrl_async.errors import CheckpointError
from skyrl_async.simulator.models import ModelledPolicy


class FilesPolicy(ModelledPolicy):
    """Saves nested files with a mark in them."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    async def save(self, directory: Path) -> None:
        (directory / "rank-0").mkdir(parents=True)
        (directory / "rank-0" / "weights").write_text(self.mark)


def state(step: int) -> TrainerState:
    return TrainerState(step=step, next_admission_index=0, dataloader={}, groups=(), totals={})


async def write(directory: Path, step: int, mark: str = "", max_to_keep: int = 0) -> Path:
    return await Checkpointer(directory, max_to_keep=max_to_keep).write(FilesPolicy(mark), state(step))


def mark_of(path: Path | None) -> str:
    assert path is not None
    read_state(path)
    return (path / "policy" / "rank-0" / "weights").read_text()


def names_in(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


class Killed(BaseException):
    """The process is gone."""


class KilledAt:
    """Lets the first ``num_calls`` of what changes the disk happen, and is killed at the next."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def __call__(self, function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return function(*args, **kwargs)

        return call


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], pytest.MonkeyPatch]]:
    def arm(num_calls: int) -> pytest.MonkeyPatch:
        killing = KilledAt(num_calls)
        monkeypatch.setattr(Path, "rename", killing(Path.rename))
        monkeypatch.setattr(os, "replace", killing(os.replace))
        monkeypatch.setattr(shutil, "rmtree", killing(shutil.rmtree))
        return monkeypatch

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("num_calls", range(9))
async def test_contract_7_a_kill_at_any_moment_of_writing_a_step_again_leaves_it_whole(
    tmp_path: Path, killed_at: Callable[[int], pytest.MonkeyPatch], num_calls: int
) -> None:
    await write(tmp_path, 2, "old")
    patch = killed_at(num_calls)
    with suppress(Killed):
        await write(tmp_path, 2, "new")
    patch.undo()
    latest = Checkpointer(tmp_path, max_to_keep=0).latest()
    assert latest is not None and latest.name == "global_step_2"
    assert mark_of(latest) in ("old", "new")
    await write(tmp_path, 4, "next")
    assert names_in(tmp_path) == ["global_step_2", "global_step_4", "latest_ckpt_global_step.txt"]


@pytest.mark.parametrize("num_calls", range(9))
async def test_contract_7_a_kill_while_old_ones_are_deleted_leaves_only_whole_ones(
    tmp_path: Path, killed_at: Callable[[int], pytest.MonkeyPatch], num_calls: int
) -> None:
    for step in (1, 2, 3):
        await write(tmp_path, step, str(step))
    patch = killed_at(num_calls)
    with suppress(Killed):
        await write(tmp_path, 4, "4", max_to_keep=1)
    patch.undo()
    for name in names_in(tmp_path):
        if name.startswith("global_step_"):
            assert mark_of(tmp_path / name) == name.removeprefix("global_step_")
    assert mark_of(Checkpointer(tmp_path, max_to_keep=1).latest()) in ("3", "4")


async def test_contract_7_everything_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    unsynced: list[str] = []
    rename = Path.rename

    def checked(self: Path, target: Path) -> Path:
        unsynced.extend(str(p) for p in (self, *self.rglob("*")) if p.stat().st_ino not in synced)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", checked)
    path = await write(tmp_path / "run" / "checkpoints", 1)
    assert unsynced == []
    assert {p.stat().st_ino for p in (path.parent, path.parent.parent)} <= synced


async def test_what_a_killed_run_left_half_written_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".partial-global_step_7" / "policy").mkdir(parents=True)
    await write(tmp_path, 9)
    assert not (tmp_path / ".partial-global_step_7").exists()


async def test_a_pointer_to_a_checkpoint_that_was_deleted_is_an_error(tmp_path: Path) -> None:
    shutil.rmtree(await write(tmp_path, 3))
    with pytest.raises(CheckpointError, match="names global_step_3, which is not there"):
        Checkpointer(tmp_path, max_to_keep=0).latest()


async def test_a_checkpoint_whose_pointer_was_never_written_is_the_latest(tmp_path: Path) -> None:
    for step in (3, 12):
        await write(tmp_path, step, str(step))
    (tmp_path / checkpoint_module.LATEST).unlink()
    assert mark_of(Checkpointer(tmp_path, max_to_keep=0).latest()) == "12"
    assert Checkpointer(tmp_path / "empty", max_to_keep=0).latest() is None


async def test_a_directory_that_only_looks_like_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "global_step_1_backup").mkdir(parents=True)
    for step in (1, 2, 3):
        await write(tmp_path, step, max_to_keep=1)
    assert names_in(tmp_path)[:-1] == ["global_step_1_backup", "global_step_3"]


async def test_a_checkpoint_of_another_format_is_refused_by_both_numbers(tmp_path: Path) -> None:
    path = await write(tmp_path, 1)
    saved = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps({**saved, "format": 0}))
    with pytest.raises(CheckpointError, match=f"has format 0, expected {checkpoint_module.FORMAT}"):
        read_state(path)
