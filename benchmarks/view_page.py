"""The page over a long run: 1,000 steps with 100 figures and 112 spans each, and 100,000 samples of 200 tokens with their texts.

``boot_s``: from the command to its address. ``open_s``: from there to the first drawn chart, in headless Chromium. ``rows_s``: from a click
to the table of all samples. ``find_s``: words in the texts of all. ``sample_s``: from a click to the tokens of a sample. ``time_s``: from a
click to the spans of the whole run. ``viewer_mb``: resident memory of the viewer's process. ``record_s_per_million_tokens``: what the
thread that writes the record takes, without decoding tokens. ``export_s``: writing the report in one file.

``first_answers``: of runs of more steps, with the figures of that step of the recorded run which has most: CPU seconds of the viewer's
first answer and of the next, and the most memory.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from playwright.sync_api import expect, sync_playwright
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.report import arguments, conditions, report
from skyrl_async.chat.turns import RowTurn
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.record.files import DIRECTORY, TOKENIZER
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.types import Group, Trajectory
from skyrl_async.view.__main__ import DEMO

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
NUM_TOKENS = 200
_GROUP = 10
_NUM_WORDS = 150_000
_STEP_S = 10.0


def write_trace(directory: Path, num_steps: int) -> None:
    """Stages, weight updates, waits of the trainer and generated groups."""
    begin = 0.0
    trace = Trace(directory, lambda: begin)
    for step in range(num_steps):
        begin = _STEP_S * step
        for part in range(25):
            at = begin + part * _STEP_S / 25
            trace.past_span(f"step {step}", "stages/train", at, at + 0.3)
            trace.past_span("waiting for input", "stages/train", at + 0.3, at + 0.4)
            trace.past_span("step", "training", at, at + 0.3, step=step)
            trace.past_span("group", "generation", at, at + _STEP_S, uid=f"p{step}-{part}")
        for number in range(10):
            trace.past_span("wait_for_groups", "waiting", begin + number, begin + number + 0.1, step=step)
        trace.past_span("gather", "publish", begin, begin + 0.1, version=step)
        trace.past_span("load", "engines/engine-0", begin + 0.2, begin + 0.3, version=step)
    trace.close()


def write_run(run_dir: Path, *, num_steps: int, num_samples: int, seed: int) -> float:
    """A run of random figures and tokens, whose answers end with the number of their row. Returns the seconds of writing its record."""
    random = np.random.default_rng(seed)
    run_dir.mkdir()
    names = ["reward/mean", "policy/entropy", "policy/ess", *(f"timing/part_{i}" for i in range(97))]
    with (run_dir / "metrics.jsonl").open("wb") as file:
        for step in range(1, num_steps + 1):
            values = dict(zip(names, random.random(len(names)).tolist(), strict=True))
            file.write(msgspec.json.encode({"step": step, "time_s": 10.0 * step, **values}) + b"\n")
    words = np.array([f"word{i}" for i in range(_NUM_WORDS)])

    def turns(row: Trajectory) -> list[RowTurn]:
        text = " ".join(words[row.response_token_ids])
        return [
            RowTurn("user", "What is it?", 0, 8),
            RowTurn("assistant", f"{text} number {row.metrics['number']:.0f}.", 8, 208),
        ]

    write_trace(run_dir / "trace", num_steps)
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(str(run_dir / TOKENIZER))
    record, seconds = SampleRecord(run_dir / DIRECTORY, turns_of=turns), 0.0
    for step in range(1, num_steps + 1):
        for number in range((step - 1) * num_samples // num_steps, step * num_samples // num_steps, _GROUP):
            rows = tuple(
                Trajectory(
                    prompt_token_ids=np.arange(8),
                    response_token_ids=random.integers(0, _NUM_WORDS, NUM_TOKENS),
                    loss_mask=np.ones(NUM_TOKENS, bool),
                    logprobs=-random.random(NUM_TOKENS),
                    versions=np.full(NUM_TOKENS, step - 1),
                    reward=float(random.random() > 0.5),
                    metrics={"number": float(number + i)},
                )
                for i in range(_GROUP)
            )
            group = Group(uid=f"p{number}", admission_index=number, scheduled_version=step - 1, trajectories=rows)
            record.add(EndedGroup(group=group, outcome=Outcome.TRAINED, step=step))
        began = time.perf_counter()
        asyncio.run(record.flush())
        seconds += time.perf_counter() - began
    record.close()
    return seconds


def measure(run_dir: Path, num_samples: int) -> dict[str, Any]:
    """Open the run in the page, as a user would."""
    if CHROMIUM is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    command = [sys.executable, "-m", "skyrl_async.view", str(run_dir), "--port", "0", "--no-browser"]
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            figures = {"boot_s": lap()}
            page = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS).new_page()
            page.set_default_timeout(120_000)
            lap()
            page.goto(address)
            page.locator(".panel canvas").first.wait_for()
            figures["open_s"] = lap()
            page.get_by_role("link", name="Samples").click()
            expect(page.locator("#num-rows")).to_have_text(f"{num_samples:,} of {num_samples:,} rows", timeout=120_000)
            figures["rows_s"] = lap()
            page.fill("#words", f"number {num_samples // 2 + 7}.")
            lap()
            page.press("#words", "Enter")
            expect(page.locator("#num-rows")).to_have_text(f"1 of {num_samples:,} rows", timeout=120_000)
            figures["find_s"] = lap()
            page.locator(".row:not(.head)").first.click()
            page.locator(".turn.assistant .text").wait_for()
            figures["sample_s"] = lap()
            page.get_by_role("link", name="Time").click()
            expect(page.locator("#time-state")).not_to_be_empty(timeout=120_000)
            lap()
            page.get_by_role("button", name="whole run").click()
            expect(page.locator("#time-state")).to_contain_text("short spans drawn together", timeout=120_000)
            figures["time_s"] = lap()
            figures["viewer_mb"] = psutil.Process(server.pid).memory_info().rss / 1e6
            return figures
        finally:
            server.terminate()


_ANSWER_TWICE = """
import json, re, sys, time
from pathlib import Path
from skyrl_async.view.run import ViewedRun
run, laps = ViewedRun(Path(sys.argv[1])), [time.process_time()]
for _ in range(2):
    assert run.overview()["error"] is None
    laps.append(time.process_time())
