"""What every benchmark shares; the measurements themselves are run by hand, on a quiet machine."""

import asyncio
import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from benchmarks.control_plane import WakesEveryone, WakesOne, measure
from benchmarks.delta import share_unchanged
from benchmarks.endpoint_overhead import BARE_ENVIRONMENT, Load, figures_of
from benchmarks.estimator_bias import compared
from benchmarks.estimator_figures import table as estimator_table
from benchmarks.estimator_runs import RUNS, overrides, partial_credit
from benchmarks.report import arguments, conditions, kept_rows, report
from benchmarks.staleness_curves import CORRECTIONS, Plan, against_no_staleness, known_rows
from benchmarks.staleness_picture import draw_rewards, draw_staleness_curves
from benchmarks.staleness_policies import Case, at_equal_bounds
from benchmarks.staleness_policies import measure as measure_policy
from benchmarks.staleness_tables import tables
from benchmarks.turn_policy import make_policy
from benchmarks.view_page import CHROMIUM, write_run
from benchmarks.view_page import measure as measure_page
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.notices import advice
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.tasks.registry import get_task
from skyrl_async.tasks.tiny_policy import task_tokenizer

ROOT = Path(__file__).parents[2]


def test_figures_are_written_with_their_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"variant": "plain loop", "seconds": 2.0}, {"variant": "S=4", "seconds": 1.0}]
    report("three ways", {"speedup": 2.0, "conditions": conditions(seed=7)}, rows, tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["speedup"] == 2.0 and written["rows"] == rows
    assert written["conditions"]["seed"] == 7 and written["conditions"]["versions"]["torch"]
    printed = capsys.readouterr().out
    assert "plain loop" in printed and "speedup: 2" in printed


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        arguments("").parse_args(["--json", "nowhere/figures.json"])
    assert "argument --json: nowhere is no directory" in capsys.readouterr().err


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


def test_the_overhead_of_the_endpoint_is_a_median_of_rounds_with_its_range() -> None:
    def loads(*tokens_per_s: float) -> list[Load]:
        return [Load(tokens_per_s=value, p50=10 / value, p99=20 / value) for value in tokens_per_s]

    rounds = {"bare": loads(100, 50, 100), "ours": loads(74, 50, 133), "updated": loads(50, 45, 90)}
    figures = figures_of(rounds | {"bare_logprobs": loads(10, 10, 10), "logprobs": loads(9, 9, 9)})
    assert (figures["ratio_tokens_per_s"], figures["ratio_tokens_per_s_range"]) == (1.0, [0.74, 1.33])
    assert figures["ratio_tokens_per_s_with_updates_range"] == [0.5, 0.9]
    assert figures["ratio_p50_range"] == [0.75, 1.35]


def test_the_bare_server_keeps_connections_longer_than_its_clients_do() -> None:
    kept_by_clients_s = httpx.Limits().keepalive_expiry
    assert kept_by_clients_s is not None
    assert float(BARE_ENVIRONMENT["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > kept_by_clients_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "agent_first_run",
        "async_speedup",
        "control_plane",
        "delta",
        "distillation_runs",
        "driver",
        "endpoint_freeze",
        "endpoint_overhead",
        "endpoint_routers",
        "estimator_bias",
        "estimator_runs",
        "plan_accuracy",
        "publish",
        "published_results",
        "record_cost",
        "routing",
        "schedules",
        "staleness_curves",
        "staleness_policies",
        "view_page",
    ],
)
def test_a_benchmark_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    said = capsys.readouterr().out
    assert end.value.code == 0 and "--json" in said and "--quick" in said


@pytest.mark.parametrize(
    "policy", ["wait", *(pytest.param(name, marks=pytest.mark.slow) for name in ("prime_rl", "tinker"))]
)
def test_the_staleness_benchmark_measures_a_policy_in_the_real_loop(policy: str) -> None:
    case = Case(policy=policy, streamed=True, sigma=0.5, staleness=1, seed=0, num_steps=12, mini_batch_size=8)
    row = measure_policy(case)
    assert 0 < row["share_of_limit"] and 0 < row["utilisation"] <= 1
    assert row["over_share"] == row["masked_frac"] == 0
    if policy == "wait":
        assert row["wasted_share"] == 0 and row["length_ratio"] == pytest.approx(1.0) and row["share_of_limit"] <= 1
    else:
        assert row["wasted_share"] > 0 and row["length_ratio"] < 1


@pytest.mark.slow
def test_rules_that_waste_nothing_are_compared_with_wait_at_the_bound_that_they_hold() -> None:
    policies = {"wait": (1, 2), "window": (1,), "torchtitan_fifo": (1,), "torchtitan_window": (1,), "verl_wait": (1,)}
    rows = [
        measure_policy(
            Case(policy=policy, streamed=False, sigma=0.8, staleness=s, seed=0, num_steps=12, mini_batch_size=8)
        )
        for policy, bounds in policies.items()
        for s in bounds
    ]
    assert all(row["wasted_share"] == 0 for row in rows)
    assert all(row["over_share"] == 0 for row in rows if row["policy"] != "verl_wait"), "that holds none in every case"
    seconds = {(row["policy"], row["bound"]): row["step_s"] for row in rows}
    found = {row["policy"]: row for row in at_equal_bounds(rows)}
    bounds = {"window": 2, "torchtitan_fifo": 1, "torchtitan_window": 2, "verl_wait": 1}
    assert {name: row["bound"] for name, row in found.items()} == bounds
    for name, bound in bounds.items():
        assert found[name]["speed_alike"] == seconds[name, bound] / seconds["wait", bound]
        assert found[name]["speed_streamed"] is None, "no run was streamed"


PLAN = Plan(
    corrections=("none", "icepop"),
    bounds=(0, 4),
    seeds=(0, 1),
    policy="wait",
    num_steps=45,
    num_eval_prompts=100,
    overrides=(),
)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("publish", "parameters gather_ms send_ms load_ms pause_ms copy_ms tokens_during_send"),
        ("schedules", "schedule ref_logp seconds reward_after utilisation"),
        ("staleness_curves", "staleness correction policy seed reward_before reward_after seconds"),
    ],
)
def test_figures_that_are_kept_have_the_keys_that_readers_look_for(name: str, keys: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
    assert rows and all(set(keys.split()) <= row.keys() for row in rows)


def test_the_page_about_publishing_shows_the_figures_that_are_kept() -> None:
    page = (ROOT / "docs/reference/publishing.md").read_text()
    for row in json.loads((ROOT / "benchmarks/results/publish.json").read_text())["rows"]:
        times = " | ".join(
            f"{row[f'{name}_ms']:.0f}" for name in ["gather", "send", "stage", "acknowledge", "pause", "load"]
        )
        ratios = f"{row['pause_per_copy']:.2f} | {row['asked_to_resumed_per_copy']:.2f}"
        assert (
            f"| {row['policy']}, {row['dtype']} | {row['mib']:.0f} MiB | {times} | {row['copy_ms']:.1f} | {ratios} | "
            f"{row['tokens_during_send']:.0f} |\n"
        ) in page


Kept = dict[str, Any]
"""What a file of ``benchmarks/results`` holds."""


def listed(values: Iterable[float], between: str = " ", digits: int = 2) -> str:
    return between.join(f"{value:.{digits}f}" for value in values)


def after(kept: Kept, correction: str, *bounds: int) -> list[list[float]]:
    """The rewards of the seeds, in their order, at each bound on staleness."""
    rows = sorted((row for row in kept["rows"] if row["correction"] == correction), key=lambda row: row["seed"])
    return [[row["reward_after"] for row in rows if row["staleness"] == bound] for bound in bounds]


def less(kept: Kept, correction: str, bound: int) -> str:
    """How far the reward is from that at a bound of 0."""
    key = correction, bound
    (row,) = (row for row in kept["against_no_staleness"] if (row["correction"], row["staleness"]) == key)
    return f"{row['reward_difference']:+.3f} ± {row['standard_error']:.3f}"


def of_schedules(kept: Kept) -> Iterator[str]:
    for row in kept["rows"]:
        seconds = f"{row['seconds']:.1f} s | {row['seconds_of_all_steps']:.1f} s"
        ends = f"{row['reward_after']:.2f} | {100 * row['utilisation']:.0f} % | {row['staleness_max']}"
        yield f"| `{row['schedule']}` | {row['ref_logp']} | {seconds} | {ends} |"
    synchronous, _, ours, *_ = (row["seconds_of_all_steps"] for row in kept["rows"])
    yield f"all 30 steps take {ours / synchronous:.2f} of the synchronous time"


def of_distillation_runs(kept: Kept) -> Iterator[str]:
    assert all(row["reward_after"] > 0.9 and row["seconds"] < 120 for row in kept["rows"])
    for row in [{"divergence": "", "kind": "the teacher itself"} | kept["teacher"], *kept["rows"]]:
        name = f"`{row['divergence']}`, {row['kind']}" if row["divergence"] else row["kind"]
        rewards = f"{row['reward_before']:.2f} | {row['reward_after']:.2f}"
        yield f"| {name} | {rewards} | {row['seconds']:.0f} s | {row['cpu_seconds']:.0f} s |"


def of_estimator_runs(kept: Kept) -> Iterator[str]:
    assert {row["estimator"] for row in kept["rows"]} == set(RUNS)
    for row in kept["rows"]:
        name = ", ".join(f"`{part}`" for part in row["estimator"].split(", "))
        yield f"| {name} | {row['reward_before']:.2f} | {row['reward_after']:.2f} |"
    rewritten = (row["rows_per_sample"] for row in kept["rows"] if "rewritten" in row["estimator"])
    yield f"a sample is {' and '.join(f'{num:.1f}' for num in rewritten)} rows in the mean"


def of_critic(kept: Kept) -> Iterator[str]:
    weighted, plain = (after(kept, name, 0, 4, 8) for name in ("gae", "gae_unweighted"))
    first, second, third = map(fmean, weighted)
    yield f"{first:.2f} (S = 0), {second:.2f} (4) and {third:.2f} (8) with the weights"
    yield f"and {listed(map(fmean, plain), ', ')} with `trainer.algorithm.vtrace_clip=null`"
    spreads = [max(ends) - min(ends) for ends in (*weighted, *plain)]
    yield f"differ by {min(spreads):.2f} to {max(spreads):.2f}"
    yield f"the same computation, by {first - fmean(plain[0]):.2f} "


def of_distillation_curves(kept: Kept) -> Iterator[str]:
    for bound in (0, 4, 8):
        means = (fmean(*after(kept, name, bound)) for name in ("none", "decoupled", "forward_kl"))
        yield f"| {bound} | {listed(means, ' | ', 3)} |"
    yield f"(from {fmean(row['reward_before'] for row in kept['rows']):.2f};"


def of_min_ess(kept: Kept) -> Iterator[str]:
    names = {"token_tis": "`token_tis`", "token_tis_min_ess": "with `trainer.guard.min_ess=0.3`"}
    for name, title in names.items():
        yield f"| {title} | {listed(*after(kept, name, 8), ' | ')} |"
    rows = sorted((row for row in kept["rows"] if row["correction"] == name), key=lambda row: row["seed"])
    yield f"| steps refused | {listed(((1 - row['lr_scale']) * row['steps'] for row in rows), ' | ', 0)} |"


def of_guarded(kept: Kept) -> Iterator[str]:
    others = [
        json.loads((ROOT / f"benchmarks/results/staleness_curves{of}.json").read_text()) for of in ("", "_lower_rate")
    ]
    for name in kept["conditions"]["corrections"]:
        plain, scaled, slower = (listed(*after(of, name, 8)) for of in (others[0], kept, others[1]))
        yield f"| `{name}` | {plain} | {scaled} | {slower} |"
    plain, scaled, slower = (
        {(row["correction"], row["seed"]): row for row in of["rows"] if row["staleness"] == 8}
        for of in (others[0], kept, others[1])
    )
    worst = {name for name, _ in slower}
    rises = {key: scaled[key]["reward_after"] - plain[key]["reward_after"] for key in scaled}
    of_worst, of_others = (
        [rise for (name, _), rise in rises.items() if (name in worst) is is_worst] for is_worst in (True, False)
    )
    failed = [sum(row["reward_after"] < 0.87 for row in of.values()) for of in (plain, scaled, slower)]
    near = sum(0.867 <= row["reward_after"] < 0.87 for row in scaled.values())
    assert near == 2
    yield f"{failed[0]} of {len(plain)} runs fail without the key and {failed[1]} with it, two of these within 0.003 of the limit."
    error = stdev(of_others) / len(of_others) ** 0.5
    yield f"rise by {fmean(of_worst):.2f}, and the six others fall by {-fmean(of_others):.2f} (± {error:.2f})"
    yield f"{failed[2]} of {len(slower)} fail"
    stale = [fmean(row["staleness_mean"] for row in of.values()) for of in (plain, scaled, slower)]
    yield "by {:.1f} versions in the mean, and by {:.1f} with the key and {:.1f} at 0.9 of the rate".format(*stale)


def of_record_cost(kept: Kept) -> Iterator[str]:
    for keep, title in (("all", "`all`"), ("none", "`none` (figures alone)")):
        rows = [row for row in kept["rows"] if row["keep"] == keep]
        add, share = sorted(row["add_s"] for row in rows), sorted(100 * row["share_of_job"] for row in rows)
        seconds = " | ".join(
            (
                listed((row["record_s"] for row in rows), ", "),
                f"{add[0]:.3f}-{add[-1]:.3f}",
                *(listed((row[name] for row in rows), ", ", 1) for name in ("driver_s", "job_s")),
            )
        )
        yield f"| {title} | {seconds} | {share[0]:.2f}-{share[-1]:.2f} % |"
    for name, title, digits in (("with_texts", "with texts", 2), ("without", "without", 3)):
        costs = (row[f"{name}_s_per_million_tokens"] for row in kept["by_length"])
        yield f"| {title} | {listed(costs, ' | ', digits)} |"


def of_eight_seeds(kept: Kept) -> Iterator[str]:
    ends = after(kept, "none", 0, 1, 4, 8)
    for seed, of_seed in enumerate(zip(*ends, strict=True)):
        yield f"| {seed} | {listed(of_seed, ' | ')} | {of_seed[2] - of_seed[0]:+.3f} |"
    yield f"| mean | {listed(map(fmean, ends), ' | ', 3)} | {fmean(ends[2]) - fmean(ends[0]):+.3f} |"
    yield f"| less S = 0 | | {' | '.join(less(kept, 'none', bound) for bound in (1, 4, 8))} | |"
    for name, bound in [*product(("token_tis",), (0, 1, 4, 8)), *product(("decoupled",), (0, 4))]:
        (of_bound,) = after(kept, name, bound)
        costs = less(kept, name, bound) if bound else ""
        yield f"| `{name}` | {bound} | {listed(of_bound)} | {fmean(of_bound):.3f} | {costs} |"
    for name, title in {
        "token_tis": "`token_tis`",
        "token_tis_guard": "with `trainer.guard.scale_lr_by_ess=true`",
    }.items():
        yield f"| {title} | {listed(*after(kept, name, 8), ' | ')} |"


def of_half_rate(kept: Kept) -> Iterator[str]:
    fresh, stale, stalest = map(listed, after(kept, "token_tis", 0, 4, 8))
    yield f"`token_tis` ends at {fresh} (S = 0), {stale} (4) and {stalest} (8)."
    difference, error = less(kept, "token_tis", 4).split(" ± ")
    yield f"S = 4 is {difference.removeprefix('-')} below S = 0 (± {error})"
    fresh, stale, stalest = map(listed, after(kept, "none", 0, 4, 8))
    yield f"`none` ends at {fresh}, {stale} and {stalest}:"


@pytest.mark.parametrize(
    ("figures", "page", "said"),
    [
        ("schedules", "tutorials/05_stages", of_schedules),
        ("record_cost", "benchmarks", of_record_cost),
        ("distillation_runs", "tutorials/06_algorithms", of_distillation_runs),
        ("estimator_runs", "tutorials/06_algorithms", of_estimator_runs),
        ("staleness_curves_critic", "tutorials/06_algorithms", of_critic),
        ("staleness_curves_distillation", "tutorials/06_algorithms", of_distillation_curves),
        ("staleness_curves_min_ess", "tutorials/06_algorithms", of_min_ess),
        ("staleness_curves_guarded", "tutorials/06_algorithms", of_guarded),
        ("staleness_curves_eight_seeds", "tutorials/06_algorithms", of_eight_seeds),
        ("staleness_curves_half_rate", "tutorials/06_algorithms", of_half_rate),
    ],
)
def test_a_page_says_the_figures_that_are_kept(figures: str, page: str, said: Callable[[Kept], Iterator[str]]) -> None:
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    for line in said(json.loads((ROOT / f"benchmarks/results/{figures}.json").read_text())):
        assert " ".join(line.split()) in text


def test_the_page_about_published_results_shows_the_figures_that_are_kept() -> None:
    page = (ROOT / "docs/published_results.md").read_text()
    kept = json.loads((ROOT / "benchmarks/results/published_results.json").read_text())
    shown = {tuple(cells[:2]): cells for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) == 8}
    for row in kept["rows"]:
        figures = f"{row['modelled_speedup']:.2f}", f"{row['ours_speedup']:.2f} ({row['bound']})", row["generating"]
        assert shown[row["system"], row["setting"]][5:] == list(figures)
    for row in kept["scaling"]:
        sizes = f"| {row['batch']} | {row['devices']:,} | {row['answers']:,} |"
        assert f"{sizes} {row['sync_step_s']:.0f} | {row['ours_step_s']:.0f} | {row['speedup']:.1f} |" in page
    for row in (run for sweep in kept["sweeps"] for run in sweep["runs"]):
        runs = f"| {row['setting']} | {row['bound']} | {row['engines']} | {row['published_step_s']:.1f} s |"
        assert f"{runs} {row['predicted_step_s']:.1f} s | {100 * row['error']:+.0f} % |\n" in page
    for row in kept["sensitivity"]:
        assert f"| {row['other']} | 2.37 | {row['modelled_speedup']:.2f} | {row['ours_speedup']:.2f} |" in page or (
            f"| {row['other']} | 1.53 | {row['modelled_speedup']:.2f} | {row['ours_speedup']:.2f} |" in page
        )


