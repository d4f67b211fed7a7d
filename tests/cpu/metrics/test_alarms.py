"""What is wrong with a run is named, and a healthy run is left alone."""

import re
from pathlib import Path

import pytest

from skyrl_async.metrics.alarms import ABANDONED, FAILED, RULES, Row, alarms
from tests.cpu.documented_metrics import DOCUMENTED_METRICS

HEALTHY = {
    "reward/mean": 0.4,
    "reward/zero_variance_frac": 0.4,
    "generate/failed_frac": 0.0,
    "generate/abandoned_frac": 0.0,
    "generate/filtered_frac": 0.3,
    "generate/truncated_frac": 0.05,
    "policy/lag0_behavior_kl": 0.0008,
    "async/engine_logprob_gap": 0.01,
    "policy/ess": 0.97,
    "policy/correction_masked": 0.01,
    "policy/entropy": 0.4,
    "policy/grad_norm": 0.3,
    "trainer/idle_frac": 0.1,
    "stage/generate/waiting_for_output_frac": 0.05,
    "timing/step": 20.0,
    "timing/wait_for_staleness": 0.5,
    "async/length_ratio": 0.97,
    "engines/slowest_frac": 0.95,
    "checkpoint/failures": 0.0,
}
FAULTS: dict[str, dict[str, float]] = {
    "failing samples": {"generate/failed_frac": 0.2},
    "abandoned samples": {"generate/abandoned_frac": 0.5},
    "slow engine": {"engines/slowest_frac": 0.3},
    "engines hold other weights": {"policy/lag0_behavior_kl": 0.08},
    "engines differ from the trainer": {"async/engine_logprob_gap": 0.2},
    "no signal, all wrong": {"reward/zero_variance_frac": 1.0, "reward/mean": 0.0},
    "no signal, all right": {"reward/zero_variance_frac": 0.95, "reward/mean": 1.0},
    "nothing passes the filter": {"generate/filtered_frac": 0.9},
    "effective sample size": {"policy/ess": 0.2},
    "all tokens masked": {"policy/correction_masked": 0.8},
    "entropy": {"policy/entropy": 0.001},
    "answers cut": {"generate/truncated_frac": 0.6},
    "gradient": {"policy/grad_norm": float("nan")},
    "trainer idle": {"trainer/idle_frac": 0.7},
    "generation idle": {"stage/generate/waiting_for_output_frac": 0.8},
    "cost of the bound": {"timing/wait_for_staleness": 6.0},
    "lost lengths": {"async/length_ratio": 0.5},
    "checkpoints": {"checkpoint/failures": 2.0},
}


def steps(*figures: Row, first: int = 1) -> list[Row]:
    return [{**HEALTHY, **row, "step": step} for step, row in enumerate(figures, first)]


def test_a_healthy_run_has_no_alarm() -> None:
    assert not list(alarms(steps(*[{}] * 40)))
    assert not list(alarms([]))


def test_every_rule_has_a_fault_here() -> None:
    assert [rule.name for rule in RULES] == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_the_step_since_which_it_lasts(name: str) -> None:
    (found,) = alarms(steps(*[{}] * 20, *[FAULTS[name]] * 10))
    assert (found.name, found.since_step) == (name, 21)
    assert found.metric in FAULTS[name]
    assert not list(alarms(steps(*[FAULTS[name]] * 20, {}))), "it is over"


def test_one_bad_step_is_no_alarm_and_a_step_that_lacks_the_figure_is_passed_over() -> None:
    bad = FAULTS["effective sample size"]
    assert not list(alarms(steps(*[{}] * 20, bad, bad)))
    evaluation: Row = {"step": 21, "reward/eval": 0.5}
    (found,) = alarms([*steps(*[{}] * 20), *steps(bad, first=21), evaluation, *steps(bad, bad, first=22)])
    assert found.since_step == 21


@pytest.mark.parametrize("name", ["no signal, all wrong", "no signal, all right"])
def test_equal_rewards_are_no_fault_where_a_teacher_trains_every_token(name: str) -> None:
    assert not list(alarms(steps(*[FAULTS[name] | {"policy/teacher_kl": 0.1}] * 20)))


def test_the_alarms_on_lost_samples_name_the_commonest_reason_and_its_share() -> None:
    rows = steps(*[FAULTS["failing samples"] | FAULTS["abandoned samples"]] * 10)
    why = {FAILED: ["OSError: gone"], ABANDONED: ["no place in the sandbox"]}
    failing, abandoned = alarms(rows, lambda: why)
    assert failing.says.endswith("100% of them with OSError: gone")
    assert abandoned.says.endswith("100% of them with no place in the sandbox")


def test_reasons_that_differ_in_numbers_are_one_and_a_long_one_is_cut() -> None:
    rows = steps(*[FAULTS["failing samples"]] * 10)
    slow = [f"DeadlineError: the rollout of p{number} took longer than 30 s" for number in range(3)]
    (found,) = alarms(rows, lambda: {FAILED: ["OSError: gone", *slow]})
    assert (
        found.says == "20% of the samples fail, 75% of them with DeadlineError: the rollout of p2 took longer than 30 s"
    )
    (found,) = alarms(rows, lambda: {FAILED: [f"ValueError: {'x ' * 10_000}"]})
    assert found.says.endswith("x ...") and len(found.says) < 300
    (found,) = alarms(rows, lambda: {FAILED: [f"ValueError: {'x' * 10_000}"]})
    assert "ValueError: xx" in found.says and found.says.endswith("x ...") and len(found.says) < 300
    (found,) = alarms(rows)
    assert found.says == "20% of the samples fail"


def test_a_slow_engine_is_named_where_all_have_ended_calls() -> None:
    fault = FAULTS["slow engine"]
    speeds = {"engine/fast/tokens_per_call_second": 9.0}
    rows = steps(*[fault | speeds | {"engine/slow/tokens_per_call_second": 2.0}] * 9)
    newest = {name: value for name, value in HEALTHY.items() if name != "engines/slowest_frac"}
    (found,) = alarms([*rows, {**newest, **speeds, "step": 10}])
    assert found.says.endswith("the others do: slow")


def test_the_first_steps_are_left_out() -> None:
    assert not list(alarms(steps(*[FAULTS["trainer idle"]] * 5)))


def test_advice_names_keys_that_exist_and_figures_that_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([a-z_.]+)`", page, re.MULTILINE)
    for rule in RULES:
        assert re.sub("stage/[a-z]+/", "stage/<name>/", rule.metric).replace("lag0", "lag<n>") in DOCUMENTED_METRICS
        commands = re.findall(r"-m skyrl_async\.\w+", rule.advice)
        found = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", re.sub(r"-m skyrl_async\.\w+", "", rule.advice))
        assert commands or found, rule.name
        for named in found:
            assert any(key == named or key.startswith(f"{named}.") for key in keys), (rule.name, named)
