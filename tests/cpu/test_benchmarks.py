"""What every benchmark shares; the measurements themselves are run by hand, on a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import conditions, report

ROOT = Path(__file__).parents[2]


def test_figures_are_written_with_their_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"variant": "plain loop", "seconds": 2.0}, {"variant": "S=4", "seconds": 1.0}]
    report("three ways", {"speedup": 2.0, "conditions": conditions(seed=7)}, rows, tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["speedup"] == 2.0 and written["rows"] == rows
    assert written["conditions"]["seed"] == 7 and written["conditions"]["versions"]["torch"]
    printed = capsys.readouterr().out
    assert "plain loop" in printed and "speedup: 2" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async_speedup", "endpoint_overhead"])
def test_a_benchmark_says_what_it_takes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--json" in done.stdout and "--quick" in done.stdout