def test_the_page_about_benchmarks_shows_the_kept_figures_of_plans_and_routing() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    for row in json.loads((ROOT / "benchmarks/results/plan_accuracy.json").read_text())["rows"]:
        calibrated = (
            f"{row['calibration_step_s']:.2f} s",
            *(f"{100 * row[f'calibration_{what}']:+.0f} %" for what in ("error", "drift")),
        )
        interval = f"{row['low_s']:.2f} to {row['high_s']:.2f}"
        ran = (
            f"{row['predicted_step_s']:.2f} s",
            interval,
            f"{row['measured_step_s']:.2f} s",
            f"{100 * row['error']:+.0f} %",
        )
        assert f"| {' | '.join((row['what'], *calibrated, *ran))} |\n" in page
    for row in json.loads((ROOT / "benchmarks/results/routing.json").read_text())["rows"]:
        assert f" {row['tokens_per_s']:,.0f} ({100 * row['prefix_hit_frac']:.0f} %) |" in page


def test_partial_credit_is_at_the_digits_of_right_sums_and_at_the_end_of_a_right_answer() -> None:
    task, rng = get_task("lagged_fibonacci"), random.Random(0)
    tokenizer = task_tokenizer(task)
    for prompt in (task.draw_prompt(rng) for _ in range(20)):
        answer = task.conversation(prompt, rng)[-1]["content"]
        ids = tokenizer.encode(answer + "<|im_end|>")
        for said, share in ((answer, 1.0), (answer.replace("=", "-"), 0.5)):
            found = partial_credit(said, {**prompt.extras, "prompt": prompt.messages, "response_token_ids": ids})
            assert sum(found) == pytest.approx(share) and found[-1] == 0.5
            digits = [tokenizer.decode(ids[:token])[-2:] for token in np.flatnonzero(found[:-1]) + 1]
            assert digits == re.findall(r"=\d", said)


