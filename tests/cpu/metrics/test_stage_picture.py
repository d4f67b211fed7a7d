"""The picture of a run's stages, from its trace."""

from contextlib import closing
from pathlib import Path

import pytest

from skyrl_async.metrics.stage_picture import StageSpan, main, read_stages
from skyrl_async.metrics.trace import Trace, trace_stages
from skyrl_async.runtime.stages import Stage


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """Of a stage that waits 2 s, works on p1 for 3 s, and waits for output for 1 s."""
    now = [10.0]
    path = tmp_path / "trace"
    with closing(Trace(path, lambda: now[0])) as trace:
        stage = Stage("train", lambda: now[0], trace_stages(trace))
        with stage.lane() as lane:
            lane.wait_for_input()
            now[0] = 12.0
            lane.process("p1")
            now[0] = 15.0
            lane.wait_for_output()
            now[0] = 16.0
            lane.wait_for_input()
    return path


def test_the_trace_has_a_row_for_each_stage_with_its_states_and_items(trace_path: Path) -> None:
    assert read_stages(trace_path) == [
        StageSpan(stage="train", state="waiting for input", item="", begin=0.0, end=2.0),
        StageSpan(stage="train", state="processing", item="p1", begin=2.0, end=5.0),
        StageSpan(stage="train", state="waiting for output", item="p1", begin=5.0, end=6.0),
    ]


def test_it_is_drawn_also_from_the_trace_of_a_killed_run(trace_path: Path, tmp_path: Path) -> None:
    part = trace_path / "000001.json"
    part.write_text(part.read_text().rstrip().rstrip("]"))
    for trace in (tmp_path, trace_path, part):
        assert read_stages(trace, 1.0)[0].end == 2.0
    assert main([str(tmp_path), str(tmp_path / "a.png"), "--begin", "1"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("[]", (), "holds no stages: expected the directory of a run"),
        (None, ("--begin", "9"), "holds no stages from 9 s to inf s: it ends at 6 s"),
        ('{"a"', (), "error: "),
    ],
)
def test_an_error_of_drawing_is_one_line(
    trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, options: tuple, message: str
) -> None:
    if text is not None:
        (trace_path / "000001.json").write_text(text)
    assert main([str(trace_path), str(tmp_path / "a.png"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_trace_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json"), str(tmp_path / "a.png")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_kind_of_picture_that_is_not_known_is_one_line_of_error(
    trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace_path), str(tmp_path / "a.movie")]) == 2
    error = capsys.readouterr().err
    assert "Format 'movie' is not supported" in error and error.count("\n") == 1
