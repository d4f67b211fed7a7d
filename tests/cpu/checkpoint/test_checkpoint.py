"""Checkpoints: complete or not there at all, whatever the moment of a kill (contract 7)."""

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.checkpoint import checkpointer as checkpoint_module
from skyrl_async.checkpoint import columns_file
from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState, read_state
from skyrl_async.checkpoint.columns_file import ColumnsWriter, read_columns, with_columns
from skyrl_async.checkpoint.files import write_json_list, write_manifest
from skyrl_async.errors import CheckpointError, WorkerDiedError
from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.rollout.group_state import RunningGroup, SampleState
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import Group, Trajectory
from tests.patience import PATIENCE_S


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
    latest = Checkpointer(tmp_path, max_to_keep=0).usable().path
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
    assert mark_of(Checkpointer(tmp_path, max_to_keep=1).usable().path) in ("3", "4")


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


class CutOffPolicy(FilesPolicy):
    """Its first save is cut off, which its ranks do not learn of: they go on until it is done, and make the next call then."""

    def __init__(self) -> None:
        super().__init__("new")
        self.is_saving = asyncio.Event()
        self.cut_off: Path | None = None

    async def save(self, directory: Path) -> None:
        if self.cut_off is None:
            self.cut_off = directory
            self.is_saving.set()
            await asyncio.Event().wait()
        else:
            (self.cut_off / "rank-0").mkdir(parents=True)
            (self.cut_off / "rank-0" / "late").write_text("old")
            await super().save(directory)


async def test_ranks_that_still_write_a_checkpoint_that_was_cut_off_write_into_no_other(tmp_path: Path) -> None:
    writer, policy = checkpointer(tmp_path), CutOffPolicy()
    cut_off = asyncio.ensure_future(writer.write(policy, state(2)))
    await policy.is_saving.wait()
    cut_off.cancel()
    await asyncio.wait([cut_off])
    written = await writer.write(policy, state(2))
    assert mark_of(written) == "new"
    assert names_in(written / "policy" / "rank-0") == ["weights"]
    assert names_in(tmp_path) == ["global_step_2", "latest_ckpt_global_step.txt"]


async def test_a_pointer_to_a_checkpoint_that_was_deleted_is_an_error(tmp_path: Path) -> None:
    shutil.rmtree(await write(tmp_path, 3))
    with pytest.raises(CheckpointError, match="names global_step_3, which is not there"):
        Checkpointer(tmp_path, max_to_keep=0).usable()


async def test_a_checkpoint_whose_pointer_was_never_written_is_the_latest(tmp_path: Path) -> None:
    for step in (3, 12):
        await write(tmp_path, step, str(step))
    (tmp_path / checkpoint_module.LATEST).unlink()
    assert mark_of(Checkpointer(tmp_path, max_to_keep=0).usable().path) == "12"
    assert Checkpointer(tmp_path / "empty", max_to_keep=0).usable() is None


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


def open_groups() -> TrainerState:
    """A finished group and a running one, with every kind of value that a checkpoint holds."""
    row = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2, 3),
        loss_mask=(1, 0),
        logprobs=(-0.5, 0.0),
        versions=(0, -1),
        reward=1,
        metrics={"calls": 2.0},
        old_logprobs=(-0.25, 0.0),
        old_version=1,
    )
    running = RunningGroup(
        epoch=0,
        uid="b",
        admission_index=1,
        scheduled_version=0,
        generation_seconds=0.5,
        num_samples=2,
        sampling={"max_tokens": 4},
        samples={0: SampleState(rows=(row,), num_tokens=1), 1: SampleState(state={"turn": None}, num_tokens=3)},
    )
    return TrainerState(
        step=1,
        next_admission_index=2,
        dataloader={},
        totals=asdict(RunTotals(filtered_by={"0": 1}, pauses=[0.5], reward_before=0.25)),
        groups=(Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,)),),
        running=(running,),
        kl_coef=0.1,
        filtered_in_a_row={"0": 1},
    )


def changed(value: Any) -> Iterator[Any]:
    """The JSON with something else in one place, or without it, for every place."""
    yield from ("text", -1, 1.5, None, [], {}, ["text"], {"unknown": 0})
    if isinstance(value, dict):
        yield value | {"unknown": 0}
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        rest = value.copy()
        del rest[key]
        yield rest
        for inner in changed(value[key]):
            rest = value.copy()
            rest[key] = inner
            yield rest