def test_runs_of_estimators_are_configurations_and_those_that_are_not_run_again_are_kept_with_their_commit(
    tmp_path: Path,
) -> None:
    configs = {name: from_overrides(*overrides(name, 30)) for name in RUNS}
    for name, config in configs.items():
        assert name.startswith(config.trainer.algorithm.advantage_estimator) and advice(config) == []
    assert configs["gae, partial_credit"].task.reward == "benchmarks.estimator_runs:partial_credit"
    losses = {config.trainer.algorithm.policy_loss_type for config in configs.values()}
    assert {POLICY_LOSSES.entry(name).path for name in losses} == {
        entry.path for name, entry in POLICY_LOSSES.entries.items() if POLICY_LOSSES.is_builtin(name)
    }
    path = tmp_path / "runs.json"
    rows = [{"estimator": "grpo", "reward_after": 1.0}, {"estimator": "gae", "commit": "b"}]
    path.write_text(json.dumps({"conditions": {"seed": 0, "commit": "a"}, "rows": rows}))
    assert kept_rows(path, 0, lambda row: False) == [rows[0] | {"commit": "a"}, rows[1]]
    assert kept_rows(path, 0, lambda row: row["estimator"] == "grpo") == rows[1:]
    with pytest.raises(SystemExit, match="holds rows of --seed 0, got --seed 1; name another file"):
        kept_rows(path, 1, lambda row: False)


