"""Runs of the real loop with planted figures leave their files; the plan reads these alone."""

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.config.load import built, changed, compose_config, from_overrides, to_yaml
from skyrl_async.config.schema.algorithm import AlgorithmConfig
from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.config.schema.trainer import Schedule, StalenessPolicy
from skyrl_async.errors import ConfigError
from skyrl_async.metrics.trace_parts import read_spans
from skyrl_async.plan.__main__ import check, main
from skyrl_async.plan.calls import Samples, groups_of, waiting_seconds
from skyrl_async.plan.description import described
from skyrl_async.plan.findings import findings
from skyrl_async.plan.forecast import Accuracy, Forecast, Planner, WhatIf, _simulated, config_of
from skyrl_async.plan.measured import Measured, measured
from skyrl_async.plan.memory import check_devices
from skyrl_async.plan.model import fit, non_negative_least_squares, settings_of
from skyrl_async.plan.report import Row, best_splits, devices_of, row_of, sentences
from skyrl_async.record.files import read_samples
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KnownGroup, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group
from tests.cpu.plan.modelled_runs import recorded

ROOT = Path(__file__).parents[3]


def known_groups(
    seed: int = 0, seconds: Callable[[int], float] = lambda group: 0.0, num_filtered: int = 0
) -> tuple[KnownGroup, ...]:
    """60 of answers of 10 to 230 tokens; those to one prompt are alike."""
    rng = random.Random(seed)
    means = [rng.randrange(10, 200) for _ in range(60)]
    return tuple(
        KnownGroup(
            samples=tuple(((mean + rng.randrange(30), seconds(i)),) for _ in range(6)), is_filtered=i < num_filtered
        )
        for i, mean in enumerate(means)
    )


PLANTED = SimulationSettings(
    mini_batch_size=8,
    group_size=4,
    num_steps=26,
    num_prompts=400,
    num_workers=24,
    num_engines=1,
    max_staleness_steps=2,
    tokens_per_second=500.0,
    half_speed_requests=60.0,
    max_num_seqs=64,
    prefill_seconds=0.002,
    call_seconds=0.05,
    known_groups=known_groups(),
    seconds_per_token=2e-4,
    seconds_per_group=0.01,
    step_seconds=0.05,
    gather_seconds=0.005,
    send_seconds=0.01,
    stage_seconds=0.02,
    load_seconds=0.02,
    shared_cores=2,
)