(most,) = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(json.dumps({"first_s": laps[1] - laps[0], "next_s": laps[2] - laps[1], "most_mb": int(most) * 1024 / 1e6}))
"""


def first_answer(num_steps: int) -> dict[str, float]:
    """In a process of its own, which imports nothing else."""
    step = msgspec.json.decode(max((DEMO / "metrics.jsonl").read_bytes().splitlines(), key=len))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        with path.open("wb") as file:
            for number in range(1, num_steps + 1):
                file.write(msgspec.json.encode(step | {"step": number, "time_s": 10.0 * number}) + b"\n")
        size_mb = path.stat().st_size / 1e6
        found = subprocess.run([sys.executable, "-c", _ANSWER_TWICE, directory], stdout=subprocess.PIPE, check=True)
    return {"num_steps": num_steps, "metrics_mb": size_mb, **msgspec.json.decode(found.stdout)}


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    sizes = {"num_steps": 100, "num_samples": 10_000} if options.quick else {"num_steps": 1000, "num_samples": 100_000}
    under = conditions(seed=options.seed, tokens=NUM_TOKENS, **sizes)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        seconds = write_run(run_dir, seed=options.seed, **sizes)
        per_million = seconds / (sizes["num_samples"] * NUM_TOKENS / 1e6)
        size_mb = sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file()) / 1e6
        rows = [{"round": i, **measure(run_dir, sizes["num_samples"])} for i in range(3)]
        began = time.perf_counter()
        command = [sys.executable, "-m", "skyrl_async.view", str(run_dir), "--export", f"{directory}/report.html"]
        subprocess.run(command, check=True)
        export_s = time.perf_counter() - began
    figures = {
        "run_mb": size_mb,
        "record_s_per_million_tokens": per_million,
        "export_s": export_s,
        "first_answers": [first_answer(num_steps) for num_steps in ((1000,) if options.quick else (10_000, 100_000))],
    }
    report("the page over a long run", {"conditions": under, **figures}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
