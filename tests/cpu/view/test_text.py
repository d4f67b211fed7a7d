"""Samples in a terminal."""

from pathlib import Path

import pytest

from skyrl_async.chat.turns import RowTurn
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.types import ToolCall, Trajectory
from skyrl_async.view.__main__ import main
from tests.cpu.record.test_sample_record import ended, row


def turns(row: Trajectory) -> list[RowTurn]:
    calls = (ToolCall(id="call_1", name="add", arguments='{"to": "\x1b[2J"}'), ToolCall(name="stop", arguments=""))
    return [
        RowTurn("user", "<|user|>What is 2+2?\n", 0, 2),
        RowTurn("assistant", "\x1b[2J4<script>\r\nDone", 2, 4, calls, engines=("engine-1",), engine_seconds=0.25),
        RowTurn("tool", "= 4", 4, 5, tool_call_id="call_1", name="add"),
    ]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    record = SampleRecord(tmp_path / DIRECTORY, turns_of=turns, groups_with_text=1)
    record.add(ended("sum-1", 3, Outcome.TRAINED, row(), row(reward=0.0, is_truncated=True)))
    record.add(ended("sum-2", 3, Outcome.TRAINED))
    record.add(ended("sum-1", 5, Outcome.FAILED, failed=[0], failure=OSError("gone")))
    record.close()
    return tmp_path


def test_a_prompt_is_shown_with_every_sample_turn_by_turn(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--text", "sum-1"]) == 0
    shown = capsys.readouterr().out
    assert "sum-1: epoch 0, step 3, scheduled at version 0\n" in shown
    assert "--- sample 0: trained, reward 1, 2 tokens of version 1, staleness 2\n[user] <|user|>What is 2+2?\n" in shown
    assert "--- sample 1: trained, reward 0, 2 tokens of version 1, staleness 2, truncated\n" in shown
    assert "sample 0: failed (OSError: gone)\n" in shown


def test_no_text_commands_the_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_dir), "--text", "sum-1"])
    shown = capsys.readouterr().out
    assert "[assistant] \\x1b[2J4<script>\\r\nDone\n" in shown and "\x1b" not in shown


def test_a_call_is_shown_as_a_call_and_its_result_as_its_tools(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run_dir), "--text", "sum-1"])
    shown = capsys.readouterr().out
    assert '  -> add({"to": "\\x1b[2J"}) call_1\n  -> stop()\n[tool add call_1] = 4\n' in shown


def test_a_text_that_was_not_kept_is_said_to_be_missing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--text", "sum-2"]) == 0
    assert "(text not kept)" in capsys.readouterr().out


def test_what_is_no_run_and_what_is_no_prompt_are_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir / "nowhere"), "--text", "sum-1"]) == 2
    assert "nowhere must be the directory of a run" in capsys.readouterr().err
    assert main([str(run_dir), "--text", "sum-3"]) == 2
    assert "has no sample of 'sum-3'; it has samples of 2 prompts, such as sum-" in capsys.readouterr().err
