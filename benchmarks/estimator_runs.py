"""What each advantage estimator trains: a real run of ``relay``, whose turns are rewarded one by one, per estimator.

``reward_before`` and ``reward_after`` are of held-out prompts. A run is short, and has one seed: the rows show that an estimator works from
the command line to the policy, not which one is best.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, conditions, report
from skyrl_async.algorithms.advantages import ADVANTAGE_ESTIMATORS

SINGLE = ("gae", "turn_gae", "running_mean")
"""Those that need no group: they get one sample per prompt, of 32 prompts a step."""


def run(estimator: str, num_steps: int, seed: int, output_dir: Path) -> dict[str, Any]:
    """Train with one estimator."""
    words = [
        "task=relay",
        f"trainer.algorithm.advantage_estimator={estimator}",
        f"trainer.num_steps={num_steps}",
        f"trainer.seed={seed}",
        f"trainer.output_dir={output_dir}",
    ]
    if estimator in SINGLE:
        words += ["generator.n_samples_per_prompt=1", "trainer.policy_mini_batch_size=32"]
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_async.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{estimator}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    logged = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [values["reward/eval"] for values in logged if "reward/eval" in values]
    row = {"estimator": estimator, "reward_before": rewards[0], "reward_after": rewards[-1], "steps": num_steps}
    print(row, flush=True)
    return row


def main() -> int:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    before = conditions(seed=given.seed)
    names = ("grpo", "gae") if given.quick else tuple(ADVANTAGE_ESTIMATORS.entries)
    with tempfile.TemporaryDirectory() as work:
        rows = [run(name, given.steps, given.seed, Path(work) / name) for name in names]
    report("Estimators on relay", {"conditions": before}, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
