"""The record of samples: every one at its end, exact, once, whatever kills the run or fills the disk."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.chat.turns import RowTurn
from skyrl_async.checkpoint.checkpointer import read_state
from skyrl_async.columns import repeated
from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.errors import CheckpointError
from skyrl_async.record import files
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.record.files import DIRECTORY, SamplesFile, files_in, find_samples, read_samples
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import ENVIRONMENT_VERSION, Group, SampleWork, ToolCall, Trajectory
from tests.patience import PATIENCE_S


def row(num_tokens: int = 3, **fields: Any) -> Trajectory:
    """Two prompt tokens and an answer, of which the second token is the environment's."""
    is_sampled = np.arange(num_tokens) != 1
    columns = {
        "loss_mask": is_sampled,
        "logprobs": np.where(is_sampled, -0.5, 0.0),
        "versions": np.where(is_sampled, 1, ENVIRONMENT_VERSION),
    }
    answer = np.arange(3, 3 + num_tokens)
    return Trajectory(prompt_token_ids=(1, 2), response_token_ids=answer, **{"reward": 1.0, **columns, **fields})


def ended(uid: str, step: int = 1, outcome: Outcome = Outcome.TRAINED, *rows: Trajectory, **fields: Any) -> EndedGroup:
    group = Group(uid=uid, admission_index=7, scheduled_version=0, trajectories=rows or (row(),))
    return EndedGroup(group=group, outcome=outcome, step=step, **fields)


def written(run_dir: Path, *groups: EndedGroup, **settings: Any) -> list[dict[str, Any]]:
    record = SampleRecord(run_dir / DIRECTORY, **settings)
    for group in groups:
        record.add(group)
    record.close()
    return read_samples(run_dir).to_pylist()


def test_advantages_of_tokens_are_a_column_and_their_mean_a_figure(tmp_path: Path) -> None:
    advantages = np.array([0.5, 9.0, -1.0], np.float32)
    group = replace(ended("a", 3).group, trajectories=(row(),), advantages=(advantages,))
    (found,) = written(tmp_path, EndedGroup(group=group, outcome=Outcome.TRAINED, step=3))
    assert found["loss_mask"] == [True, False, True]
    assert (found["advantages"], found["advantage"]) == ([0.5, 9.0, -1.0], -0.25)


def test_a_row_says_which_version_sampled_which_token_and_all_that_training_knew(tmp_path: Path) -> None:
    known = row(
        ref_logprobs=(-1.0, 0.0, -2.0),
        old_logprobs=(-0.5, 0.0, -0.25),
        old_version=1,
        shaped_reward=0.5,
        values=(0.5, 0.0, 1.0),
        token_weights=(0.25, 0.0, 2.0),
        token_rewards=(0.25, 0.0, 0.75),
    )
    group = replace(ended("a", 3).group, trajectories=(known,), advantages=(repeated(0.75, 3),))
    (found,) = written(tmp_path, EndedGroup(group=group, outcome=Outcome.TRAINED, step=3))
    assert (found["uid"], found["step"], found["scheduled_version"], found["staleness"]) == ("a", 3, 0, 2)
    assert (found["reward"], found["shaped_reward"], found["advantage"]) == (1.0, 0.5, 0.75)
    assert found["prompt_token_ids"] == [1, 2] and found["response_token_ids"] == [3, 4, 5]
    assert found["loss_mask"] == [True, False, True] and found["logprobs"] == [-0.5, 0.0, -0.5]
    assert found["ref_logprobs"] == [-1.0, 0.0, -2.0] and found["old_logprobs"] == [-0.5, 0.0, -0.25]
    assert found["values"] == [0.5, 0.0, 1.0] and found["token_weights"] == [0.25, 0.0, 2.0]
    assert found["token_rewards"] == [0.25, 0.0, 0.75]
    assert [span["version"] for span in found["policy_versions"]] == [1, ENVIRONMENT_VERSION, 1]
    assert found["advantages"] is None
    assert (found["outcome"], found["reason"], found["row"], found["branch"]) == ("trained", None, 0, 0)


