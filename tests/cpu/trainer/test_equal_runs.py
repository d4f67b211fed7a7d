"""Two runs of one command with ``trainer.deterministic=true`` on a dataset, beside each other: equal but for their times. One is evaluated.

``test_deterministic_run`` has the parts alone, in virtual time, where all that could differ is under control; here it is a machine's.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from skyrl_async.metrics.tracker import read_rows
from skyrl_async.record.files import read_samples
from skyrl_async.view.run import ViewedRun
from tests.cpu.test_main import NO_VLLM, Command, Outcome, dataset, policy_dir, row, run

__all__ = ["policy_dir"]  # a fixture

NUM_STEPS = 4
MAX_STALENESS_STEPS = 2
OVERRIDES = (
    *NO_VLLM,
    "trainer.deterministic=true",
    "trainer.schedule=fully_async",
    f"trainer.max_staleness_steps={MAX_STALENESS_STEPS}",
    f"trainer.num_steps={NUM_STEPS}",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "generator.sampling.max_tokens=24",
    "evaluation.sampling.max_tokens=24",
    "policy.warm_start.enabled=false",
    "trainer.algorithm.advantage_estimator=examples.own_algorithm.unsure_tokens:unsure_tokens",
    "task.reward=rewards:by_letters",
    "trainer.output_dir=out",
)
REWARDS = """
def by_letters(answer, extras):
    "Differs between answers of an untrained policy."
    return sum(map(ord, answer)) % 7 / 7
"""
IS_TIME = re.compile(
    r"time_s|timing/.*|.*seconds.*|generate/tokens_per_second|trainer/idle_frac|stage/\w+/\w+_frac|"
    # Where engines and rollouts are at the moment of writing, beside what is trained.
    r"stages|stage/\w+/(state|items)|engines|weight_sync/lag_steps_max|async/(buffer|running)_groups|async/length_ratio|generate/tokens"
)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory, policy_dir: Path, ray_session: None) -> list[str]:
    """The command of both runs, which join the tests' Ray: some prompts, and two that are longer than the context."""
    train, held_out = (tmp_path_factory.mktemp(name) for name in ("train", "held_out"))
    prompts = [*(row(f"p{i}") for i in range(12)), row("long-1", "1" * 70), row("long-2", "2" * 80)]
    train_file = dataset(train, prompts)
    eval_file = dataset(held_out, [row(f"h{i}", f"Extend 324{i} until 0.") for i in range(4)])
    return [
        *OVERRIDES,
        "task=dataset",
        f"task.train_files=[{train_file}]",
        f"task.eval_files=[{eval_file}]",
        f"policy.path={policy_dir}",
        "engine.max_model_len=60",
        f"placement.ray_address={ray.get_runtime_context().gcs_address}",
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> dict[Path, Outcome]:
    """Directory of each run -> what it said."""
    places = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for place in places:
        (place / "rewards.py").write_text(REWARDS)
    first, second = (Command(overrides, cwd=place, is_forked=True) for place in places)
    with first, second:
        ended = (first.finish(), second.finish())
    for outcome in ended:
        assert outcome.code == 0, outcome.stderr
    return {place / "out": outcome for place, outcome in zip(places, ended, strict=True)}


@pytest.fixture
def runs(outcomes: dict[Path, Outcome]) -> list[Path]:
    return list(outcomes)


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not IS_TIME.fullmatch(name)}


@pytest.mark.slow
def test_two_runs_of_a_deterministic_command_log_the_same_values_but_for_times(runs: list[Path]) -> None:
    first, second = (read_rows(run / "metrics.jsonl") for run in runs)
    assert [row.keys() for row in first] == [row.keys() for row in second]
    assert list(map(without_times, first)) == list(map(without_times, second))
    steps = [row for row in first if "policy/loss" in row]
    assert len({row["policy/loss"] for row in steps}) == len({row["reward/mean"] for row in steps}) == NUM_STEPS
    assert all(row["policy/grad_norm"] > 0 for row in steps)
    assert max(row["async/staleness_max"] for row in steps) == MAX_STALENESS_STEPS


@pytest.mark.slow
def test_they_train_the_same_tokens_and_export_the_same_weights_bit_for_bit(runs: list[Path], policy_dir: Path) -> None:
    first, second = (
        [row for row in read_samples(run).drop_columns(["row", "seconds"]).to_pylist() if row["outcome"] == "trained"]
        for run in runs
    )
    for name in ("engine_seconds", "asked_at"):
        times = [turn.pop(name) for row in (*first, *second) for turn in row["turns"]]
        assert sum(time is not None for time in times) == len(first) + len(second), "one answer per row"
    assert first == second and all(row["response_token_ids"] and row["turns"] for row in first)
    assert all(row["engines"] for row in first)
    assert all(trained["old_version"] == trained["step"] - 1 for trained in first)
    fresh = [row for row in first if {span["version"] for span in row["policy_versions"]} == {row["old_version"]}]
    gaps = [np.abs(np.subtract(row["old_logprobs"], row["logprobs"])).max() for row in fresh]
    assert 0 < len(gaps) < len(first) and max(gaps) < 1e-4, "engine and trainer agree on tokens of the trained version"
    for trained in first:
        assert trained["token_weights"] == pytest.approx(1 - np.exp(trained["logprobs"]), abs=1e-6), "the estimator's"
    weights = [(run / "policy" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert (policy_dir / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.slow
def test_prompts_longer_than_the_context_are_left_out_and_named_once(outcomes: dict[Path, Outcome]) -> None:
    said = "left out 2 prompts longer than the context of 60 tokens: long-1, long-2"
    for outcome in outcomes.values():
        assert said in outcome.stdout and outcome.stderr.count("long-1, long-2") == 1


@pytest.mark.slow
def test_an_evaluation_of_a_finished_run_leaves_all_that_it_left_and_writes_files_of_its_own(
    runs: list[Path], overrides: list[str]
) -> None:
    out = runs[0]
    growing = {"metrics.jsonl", "run.log"}
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "run.lock"}
    left = {path.name for path in out.iterdir()}
    assert {"summary.json", "curves.png", "policy", "checkpoints"} <= left

    evaluating = [*overrides, "trainer.resume_mode=latest", "trainer.eval_only=true", "evaluation.num_prompts=4"]
    (out / "evaluation.json").write_text("of an evaluation before")
    outcome = run(*evaluating, cwd=out.parent, is_forked=True)
    assert outcome.code == 0, outcome.stderr
    for path, content in before.items():
        assert path.exists(), path
        now = path.read_bytes()
        assert now == content or (path.name in growing and now.startswith(content)), path
    assert {path.name for path in out.iterdir()} - left == {
        "evaluation.json",
        "evaluation-2.json",
        "evaluation",
    }
    assert (out / "evaluation.json").read_text() == "of an evaluation before"
    evaluation = json.loads((out / "evaluation-2.json").read_text())
    step, checkpoint = NUM_STEPS, out / "checkpoints" / f"global_step_{NUM_STEPS}"
    assert (evaluation["steps"], evaluation["checkpoint"]) == (step, str(checkpoint))
    last = read_rows(out / "metrics.jsonl")[-1]
    assert (last["step"], last["reward/eval"]) == (step, evaluation["reward/eval"])
    assert "held-out reward" in outcome.stdout
    assert ViewedRun(out / "evaluation").overview()["num_rows"] == 4