@pytest.fixture(scope="module", autouse=True)
def short_simulations() -> Iterator[None]:
    """A planted run is steadier than a real one, so that fewer steps and replicates say as much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_async.plan.forecast._MOST_STEPS", 12)
        patch.setattr("skyrl_async.plan.forecast._NUM_REPLICATES", 2)
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan") / "run"
    recorded(PLANTED, directory)
    return directory


@pytest.fixture(scope="module")
def run(run_dir: Path) -> Measured:
    return measured(run_dir)


def step_seconds(settings: SimulationSettings, directory: Path) -> float:
    """Of the loop itself, warm."""
    rows = recorded(settings, directory)
    return fmean(row["timing/step"] for row in rows if "timing/step" in row and row["step"] > 12)


def test_what_the_trainer_and_a_publish_take_is_found(run: Measured) -> None:
    found, tokens = fit(run), float(run.gradients.num_tokens.mean())
    assert found.group_seconds + tokens * found.gradient_seconds == pytest.approx(
        PLANTED.seconds_per_group + tokens * PLANTED.seconds_per_token, rel=0.05
    )
    for name in ("step_seconds", "gather_seconds", "send_seconds", "stage_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=0.05), name
    assert found.pause_seconds == pytest.approx(PLANTED.load_seconds, rel=0.05)


@pytest.mark.parametrize(
    "others", [{"publish_every_steps": 3}, {"eval_interval_steps": 8, "num_eval_prompts": 96}], ids=lambda o: min(o)
)
def test_what_a_publish_takes_depends_neither_on_how_many_there_are_nor_on_validations_that_hold_some_up(
    tmp_path: Path, others: dict[str, int]
) -> None:
    recorded(replace(PLANTED, **others), tmp_path)
    found = fit(measured(tmp_path))
    planted = (PLANTED.gather_seconds, PLANTED.send_seconds, PLANTED.stage_seconds, PLANTED.load_seconds)
    assert (found.gather_seconds, found.send_seconds, found.stage_seconds, found.pause_seconds) == pytest.approx(
        planted, rel=0.1
    )


@pytest.mark.parametrize(
    "batch",
    [
        {"update_epochs_per_batch": 2, "max_staleness_steps": 5},
        {"train_batch_size": 16, "max_staleness_steps": 5, "num_workers": 48},
    ],
    ids=["two passes", "two mini-batches"],
)
def test_what_groups_and_optimizer_steps_take_is_found_where_a_batch_has_two_steps(
    tmp_path: Path, batch: dict[str, int]
) -> None:
    planted = replace(PLANTED, num_steps=52, **batch)
    recorded(planted, tmp_path)
    found = measured(tmp_path)
    model, tokens = fit(found), float(found.gradients.num_tokens.mean())
    assert model.group_seconds + tokens * model.gradient_seconds == pytest.approx(0.01 + tokens * 2e-4, rel=0.05)
    assert model.step_seconds == pytest.approx(PLANTED.step_seconds, rel=0.05)
    assert abs(error_of_its_model(found)) < 0.1


def test_a_run_whose_weights_change_only_while_no_group_is_in_flight_is_planned_as_one(tmp_path: Path) -> None:
    recorded(replace(PLANTED, deterministic=True, tokens_per_second=100.0), tmp_path)
    run = measured(tmp_path)
    assert fit(run).stage_seconds == pytest.approx(PLANTED.stage_seconds, rel=0.1), "without the wait for groups"
    assert abs(error_of_its_model(run)) < 0.1


def test_gradients_that_a_kill_lost_and_a_resume_computed_again_do_not_count(
    run_dir: Path, run: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = list(read_spans(run_dir))
    lost = [
        replace(span, begin=span.begin - 1000, end=span.end - 990)  # with settings that were slower
        for span in spans
        if span.name == "forward_backward" and span.args.get("step") in (20, 21)
    ][:-2]
    monkeypatch.setattr("skyrl_async.plan.measured.read_spans", lambda directory: [*lost, *spans])
    for name in ("num_tokens", "seconds"):
        before, after = (
            getattr(found, name)[np.isin(found.step, (20, 21))]
            for found in (run.gradients, measured(run_dir).gradients)
        )
        assert len(after) == len(before) and after.mean() == pytest.approx(before.mean())


def test_an_update_of_idle_engines_takes_what_the_first_one_took(tmp_path: Path) -> None:
    slow = replace(PLANTED, tokens_per_second=100.0, idle_stage_seconds=0.004, idle_load_seconds=0.002)
    recorded(slow, tmp_path)
    found = fit(measured(tmp_path))
    assert (found.idle_stage_seconds, found.idle_pause_seconds) == pytest.approx((0.004, 0.002))
    assert (found.stage_seconds, found.pause_seconds) == pytest.approx((0.02, 0.02), rel=0.1)


def test_a_token_takes_what_it_took_at_the_loads_that_there_were(run: Measured) -> None:
    found, load = fit(run), float(run.calls.load.mean())
    per_token = found.token_seconds + load * found.token_seconds_per_request
    assert per_token == pytest.approx((1 + load / PLANTED.half_speed_requests) / PLANTED.tokens_per_second, rel=0.15)


def test_what_engines_say_of_their_iterations_counts_more_than_the_calls(tmp_path: Path) -> None:
    def edit(row: dict[str, Any]) -> None:
        requests, tokens = 10.0 + row["step"] % 7, 100.0 + row["step"] % 3
        for kind, prompts, prefilled in (("decode", 0.0, 0.0), ("prefill", 4.0, tokens)):
            seconds = 1.25 * (0.01 + 0.002 * requests + 0.0001 * prefilled)
            found = {"seconds": seconds, "requests": requests, "prompts": prompts, "tokens": prefilled}
            row |= {f"engines/{kind}_iteration_{name}": value for name, value in found.items()}

    recorded(PLANTED, tmp_path, edit)
    run = measured(tmp_path)
    found, slowdown = fit(run), 1.25 * float(np.average(run.calls.speed, weights=run.calls.seconds - run.calls.waiting))
    assert found.token_seconds + 13 * found.token_seconds_per_request == pytest.approx(slowdown * 0.036, rel=0.02)
    assert found.prefill_seconds == pytest.approx(slowdown * 0.0001 * 101 / 4, rel=0.05)


DOUBLED = tuple(
    KnownGroup(samples=tuple(tuple((2 * n, s) for n, s in turns) for turns in group.samples))
    for group in PLANTED.known_groups
)
WHAT_IFS = (
    (WhatIf(), {}),
    (WhatIf(keys={"trainer.max_staleness_steps": 0}), {"max_staleness_steps": 0, "num_workers": 8}),
    (WhatIf(keys={"trainer.max_staleness_steps": 6}), {"max_staleness_steps": 6}),
    (WhatIf(keys={"engine.num_engines": 3}), {"num_engines": 3}),
    (WhatIf(keys={"trainer.staleness_policy": StalenessPolicy.allow}), {"staleness_policy": "allow"}),
    (WhatIf(lengths=2.0), {"known_groups": DOUBLED}),
)


@pytest.fixture(scope="module")
def forecasts(run: Measured) -> tuple[list[Forecast], Accuracy | None]:
    """One of each what-if."""
    planner = Planner(run, num_processes=1)
    return planner.forecasts([what_if for what_if, _ in WHAT_IFS]), planner.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(WHAT_IFS)), ids=lambda index: str(WHAT_IFS[index][0]))
def test_a_forecast_is_what_the_loop_then_takes(
    forecasts: tuple[list[Forecast], Accuracy | None], tmp_path: Path, index: int
) -> None:
    found, _ = forecasts
    truth = step_seconds(replace(PLANTED, num_steps=30, seed=3, **WHAT_IFS[index][1]), tmp_path / "run")
    assert found[index].step_seconds == pytest.approx(truth, rel=0.1)


def test_whole_waves_of_steps_are_measured_and_nothing_of_the_end() -> None:
    settings = replace(PLANTED, num_steps=None, stage_seconds=1.0)
    found = _simulated({}, settings)

    async def main() -> list[float]:
        simulation = Simulation(replace(settings, num_steps=20))
        await simulation.run()
        return [values["timing/step"] for _, values in simulation.logged if "timing/step" in values]

    # A wave of three is left out, and four are measured.
    assert found.step_seconds == pytest.approx(fmean(run_in_virtual_time(main())[3:15]))


def test_batches_of_several_steps_are_forecast_too_per_optimizer_step(run: Measured, tmp_path: Path) -> None:
    batch = {"update_epochs_per_batch": 2, "max_staleness_steps": 5}
    (found,) = Planner(run, num_processes=1).forecasts([WhatIf(keys={f"trainer.{k}": n for k, n in batch.items()})])
    of_batch = step_seconds(replace(PLANTED, num_steps=60, seed=3, **batch), tmp_path)
    assert found.step_seconds == pytest.approx(of_batch / 2, rel=0.1)


def test_how_idle_engines_are_is_of_the_steps_that_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "training_binds.yaml"
    path.write_text(
        "{num_engines: 1, max_staleness_steps: 8, policy_mini_batch_size: 4, n_samples_per_prompt: 2, "
        "lengths: {mean_tokens: 100, max_tokens: 100, sigma: 0, prompt_tokens: 0}, "
        "engine: {tokens_per_second: 1e5, half_speed_requests: 1e-3}, "  # 100 tokens/s of however many requests
        "training: {tokens_per_second: 10, step_seconds: 0}, num_workers: 4, "
        "publish: {send_seconds: 0, pause_seconds: 0}}"
    )
    (found,) = Planner(described(path), num_processes=1).forecasts([WhatIf()])
    assert found.step_seconds == pytest.approx(20, rel=0.01), "800 tokens at 40 per second"
    assert found.engines_idle_frac == pytest.approx(1 - 8 / 20, abs=0.02), "as many take an engine 8 s"


@pytest.mark.slow
def test_where_cores_are_shared_an_engine_on_twice_the_devices_takes_twice_the_cores(run: Measured) -> None:
    as_it_was, twice = Planner(run, num_processes=1).forecasts(
        [WhatIf(), WhatIf(keys={"engine.tensor_parallel_size": 2})]
    )
    assert twice.step_seconds > 0.95 * as_it_was.step_seconds, "one engine took more than half of the two cores"


@pytest.mark.slow
def test_the_model_of_a_run_reproduces_it(forecasts: tuple[list[Forecast], Accuracy | None]) -> None:
    _, accuracy = forecasts
    assert accuracy is not None and abs(accuracy.error) < 0.1


@pytest.mark.slow
def test_the_model_of_a_run_whose_requests_wait_for_a_place_reproduces_it(tmp_path: Path) -> None:
    one_is_long = (KnownGroup(samples=(((400, 0.0),), *(((20, 0.0),),) * 3)),) * 60
    many = {"num_workers": 40, "max_staleness_steps": 5, "max_num_seqs": 32, "prefill_seconds": 0.01}
    recorded(replace(PLANTED, known_groups=one_is_long, load_seconds=0.2, **many), tmp_path)
    planner = Planner(measured(tmp_path), num_processes=1)
    planner.forecasts([])
    assert planner.accuracy is not None and abs(planner.accuracy.error) < 0.05


def test_a_run_that_has_ended_is_read_without_the_steps_for_which_all_was_generated(run: Measured) -> None:
    assert (PLANTED.num_steps, PLANTED.max_staleness_steps) == (26, 2)
    assert [run.steps[i]["step"] for i in (0, -1)] == [3, 24]


def test_a_run_with_fewer_engines_than_autoscale_may_leave_can_be_planned(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    config = built(compose_config([], run_dir / "config.yaml"))
    bounds = dict.fromkeys(("num_engines", "min_engines", "max_engines"), 2)
    (tmp_path / "config.yaml").write_text(to_yaml(changed(config, {f"engine.{key}": n for key, n in bounds.items()})))
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"engines/serving": 1}) + "\n" for row in rows))
    known = measured(tmp_path)
    for num_engines in (1, 2, 3):
        check(known, WhatIf(keys={"engine.num_engines": num_engines}))


def test_a_group_has_each_known_sample_of_its_prompt(run_dir: Path) -> None:
    lengths: dict[int, list[int]] = {}
    for row in read_samples(run_dir, ("admission_index", "num_sampled_tokens")).to_pylist():
        lengths.setdefault(row["admission_index"], []).append(row["num_sampled_tokens"])
    known = [[turns[0][0] for turns in group.samples] for group in PLANTED.known_groups]
    for found in lengths.values():
        assert any(not Counter(found) - Counter(group) for group in known), found


@given(
    values=st.lists(st.floats(-5, 5), min_size=6, max_size=6),
    features=st.lists(st.lists(st.floats(0, 3), min_size=3, max_size=3), min_size=6, max_size=6),
)
def test_least_squares_without_a_negative_coefficient_cannot_be_improved(
    values: list[float], features: list[list[float]]
) -> None:
    x, y = np.array(features), np.array(values)
    found = non_negative_least_squares(x, y)

    def cost(w: np.ndarray) -> float:
        return float(((x @ w - y) ** 2).sum() + 0.01 * len(y) * ((w * x.mean(axis=0)) ** 2).sum())

    assert (found >= 0).all()
    for index in range(3):
        for change in (-1e-3, 1e-3):
            other = found.copy()
            other[index] = max(0.0, other[index] + change)
            assert cost(found) <= cost(other) + 1e-6


def test_a_request_waits_for_a_place_until_older_ones_have_left_theirs() -> None:
    begin, end = np.array([0.0, 0.0, 1.0]), np.array([4.0, 9.0, 6.0])
    order, places = np.array([0.0, 2.0, 1.0]), np.ones(3)
    # One place: the first has it until 4, the third, which is older than the second, until 6.
    assert waiting_seconds(begin, end, order, np.array([]), places, capacity=1).tolist() == [0.0, 6.0, 3.0]
    # An update at 5 gives all places anew, to the same.
    assert waiting_seconds(begin, end, order, np.array([5.0]), places, capacity=1).tolist() == [0.0, 6.0, 3.0]
    assert waiting_seconds(begin, end, order, np.array([]), places, capacity=2).tolist() == [0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("key", "value", "streams"),
    [
        ("algorithm.advantage_estimator", "grpo", True),
        ("algorithm.advantage_estimator", "reinforce++", False),
        ("algorithm.policy_loss_type", "clip_cov", False),
        ("algorithm.advantage_batch_normalize", True, False),
        ("update_epochs_per_batch", 2, False),
        ("schedule", Schedule.one_step_off, False),
    ],
)
def test_what_needs_a_whole_step_is_not_planned_as_streamed(run: Measured, key: str, value: Any, streams: bool) -> None:
    model = fit(run)
    config = changed(model.config, {f"trainer.{key}": value})
    assert settings_of(model, config).stream_mini_batch is streams


def test_replies_are_placed_where_they_were_asked_for(run: Measured) -> None:
    """A sample of 8 s: it asks after 0 and 3 s, waits 2 and 1 s for 10 and 30 tokens, and its environments take 1 and 4 s."""
    spans = ({"start": 0, "end": 12}, {"start": 12, "end": 48})
    asked = ({"asked_at": 50.0, "engine_seconds": 2.0}, {"asked_at": 53.0, "engine_seconds": 1.0})
    nothing = {"asked_at": None, "engine_seconds": None, "start": 48, "end": 60}
    turns = [span | of_turn for span, of_turn in zip(spans, asked, strict=True)] + [nothing]
    row = {"turns": turns, "seconds": 8.0, "num_turns": 2, "num_sampled_tokens": 40, "admission_index": 5, "step": 1}
    row |= {"outcome": "trained", "num_trained_tokens": 40}
    assert groups_of([row]) == (KnownGroup(samples=(((10, 1.0), (30, 4.0)),)),)
    samples = Samples([row], np.array([100.0]), (), run.config)
    assert (samples.begin.tolist(), samples.end.tolist()) == ([100.0, 103.0], [102.0, 104.0])


def test_an_outage_between_two_replies_is_not_their_environments_time() -> None:
    """The run is resumed ten hours after the first reply; the sample then takes 4 s, of which an engine has 1 s."""
    asked = ({"asked_at": 50.0, "engine_seconds": 2.0}, {"asked_at": 36_050.0, "engine_seconds": 1.0})
    turns = [of_turn | {"start": 0, "end": 20} for of_turn in asked]
    row = {"turns": turns, "seconds": 4.0, "num_turns": 2, "num_sampled_tokens": 40, "admission_index": 5, "step": 1}
    row |= {"outcome": "trained", "num_trained_tokens": 40}
    assert groups_of([row]) == (KnownGroup(samples=(((20, 0.5), (20, 0.5)),)),)


def test_a_steady_run_has_no_findings(run: Measured) -> None:
    assert findings(run) == []


def test_lengths_that_drift_are_named(run: Measured) -> None:
    half = run.calls.step > np.median(run.calls.step)
    longer = replace(run.calls, num_tokens=run.calls.num_tokens * np.where(half, 2.0, 1.0))
    (said,) = findings(replace(run, calls=longer))
    assert said.startswith("lengths drift: ")


def test_environments_that_hang_are_named(tmp_path: Path) -> None:
    hanging = known_groups(seconds=lambda group: 30.0 if group == 7 else 0.1)
    recorded(replace(PLANTED, known_groups=hanging), tmp_path / "run")
    run = measured(tmp_path / "run")
    # The simulator's turns end with their environment, which its record does not tell apart: as the record of a real run would.
    environment = np.where(run.calls.seconds > 25, 30.0, 0.1)
    (said,) = findings(replace(run, calls=replace(run.calls, environment_seconds=environment)))
    assert said.startswith("environments hang: ") and "30.0 s" in said


def test_engines_of_different_speeds_are_named(tmp_path: Path) -> None:
    def slow_one(row: dict[str, Any]) -> None:
        row["engines"] = {f"engine-{i}": {"tokens_per_call_second": speed} for i, speed in enumerate((100.0, 60.0))}

    recorded(PLANTED, tmp_path / "run", edit=slow_one)
    (said,) = findings(measured(tmp_path / "run"))
    assert said.startswith("engines differ: 60 tokens per call and second in engine-1, 100 in engine-0")


def test_restarts_of_engines_are_counted_over_a_resume_which_begins_at_0(run: Measured) -> None:
    counts = [2.0, 3.0, 3.0, 0.0, *[1.0] * (len(run.steps) - 4)]
    steps = tuple(step | {"engines/restarts": num} for step, num in zip(run.steps, counts, strict=True))
    (said,) = findings(replace(run, steps=steps))
    assert said.startswith("engines were restarted 2 times")


@pytest.mark.slow
def test_the_command_prints_a_table_and_what_it_says(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engines", "1,2", "--staleness", "2", "--gpu-hour", "2.5", "--processes", "1"]
    assert main([str(run_dir), *options, "--picture", str(tmp_path / "plan.png")]) == 0
    said = capsys.readouterr().out
    assert "in the model of it" in said and "1 -> 2 engines with S 2: " in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert main([str(run_dir), *options, "--json", "--budget", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["keys"] for row in found["rows"]][1:] == [
        {"engine.num_engines": n, "trainer.max_staleness_steps": 2} for n in (1, 2)
    ]
    first = found["rows"][0]
    assert first["low_seconds"] <= first["step_seconds"] <= first["high_seconds"]
    assert first["dollars_per_1000_steps"] == pytest.approx(1000 * first["step_seconds"] / 3600 * 2 * 2.5)
    assert sorted(row["num_devices"] for row in found["splits"]) == [2, 3, 3, 4, 4]
    assert {row["keys"]["trainer.max_staleness_steps"] for row in found["splits"]} == {2}
    assert found["best_split"].startswith("most tokens per second: engines ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "missing must be the directory of a run"),
        (["RUN", "--staleness=-1"], "--staleness must be whole numbers >= 0"),
        (["RUN", "--engines", "0"], "--engines must be whole numbers >= 1"),
        (["RUN", "--policy", "waits"], "--policy must be of wait, "),
        (["RUN", "--lengths", "xtwo"], "--lengths must be factors such as x2,x0.5, got 'xtwo'"),
        (["RUN", "--budget", "1"], "--budget must be >= 2"),
        (["RUN", "--gpu-hour", "-2.5"], "--gpu-hour must be dollars >= 0, got -2.5"),
        (
            ["RUN", "--picture", "missing/plan.png"],
            "--picture must be a .png in a directory that exists, got missing/plan.png",
        ),
        (["RUN", "--mini-batch", "32"], "mini-batch 32: "),
        (
            ["--describe", "LARGE", "--budget", "6"],
            "no split of so many devices holds the model; engines 1, training workers 2: training.num_workers must be >= 7, got 2",
        ),
        (["--describe", "missing.yaml"], "missing.yaml describes no cluster"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    run_dir: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"RUN": str(run_dir), "LARGE": str(ROOT / "examples" / "plan" / "cluster_64.yaml")}
    assert main([files.get(word, word) for word in arguments]) == 2
    assert said in capsys.readouterr().err


def test_of_a_long_run_the_newest_steps_are_read_with_all_of_their_samples(
    run_dir: Path, run: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_async.plan.measured._MAX_ROWS", 10)
    newest = measured(run_dir)
    assert [step["step"] for step in newest.steps] == [step["step"] for step in run.steps[-8:]]
    assert newest.gradients.num_tokens.min() > 0
    model, whole = fit(newest), fit(run)
    tokens = float(run.gradients.num_tokens.mean())
    assert model.group_seconds + tokens * model.gradient_seconds == pytest.approx(
        whole.group_seconds + tokens * whole.gradient_seconds, rel=0.05
    )


def test_lengths_and_stages_are_of_the_steps_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def old_logprobs(policy: ModelledPolicy, group: Group) -> Group:
        await policy.compute(0.05 if len(policy.steps) < 14 else 0.15)
        return group

    recorded(
        replace(PLANTED, algorithm=AlgorithmConfig(policy_loss_type="decoupled_ppo")),
        tmp_path,
        prepare_with=lambda policy: {"logp": partial(old_logprobs, policy)},
    )
    monkeypatch.setattr("skyrl_async.plan.measured._MAX_ROWS", 10)
    run = measured(tmp_path)
    assert run.steps[0]["step"] == 17
    assert len(run.groups) == 8 * (26 - 16), "those of older steps may be of other settings"
    assert run.stages["logp"] == pytest.approx(0.15, rel=0.1)


def test_a_run_whose_samples_lack_a_figure_is_refused_by_its_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*arguments: Any, **options: Any) -> Any:
        table = read_samples(*arguments, **options)
        place = table.column_names.index("num_response_tokens")
        return table.set_column(place, "num_response_tokens", pa.nulls(len(table), pa.int32()))

    monkeypatch.setattr("skyrl_async.plan.measured.read_samples", without)
    assert main([str(run_dir)]) == 2
    assert "must have num_response_tokens of each sample: was it written by another version?" in capsys.readouterr().err


def test_the_cores_of_a_run_are_those_that_it_had_and_one_that_does_not_say_is_refused(tmp_path: Path) -> None:
    recorded(replace(PLANTED, num_steps=14, shared_cores=31), tmp_path)
    assert measured(tmp_path).shared_cores == 31
    recorded(replace(PLANTED, num_steps=14, shared_cores=None), tmp_path / "on_devices")
    assert measured(tmp_path / "on_devices").shared_cores is None
    recorded(replace(PLANTED, num_steps=14), tmp_path / "old", lambda row: row.pop("engines/shared_cores", None))
    with pytest.raises(ConfigError, match="must have engines/shared_cores: was it written by another version?"):
        measured(tmp_path / "old")


def test_a_damaged_file_of_a_run_is_named(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    part = next((tmp_path / "run" / "samples").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    assert main([str(tmp_path / "run")]) == 2
    assert part.name in capsys.readouterr().err


def test_a_run_that_is_always_validating_is_refused_and_one_of_few_replies_beside_none_is_planned(
    run_dir: Path, tmp_path: Path, run: Measured
) -> None:
    first = run.calls.step == run.steps[0]["step"]
    few = replace(run.calls, **{one.name: getattr(run.calls, one.name)[first] for one in fields(run.calls)})
    for seed in range(5):
        assert fit(replace(run, calls=few, steps=run.steps[:2]), np.random.default_rng(seed)).token_seconds >= 0
    shutil.copytree(run_dir, tmp_path / "run")
    row = {"pid": 1, "tid": 9999}
    validating = [
        {"ph": "M", "name": "thread_name", **row, "args": {"name": "evaluation", "track": "evaluation", "lane": 1}},
        {"ph": "X", "name": "evaluation", **row, "ts": 0, "dur": 10**12, "args": {}},
    ]
    for part in (tmp_path / "run" / "trace").glob("*.json"):
        first_line, *others = part.read_text().splitlines()
        part.write_text("\n".join([first_line, *(f"{json.dumps(event)}," for event in validating), *others]) + "\n")
    with pytest.raises(ConfigError, match="no reply without a validation beside it .* trainer.eval_interval_steps"):
        measured(tmp_path / "run")


def test_a_figure_that_was_not_finite_is_as_one_that_is_not_there(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) | {"timing/publish": None} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert measured(tmp_path / "run").mean("timing/publish") == 0.0


def error_of_its_model(run: Measured) -> float:
    """By how much the model of a run is wrong about it."""
    planner = Planner(run, num_processes=1)
    planner.forecasts([])
    assert planner.accuracy is not None
    return planner.accuracy.error


def test_groups_that_are_filtered_are_generated_and_not_trained(
    tmp_path: Path,
) -> None:
    recorded(replace(PLANTED, known_groups=known_groups(num_filtered=36), sample_full_batch=True), tmp_path)
    run = measured(tmp_path)
    assert 0.5 < fmean(group.is_filtered for group in run.groups) < 0.7
    assert findings(run) == [] and abs(error_of_its_model(run)) < 0.1


def test_samples_that_are_not_trained_because_a_limit_cut_them_are_generated_all_the_same(tmp_path: Path) -> None:
    cut = tuple(replace(group, samples=(((400, 0.0),), *group.samples[:3]), num_masked=1) for group in known_groups())
    recorded(replace(PLANTED, known_groups=cut), tmp_path)
    run = measured(tmp_path)
    assert {(group.num_masked, group.samples[0]) for group in run.groups} == {(1, ((400, 0.0),))}
    assert abs(error_of_its_model(run)) < 0.1


@pytest.mark.parametrize("on_failed_samples", [OnFailedSamples.train_rest, OnFailedSamples.drop])
def test_samples_that_fail_are_generated_and_not_trained(tmp_path: Path, on_failed_samples: OnFailedSamples) -> None:
    groups = tuple(
        replace(group, samples=(*group.samples[:3], ((100, 2.0),)), num_failing=1) if number % 3 == 0 else group
        for number, group in enumerate(known_groups())
    )
    failing = replace(PLANTED, known_groups=groups, on_failed_samples=on_failed_samples, max_failed_fraction=1.0)
    recorded(replace(failing, num_eval_prompts=64), tmp_path)
    run = measured(tmp_path)
    (said,) = findings(run)
    assert "% of the samples failed; as many do in the forecast" in said
    assert sum(group.num_failing for group in run.groups) == pytest.approx(len(run.groups) / 3, rel=0.3)
    assert abs(error_of_its_model(run)) < 0.1


def test_log_probs_and_gradients_of_the_policy_workers_wait_for_each_other(
    tmp_path: Path,
) -> None:
    async def old_logprobs(policy: ModelledPolicy, group: Group) -> Group:
        await policy.compute(0.15)
        return group

    recorded(
        replace(PLANTED, algorithm=AlgorithmConfig(policy_loss_type="decoupled_ppo")),
        tmp_path,
        prepare_with=lambda policy: {"logp": partial(old_logprobs, policy)},
    )
    run = measured(tmp_path)
    found, tokens = fit(run), float(run.gradients.num_tokens.mean())
    assert found.stages["logp"] == pytest.approx(0.15, rel=0.1)
    assert found.group_seconds + tokens * found.gradient_seconds == pytest.approx(
        PLANTED.seconds_per_group + tokens * PLANTED.seconds_per_token, rel=0.1
    )
    assert abs(error_of_its_model(run)) < 0.1


def test_stages_that_share_devices_take_turns_in_the_model_too(tmp_path: Path) -> None:
    shared = replace(PLANTED, shared_by=(("policy", "generate"),), min_generation_slice_s=0.5)
    recorded(shared, tmp_path / "run")
    planner = Planner(measured(tmp_path / "run"), num_processes=1)
    as_it_is, synchronous = planner.forecasts([WhatIf(), WhatIf(keys={"trainer.max_staleness_steps": 0})])
    assert planner.accuracy is not None and abs(planner.accuracy.error) < 0.1
    truth = step_seconds(replace(shared, max_staleness_steps=0, num_workers=8, seed=3), tmp_path / "synchronous")
    assert synchronous.step_seconds == pytest.approx(truth, rel=0.1)
    rows = [row_of(planner.config, WhatIf(), as_it_is, None)]
    assert sentences(rows, planner.config)[0].startswith(
        "policy and generate share devices: as it is, the trainer is idle"
    )


def test_a_bound_is_asked_whatever_its_name_in_the_run() -> None:
    config = from_overrides("trainer.generate_ahead_steps=2")
    assert config_of(config, WhatIf(keys={"trainer.max_staleness_steps": 4})).trainer.staleness_bound == 4


def test_devices_of_every_worker_are_counted_and_shared_ones_once() -> None:
    assert (
        devices_of(
            from_overrides(
                "trainer.algorithm.use_kl_loss=true",
                "engine.num_engines=3",
                "training.num_workers=2",
                "training.num_ref_workers=2",
            )
        )
        == 7
    )
    assert devices_of(from_overrides("trainer.algorithm.advantage_estimator=gae")) == 3
    assert devices_of(from_overrides("placement.groups=[[policy,generate]]", "placement.devices=[1]")) == 1


@pytest.mark.parametrize("bound", ["max_staleness_steps=4", "max_staleness_steps=null", "generate_ahead_steps=4"])
def test_what_is_said_of_one_thing_is_said_of_a_run_that_is_else_as_it_is(bound: str) -> None:
    config = from_overrides("engine.num_engines=2", f"trainer.{bound}")
    asked = [
        WhatIf(),
        *(
            WhatIf(keys={"engine.num_engines": engines, "trainer.max_staleness_steps": bound})
            for engines in (2, 4)
            for bound in (1, 4)
        ),
    ]
    forecast = Forecast(**dict.fromkeys((one.name for one in fields(Forecast)), 1.0))
    said = sentences([row_of(config, one, forecast, None) for one in asked], config)
    assert [sentence.partition(":")[0] for sentence in said] == [
        "weight updates bind",
        "2 -> 4 engines with S 4",
        "S = 1 with engines 2 is the fastest of these",
    ]


def test_what_binds_tells_environments_from_answers() -> None:
    idle = dict.fromkeys((one.name for one in fields(Forecast)), 1.0) | {"publish_wait_frac": 0.0}
    rows = [row_of(from_overrides(), WhatIf(), Forecast(**idle), None)]
    groups = [KnownGroup(samples=(((9, 0.0), (9, seconds)), ((9, 0.0),))) for seconds in (1.0, 3.0)]
    said, of_environments = (sentences(rows, from_overrides(), known)[0] for known in ((), groups))
    assert said.startswith("the staleness bound binds, groups wait for their longest samples: ")
    assert of_environments.startswith(
        "the staleness bound binds, groups wait for their longest samples, of which environments take 2 s in the mean: "
    )


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        (
            "trainer.policy_mini_batch_size",
            (64, 32),
            "32 -> 64 mini-batch: +25% speed (within the error), and a token is 20% cheaper",
        ),
        (
            "trainer.staleness_policy",
            (StalenessPolicy.wait, StalenessPolicy.allow),
            "wait -> allow policy: -20% speed (within the error), ",
        ),
        (
            "engine.tensor_parallel_size",
            (2, 1),
            "1 -> 2 tensor parallel: +25% speed (within the error), and a token is 20% dearer",
        ),
    ],
)
def test_what_a_change_gains_is_said_in_tokens(key: str, values: tuple[Any, Any], said: str) -> None:
    nothing = Forecast(**dict.fromkeys((one.name for one in fields(Forecast)), 1.0) | {"high_seconds": 2.0})
    rows = [
        row_of(from_overrides(), WhatIf(keys={key: value}), replace(nothing, tokens_per_second=tokens), None)
        for value, tokens in zip(values, (100.0, 80.0), strict=True)
    ]
    assert sentences(rows, from_overrides())[1].startswith(said)


def test_of_splits_that_are_about_as_fast_the_one_with_the_fewest_devices_is_named_for_each_length() -> None:
    nothing = Forecast(**dict.fromkeys((one.name for one in fields(Forecast)), 1.0))

    def row(tokens_per_second: float, num_devices: int, lengths: float = 1.0, *, is_split: bool = True) -> Row:
        what_if = WhatIf(keys={"engine.num_engines": num_devices} if is_split else {}, lengths=lengths)
        forecast = replace(nothing, tokens_per_second=tokens_per_second)
        return Row(what_if=what_if, forecast=forecast, num_devices=num_devices, dollars=None)

    splits = [row(200.0, 8, 2.0), row(100.0, 64), row(97.0, 52), row(96.0, 48), row(60.0, 32)]
    assert best_splits(splits, [row(98.0, 64, is_split=False)]) == [
        (
            "most tokens per second: engines 64, on 64 devices; engines 48 has 96% of them on 48; as it is, the run has 98% of them on 64",
            splits[1:],
        ),
        ("most tokens per second: engines 8, lengths x2, on 8 devices", splits[:1]),
    ]
    assert (
        "; lengths x2, the run has 90% of them on 64"
        in best_splits(splits, [row(180.0, 64, 2.0, is_split=False)])[1][0]
    )


def test_a_budget_is_refused_for_a_run_whose_stages_share_devices(
    run_dir: Path, run: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    shared = changed(run.config, {"placement.groups": [["policy", "generate"]], "placement.devices": [1]})
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(shared))
    assert main([str(tmp_path / "run"), "--budget", "4"]) == 2
    assert "--budget must be left out for a run with placement.groups" in capsys.readouterr().err


def test_a_run_of_another_version_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace("num_engines:", "num_motors:"))
    with pytest.raises(ConfigError, match=r"config.yaml is not of this version: .*num_motors"):
        measured(tmp_path)


def test_of_a_run_that_was_resumed_with_other_settings_the_steps_since_then_are_read(
    run_dir: Path, run: Measured, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    before = changed(run.config, {"trainer.num_steps": 13, "logging.trace_max_gb": 2.0})
    (tmp_path / "config_to_step_13.yaml").write_text(to_yaml(before))
    assert measured(tmp_path).steps == run.steps, "no other setting was changed"
    (tmp_path / "config_to_step_13.yaml").write_text(to_yaml(changed(before, {"training.num_workers": 2})))
    assert [measured(tmp_path).steps[i]["step"] for i in (0, -1)] == [16, 24]
    (tmp_path / "config_to_step_13.yaml").rename(tmp_path / "config_to_step_20.yaml")
    with pytest.raises(ConfigError, match="has 6 steps since it was resumed with other settings after step 20, and"):
        measured(tmp_path)


def test_a_run_of_few_steps_is_refused(run_dir: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        text = (run_dir / name).read_text()
        (tmp_path / name).write_text(text if name == "config.yaml" else "".join(text.splitlines(keepends=True)[:3]))
    with pytest.raises(ConfigError, match="a forecast needs 10"):
        measured(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parameters: 70e9\n", r"^tensor_parallel_size must be >= 3, got 1: the weights in an engine take 140 GB"),
        (
            "parameters: 10e9\nlengths: {max_tokens: 99500}\nengine: {kv_bytes_per_token: 1e6}\n",
            r"must be >= 2, got 1: the weights in an engine and the KV cache of the longest sample \(100 GB\) take 120 GB",
        ),
        ("parameters: 30e9\n", r"^num_workers must be >= 6, got 4: weights, gradients and Adam's state take 480 GB"),
        ("num_engine: 4\n", r"no cluster: num_engine is no key of a description; did you mean num_engines\?"),
        ("hello\n", r"no cluster: hello is no key of a description; there are num_engines, "),
        ("- 1\n", r"no cluster: it must have keys, such as num_engines: 4, not a list"),
        (
            "training: {step_seconds: soon}\n",
            r"describes no cluster: training.step_seconds: Value 'soon' of type 'str'",
        ),
        ("publish: {pause_seconds: .inf}\n", r"publish.pause_seconds must be in \[0, inf\), got inf"),
        ("lengths: 5\n", "no cluster: lengths must have keys, got 5"),
        ("lengths: {sigma: 1e308}\n", r"lengths.sigma must be in \[0, 5\], got 1e\+308"),
        ("lengths: &all\n  mean_tokens: *all\n", "no cluster: an alias is part of what it stands for"),
        ("num_workers: 2\nnum_engines: 1\nnum_engines: 2\n", "found duplicate key num_engines in line 3"),
        ("\n", "describes no cluster: it is empty"),
        ("\udcff", "describes no cluster: 'utf-8' codec"),
        (
            "shares_devices: true\nparameters: 20e9\n",
            r"must not share devices \(shares_devices\): they take 120 GB of each, and it has 80 GB",
        ),
        (
            "shares_devices: true\nnum_workers: 8\n",
            r"^num_engines must be 8 for the 8 GPUs of \[policy,generate\], .*, got 4",
        ),
        (
            "lengths: {mean_tokens: 100, max_tokens: 10}\n",
            r"lengths.mean_tokens must be <= lengths.max_tokens \(10\), got 100",
        ),
        (
            "engine: {kv_bytes_per_token: 1e6}\n",
            r"^parameters must be > 0 with engine.kv_bytes_per_token=1e\+06, got 0: the KV cache has what",
        ),
        (
            "lengths: {mean_tokens: 10, turns: 50}\n",
            r"lengths.turns must be <= lengths.mean_tokens \(10\), got 50: a reply has at least a token",
        ),
        ("lengths: {mean_tokens: -1}\n", r"lengths.mean_tokens must be in \[1, inf\), got -1"),
        ("staleness_policy: waits\n", r"describes no cluster: .*waits"),
        ("num_engines: {\n", "describes no cluster"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
        described(tmp_path / "cluster.yaml")


def test_a_what_if_may_make_no_mistake_that_the_run_has_not(run: Measured) -> None:
    prompts = {"task.num_train_prompts": 400, "trainer.num_parallel_generation_workers": None}
    free = replace(run, config=changed(run.config, prompts))
    with pytest.raises(ConfigError, match=r"mini-batch 500: .* must be <= task.num_train_prompts \(400\), got 500"):
        check(free, WhatIf(keys={"trainer.policy_mini_batch_size": 500}))
    of_the_run = replace(run, config=changed(run.config, {"task.num_train_prompts": 1}))
    check(of_the_run, WhatIf(keys={"trainer.max_staleness_steps": 3}))


def test_a_run_with_generation_workers_of_its_own_can_be_asked_about_another_mini_batch(run: Measured) -> None:
    fixed = replace(run, config=changed(run.config, {"trainer.num_parallel_generation_workers": 4}))
    mini_batch = {"trainer.policy_mini_batch_size": 32}
    with pytest.raises(
        ConfigError,
        match=r"mini-batch 32: trainer.num_parallel_generation_workers must be between .*\(32\) and .*, got 4",
    ):
        check(fixed, WhatIf(keys=mini_batch))
    check(fixed, WhatIf(keys={**mini_batch, "trainer.num_parallel_generation_workers": 32}))
    own, by_skyrls_name = (
        "trainer.num_parallel_generation_workers",
        "trainer.fully_async.num_parallel_generation_workers",
    )
    named = replace(run, config=changed(run.config, {own: None, by_skyrls_name: 8}))
    check(named, WhatIf(keys={own: 16}))


def test_a_run_with_a_window_of_its_own_can_be_asked_about_other_policies(run: Measured) -> None:
    window = {"trainer.staleness_policy": StalenessPolicy.window, "trainer.staleness_window_groups": 20}
    windowed = replace(run, config=changed(run.config, window))
    for policy in StalenessPolicy:
        what_if = WhatIf(keys={"trainer.staleness_policy": policy})
        check(windowed, what_if)
        is_window = policy is StalenessPolicy.window
        assert config_of(windowed.config, what_if).trainer.staleness_window_groups == (20 if is_window else None)


def test_an_engine_runs_no_more_requests_than_its_kv_cache_holds(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "parameters: 1e9\ndevice_gb: 10\nengine: {kv_bytes_per_token: 1e6}\n"
        "lengths: {mean_tokens: 100, sigma: 0, max_tokens: 200, prompt_tokens: 15}\n"
    )
    model = described(tmp_path / "cluster.yaml")
    # 0.85 of 10 GB less 2 GB of weights hold 6,500 tokens; a running request has its prompt and half of its answer.
    assert settings_of(model, model.config).max_num_seqs == 100
    halved = changed(model.config, {"engine.gpu_memory_utilization": 0.525})
    assert settings_of(model, halved).max_num_seqs == 50


def test_longer_replies_take_more_of_the_kv_cache_and_their_prompt_as_much_as_before(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "parameters: 1e9\ndevice_gb: 10\nengine: {kv_bytes_per_token: 1e6}\n"
        "lengths: {mean_tokens: 100, max_tokens: 200, prompt_tokens: 6000}\n"
    )
    model = described(tmp_path / "cluster.yaml")
    # Beside 2 GB of weights there is room for 6,500 tokens.
    check(model, WhatIf(lengths=2.4))
    with pytest.raises(ConfigError, match=r"lengths x2.6: engine.tensor_parallel_size must be >= 2"):
        check(model, WhatIf(lengths=2.6))


@pytest.mark.parametrize(
    ("cores", "keys", "said"),
    [
        (
            0,
            {"training.num_workers": 3},
            r"training.num_workers must be >= 4, got 3: .* take 32 GB, and a device has 10 GB",
        ),
        (0, {"engine.num_engines": 64, "training.num_workers": 4}, None),
        (
            2,
            {"engine.num_engines": 13},
            r"engine.num_engines must be <= 12, got 13: training takes 32 GB and .* each engine 4 GB",
        ),
        (2, {"engine.num_engines": 12}, None),
    ],
)
def test_a_what_if_of_a_run_needs_the_memory_that_the_run_had(
    tmp_path: Path, cores: int, keys: dict[str, int], said: str | None
) -> None:
    size = {
        "policy/num_parameters": 2e9,
        "policy/device_memory_gb": 80.0 if cores else 10.0,
        "engines/shared_cores": cores,
    }
    recorded(replace(PLANTED, num_steps=14), tmp_path, lambda row: row.update(size))
    run = measured(tmp_path)
    asked = changed(run.config, keys)
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_devices(run.memory, asked)


def test_updates_that_take_longer_than_a_step_are_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "{num_engines: 2, num_workers: 2, policy_mini_batch_size: 4, lengths: {mean_tokens: 300}, publish: {send_seconds: 60}}"
    )
    assert main(["--describe", str(file), "--processes", "1"]) == 0
    assert "weight updates bind: as it is, the trainer waits for them for 9" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "plan").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_describes_a_cluster_that_holds_its_model(path: Path) -> None:
    model = described(path)
    devices = (
        model.config.engine.num_engines * model.config.engine.tensor_parallel_size + model.config.training.num_workers
    )
    assert path.stem == f"cluster_{devices}"
    lengths = [sum(n for n, _ in turns) for group in model.groups for turns in group.samples]
    assert math.isfinite(fmean(lengths)) and fmean(lengths) > 100
