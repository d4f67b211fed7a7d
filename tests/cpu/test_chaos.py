"""Contracts 1, 2, 6, 7 and 8 under faults and Ctrl-C in virtual time. ``tests/chaos`` kills processes of real runs."""

import random
import shutil
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings

from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY, file_of, read_samples, write
from skyrl_async.record.table import schema
from tests.chaos import __main__ as command
from tests.chaos.attacked_run import AttackedRun, Role
from tests.chaos.audit import audit
from tests.chaos.machine import ARunUnderFaults, Tally, run_machine
from tests.chaos.virtual import SETTINGS, VirtualRun
from tests.chaos.virtual_attack import attack_virtually

TestARunUnderFaults = pytest.mark.slow(ARunUnderFaults.TestCase)
TestARunUnderFaults.settings = settings(stateful_step_count=12)


@pytest.mark.slow
def test_a_long_run_under_a_hundred_faults_loses_nothing(tmp_path: Path) -> None:
    attack = attack_virtually(tmp_path, num_faults=100, seed=0)
    found = attack.audit
    assert found.problems() == {}
    assert attack.survived == 100
    assert 0 < attack.saved < attack.interrupted, "Ctrl-C ends some at once"
    assert found.steps > 60
    assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) <= 3


@pytest.mark.slow
def test_a_fault_that_ends_the_run_is_not_counted_as_survived(tmp_path: Path) -> None:
    """No sample may fail, and the trainer is resumed after the one that does."""
    fragile = replace(SETTINGS, max_retries=0, max_failed_fraction=0.0)
    attack = attack_virtually(tmp_path, num_faults=30, seed=0, settings=fragile)
    assert 0 < attack.survived < 30
    assert attack.audit.lost == attack.audit.trained_twice == 0


@pytest.mark.slow
def test_the_state_machine_counts_its_faults_and_plays_the_same_for_a_seed() -> None:
    def played() -> Tally:
        run_machine(tally := Tally(), num_histories=2, num_events=4, random_seed=2)
        return tally

    tally = played()
    assert tally == played()
    assert tally.histories == 2 and tally.survived == tally.faults >= 2 * 4
    assert tally.interrupted > 0 and tally.found["lost"] == 0


@pytest.mark.parametrize(("survived", "lost", "is_kept"), [(3, 0, False), (2, 0, True), (3, 1, True), (None, 0, True)])
def test_an_attack_keeps_its_directory_and_says_where_unless_everything_was_survived(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    survived: int | None,
    lost: int,
    is_kept: bool,
) -> None:
    def attack(directory: Path, arguments: object) -> dict[str, Any]:
        (directory / "run.log").touch()
        if survived is None:
            raise RuntimeError("the run cannot be resumed")
        return {"kills": 3, "survived": survived, "lost": lost}

    monkeypatch.setattr(command, "_attack", attack)
    monkeypatch.setattr(sys, "argv", ["chaos", "--kills", "3"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError) if survived is None else nullcontext():
        assert command.main() == int(is_kept)
    kept = list(tmp_path.glob("*/run.log"))
    assert bool(kept) == is_kept
    assert [str(path.parent) in capsys.readouterr().err for path in kept] == [True] * is_kept


def test_the_audit_sees_what_is_wrong(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path)
    run.go_on(100.0)
    assert run.audit().problems() == {}
    run.close()
    rows = read_samples(tmp_path).to_pylist()
    whole = [row for row in rows if row["outcome"] == Outcome.TRAINED]

    def problems(rows: list[dict[str, Any]]) -> dict[str, int]:
        shutil.rmtree(tmp_path / DIRECTORY)
        write(file_of(tmp_path / DIRECTORY, 0, len(rows)), iter([pa.Table.from_pylist(rows, schema())]))
        uids = {f"p{i}" for i in range(SETTINGS.num_prompts)}
        return audit(tmp_path, uids=uids, mini_batch_size=3, max_staleness_steps=2).problems()

    first = whole[0]
    num_rows = SETTINGS.group_size
    group, others = whole[:num_rows], whole[num_rows:]
    (span,) = first["policy_versions"]
    assert problems(others) == {"lost": 1, "damaged_steps": 1}
    assert problems(whole + group) == {"trained_twice": 1, "damaged_steps": 1}
    assert problems([{**first, "policy_versions": [{**span, "version": 1}]}, *whole[1:]]) == {"torn_versions": 1}
    assert problems([{**row, "scheduled_version": row["scheduled_version"] - 3} for row in group] + others) == {
        "over_bound": 1
    }


@pytest.mark.slow
def test_an_end_that_ctrl_c_did_not_bring_and_what_it_leaves_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.attacked_run.shared_memory", lambda: tmp_path)
    refused = AttackedRun(["trainer.num_steps=0"], tmp_path / "run")
    refused.start()
    main = refused.find(Role.trainer, random.Random(0))
    assert main is not None
    (tmp_path / f"skyrl_async-{main.pid}-left").mkdir()
    ending = refused.ending()
    assert ending.exit_code == 2
    assert ending.problems() == {"wrong_exits": 1, "shared_memory_left": 1}