def test_a_block_is_spared_where_none_of_its_bytes_changed() -> None:
    before = torch.arange(10, dtype=torch.uint8)
    after = before.clone()
    after[9] += 1
    assert [share_unchanged(before, after, size) for size in (1, 2, 4, 16)] == pytest.approx([0.9, 0.8, 2 / 3, 0.0])


def learned(correction: str, staleness: int, seed: int, reward: float) -> dict[str, Any]:
    """A row as it is written, of a run that ended at ``reward``."""
    row = {"correction": correction, "staleness": staleness, "seed": seed, "policy": "wait", "steps": 45}
    return row | {"reward_after": reward, "curve": [[0, 0.5], [45, reward]]}


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_of_the_staleness_curves_is_a_configuration_that_runs(correction: str) -> None:
    config = PLAN.config(correction, seed=3)
    assert config.trainer.max_staleness_steps == 4 and config.trainer.seed == 3


def test_runs_whose_rows_are_there_are_not_run_again_and_those_of_another_job_are_refused(tmp_path: Path) -> None:
    rows = [learned("none", 0, 0, 1.0), learned("none", 4, 0, 1.0), learned("icepop", 4, 0, 1.0)]
    assert list(PLAN.lacking(rows)) == [("icepop", 0, [0]), ("none", 1, [0, 4]), ("icepop", 1, [0, 4])]
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"conditions": {"overrides": []}, "rows": rows}))
    assert known_rows(path, PLAN) == rows and known_rows(tmp_path / "none", PLAN) == []
    with pytest.raises(SystemExit, match="holds rows of other overrides"):
        known_rows(path, replace(PLAN, overrides=("training.lr=1e-3",)))
    for other in ({"num_steps": 8}, {"policy": "mask"}):
        with pytest.raises(SystemExit, match="holds rows of other --steps or another --policy; name another file"):
            known_rows(path, replace(PLAN, **other))


