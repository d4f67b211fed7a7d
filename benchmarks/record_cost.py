"""CPU seconds that the record of samples takes of the default job, with ``trainer.samples.keep`` all and none, in alternating runs.

``record_s``: of the thread that splits rows into turns, decodes and writes them. ``add_s``: of the event loop, which hands groups over.
``driver_s``: of the run's own process, both included. ``job_s``: of all processes until the last write, with engines and policy workers.
CPU seconds depend little on what else runs; seconds of the clock would.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import arguments, conditions, report
from skyrl_async.main import main as run
from skyrl_async.record.files import read_samples
from skyrl_async.record.sample_record import SampleRecord

_ROUNDS, _STEPS = 3, 15


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
    for number in range(1 if options.quick else _ROUNDS):
        for keep in ("all", "none"):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "one.json"
                command = [sys.executable, "-m", "benchmarks.record_cost", "--one", keep, "--json", str(path)]
                command += ["--seed", str(options.seed), *(["--quick"] if options.quick else [])]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                row = json.loads(path.read_text())
            rows.append({"round": number, **row, "share_of_job": (row["record_s"] + row["add_s"]) / row["job_s"]})
    report("the record of samples in the default job", {"conditions": under}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