def test_a_sample_has_its_own_seconds_and_engines_where_they_are_known(tmp_path: Path) -> None:
    work = {0: SampleWork(seconds=2.5, engines=("engine-1", "engine-0")), 2: SampleWork(seconds=1.0)}
    group = replace(ended("a", 3).group, trajectories=(row(), row()), generation_seconds=9.0, work=work)
    rows = written(tmp_path, EndedGroup(group=group, outcome=Outcome.FAILED, step=3, failed=[2], failure=OSError()))
    found = [(row["sample"], row["seconds"], row["engines"]) for row in rows]
    assert found == [(0, 2.5, ["engine-1", "engine-0"]), (1, 9.0, None), (2, 1.0, None)]


def test_calls_and_observations_are_columns_that_pandas_reads(tmp_path: Path) -> None:
    calls = (ToolCall(id="call_1", name="look", arguments='{"at": 1}'), ToolCall(name="stop", arguments=""))
    turns = [
        RowTurn("assistant", "I look", 0, 3, calls, engines=("engine-1",), engine_seconds=0.5),
        RowTurn("tool", "7", 3, 5, tool_call_id="call_1", name="look"),
    ]
    written(tmp_path, ended("a"), turns_of=lambda row: turns)
    first, second = pd.read_parquet(tmp_path / DIRECTORY)["turns"][0]
    assert (first["role"], list(first["engines"]), first["engine_seconds"]) == ("assistant", ["engine-1"], 0.5)
    assert list(first["tool_calls"]) == [
        {"id": "call_1", "name": "look", "arguments": '{"at": 1}'},
        {"id": None, "name": "stop", "arguments": None},
    ]
    assert (second["role"], second["name"], second["tool_call_id"]) == ("tool", "look", "call_1")
    assert not len(second["tool_calls"]) and first["tool_call_id"] is second["engines"] is None


def test_half_a_character_that_a_policy_or_an_error_spells_costs_no_row(tmp_path: Path) -> None:
    call = ToolCall(name="\ud800", arguments='{"at": "\ud83d"}')
    failed = ended("b", 1, Outcome.FAILED, failed=[1], failure=OSError("no \udcff here"))
    rows = written(tmp_path, ended("a"), failed, turns_of=lambda row: [RowTurn("assistant", "I look", 0, 3, (call,))])
    (spelled,) = rows[0]["turns"][0]["tool_calls"]
    assert (spelled["name"], json.loads(spelled["arguments"])) == ("\\ud800", {"at": "\ud83d"})
    assert rows[-1]["reason"] == "OSError: no \\udcff here"


def test_what_was_not_trained_says_why(tmp_path: Path) -> None:
    abandoned, cut = row(is_abandoned=True), row(is_overlong=True, loss_mask=(0, 0, 0))
    rows = written(
        tmp_path,
        ended("a", 1, Outcome.TRAINED, row(), abandoned, cut),
        ended("b", 1, Outcome.FILTERED, reason="all_one"),
        ended("c", 1, Outcome.FAILED, reason="other samples of its group failed", failed=[1], failure=OSError("gone")),
        ended("d", 0, Outcome.HELD_OUT),
    )
    assert [(found["uid"], found["sample"], found["outcome"], found["reason"]) for found in rows] == [
        ("a", 0, "trained", None),
        ("a", 1, "abandoned", "its harness ended without a reward"),
        ("a", 2, "masked", "a length limit cut it"),
        ("b", 0, "filtered", "all_one"),
        ("c", 0, "failed", "other samples of its group failed"),
        ("c", 1, "failed", "OSError: gone"),
        ("d", 0, "held_out", None),
    ]
    assert rows[-1]["admission_index"] is None and rows[-2]["response_token_ids"] is None


