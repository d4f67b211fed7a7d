"""What each advantage estimator trains: a real run of ``relay``, whose turns are rewarded one by one, per estimator.

``reward_before`` and ``reward_after`` are of held-out prompts. A run is short, and has one seed: the rows show that an estimator works from
the command line to the policy, not which one is best. ``--only`` runs some, and keeps the other rows of the file.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, conditions, report
from skyrl_async.algorithms.advantages import ADVANTAGE_ESTIMATORS

SINGLE = ("gae", "turn_gae", "running_mean")
"""Those that need no group: they get one sample per prompt, of 32 prompts a step."""
SETTINGS = ("trainer.update_epochs_per_batch=2", "trainer.algorithm.split_sample_weight=true")
"""Tried with grpo, each by itself. A sample of ``relay`` is one row, so the second splits nothing: it shows that the key runs."""
RUNS = (*ADVANTAGE_ESTIMATORS.entries, *(f"grpo, {setting.rpartition('.')[2]}" for setting in SETTINGS))
"""Names of the rows."""


def overrides(name: str) -> list[str]:
    """The words of a run, but for its length and seed."""
    estimator, _, setting = name.partition(", ")
    words = ["task=relay", f"trainer.algorithm.advantage_estimator={estimator}"]
    if estimator in SINGLE:
        words += ["generator.n_samples_per_prompt=1", "trainer.policy_mini_batch_size=32"]
    return words + [word for word in SETTINGS if setting and word.endswith(setting)]


def run(name: str, num_steps: int, seed: int, output_dir: Path) -> dict[str, Any]:
    """Train with one estimator."""
    words = [
        *overrides(name),
        f"trainer.num_steps={num_steps}",
        f"trainer.seed={seed}",
        f"trainer.output_dir={output_dir}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_async.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    logged = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [values["reward/eval"] for values in logged if "reward/eval" in values]
    row = {"estimator": name, "reward_before": rewards[0], "reward_after": rewards[-1], "steps": num_steps}
    print(row, flush=True)
    return row


def kept_rows(path: Path | None, names: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """The rows of an earlier invocation but for ``names``, each with the commit that it is of. Exits where that had another seed."""
    if path is None or not path.exists():
        return []
    written = json.loads(path.read_text())
    before = written["conditions"]
    if before["seed"] != seed:
        raise SystemExit(f"{path} holds rows of --seed {before['seed']}, got --seed {seed}; name another file")
    return [{"commit": before["commit"]} | row for row in written["rows"] if row["estimator"] not in names]


def main() -> int:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=RUNS, help="run these, and keep the other rows of --json")
    given = parser.parse_args()
    before = conditions(seed=given.seed)
    names = given.only or (("grpo", "gae") if given.quick else RUNS)
    rows = kept_rows(given.json, names, given.seed) if given.only else []
    with tempfile.TemporaryDirectory() as work:
        for number, name in enumerate(names):
            row = run(name, given.steps, given.seed, Path(work) / str(number))
            rows.append({"commit": before["commit"]} | row)
    rows.sort(key=lambda row: RUNS.index(row["estimator"]))
    report("Estimators on relay", {"conditions": before}, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
