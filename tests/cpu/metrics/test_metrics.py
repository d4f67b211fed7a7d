"""Where numbers go: the log, TensorBoard, the trace, the curves, the summary, log lines."""

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import re
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_async.errors import CheckpointError, ConfigError
from skyrl_async.metrics.curves import draw_curves
from skyrl_async.metrics.logs import run_logging
from skyrl_async.metrics.sinks import TensorBoardSink, WandbSink
from skyrl_async.metrics.summary import summary_table, write_summary
from skyrl_async.metrics.trace_parts import TraceParts
from skyrl_async.metrics.tracker import MetricsLog, Tracker, read_rows, read_steps
from tests.cpu.documented_metrics import DOCUMENTED_METRICS
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_line_is_on_disk_without_a_close(tmp_path: Path) -> None:
    clock = Clock()
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=clock)
    clock.now += 2.5
    log.log(1, {"reward/mean": 0.5, "policy/grad_norm": float("nan")})
    asyncio.run(log.flush())
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "time_s": 2.5, "reward/mean": 0.5, "policy/grad_norm": None}
    log.close()


def test_a_resumed_log_drops_later_steps_and_goes_on_in_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock()
    log = MetricsLog(path, clock=clock)
    for step in range(1, 6):
        clock.now += 1
        log.log(step, {"reward/mean": float(step)})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    clock.now += 1000
    before = path.read_text()
    MetricsLog(path, resume_step=3, clock=clock).close()
    assert path.read_text() == before, "nothing was read"
    log = MetricsLog(path, resume_step=3, clock=clock)
    log.begin()
    asyncio.run(log.flush())
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    clock.now += 1
    log.log(4, {"reward/mean": 40.0})
    log.close()
    assert [(row["step"], row["time_s"], row["reward/mean"]) for row in read_rows(path)] == [
        (1, 1.0, 1.0),
        (2, 2.0, 2.0),
        (3, 3.0, 3.0),
        (4, 4.0, 40.0),
    ]


def test_an_evaluation_of_a_run_keeps_all_recorded_lines(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock()
    for resume_step in (None, math.inf):
        log, sink = MetricsLog(path, resume_step, clock=clock), TensorBoardSink(tmp_path / "events", resume_step)
        log.begin()
        for step in (1, 2) if resume_step is None else (1,):
            for each in (log, sink):
                each.log(step, {"reward/mean": float(step)})
        log.close()
        sink.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 1]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {event.step for event in events.Scalars("reward/mean")} == {1, 2}


def test_a_new_run_begins_a_new_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        log = MetricsLog(path)
        log.log(1, {"reward/mean": 1.0})
        log.close()
    assert len(read_rows(path)) == 1


