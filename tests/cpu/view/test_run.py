"""One run as the page asks for it: figures and samples of files that grow, are cut, thinned or damaged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from skyrl_async.errors import ConfigError
from skyrl_async.metrics.trace import Trace
from skyrl_async.metrics.tracker import MetricsLog
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY, TOKENIZER, file_of, files_in, read_samples
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.view.__main__ import DEMO
from skyrl_async.view.metrics_file import MetricsFile
from skyrl_async.view.report import write_report
from skyrl_async.view.run import ViewedRun, differences
from skyrl_async.view.server import overview
from tests.cpu.record.test_sample_record import ended, row
from tests.cpu.view.test_text import turns


def append(path: Path, *rows: dict[str, Any], end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {"step": number, "time_s": 2.0 * number, "reward/mean": number / 10, **figures}


def test_figures_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.read()
    assert metrics.steps == []
    append(path, step(1), step(2, stages={"train": "idle"}, engines={"engine-0": {"lag_steps": 1}}))
    append(path, step(3), end="")
    metrics.read()
    assert metrics.steps == [1, 2], "the last line is not whole"
    append(path, end="\n")
    append(path, {"step": 1, "time_s": 9.0, "reward/eval": 0.5})
    metrics.read()
    found = metrics.series(["reward/mean", "reward/eval", "engine/engine-0/lag_steps", "unknown"])
    assert found["step"] == [1, 2, 3] and found["reward/mean"] == [0.1, 0.2, 0.3]
    assert found["time_s"] == [2.0, 4.0, 6.0], "a step is where it ended, and not where its evaluation did"
    assert found["reward/eval"][0] == 0.5 and found["engine/engine-0/lag_steps"][1] == 1
    assert "unknown" not in found and metrics.rows(1) == [{"step": 3.0, "time_s": 6.0, "reward/mean": 0.3}]


def test_a_run_that_went_back_to_an_earlier_step_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    append(path, *map(step, range(1, 8)))
    metrics.read()
    before = metrics.num_restarts
    kept = path.with_suffix(".new")
    append(kept, *map(step, range(1, 6)), step(6, **{"reward/mean": 9.0}))
    kept.replace(path)
    metrics.read()
    assert metrics.series(["reward/mean"])["reward/mean"][-1] == 9.0 and metrics.steps == [1, 2, 3, 4, 5, 6]
    assert metrics.num_restarts == before + 1


def test_a_long_series_is_thinned_to_means_and_loses_no_rare_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *(step(n, **({"reward/eval": 0.25} if n == 4321 else {})) for n in range(10_000)))
    metrics = MetricsFile(path)
    metrics.read()
    found = metrics.series(["reward/eval"])
    assert len(found["step"]) == 2000 and found["step"][:2] == [2.0, 7.0]
    assert [value for value in found["reward/eval"] if value == value] == [0.25]
    near = metrics.series(["reward/eval"], "time_s", 8640.0, 8650.0)
    assert near["step"] == [4319, 4320, 4321, 4322, 4323, 4324, 4325, 4326], "with one more on either side"
    assert near["reward/eval"][2] == 0.25
    wide = metrics.series([], "step", 1000, 6999)
    assert len(wide["step"]) == 1501 and wide["step"][:2] == [1000.5, 1004.5]
    assert metrics.series([], "step", 20_000)["step"] == [9999]


@pytest.mark.parametrize(("begin", "end", "steps"), [(2.2, 2.8, [2, 3]), (2, 2, [1, 2, 3]), (9, 10, [3]), (-1, 0, [1])])
def test_figures_of_a_time_come_with_their_neighbours(
    tmp_path: Path, begin: float, end: float, steps: list[int]
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    append(tmp_path / "metrics.jsonl", *map(step, range(1, 4)))
    metrics.read()
    assert metrics.series(["reward/mean"], "step", begin, end)["step"] == steps
    assert metrics.series(["reward/mean"], "time_s", 2 * begin, 2 * end)["step"] == steps


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, step(1))
    append(path, end="{broken\n")
    append(path, step(2))
    metrics = MetricsFile(path)
    for _ in range(2):
        metrics.read()
        assert re.search(r"metrics.jsonl is damaged, or not.*: line 2 is no line of metrics", metrics.problem or "")
    assert metrics.steps == [1, 2], "what is right is shown"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"_step": 1, "loss": 0.5}', "Object missing required field `step`"),
        ('{"step": 1, "engines": ["engine-0"]}', "Expected `object | null`, got `array` - at `$.engines`"),
        ('{"step": 1, "engines": {"engine-0": 5}}', "Expected `object`, got `int` - at `$.engines[...]`"),
        ("[1]", "Expected `object`, got `array`"),
    ],
)
def test_a_line_of_another_format_says_what_is_wrong_with_it(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    (found,) = overview([ViewedRun(tmp_path)])["runs"]
    assert f"line 1 is no line of metrics ({problem}); take it out" in found["error"]


def test_a_directory_that_is_gone_is_said(run: ViewedRun) -> None:
    shutil.rmtree(run.directory)
    (found,) = overview([run])["runs"]
    assert "No such file or directory" in found["error"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere must be the directory of a run.*is no directory"):
        ViewedRun(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl, config.yaml or samples/"):
        ViewedRun(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> ViewedRun:
    record = SampleRecord(tmp_path / DIRECTORY, turns_of=turns, groups_with_text=1)
    record.add(ended("sum-1", 3, Outcome.TRAINED, row(), row(reward=0.0, loss_mask=[False] * 3, is_overlong=True)))
    record.add(ended("sum-2", 4, Outcome.FAILED, failed=[0], failure=OSError("gone")))
    record.close()
    append(tmp_path / "metrics.jsonl", step(1))
    return ViewedRun(tmp_path)


def test_figures_of_rows_come_by_column_from_a_row_on(run: ViewedRun) -> None:
    found = run.samples(0)
    assert found["row"] == [0, 1, 2, 3] and found["first_version"] == [1, 1, 1, None]
    assert found["num_tokens"] == [2, 2, 2, None], "trained or not"
    assert [found["outcome"]["texts"][code] for code in found["outcome"]["codes"]][::3] == ["trained", "failed"]
    assert run.samples(3)["row"] == [3] and run.samples(4)["row"] == []


def test_the_alarm_on_failing_samples_has_the_reasons_of_the_record(run: ViewedRun) -> None:
    append(run.directory / "metrics.jsonl", *(step(n, **{"generate/failed_frac": 0.5}) for n in range(2, 9)))
    (alarm,) = run.overview()["alarms"]
    assert alarm["says"] == "50% of the samples fail, 100% of them with OSError: gone"


def test_a_gradient_that_is_not_finite_is_an_alarm(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=lambda: 0.0)
    for number in range(1, 5):
        log.log(number, {"policy/grad_norm": 0.3 if number < 4 else float("nan")})
    log.close()
    (alarm,) = ViewedRun(tmp_path).overview()["alarms"]
    assert alarm["says"] == "The norm of the gradient is nan" and alarm["since_step"] == 4


def test_an_alarm_that_lasts_keeps_its_step_however_long_the_run_is(tmp_path: Path) -> None:
    path, figures = tmp_path / "metrics.jsonl", {"trainer/idle_frac": 0.75}
    append(path, *(step(n, **figures if n > 7 else {}) for n in range(1, 500)))
    run = ViewedRun(tmp_path)
    assert [alarm["since_step"] for alarm in run.overview()["alarms"]] == [8]
    append(path, *(step(n, **figures) for n in range(500, 900)))
    assert [alarm["since_step"] for alarm in run.overview()["alarms"]] == [8]
    append(path, *(step(n, **figures | {"trainer/idle_frac": n / 2000}) for n in range(900, 1300)))
    assert [alarm["since_step"] for alarm in run.overview()["alarms"]] == [1000]


def test_samples_begin_where_rows_are_left(run: ViewedRun) -> None:
    (file,) = files_in(run.directory / DIRECTORY)
    pq.write_table(read_samples(run.directory, begin=2), file_of(file.path.parent, 2, 4).path)
    file.path.unlink()
    assert run.samples(0)["row"] == run.samples(1)["row"] == [2, 3] and run.samples(4)["row"] == []


def test_samples_go_on_behind_the_numbers_that_a_killed_run_has_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_async.view.run.MAX_ROWS", 2)
    record = SampleRecord(tmp_path / DIRECTORY)
    for number in range(6):
        record.add(ended(f"p{number}", 3))
    record.add(ended("e", 2, Outcome.HELD_OUT))
    record.close()
    resumed = SampleRecord(tmp_path / DIRECTORY)
    resumed.restore(1, evaluated_version=2)
    resumed.begin()
    resumed.close()
    append(tmp_path / "metrics.jsonl", step(1))
    run = ViewedRun(tmp_path)
    assert run.samples(0)["row"] == [0] and run.samples(1)["row"] == [6]


def test_the_newest_texts_with_some_words_are_found_whatever_their_case(
    run: ViewedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.find("WHAT is 2+2") == {"rows": [2, 1, 0], "is_cut": False}
    assert run.find("nothing of the kind")["rows"] == []
    monkeypatch.setattr("skyrl_async.view.run._MAX_FOUND", 2)
    assert run.find("WHAT is 2+2") == {"rows": [2, 1], "is_cut": True}


def test_each_token_has_its_text_once_the_tokenizer_is_known(run: ViewedRun) -> None:
    assert run.sample(0)["pieces"] is None and run.sample(0)["turns"][0]["text"] == "<|user|>What is 2+2?\n"
    tokenizer = train_tokenizer(["Ä 3248 €"])
    tokenizer.backend_tokenizer.save(str(run.directory / TOKENIZER))
    ids = tokenizer("3248 \U0001f600")["input_ids"]
    pieces = ViewedRun(run.directory)._pieces(ids)
    assert pieces is not None and len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    with pytest.raises(LookupError, match="no row 99"):
        run.sample(99)


def test_bytes_that_are_no_text_leave_the_tokens_after_them_readable(run: ViewedRun) -> None:
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), "cat", "▁dog"]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], byte_fallback=True))  # as of Llama 2
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer.save(str(run.directory / TOKENIZER))
    pieces = run._pieces([ids["cat"], ids["<0x65>"], ids["<0x8C>"], ids["cat"], ids["▁dog"]])
    assert pieces is not None and len(pieces) == 5
    assert pieces[0] == "cat" and "".join(pieces).endswith("cat dog")


def test_the_longest_waits_name_the_group_that_ended_them(run: ViewedRun) -> None:
    now = [0.0]
    trace = Trace(run.directory / "trace", lambda: now[0])
    trace.past_span("group", "generation", 1.0, 7.0, uid="slow")
    trace.past_span("wait_for_groups", "waiting", 2.0, 7.5, step=3)
    trace.past_span("tiny", "waiting", 8.0, 8.001, step=4)
    trace.past_span("load", "engines/engine-0", 8.0, 8.001, version=3)
    trace.close()
    found = run.spans(None, None)
    assert (found["last"], found["num_short"]) == (8.001, 1)
    names = [span["name"] for span in found["spans"]]
    assert names == ["group", "wait_for_groups", "load", "short spans"], "an engine's are all there"
    assert [(wait["name"], wait["uid"]) for wait in found["waits"]] == [("wait_for_groups", "slow"), ("tiny", None)]


def test_short_spans_of_a_row_are_put_together_with_the_share_of_time_that_they_fill(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", step(1))
    trace = Trace(tmp_path / "trace", lambda: 0.0)
    for begin in range(100, 200):
        trace.past_span(f"p{begin}", "stages/train", float(begin), begin + 0.25)
        trace.past_span("waiting for input", "stages/train", begin + 0.25, begin + 1.0)
    for begin in range(200, 300):
        trace.past_span(f"p{begin}", "stages/train", float(begin), begin + 0.75)
    trace.past_span("load", "engines/engine-0", 150.0, 150.01, version=1)
    trace.past_span("group", "generation", 0.0, 5000.0)
    trace.close()
    found = ViewedRun(tmp_path).spans(0.0, 5000.0)
    assert found["num_short"] == 300
    work = [span for span in found["spans"] if span["name"] == "short spans"]
    assert (work[0]["begin"], work[-1]["end"], sum(span["args"]["spans"] for span in work)) == (100.0, 300.0, 200)
    assert (work[0]["args"]["share"], work[-1]["args"]["share"]) == (0.25, 0.75), "one sees when it changed"
    (waiting,) = {span["args"]["share"] for span in found["spans"] if span["name"] == "waiting for input"}
    assert waiting == 0.75 and [span["name"] for span in found["spans"]].count("load") == 1


def test_what_engines_serve_is_known_however_long_ago_they_loaded_it(run: ViewedRun) -> None:
    trace = Trace(run.directory / "trace", lambda: 0.0)
    trace.past_span("load", "engines/engine-0", 10.0, 11.0, version=1)
    trace.past_span("gather", "publish", 20.0, 21.0, version=2)
    trace.past_span("load", "engines/engine-1", 22.0, 23.0, version=2)
    trace.past_span("step", "training", 3000.0, 3001.0)
    trace.close()
    found = run.spans(None, None)["spans"]
    assert [(span["track"], span["name"]) for span in found] == [
        *(("engines/engine-0", "load"), ("engines/engine-1", "load"), ("publish", "gather"), ("training", "step")),
    ]


def test_no_key_of_an_endpoint_is_among_the_settings(run: ViewedRun) -> None:
    config = {"server": {"api_key": "sk-1", "port": 0}, "trainer": {"algorithm": {"distillation": {"api_key": None}}}}
    (run.directory / "config.yaml").write_text(yaml.safe_dump(config))
    expected = {"server.api_key": "set", "server.port": 0, "trainer.algorithm.distillation.api_key": None}
    assert run.settings() == expected


def test_a_report_has_the_figures_of_a_run_whose_samples_are_damaged(run: ViewedRun, tmp_path: Path) -> None:
    (file,) = files_in(run.directory / DIRECTORY)
    file.path.write_bytes(file.path.read_bytes()[:50])
    _, (problem,) = write_report([run], tmp_path / "report.html")
    assert f"{file.path.name} is damaged" in problem and "reward/mean" in (tmp_path / "report.html").read_text()


def test_configurations_are_compared_by_key() -> None:
    found = differences([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}, {"a": 1, "b": 2}])
    assert found == [{"key": "b", "values": [2, 3, 2]}]
    assert differences([{"a": 1}, {}, {"a": 1}]) == []
    assert differences([{}, {"a": 1}, {"a": 2}]) == [{"key": "a", "values": [None, 1, 2]}]


def test_the_recorded_run_that_ships_has_the_columns_of_this_version() -> None:
    assert read_samples(DEMO).num_rows > 300
