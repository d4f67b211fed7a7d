"""Two runs of one command with ``trainer.deterministic=true``, in processes of their own beside each other: equal but for their times.

``test_deterministic_run`` has the parts alone, in virtual time, where all that could differ is under control; here it is a machine's.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.metrics.tracker import read_rows
from tests.cpu.test_main import NO_VLLM, Command

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
    "policy.warm_start.enabled=false",
    "task.reward=rewards:by_letters",
    "logging.trained_tokens=true",
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
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What both left. Each makes its random policy itself."""
    places = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for place in places:
        (place / "rewards.py").write_text(REWARDS)
    with Command(OVERRIDES, cwd=places[0]) as first, Command(OVERRIDES, cwd=places[1]) as second:
        for outcome in (first.finish(), second.finish()):
            assert outcome.code == 0, outcome.stderr
    return [place / "out" for place in places]


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
def test_they_train_the_same_tokens_and_export_the_same_weights_bit_for_bit(runs: list[Path]) -> None:
    first, second = (
        list(map(without_times, map(json.loads, (run / "trained_groups.jsonl").read_text().splitlines())))
        for run in runs
    )
    assert first == second and all("response_token_ids" in row for group in first for row in group["rows"])
    weights = [(run / "policy" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    initial = next((runs[0].parent / "cache").glob("policies/*/model.safetensors"))
    assert initial.read_bytes() != weights[0]