def rewritten(path: Path, name: str, content: str) -> None:
    """As if it had been written so."""
    (path / name).write_text(content)
    (path / "manifest.json").unlink()
    write_manifest(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer_state.json", "groups.json", "running_groups.json"])
async def test_a_checkpoint_with_anything_else_in_any_place_is_read_or_refused_by_its_file(
    tmp_path: Path, name: str
) -> None:
    path = await checkpointer(tmp_path).write(FilesPolicy(""), open_groups())
    assert read_state(path) == open_groups()
    refused = []
    for content in changed(json.loads((path / name).read_text())):
        rewritten(path, name, json.dumps(content))
        try:
            read_state(path)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 100 and all(name in reason or "has format" in reason for reason in refused)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("trainer_state.json", {"colour": 1, "size": 2}, "colour is not known to this version"),
        ("trainer_state.json", {"step": "four"}, r"step is 'four': Input should be a valid integer.*"),
        ("trainer_state.json", {"totals": {"colour": 1}}, "totals.colour is not known to this version"),
        ("groups.json", {"colour": 1}, r"\[0\].colour is not known to this version"),
        ("groups.json", {"trajectories": [{"reward": 1.0}]}, r"\[0\].trajectories\[0\].prompt_token_ids is missing"),
        ("running_groups.json", {"samples": {"0": {"rows": 7}}}, r"\[0\].samples.0.rows is 7: .*"),
        (
            "running_groups.json",
            {"samples": {"one": {}}},
            r"\[0\].samples.one.* is 'one': Input should be a valid integer.*",
        ),
    ],
)
async def test_a_checkpoint_of_another_version_is_refused_by_field_and_the_one_before_it_is_used(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    await write(tmp_path, 0)
    path = await checkpointer(tmp_path).write(FilesPolicy(""), open_groups())
    content = json.loads((path / name).read_text())
    (content[0] if isinstance(content, list) else content).update(change)
    rewritten(path, name, json.dumps(content))
    with pytest.raises(CheckpointError, match=f"global_step_1 cannot be used: in {name} {said}; resume from another"):
        read_state(path)
    used = checkpointer(tmp_path).usable()
    assert used is not None and used.path.name == "global_step_0"


@pytest.mark.parametrize("content", ["{", "", "[" * 100_000, "no JSON"], ids=["cut off", "empty", "deep", "text"])
async def test_a_file_that_was_never_json_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = await checkpointer(tmp_path).write(FilesPolicy(""), open_groups())
    rewritten(path, "groups.json", content)
    with pytest.raises(CheckpointError, match="groups.json is not JSON .*; resume from another one"):
        read_state(path)


WRITTEN = (
    "columns.arrow",
    "groups.json",
    "manifest.json",
    "policy/rank-0/weights",
    "running_groups.json",
    "trainer_state.json",
)


def damage(file: Path, how: str) -> None:
    """Cut a file off, change a byte of it, or take it away."""
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "a byte":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        cut = random.Random(how).randrange(len(content))
        file.write_bytes(content[: {"empty": 0, "all but the last byte": len(content) - 1}.get(how, cut)])


def checkpointer(directory: Path) -> Checkpointer:
    return Checkpointer(directory, max_to_keep=0)


@pytest.mark.parametrize("how", ["missing", "empty", "all but the last byte", "cut 1", "cut 2", "cut 3", "a byte"])
@pytest.mark.parametrize("name", WRITTEN)
async def test_contract_7_a_checkpoint_damaged_in_any_file_is_refused_by_name_and_the_one_before_it_is_used(
    tmp_path: Path, name: str, how: str
) -> None:
    for step in (2, 4):
        await write(tmp_path, step, f"weights of step {step}")
    newest = tmp_path / "global_step_4"
    assert sorted(str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()) == sorted(WRITTEN)
    damage(newest / name, how)
    with pytest.raises(CheckpointError, match="incomplete|damaged|has format") as refused:
        read_state(newest)
    if "manifest" not in name and "format" not in str(refused.value):
        assert name in str(refused.value)
    used = checkpointer(tmp_path).usable()
    assert used is not None and used.path.name == "global_step_2" and used.state.step == 2
    assert used.refused == (str(refused.value),)


@pytest.mark.parametrize("num_files", range(len(WRITTEN)))
@pytest.mark.parametrize("is_reversed", [False, True])
async def test_contract_7_a_checkpoint_cut_off_at_any_file_boundary_is_refused(
    tmp_path: Path, num_files: int, is_reversed: bool
) -> None:
    whole = await write(tmp_path / "there", 4, "weights")
    copy = tmp_path / "here" / whole.name
    copy.mkdir(parents=True)
    for name in sorted(WRITTEN, reverse=is_reversed)[:num_files]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / name, copy / name)
    with pytest.raises(CheckpointError, match="is incomplete: .* is missing"):
        read_state(copy)
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be used: .*global_step_4 is incomplete"):
        checkpointer(copy.parent).usable()


