"""The arithmetic of published settings, the scale that a synchronous row fixes, and what the benchmark writes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published_results
from benchmarks.published_model import Model, Scale, one_step_off_s, pipeline_s
from benchmarks.published_results import ASSUMPTIONS, SYNC_TOLERANCE, assumed_of, main, measure, with_linearity
from benchmarks.published_settings import SETTINGS, SWEEPS, Schedule, Setting, Synchronous, half_speed_requests

SMALL = Scale(max_answers=64, sync_steps=4, least_steps=4, least_waves=1)


def setting_of(schedule: Schedule, devices: int) -> Setting:
    return next(s for s in SETTINGS if s.schedule is schedule and s.devices == devices)


def small(setting: Setting, **changes: Any) -> Setting:
    """On 16 devices with four engines, a batch of 16 answers of much the same length."""
    generating = 8 if setting.generation_devices else None
    sizes = {"devices": 16, "devices_per_engine": 4, "generation_devices": generating, "groups": 8, "group_size": 2}
    return replace(setting, **{"sigma": 0.2, "update_on": {}, **sizes, **changes})


def test_a_published_speedup_is_synchronous_over_asynchronous_seconds_per_step() -> None:
    speedups = {(s.system, s.setting): s.published_speedup for s in SETTINGS}
    assert speedups["verl fully async", "Qwen2.5-Math-7B, 28k, 128 GPUs"] == pytest.approx(356.30 / 150.63)
    assert speedups["AReaL", "R1-Distill-Qwen-1.5B, 27k, 128 GPUs"] == pytest.approx(41.0 / 14.8)
    assert speedups["async-rl", "Red-MoE-16B, 32 GPUs"] == pytest.approx(260 / 170)
    assert speedups["async-rl", "Red-MoE-16B, 8 GPUs"] is None


def test_a_saving_of_a_whole_run_counts_fewer_steps_as_well_and_the_one_per_step_does_not() -> None:
    tail = next(s for s in SETTINGS if "18k" in s.setting)
    assert tail.published_total_speedup == pytest.approx(1 / (1 - 0.511), rel=1e-3)
    assert tail.published_speedup == pytest.approx((67 * 60 + 34) / 200 / ((33 * 60 + 2) / 110))


def test_training_takes_longer_on_fewer_devices_unless_a_row_says_how_long() -> None:
    setting = replace(
        SETTINGS[0],
        devices=16,
        synchronous=Synchronous(generate_s=200, update_s=30, old_logprobs_s=6, reference_s=3, switch_s=9, other_s=12),
        update_on={8: 50.0},
    )
    assert setting.synchronous.step_s == 260
    assert setting.training_s(12, has_old_logprobs=True) == pytest.approx((30 + 6 + 3) * 16 / 12)
    assert setting.training_s(8, has_old_logprobs=False) == pytest.approx(50 + 3 * 2)


def test_what_is_printed_of_a_setting_names_what_it_assumes_and_the_phases_that_fall_away() -> None:
    row = Synchronous(generate_s=200, update_s=30, old_logprobs_s=6, switch_s=9)
    gone = {}
    for schedule in Schedule:
        said = assumed_of(replace(SETTINGS[0], schedule=schedule, synchronous=row, assumed="a guess"))
        assert "half = " in said["assumed"] and "sigma" in said["assumed"] and said["assumed"].endswith("a guess")
        assert said["phases that fall away in ours"] == "recomputed log-probs (6 s), devices changing hands (9 s)"
        gone[schedule] = said["phases that fall away in modelled"]
    assert gone[Schedule.PARTIAL] == "none"
    assert gone[Schedule.ONE_STEP_OFF] == gone[Schedule.ASYNC_RL] == "devices changing hands (9 s)"
    assert (
        gone[Schedule.AREAL] == gone[Schedule.FULLY_ASYNC] == "recomputed log-probs (6 s), devices changing hands (9 s)"
    )


def test_a_step_of_another_length_keeps_the_shares_of_its_phases() -> None:
    row = Synchronous(generate_s=6, update_s=3, switch_s=1).of_length(100)
    assert (row.generate_s, row.update_s, row.switch_s) == pytest.approx((60, 30, 10)) and row.step_s == pytest.approx(
        100
    )


def test_requests_halve_each_others_speed_where_their_caches_weigh_as_much_as_the_weights() -> None:
    bytes_of_weights, bytes_of_a_token = 7.6e9 * 2, 28 * 4 * 128 * 2 * 2
    assert half_speed_requests(7.6e9, 28, 4, 1000) == pytest.approx(bytes_of_weights / (bytes_of_a_token * 1000))


def test_one_step_off_waits_for_the_slower_of_generation_and_training() -> None:
    assert one_step_off_s([10, 30, 20], 20) == pytest.approx((20 + 30 + 20) / 3)


@pytest.mark.parametrize(
    ("generate_s", "reference_s", "training_s", "ahead", "expected"),
    [(10, 5, 20, 1, 20), (10, 5, 4, 1, 10), (10, 12, 4, 2, 12), (10, 5, 4, 0, 19)],
    ids=["training is slowest", "generation is slowest", "reference is slowest", "nothing overlaps"],
)
def test_a_pipeline_is_as_fast_as_its_slowest_stage_if_it_may_run_ahead(
    generate_s: float, reference_s: float, training_s: float, ahead: int, expected: float
) -> None:
    assert pipeline_s([generate_s] * 12, reference_s, training_s, ahead=ahead) == pytest.approx(expected)


@pytest.mark.parametrize(
    "setting",
    [setting_of(Schedule.FULLY_ASYNC, 128), pytest.param(setting_of(Schedule.AREAL, 128), marks=pytest.mark.slow)],
)
def test_the_synchronous_model_takes_the_published_seconds_per_step(setting: Setting) -> None:
    model = Model(small(setting), replace(SMALL, sync_steps=12), seed=0)
    assert model.synchronous_s() == pytest.approx(setting.synchronous.step_s, rel=SYNC_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(Schedule))
def test_no_schedule_is_faster_than_its_trainer_and_ours_holds_its_bound(schedule: Schedule) -> None:
    sync = Synchronous(generate_s=100, update_s=30, other_s=5)
    setting = next(s for s in SETTINGS if s.schedule is schedule)
    row = measure(small(setting, bound=1, is_balanced=False, synchronous=sync), SMALL, 0)
    assert row["modelled_step_s"] > 0.95 * (30 if schedule is Schedule.PARTIAL else 30 * 16 / 12) + 5
    assert row["ours_step_s"] > 0.95 * 30 * 16 / 12 + 5
    sync_s = 135 * (1 + row["sync_error"])
    assert row["modelled_speedup"] == pytest.approx(sync_s / row["modelled_step_s"])
    assert row["ours_speedup"] == pytest.approx(sync_s / row["ours_step_s"])
    assert row["sync_step_s"] == 135 and row["bound"] == 1 and row["ours_over_share"] == 0


def test_linearity_is_answers_per_second_and_device_over_those_on_the_fewest_devices() -> None:
    rows = [
        {"batch": "fixed", "devices": 8, "answers": 100, "sync_step_s": 80.0, "ours_step_s": 40.0},
        {"batch": "fixed", "devices": 16, "answers": 100, "sync_step_s": 50.0, "ours_step_s": 20.0},
    ]
    assert [row["sync_linearity"] for row in with_linearity(rows)] == pytest.approx([1, 0.8])
    assert [row["ours_linearity"] for row in with_linearity(rows)] == pytest.approx([1, 1])


@pytest.mark.slow
def test_a_quick_run_writes_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (small(setting_of(Schedule.FULLY_ASYNC, 128)),)
    monkeypatch.setattr(published_results, "SETTINGS", settings)
    sweep = replace(SWEEPS[0], groups=8, group_size=2, num_workers=12, step_s={(0, 1): 60.0, (2, 1): 40.0})
    monkeypatch.setattr(published_results, "SWEEPS", (sweep,))
    monkeypatch.setattr(published_results, "QUICK", SMALL)
    monkeypatch.setattr(published_results, "_QUICK_SCALING_DEVICES", (8, 16))
    monkeypatch.setattr(
        sys, "argv", ["published_results", "--quick", "--processes", "1", "--json", str(tmp_path / "it.json")]
    )
    assert main() == 0
    written = json.loads((tmp_path / "it.json").read_text())
    row = written["rows"][0]
    assert {"system", "setting", "published_speedup", "modelled_speedup", "ours_speedup", "bound"} <= set(row)
    assert row["published_speedup"] == pytest.approx(356.30 / 150.63)
    assert [(r["batch"], r["devices"]) for r in written["scaling"]] == [
        ("fixed", 8),
        ("fixed", 16),
        ("grows", 8),
        ("grows", 16),
    ]
    assert {"commit", "cores", "versions", "seeds", "settings"} <= set(written["conditions"])
    at_0, at_2 = written["sweeps"][0]["runs"]
    assert (at_0["published_step_s"], at_2["published_step_s"]) == (60.0, 40.0)
    assert abs(at_0["error"]) < 0.3 and at_2["predicted_step_s"] < at_0["predicted_step_s"], (
        "the scale is that of S = 0"
    )
    printed = capsys.readouterr().out
    assert settings[0].source in printed and settings[0].assumed in printed
    assert all(assumption in printed for assumption in ASSUMPTIONS)
    assert "phases that fall away in modelled: recomputed log-probs" in printed