def test_what_staleness_costs_is_a_difference_per_seed_with_its_error() -> None:
    rows = [learned("none", bound, seed, 0.9 - 0.1 * (bound > 0) * seed) for bound in (0, 4) for seed in (1, 2)]
    (found,) = against_no_staleness([*rows, learned("icepop", 4, 0, 1.0)], 100)
    assert (found["correction"], found["staleness"], found["seeds"]) == ("none", 4, 2)
    assert found["reward_difference"] == pytest.approx(-0.15)
    assert found["standard_error"] == pytest.approx(0.05) and not found["is_within_noise"]
    (alike,) = against_no_staleness([learned("none", 0, 0, 0.8), learned("none", 4, 0, 0.85)], 100)
    assert alike["standard_error"] == pytest.approx(((0.8 * 0.2 + 0.85 * 0.15) / 100) ** 0.5)
    assert alike["is_within_noise"]


def test_a_correction_without_a_run_at_the_bound_of_0_has_no_difference_in_the_table() -> None:
    rows = [learned("none", bound, 0, 0.9) for bound in (0, 4)] + [learned("icepop", 4, 0, 0.7)]
    table = tables({"rows": rows, "against_no_staleness": against_no_staleness(rows, 100)})["learning"]
    assert table.endswith("\n| `icepop` |  | 0.70 |  |")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_the_benchmark_of_the_page_finds_what_it_waits_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=40, num_samples=400, seed=0)
    assert all(value > 0 for value in measure_page(tmp_path / "run", 400).values())