columns = st.lists(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9).map(lambda values: np.array(values, dtype=np.int32))
    | st.lists(st.floats(width=32, allow_nan=False), max_size=9).map(lambda values: np.array(values, dtype=np.float32))
    | st.lists(st.booleans(), max_size=9).map(lambda values: np.array(values, dtype=bool)),
    max_size=9,
)


@given(columns=columns)
def test_columns_come_back_as_they_were_written_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, columns: list[np.ndarray]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_file, "_PIECE_COLUMNS", 4)
        with ColumnsWriter(directory / "columns.arrow") as writer:
            write_json_list(directory / "value.json", [{"at": [column]} for column in columns], writer)
    read = with_columns(json.loads((directory / "value.json").read_text()), read_columns(directory / "columns.arrow"))
    for found, column in zip(read, columns, strict=True):
        assert found["at"][0].dtype == column.dtype and np.array_equal(found["at"][0], column)
        assert not found["at"][0].flags.writeable


async def test_other_programs_read_the_columns_and_a_token_takes_its_bytes_only(tmp_path: Path) -> None:
    (group,) = open_groups().groups
    long = replace(
        group.trajectories[0],
        response_token_ids=np.arange(100_000),
        loss_mask=np.ones(100_000, dtype=bool),
        logprobs=np.linspace(-3, 0, 100_000),
        versions=np.arange(100_000) // 30_000,
        old_logprobs=None,
    )
    finished = replace(open_groups(), groups=(replace(group, trajectories=(long,) * 4),), running=())
    path = await checkpointer(tmp_path).write(FilesPolicy(""), finished)
    assert read_state(path).groups == finished.groups
    assert sum(file.stat().st_size for file in path.glob("*.*")) < 9 * 400_000
    table = pyarrow.ipc.open_file(path / "columns.arrow").read_all()
    assert table.column("int32")[1].as_py() == list(range(100_000))


async def test_a_row_whose_columns_differ_in_length_is_refused(tmp_path: Path) -> None:
    path = await checkpointer(tmp_path).write(FilesPolicy(""), open_groups())
    groups = json.loads((path / "groups.json").read_text())
    row = groups[0]["trajectories"][0]
    row["logprobs"] = row["prompt_token_ids"]
    rewritten(path, "groups.json", json.dumps(groups))
    with pytest.raises(
        CheckpointError, match=r"in groups.json .*trajectory.logprobs has 1 entries for 2 response tokens"
    ):
        read_state(path)