def test_branches_of_a_rewritten_history_are_rows_of_one_sample(tmp_path: Path) -> None:
    branches = [row(sample_index=0, weight=0.5), row(sample_index=0, weight=0.5), row(sample_index=1)]
    rows = written(tmp_path, ended("a", 1, Outcome.TRAINED, *branches))
    assert [(found["sample"], found["branch"], found["weight"]) for found in rows] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (1, 0, 1.0),
    ]


def test_of_so_many_groups_of_each_outcome_in_a_step_texts_and_tokens_are_kept_and_figures_of_all(
    tmp_path: Path,
) -> None:
    groups = [
        ended(f"{outcome}{i}", 1 + i // 3, outcome) for i in range(6) for outcome in (Outcome.TRAINED, Outcome.FILTERED)
    ]
    rows = written(tmp_path, *groups, groups_with_text=1)
    assert {found["uid"] for found in rows if found["response_token_ids"]} == {
        "trained0",
        "filtered0",
        "trained3",
        "filtered3",
    }
    assert len(rows) == 12 and all(found["reward"] == 1.0 for found in rows)


def test_parts_are_joined_and_pandas_reads_the_directory_as_it_is(tmp_path: Path) -> None:
    record = SampleRecord(tmp_path / DIRECTORY)
    for step in range(150):
        record.add(ended(f"p{step}", step))
        asyncio.run(record.flush())
    record.close()
    assert [file.kind for file in files_in(tmp_path / DIRECTORY)].count("") == 2
    frame = pd.read_parquet(tmp_path / DIRECTORY)
    assert frame["uid"].tolist() == [f"p{step}" for step in range(150)] == read_samples(tmp_path)["uid"].to_pylist()


def test_short_steps_share_a_file(tmp_path: Path) -> None:
    record = SampleRecord(tmp_path / DIRECTORY)
    record.add(ended("p0", 0))
    asyncio.run(record.flush())
    for step in range(1, 20):
        record.add(ended(f"p{step}", step))
        record.end_step()
    record.close()
    assert [(file.first, file.end) for file in files_in(tmp_path / DIRECTORY)] == [(0, 1), (1, 20)]


_WRITE_AND_JOIN = """
import asyncio, pathlib, sys
from skyrl_async.record import sample_record
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.types import Group, Trajectory

row = Trajectory(
    prompt_token_ids=(1,), response_token_ids=(2,), loss_mask=(True,), logprobs=(0.0,), versions=(0,), reward=1.0
)
group = Group(uid="p", admission_index=0, scheduled_version=0, trajectories=(row,))
record = sample_record.SampleRecord(pathlib.Path(sys.argv[1]))
sample_record._JOINED_PARTS = 2
imported = set(sys.modules)
for step in range(4):
    record.add(EndedGroup(group=group, outcome=Outcome.TRAINED, step=step))
    asyncio.run(record.flush())
print(*(set(sys.modules) - imported))
"""


@pytest.mark.slow
def test_all_that_writing_and_joining_import_is_imported_before_the_run(tmp_path: Path) -> None:
    script = [sys.executable, "-c", _WRITE_AND_JOIN, str(tmp_path)]
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout.split() == []
    assert len(files_in(tmp_path)) < 4


def recorded(run_dir: Path, num_steps: int, *, num_tokens: int, max_bytes: float) -> list[dict[str, Any]]:
    """What is left of a sample per step, of log-probs that cannot be compressed."""
    record = SampleRecord(run_dir / DIRECTORY, max_bytes=max_bytes)
    for step in range(num_steps):
        noise = np.random.default_rng(step).normal(size=num_tokens).astype(np.float32)
        record.add(ended(f"p{step}", step, Outcome.TRAINED, row(num_tokens, logprobs=noise)))
        asyncio.run(record.flush())
    assert sum(file.num_bytes for file in files_in(run_dir / DIRECTORY)) <= max_bytes
    return read_samples(run_dir).to_pylist()


@pytest.mark.slow
def test_past_the_limit_the_oldest_lose_their_texts_and_then_their_figures(tmp_path: Path, caplog: Any) -> None:
    thinned = recorded(tmp_path / "a", 200, num_tokens=3000, max_bytes=1.5e6)
    assert [found["uid"] for found in thinned] == [f"p{step}" for step in range(200)]
    has_tokens = [found["logprobs"] is not None for found in thinned]
    assert not has_tokens[0] and has_tokens[-1] and has_tokens == sorted(has_tokens)
    assert caplog.text.count("trainer.samples.max_gb") == 1
    steps = [found["step"] for found in recorded(tmp_path / "b", 100, num_tokens=3000, max_bytes=1e5)]
    assert steps == list(range(steps[0], 100)) and 0 < steps[0] < 98, "the figures of the oldest are gone"
    assert caplog.text.count("the oldest are deleted") == 1


def test_figures_outlast_texts_where_the_parts_alone_or_one_file_exceed_the_limit(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "parts", 30, num_tokens=3000, max_bytes=300e3)
    has_tokens = [found["logprobs"] is not None for found in rows]
    assert len(rows) == 30 and not has_tokens[0] and has_tokens[-1] and has_tokens == sorted(has_tokens)
    rows = recorded(tmp_path / "one", 4, num_tokens=30_000, max_bytes=100e3)
    assert len(rows) == 4 and rows[-1]["logprobs"] is None


async def test_the_limit_holds_after_somebody_has_deleted_old_files(tmp_path: Path, caplog: Any) -> None:
    record = SampleRecord(tmp_path / DIRECTORY, max_bytes=60_000)
    for step in range(1, 13):
        record.add(ended(f"p{step}", step, Outcome.TRAINED, row(1000)))
        await record.flush()
        if step == 4:
            files_in(tmp_path / DIRECTORY)[0].path.unlink()
    record.close()
    assert "cannot be written" not in caplog.text
    assert sum(file.num_bytes for file in files_in(tmp_path / DIRECTORY)) <= 60_000


@given(num_known=st.integers(0, 18), evaluated=st.integers(-1, 6), num_after=st.integers(0, 3), is_joined=st.booleans())
def test_a_resumed_run_keeps_the_rows_of_its_checkpoint_and_of_the_evaluations_that_ended(
    tmp_path_factory: pytest.TempPathFactory, num_known: int, evaluated: int, num_after: int, is_joined: bool
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    record = SampleRecord(run_dir / DIRECTORY)
    expected: list[tuple[str, int]] = []
    for step in range(6):
        record.add(ended(f"p{step}", step, Outcome.TRAINED, row(), row()))
        record.add(ended(f"e{step}", step, Outcome.HELD_OUT))
        expected += [(f"p{step}", number) for number in (3 * step, 3 * step + 1) if number < num_known]
        expected += [(f"e{step}", 3 * step + 2)] * (step <= evaluated)
        if not is_joined:
            asyncio.run(record.flush())
    record.close()
    SampleRecord(run_dir / DIRECTORY).close()
    again = SampleRecord(run_dir / DIRECTORY)
    again.restore(num_known, evaluated)
    assert read_samples(run_dir).num_rows == 18, "until it begins"
    again.begin()
    for number in range(num_after):
        again.add(ended(f"q{number}", 9))
    again.close()
    begin = max([num_known, *(number + 1 for _, number in expected)])
    expected += [(f"q{number}", begin + number) for number in range(num_after)]
    found = read_samples(run_dir)
    assert [*zip(found["uid"].to_pylist(), found["row"].to_pylist(), strict=True)] == expected


def test_a_record_that_lacks_rows_is_cut_at_the_same_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = SampleRecord(tmp_path / DIRECTORY)
    record.add(ended("p0"))
    with monkeypatch.context() as full:
        full.setattr(record._writer, "_max_bytes", 0)
        record.add(ended("p1"))
    record.add(ended("p2"))
    record.close()
    assert read_samples(tmp_path)["uid"].to_pylist() == ["p0", "p2"]
    again = SampleRecord(tmp_path / DIRECTORY)
    again.restore(2, -1)
    again.begin()
    again.close()
    assert read_samples(tmp_path)["uid"].to_pylist() == ["p0"]


class FailsSometimes(ModelledGenerator):
    """A fifth of the groups fail, and the rewards of a third do not differ."""

    async def generate(self, request: Any) -> tuple[Trajectory, ...]:
        rows = await super().generate(request)
        if int(request.prompt.uid[1:]) % 5 == 0 and not request.is_evaluation:
            request.sample_states.fail(0, rows[:1], "its tool is broken")
            raise RuntimeError("the tool is broken")
        is_equal = int(request.prompt.uid[1:]) % 3 == 0
        return tuple(replace(row, reward=0.0 if is_equal else float(i % 2)) for i, row in enumerate(rows))


SETTINGS = SimulationSettings(
    mini_batch_size=4,
    group_size=2,
    num_steps=8,
    num_prompts=100,
    mean_tokens=200.0,
    sample_full_batch=True,
    max_failed_fraction=0.9,
    on_failed_samples=OnFailedSamples.drop,
    num_eval_prompts=3,
    checkpoint_interval_steps=2,
)


def test_every_group_of_a_run_is_in_its_record_once_and_as_it_was_trained(tmp_path: Path) -> None:
    kept = KeptGroups()

    class Both(SampleRecord):
        def add(self, ended: EndedGroup) -> None:
            kept.add(ended)
            super().add(ended)

    record = Both(tmp_path / DIRECTORY)

    async def main() -> Simulation:
        simulation = Simulation(
            SETTINGS, checkpoint_dir=tmp_path / "checkpoints", generator_over=FailsSometimes, record=record
        )
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    record.close()
    rows = read_samples(tmp_path).to_pylist()
    groups = {outcome: {(r["epoch"], r["uid"]) for r in rows if r["outcome"] == outcome} for outcome in Outcome}
    ledger = simulation.dataloader.statistics()
    for outcome in (Outcome.TRAINED, Outcome.FILTERED, Outcome.FAILED):
        assert len(groups[outcome]) == ledger[f"{outcome}_total"] > 0
    assert len([r for r in rows if r["outcome"] == Outcome.HELD_OUT]) == 2 * 3
    trained = [(step, t) for step, group in kept.trained for t in group.trajectories]
    recorded = [r for r in rows if r["outcome"] == Outcome.TRAINED]
    for (step, trajectory), found in zip(trained, recorded, strict=True):
        assert (found["step"], found["reward"]) == (step, trajectory.reward)
        assert found["response_token_ids"] == trajectory.response_token_ids.tolist()
        assert found["policy_versions"] == trajectory.versions.to_json()
    failed = {
        (r["sample"], r["reason"], r["response_token_ids"] is None) for r in rows if r["outcome"] == Outcome.FAILED
    }
    assert failed == {(0, "its tool is broken", False), (1, "RuntimeError: the tool is broken", True)}
    newest = simulation.trainer.newest_checkpoint
    assert newest is not None and 0 < read_state(newest).num_recorded <= len(rows)


def test_a_full_disk_costs_no_run_and_rows_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    record = SampleRecord(tmp_path / DIRECTORY)
    with monkeypatch.context() as patched:
        patched.setattr(pq, "ParquetWriter", refuse)
        for step in range(3):
            record.add(ended(f"p{step}", step))
            asyncio.run(record.flush())
    assert caplog.text.count("No space left on device") == 1
    record.add(ended("p3", 3))
    record.close()
    assert read_samples(tmp_path)["uid"].to_pylist() == ["p0", "p1", "p2", "p3"]


def test_rows_with_more_columns_leave_room_in_memory_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("skyrl_async.record.sample_record._MAX_WAITING_BYTES", 150_000)
    columns = dict.fromkeys(("values", "token_weights", "ref_logprobs"), np.zeros(10_000, np.float32))
    for fields in ({}, columns):
        assert not caplog.messages
        SampleRecord(tmp_path / DIRECTORY).add(ended("p", 1, Outcome.TRAINED, row(10_000, **fields)))
    assert "samples are left out: the disk does not keep up with them" in caplog.text


def test_a_disk_that_hangs_costs_no_run_a_bounded_memory_and_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files that may be written next are pipes, which nobody reads: to open one blocks a thread for real."""
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._FLUSH_TIMEOUT_S", 0.2)
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("skyrl_async.record.sample_record._MAX_WAITING_BYTES", 20_000)
    record = SampleRecord(tmp_path / DIRECTORY)
    record.add(ended("p0"))
    asyncio.run(record.flush())
    pipes = [tmp_path / DIRECTORY / f".000000000001-{end:012}.part.writing" for end in range(2, 102)]
    for pipe in pipes:
        os.mkfifo(pipe)
    before = threading.active_count()

    async def take_steps() -> float:
        began = asyncio.get_running_loop().time()
        for step in range(1, 101):
            record.add(ended(f"p{step}", step))
            record.end_step()
            if step % 10 == 0:  # a checkpoint
                await record.flush()
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(take_steps()) < 2.0, "one checkpoint waits, and no later one"
    record.close()
    assert threading.active_count() <= before + 3
    assert caplog.text.count("the disk hangs, and the run goes on without them") == 1
    assert caplog.text.count("samples are left out: the disk does not keep up with them") == 1
    assert caplog.text.count("the last samples are not yet in") == 1 and str(tmp_path) in caplog.text
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._CLOSE_TIMEOUT_S", PATIENCE_S)
    readers = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in pipes]  # the disk is back
    record.close()
    for reader in readers:
        os.close(reader)
    for pipe in pipes:
        pipe.unlink(missing_ok=True)
    record.close()
    record.add(ended("p101", 101))
    record.close()
    uids = read_samples(tmp_path)["uid"].to_pylist()
    assert uids[:2] == ["p0", "p1"] and uids[-1] == "p101" and 10 < len(uids) < 30


def test_samples_that_cannot_be_split_into_turns_are_left_out_and_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(row: Trajectory) -> list[RowTurn]:
        if row.reward < 0:
            raise ValueError("unknown token")
        return []

    record = SampleRecord(tmp_path / DIRECTORY, turns_of=refuses)
    for step, reward in enumerate([1.0, -1.0, 1.0]):
        record.add(ended(f"p{step}", step, Outcome.TRAINED, row(reward=reward)))
        asyncio.run(record.flush())
    record.close()
    assert read_samples(tmp_path)["uid"].to_pylist() == ["p0", "p2"]
    assert "samples are left out" in caplog.text


WRITES = """
import asyncio, sys
from pathlib import Path
from tests.cpu.record.test_sample_record import ended
from skyrl_async.record.sample_record import SampleRecord
record = SampleRecord(Path(sys.argv[1]))
print("begun", flush=True)
for step in range(10**9):
    record.add(ended(f"p{step}", step))
    asyncio.run(record.flush())
    print(step, flush=True)
"""


def test_pandas_reads_the_directory_beside_a_file_that_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SampleRecord(tmp_path / DIRECTORY)
    record.add(ended("a"))
    asyncio.run(record.flush())
    found: list[list[str]] = []

    def write_half(writer: pq.ParquetWriter, table: pa.Table) -> None:
        assert len(list((tmp_path / DIRECTORY).iterdir())) == 2
        found.append(pd.read_parquet(tmp_path / DIRECTORY)["uid"].tolist())

    monkeypatch.setattr(pq.ParquetWriter, "write_table", write_half)
    record.add(ended("b"))
    record.close()
    assert found == [["a"]]


@pytest.mark.parametrize("hidden", [".", ""], ids=["by this version", "by an older one"])
def test_what_a_killed_run_left_half_written_is_deleted(tmp_path: Path, hidden: str) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / f"{hidden}000000000001-000000000002.part.writing").touch()
    written(tmp_path, ended("a"))
    assert [path.suffix for path in (tmp_path / DIRECTORY).iterdir()] == [".parquet"]


@pytest.mark.slow
def test_kill_9_leaves_whole_files_and_every_row_that_was_flushed(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    with subprocess.Popen([sys.executable, "-c", WRITES, str(directory)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(100)]
        writer.kill()
        said += writer.stdout.readlines()
    last = max(int(line) for line in said if line.strip().isdigit())
    steps = read_samples(tmp_path)["step"].to_pylist()
    assert steps[: last + 1] == list(range(last + 1)) and len(steps) <= last + 2
    again = SampleRecord(directory)
    again.restore(last + 1, -1)
    again.begin()
    again.close()
    assert read_samples(tmp_path)["step"].to_pylist() == list(range(last + 1))
    assert all(path.suffix == ".parquet" for path in directory.iterdir()), "nothing half written is left"


@pytest.mark.parametrize(
    "read", [read_samples, lambda run_dir: find_samples(run_dir, "words", 10)], ids=["read", "find"]
)
def test_a_file_that_is_damaged_or_of_another_format_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    written(tmp_path, ended("a"))
    (file,) = files_in(tmp_path / DIRECTORY)
    older = read_samples(tmp_path)
    pd.DataFrame({"uid": ["a"]}).to_parquet(file.path)
    with pytest.raises(CheckpointError, match=r"written by another version .* uid \(large_string\)"):
        read(tmp_path)
    turns = pa.nulls(1, pa.list_(pa.struct({"role": pa.string(), "mood": pa.string()})))
    pq.write_table(older.set_column(older.schema.get_field_index("turns"), "turns", turns), file.path)
    with pytest.raises(CheckpointError, match=r"another version .* turns \(list<.*mood: string>>\)"):
        read(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=f"{file.path.name} is damaged"):
        read(tmp_path)


def test_words_are_found_while_the_run_joins_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = SampleRecord(tmp_path / DIRECTORY, turns_of=lambda row: [RowTurn("assistant", "some words", 2, 5)])
    for uid in "abc":
        record.add(ended(uid))
        asyncio.run(record.flush())
    record.close()
    search = files._rows_with

    def search_late(file: SamplesFile, words: str) -> list[int]:
        if len(parts := files_in(tmp_path / DIRECTORY)) > 1:
            files.join(parts)
        return search(file, words)

    monkeypatch.setattr(files, "_rows_with", search_late)
    assert find_samples(tmp_path, "words", 10) == [2, 1, 0]


def test_a_run_of_an_older_version_goes_on_and_what_its_files_lack_is_null(tmp_path: Path) -> None:
    written(tmp_path, ended("a", 1), ended("b", 2))
    (file,) = files_in(tmp_path / DIRECTORY)
    older = read_samples(tmp_path).drop_columns(["token_rewards"])
    turns = pa.array(
        [[{"role": "user", "text": "words"}]] * 2, pa.list_(pa.struct({"role": pa.string(), "text": pa.string()}))
    )
    pq.write_table(older.set_column(older.schema.get_field_index("turns"), "turns", turns), file.path)
    record = SampleRecord(tmp_path / DIRECTORY)
    record.restore(1, -1)  # "b" was trained after the checkpoint
    record.begin()
    record.add(ended("c", 2))
    record.close()
    found = read_samples(tmp_path, ["uid", "token_rewards", "turns"]).to_pylist()
    assert [(one["uid"], one["token_rewards"]) for one in found] == [("a", None), ("c", None)]
    assert found[0]["turns"][0]["text"] == "words" and found[0]["turns"][0]["asked_at"] is None
    assert find_samples(tmp_path, "words", 10) == [0]


def test_metrics_of_an_environment_are_json(tmp_path: Path) -> None:
    (found,) = written(tmp_path, ended("a", 1, Outcome.TRAINED, row(metrics={"tool_calls": 2.0})))
    assert json.loads(found["metrics"]) == {"tool_calls": 2.0}
