"""CPU seconds that the record of samples takes of the default job, with ``trainer.samples.keep`` all and none, in alternating runs.

``record_s``: of the thread that splits rows into turns, decodes and writes them. ``add_s``: of the event loop, which hands groups over.
``driver_s``: of the run's own process, both included. ``job_s``: of all processes until the last write, with engines and policy workers.

``by_length``: CPU seconds per million tokens of making rows, with texts and without, by the length of an answer in tokens, of single
characters as the default task's are.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.report import arguments, conditions, report
from skyrl_async.chat.renderer import ChatRenderer
from skyrl_async.chat.turns import TurnSplitter
from skyrl_async.columns import VersionSpans
from skyrl_async.main import main as run
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.record.files import read_samples
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.record.table import table_of
from skyrl_async.tasks.registry import get_task
from skyrl_async.tasks.tiny_policy import task_tokenizer
from skyrl_async.types import Group, Trajectory

_ROUNDS, _STEPS, _REPEATS = 3, 15, 3
_LENGTHS = (64, *(1024 * n for n in (1, 8, 32, 128)))


def measured_run(keep: str, run_dir: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """The default job in this process, which should be new; raises ``RuntimeError`` if it fails."""
    seconds = {"record_s": 0.0, "add_s": 0.0, "driver_s": 0.0, "job_s": 0.0}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began = time.thread_time()
            result = method(*given)
            seconds[name] += time.thread_time() - began
            if name == "record_s":
                processes = psutil.Process().children(recursive=True)
                seconds["job_s"] = max(seconds["job_s"], sum(map(_cpu_seconds, processes)))
            return result

        return call

    SampleRecord._write = timed("record_s", SampleRecord._write)  # type: ignore[method-assign]
    SampleRecord.add = timed("add_s", SampleRecord.add)  # type: ignore[method-assign]
    keys = {
        "trainer.output_dir": run_dir,
        "trainer.num_steps": num_steps,
        "trainer.samples.keep": keep,
        "trainer.seed": seed,
    }
    if code := run([f"{key}={value}" for key, value in keys.items()]):
        raise RuntimeError(f"the run ended with {code}; {run_dir / 'run.log'} says why")
    seconds["driver_s"] = _cpu_seconds(psutil.Process())
    seconds["job_s"] += seconds["driver_s"]
    tokens = read_samples(run_dir, ["num_prompt_tokens", "num_response_tokens"]).to_pylist()
    return {
        "keep": keep,
        "samples": len(tokens),
        "tokens": sum(value or 0 for row in tokens for value in row.values()),
        **seconds,
    }


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return times.user + times.system


def costs_by_length() -> list[dict[str, float]]:
    """A row per length of answers, each with as many tokens in all."""
    task = get_task("lagged_fibonacci")
    renderer = ChatRenderer(task_tokenizer(task))
    prompt = renderer.render(task.draw_prompt(random.Random(0)).messages)
    digits = renderer.tokenizer.encode("0123456789", add_special_tokens=False)
    found = []
    for length in _LENGTHS:
        row = Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=np.resize(digits, length),
            loss_mask=np.ones(length, np.bool_),
            logprobs=np.full(length, -1.0, np.float32),
            versions=VersionSpans.constant(1, length),
            reward=1.0,
        )
        num_rows = _LENGTHS[-1] // length
        group = Group(uid="p", admission_index=0, scheduled_version=0, trajectories=(row,) * num_rows)
        ended = EndedGroup(group=group, outcome=Outcome.TRAINED, step=1)
        seconds = dict[str, float]()
        for name, turns_of in (("with_texts", TurnSplitter(renderer).turns), ("without", None)):
            times = []
            for _ in range(_REPEATS):
                began = time.thread_time()
                table_of([(0, ended, True)], turns_of)
                times.append(time.thread_time() - began)
            seconds[f"{name}_s_per_million_tokens"] = min(times) / (num_rows * length) * 1e6
        found.append({"response_tokens": length, **seconds})
    return found


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--one", metavar="KEEP", help="one run in this process, for the command itself")
    options = parser.parse_args()
    num_steps = 3 if options.quick else _STEPS
    if options.one:
        measured = measured_run(options.one, options.json.parent / "run", num_steps, options.seed)
        options.json.write_text(json.dumps(measured))
        return 0
    under, rows = conditions(seed=options.seed, steps=num_steps), []
    by_length = costs_by_length()
    for number in range(1 if options.quick else _ROUNDS):
        for keep in ("all", "none"):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "one.json"
                command = [sys.executable, "-m", "benchmarks.record_cost", "--one", keep, "--json", str(path)]
                command += ["--seed", str(options.seed), *(["--quick"] if options.quick else [])]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                row = json.loads(path.read_text())
            rows.append({"round": number, **row, "share_of_job": (row["record_s"] + row["add_s"]) / row["job_s"]})
    report(
        "the record of samples in the default job", {"conditions": under, "by_length": by_length}, rows, options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