@pytest.mark.slow
def test_curves_are_drawn_of_whatever_rows_there_are(tmp_path: Path) -> None:
    some = [learned(name, bound, 0, 0.9) for name in ("none", "icepop", "mis", "opsm", "m2po") for bound in (0, 4)]
    for index, rows in enumerate(([], some[:1], some)):
        draw_staleness_curves(rows, tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").stat().st_size > 1000
    draw_rewards(some, {"none": "as it is"}, tmp_path / "rewards.png")
    assert (tmp_path / "rewards.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("figures", "page"),
    [("staleness_curves", "06_algorithms"), ("staleness_policies", "02_staleness")],
)
def test_a_tutorial_shows_the_tables_of_the_figures_that_are_kept(figures: str, page: str) -> None:
    written = json.loads((ROOT / "benchmarks" / "results" / f"{figures}.json").read_text())
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
    for name, table in tables(written).items():
        assert table in text, name


def test_the_tutorial_about_algorithms_shows_the_exact_and_the_measured_bias_that_are_kept() -> None:
    kept = json.loads((ROOT / "benchmarks/results/estimator_bias.json").read_text())
    rows, page = kept["rows"], (ROOT / "docs/tutorials/06_algorithms.md").read_text()
    assert estimator_table(rows) in page
    assert {row["estimator"] for row in rows} == set(compared(make_policy(0)))
    built_in = {name for name in ADVANTAGE_ESTIMATORS.entries if ADVANTAGE_ESTIMATORS.is_builtin(name)}
    assert built_in <= {row["estimator"].partition(",")[0] for row in rows}
    assert all(row.keys() == {"estimator", *kept["keys"]} for row in rows)
    for row in rows:
        assert abs(row["measured_bias"] - row["bias"]) < 4 * row["standard_error"], row["estimator"]
        assert abs(row["measured_variance"] - row["variance"]) < 4 * row["variance_error"], row["estimator"]
        assert row["is_unbiased"] == (row["bias"] < 1e-9), row["estimator"]