async def test_when_no_checkpoint_is_whole_all_are_named(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (await write(tmp_path, step) / "groups.json").unlink()
    shutil.rmtree(tmp_path / "global_step_6")
    with pytest.raises(CheckpointError, match=r"names global_step_6, which is not there; .*step_4 is.*step_2 is"):
        checkpointer(tmp_path).usable()
    assert checkpointer(tmp_path / "empty").usable() is None


async def test_of_checkpoints_that_are_whole_the_one_pointed_at_is_used_and_none_is_said_to_be_refused(
    tmp_path: Path,
) -> None:
    for step in (2, 12, 4):
        await write(tmp_path, step)
    used = checkpointer(tmp_path).usable()
    assert used is not None and used.path.name == "global_step_4" and used.refused == ()


class FullDiskPolicy(FilesPolicy):
    """Some of its files lie on a device that is always full: what is written there fails in the kernel."""

    def __init__(self, *full: str) -> None:
        super().__init__("new")
        self.full = full

    async def save(self, directory: Path) -> None:
        for name in self.full:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to("/dev/full")
        (directory / "rank-0").mkdir(parents=True, exist_ok=True)
        (directory / "rank-0" / "weights").write_text(self.mark)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@pytest.mark.parametrize(
    "full",
    ["rank-0/weights", *(f"../{name}" for name in WRITTEN if "/" not in name)],
    ids=lambda name: name,
)
@pytest.mark.parametrize("step", [2, 4], ids=["the same step again", "the next step"])
async def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_of_the_new_one(
    tmp_path: Path, full: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    await write(tmp_path, 2, "old")
    writer = checkpointer(tmp_path)
    assert await writer.try_write(FullDiskPolicy(full), state(step)) is None
    assert names_in(tmp_path) == ["global_step_2", "latest_ckpt_global_step.txt"]
    used = writer.usable()
    assert used is not None and mark_of(used.path) == "old"
    assert writer.num_failures == 1 and "No space left on device" in str(writer.failure)
    (warning,) = caplog.records
    assert f"the checkpoint of step {step} could not be written" in warning.getMessage()
    assert "No space left on device; earlier checkpoints stay" in warning.getMessage()

    assert await writer.try_write(FilesPolicy("new"), state(step)) == tmp_path / f"global_step_{step}"
    assert writer.failure is None and writer.num_failures == 1


async def test_a_critic_that_has_died_raises_its_error_and_leaves_nothing_of_the_new_checkpoint(tmp_path: Path) -> None:
    class DeadCritic(FilesPolicy):
        async def save(self, directory: Path) -> None:
            raise WorkerDiedError("critic-worker-0 died")

    await write(tmp_path, 2, "old")
    writer = checkpointer(tmp_path)
    with pytest.raises(WorkerDiedError, match="critic-worker-0 died"):
        await writer.try_write(FilesPolicy("new"), state(4), DeadCritic(""))  # type: ignore[arg-type]
    assert names_in(tmp_path) == ["global_step_2", "latest_ckpt_global_step.txt"]


FULL_TMPFS = """
import asyncio, sys
from pathlib import Path
from tests.cpu.checkpoint.test_checkpoint import FilesPolicy, checkpointer, names_in, state

async def main(directory):
    writer = checkpointer(directory)
    await writer.write(FilesPolicy("o" * 20_000), state(1))
    for num_bytes in (15_000, 40_000, 100_000):
        assert await writer.try_write(FilesPolicy("n" * num_bytes), state(2)) is None, num_bytes
        assert "No space left on device" in str(writer.failure), writer.failure
        assert names_in(directory) == ["global_step_1", "latest_ckpt_global_step.txt"]
        assert writer.usable().path.name == "global_step_1"
    assert await writer.try_write(FilesPolicy("n"), state(3)) is not None

asyncio.run(main(Path(sys.argv[1]) / "checkpoints"))
print("survived")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """In a mount of its own, which an unprivileged user may make where the kernel lets it."""
    mount = f"mount -t tmpfs -o size=80k tmpfs {tmp_path}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs of one's own")
    command = f"{mount} && exec {sys.executable} -c '{FULL_TMPFS}' {tmp_path}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([*unshare, command], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "survived\n", done.stderr


async def test_a_read_only_directory_is_a_failed_checkpoint_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = Checkpointer(tmp_path / "file" / "checkpoints", max_to_keep=0)
    assert await writer.try_write(FilesPolicy(""), state(1)) is None
    assert os.strerror(errno.ENOTDIR) in str(writer.failure)


async def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time is one that waits for the loop here: on the loop it would wait for ever."""
    turned, main_thread = threading.Event(), threading.get_ident()
    fsync, threads = os.fsync, set()

    def slow(handle: int) -> None:
        threads.add(threading.get_ident())
        assert turned.wait(timeout=PATIENCE_S)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    writing = asyncio.ensure_future(write(tmp_path, 1, "weights"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(turned.set)
    assert mark_of(await writing) == "weights"
    assert main_thread not in threads and threads


async def test_a_checkpoint_that_is_given_up_leaves_no_name_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, cancelled = asyncio.Event(), threading.Event()
    loop, write_manifest = asyncio.get_running_loop(), checkpoint_module.write_manifest

    def slow(directory: Path, *, check: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(syncing.set)
        assert cancelled.wait(timeout=PATIENCE_S)
        write_manifest(directory, check=check)

    await write(tmp_path, 1, "old")
    monkeypatch.setattr(checkpoint_module, "write_manifest", slow)
    threads = ThreadPoolExecutor()
    writer = Checkpointer(tmp_path, max_to_keep=0, threads=threads)
    writing = asyncio.ensure_future(writer.write(FilesPolicy("new"), state(2)))
    await syncing.wait()
    writing.cancel()
    await asyncio.wait([writing])
    cancelled.set()
    threads.shutdown()
    assert writing.cancelled()
    assert mark_of(Checkpointer(tmp_path, max_to_keep=0).usable().path) == "old"
    checkpointer(tmp_path).tidy()
    assert names_in(tmp_path) == ["global_step_1", "latest_ckpt_global_step.txt"]