def test_a_damaged_line_of_a_log_that_goes_on_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 0.5}\n{"step": 2, "ti\n')
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged: line 2 is not JSON .*; take the line out"):
        MetricsLog(path, resume_step=2)


def test_lines_of_one_step_are_read_as_one_row(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=Clock())
    log.log(20, {"reward/mean": 0.5})
    log.log(20, {"reward/eval": 0.7, "reward/mean": float("inf")})
    log.close()
    assert read_steps(tmp_path / "metrics.jsonl") == [
        {"step": 20, "time_s": 0.0, "reward/mean": 0.5, "reward/eval": 0.7}
    ]


def test_a_tracker_hands_values_to_every_sink_and_closes_them(tmp_path: Path) -> None:
    with closing(Tracker([MetricsLog(tmp_path / name) for name in ("a", "b")])) as tracker:
        tracker.log(1, {"reward/mean": 1.0})
    assert [len(read_rows(tmp_path / name)) for name in ("a", "b")] == [1, 1]


def test_tensorboard_reads_what_was_logged_and_hides_what_a_resume_dropped(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": float(step)})
    sink.close()
    sink = TensorBoardSink(tmp_path, resume_step=1)
    sink.log(2, {"reward/mean": 20.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == {1: 1.0, 2: 20.0}


def test_where_wandb_has_no_key_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class UsageError(Exception):
        pass

    def init(**settings: Any) -> None:
        raise UsageError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=UsageError))
    with pytest.raises(ConfigError, match=r"logging.wandb must be false .* \(no-tty\); run wandb login first"):
        WandbSink(tmp_path, "project", {})


@pytest.mark.slow
def test_tensorboard_loads_neither_torch_nor_tensorflow() -> None:
    code = "import sys, skyrl_async.metrics.sinks; sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "num_steps", [pytest.param(None, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow), 2]
)
def test_curves_are_drawn_however_little_was_logged(num_steps: int | None, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.begin()
    if num_steps is not None:
        log.log(0, {"reward/eval": 0.4})
    for step in range(1, (num_steps or 0) + 1):
        log.log(step, {"reward/mean": 0.5, "timing/forward_backward": 0.4, "async/staleness_max": 2.0})
    log.close()
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    height, width, _ = imread(tmp_path / "curves.png").shape
    assert (width, height) == (1560, 864)


def test_a_summary_is_replaced_as_a_whole_and_paths_become_text(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(path, {"reward_after": 0.97, "curves": tmp_path / "curves.png", "reward_before": None})
    assert json.loads(path.read_text()) == {
        "reward_after": 0.97,
        "curves": str(tmp_path / "curves.png"),
        "reward_before": None,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_table_has_a_row_per_figure_known_or_not() -> None:
    table = summary_table({"policy_dir": "/x", "reward_before": 0.41, "pause_seconds_median": None, "other": 1.5})
    labels, values = ([*column.cells] for column in table.columns)
    assert labels == ["held-out reward before", "generation paused per publish, median", "policy dir", "other"]
    assert values == ["0.410", "-", "/x", "1.5"]


def test_log_lines_go_to_the_file_and_only_our_warnings_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = logging.getLogger("skyrl_async.trainer.fully_async"), logging.getLogger("somebody.else")
    handlers = list(logging.getLogger().handlers)
    with run_logging(tmp_path / "run.log", "info"), warnings.catch_warnings():
        warnings.simplefilter("always")
        ours.info("step %d", 3)
        ours.debug("hidden")
        ours.warning("slow group")
        theirs.warning("deprecated")
        warnings.warn("old", stacklevel=1)
    ours.warning("after the run")
    assert logging.getLogger().handlers == handlers
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "WARNING slow group\n"
    text = (tmp_path / "run.log").read_text()
    for line in ("INFO skyrl_async.trainer.fully_async: step 3", "WARNING somebody.else: deprecated", "old"):
        assert line in text
    assert "hidden" not in text
    assert "after the run" not in text


def test_every_metric_named_in_the_code_is_documented() -> None:
    name = re.compile(r'(?<!f)"((?:async|timing|policy|generate|trainer|reward)/[a-z_]+)"')
    used = {
        (found, str(path.relative_to(ROOT)))
        for path in (ROOT / "skyrl_async").rglob("*.py")
        for found in name.findall(path.read_text())
    }
    assert len(used) > 50
    assert {(found, path) for found, path in used if found not in DOCUMENTED_METRICS} == set()


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel writes what still fits of the last record, then refuses, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_and_spans_that_the_disk_refuses_are_written_whole_and_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    log, parts = MetricsLog(tmp_path / "metrics.jsonl"), TraceParts(tmp_path / "trace", clock, 10**6)
    part = tmp_path / "trace" / "000001.json"

    def write(*steps: int) -> None:
        for step in steps:
            log.log(step, {"reward/mean": 1.0})
            parts.add_span(0.0, 1.0, {"ph": "X", "name": f"step {step}", "tid": 1})
            asyncio.run(log.flush())
            asyncio.run(parts.flush())

    write(1)
    caplog.clear()
    with files_of_at_most(20 + min(path.stat().st_size for path in (tmp_path / "metrics.jsonl", part))):
        write(2, 3, 4)
    assert [record.getMessage() for record in caplog.records] == [
        f"lines cannot be written: File too large; they are tried again ({tmp_path / 'metrics.jsonl'})",
        f"spans cannot be written: File too large; they are tried again ({tmp_path / 'trace'})",
    ]
    write(5)
    log.close()
    parts.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [event["name"] for event in json.loads(part.read_text())[1:]] == [f"step {step}" for step in range(1, 6)]


def test_a_disk_that_hangs_under_the_figures_and_the_trace_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both files are pipes, which nobody reads: to open one blocks a thread for real."""
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._FLUSH_TIMEOUT_S", 0.2)
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("skyrl_async.metrics.tracker.MAX_WAITING_BYTES", 2_000)
    monkeypatch.setattr("skyrl_async.metrics.trace_parts.MAX_WAITING_BYTES", 2_000)
    (tmp_path / "trace").mkdir()
    pipes = [tmp_path / "metrics.jsonl", tmp_path / "trace" / "000001.json"]
    log, trace = MetricsLog(pipes[0], resume_step=math.inf), TraceParts(tmp_path / "trace", Clock(), 10**6)
    for pipe in pipes:
        os.mkfifo(pipe)
    before = threading.active_count()

    async def take_steps() -> float:
        began = asyncio.get_running_loop().time()
        for step in range(1, 101):
            log.log(step, {"reward/mean": 1.0})
            trace.add_span(0.0, 1.0, {"ph": "X", "name": f"step {step}", "tid": 1})
            if step % 10 == 0:  # a checkpoint
                await log.flush()
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(take_steps()) < 2.0, "one checkpoint waits, and no later one"
    for file, what in ((log, "lines"), (trace, "spans")):
        file.close()
        assert caplog.text.count(f"{what} are left out: the disk does not keep up with them") == 1
        assert caplog.text.count(f"the last {what} are not yet in") == 1
    assert caplog.text.count("lines wait: the disk hangs, and the run goes on without them") == 1
    assert threading.active_count() <= before + 5
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._CLOSE_TIMEOUT_S", PATIENCE_S)
    os.close(os.open(pipes[0], os.O_WRONLY))  # the disk is back
    log.close()
    reader = os.open(pipes[1], os.O_RDONLY | os.O_NONBLOCK)
    trace.close()
    events = json.loads(os.read(reader, 1 << 16))
    os.close(reader)
    written = [row["step"] for row in read_rows(pipes[0])], [e["name"] for e in events if e["ph"] == "X"]
    for steps in written:
        assert 10 < len(steps) < 100
    assert written[0] == list(range(1, len(written[0]) + 1))
    assert written[1] == [f"step {step}" for step in range(1, len(written[1]) + 1)]


class Noticed(io.StringIO):
    """A text stream that tells when it has been written to."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.has_text.set()
        return written


def test_a_log_file_on_a_full_disk_is_reported_once_and_has_its_lines_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Noticed())
    with run_logging(tmp_path / "run.log", "INFO"):
        with files_of_at_most(0):
            for number in range(3):
                logging.getLogger("late").info("line %d", number)
            assert stderr.has_text.wait(PATIENCE_S)
        logging.getLogger("late").info("line 3")
    said = f"lines of the log cannot be written: File too large; they are tried again ({tmp_path / 'run.log'})"
    assert stderr.getvalue() == f"WARNING {said}\n"
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line[-6:] for line in lines if " late: " in line] == [f"line {number}" for number in range(4)]
    assert sum(said in line for line in lines) == 1


def test_a_wrong_call_of_a_logger_and_half_a_character_cost_no_run_and_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as alone:
        alone.setattr(logging.getLogger(), "handlers", [])  # pytest's own raises
        with run_logging(tmp_path / "run.log", "INFO"):
            logging.getLogger("sloppy").info("before")
            logging.getLogger("sloppy").info("%d", "no number")
            logging.getLogger("sloppy").info("half \udc80 a character")
            logging.getLogger("sloppy").info("after")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.partition(" sloppy: ")[2] for line in lines] == ["before", r"half \udc80 a character", "after"]
    assert "no number" in capsys.readouterr().err


def test_a_disk_that_hangs_under_the_log_or_tensorboard_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is a pipe that nobody reads; the event file does not come back from a flush."""
    monkeypatch.setattr("skyrl_async.runtime.disk_writer._CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("skyrl_async.metrics.tracker.MAX_WAITING_BYTES", 2_000)
    os.mkfifo(tmp_path / "run.log")
    sink, is_back = TensorBoardSink(tmp_path / "events"), threading.Event()
    monkeypatch.setattr(sink._file, "flush", is_back.wait)
    with run_logging(tmp_path / "run.log", "INFO"):
        for number in range(100):
            logging.getLogger("lost").info("line %d", number)
            sink.log(number, {"reward/mean": 1.0})
        sink.close()
    said = capsys.readouterr().err
    assert said.count("lines of the log are left out: the disk does not keep up with them") == 1
    assert said.count("the last TensorBoard values are not yet in") == 1
    is_back.set()
