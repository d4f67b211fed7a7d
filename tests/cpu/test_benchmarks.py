"""What every benchmark shares; the measurements themselves are run by hand, on a quiet machine."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.control_plane import WakesEveryone, WakesOne, measure
from benchmarks.report import conditions, report
from benchmarks.staleness_policies import Case
from benchmarks.staleness_policies import measure as measure_policy
from skyrl_async.simulator.clock import run_in_virtual_time

ROOT = Path(__file__).parents[2]


def test_figures_are_written_with_their_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"variant": "plain loop", "seconds": 2.0}, {"variant": "S=4", "seconds": 1.0}]
    report("three ways", {"speedup": 2.0, "conditions": conditions(seed=7)}, rows, tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["speedup"] == 2.0 and written["rows"] == rows
    assert written["conditions"]["seed"] == 7 and written["conditions"]["versions"]["torch"]
    printed = capsys.readouterr().out
    assert "plain loop" in printed and "speedup: 2" in printed


@pytest.mark.parametrize("kind", [WakesOne, WakesEveryone])
def test_both_managers_admit_whoever_waits_by_the_same_rule(kind: type[WakesOne] | type[WakesEveryone]) -> None:
    async def main() -> list[int]:
        manager, in_flight, admitted = kind(3), set[int](), list[int]()

        async def work() -> None:
            for _ in range(5):
                admission = await manager.acquire()
                admitted.append(admission.index)
                in_flight.add(admission.index)
                assert len(in_flight) <= 3
                await asyncio.sleep(1)
                in_flight.remove(admission.index)
                await manager.finish(admission)

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(work(), name=f"worker-{number}")
        return admitted

    assert run_in_virtual_time(main()) == list(range(40))


def test_waking_one_waiter_admits_many_times_what_waking_all_of_them_does() -> None:
    row = measure(400, num_rounds=1, seconds=0.1)
    assert row["ratio"] == row["admissions_per_s"] / row["baseline_admissions_per_s"] > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "async_speedup",
        "control_plane",
        "endpoint_overhead",
        "publish",
        "published_results",
        "schedules",
        "staleness_policies",
    ],
)
def test_a_benchmark_says_what_it_takes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--json" in done.stdout and "--quick" in done.stdout


@pytest.mark.parametrize("policy", ["wait", "prime_rl"])
def test_the_staleness_benchmark_measures_a_policy_in_the_real_loop(policy: str) -> None:
    case = Case(policy=policy, streamed=True, sigma=0.5, staleness=1, seed=0, num_steps=12, mini_batch_size=8)
    row = measure_policy(case)
    assert 0 < row["share_of_limit"] and 0 < row["utilisation"] <= 1
    assert row["over_share"] == row["masked_share"] == 0
    if policy == "wait":
        assert row["wasted_share"] == 0 and row["length_ratio"] == pytest.approx(1.0) and row["share_of_limit"] <= 1
    else:
        assert row["wasted_share"] > 0 and row["length_ratio"] < 1
