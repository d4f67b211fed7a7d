"""What ``skyrl_async.plan`` predicts against what is then measured: calibrated on ten steps of the default task at S = 4.

A row is a run of real engines, real trainer and real Ray: ``what`` differs from the calibration's, ``predicted_step_s`` with its interval
``low_s`` to ``high_s`` is forecast from calibrations alone, ``measured_step_s`` is the mean of its steps but the first two and those for
which all is generated. All runs have the same policy, which is trained first and then no more (a rate of 1e-12), so that lengths do not
drift, and write no checkpoint. Of the prompts, those with twice the lengths have exactly twice the worked lines.

The speed of a shared machine drifts by tens of percent within minutes. So each case is calibrated right before it runs and right after,
and has the means of both forecasts; ``calibration_drift`` is how much slower the second calibration was. All cases are run in several
rounds, one after the other, of which a row has the means; ``round_errors`` are those of the single rounds, and ``the same again`` shows
what is left of the drift.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.report import arguments, conditions, report
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.plan.forecast import Planner, WhatIf
from skyrl_async.plan.measured import WARM_UP_STEPS, Measured, measured
from skyrl_async.tasks.lagged_fibonacci import NAME, all_seed_digits, extend, right_answer

_SHORT_STEPS = range(5, 31)
"""Worked lines of the prompts; each number of lines has another one that is twice as long."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    what: str
    what_if: WhatIf
    doubled: bool = False
    """The prompts of twice the lengths."""


_S = "trainer.max_staleness_steps"
_BOUND = 4
"""The calibrations' bound: so many steps at the end of a run are left out."""
CASES = (
    Case("the same again", WhatIf()),
    Case("S = 0", WhatIf(keys={_S: 0})),
    Case("S = 1", WhatIf(keys={_S: 1})),
    Case("S = 8", WhatIf(keys={_S: 8})),
    Case("two engines", WhatIf(keys={"engine.num_engines": 2})),
    Case("twice the lengths", WhatIf(), doubled=True),
    Case("policy window", WhatIf(keys={"trainer.staleness_policy": StalenessPolicy.window})),
    Case("policy allow, S = 1", WhatIf(keys={"trainer.staleness_policy": StalenessPolicy.allow, _S: 1})),
    Case("policy mask, S = 1", WhatIf(keys={"trainer.staleness_policy": StalenessPolicy.mask, _S: 1})),
    Case("policy resample, S = 1", WhatIf(keys={"trainer.staleness_policy": StalenessPolicy.resample, _S: 1})),
    Case("mini-batch of 4", WhatIf(keys={"trainer.policy_mini_batch_size": 4})),
    Case("mini-batch of 16", WhatIf(keys={"trainer.policy_mini_batch_size": 16})),
    Case("groups of 4", WhatIf(keys={"generator.n_samples_per_prompt": 4})),
)


def _run(output_dir: Path, *overrides: str) -> None:
    """A run as a user starts it, unless ``--keep`` has it."""
    if (output_dir / "summary.json").exists():
        return
    command = (sys.executable, "-m", "skyrl_async.main", f"trainer.output_dir={output_dir}", *overrides)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _write_prompts(path: Path, *, doubled: bool) -> None:
    """As many prompts of each length as there are of twice that."""
    by_lines: dict[int, list[str]] = {}
    for digits in all_seed_digits():
        by_lines.setdefault(len(extend(digits) or ""), []).append(digits)
    chosen: list[str] = []
    for lines in _SHORT_STEPS:
        short, long = by_lines.get(lines, []), by_lines.get(2 * lines, [])
        num = min(len(short), len(long), 40)
        chosen += (long if doubled else short)[:num]
    # A fixed order that mixes the lengths, the same for both files.
    order = sorted(range(len(chosen)), key=lambda i: i * 7919 % len(chosen))
    rows = [
        {
            "uid": f"{NAME}-{chosen[i]}",
            "prompt": [{"role": "user", "content": f"Extend {chosen[i]} until 0."}],
            "env_class": NAME,
            "reward_spec": {"method": "rule", "ground_truth": right_answer(chosen[i])},
        }
        for i in order
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(
    work: Path, num_steps: int, cases: Sequence[Case], *, num_rounds: int, seed: int, training_steps: int
) -> list[dict[str, Any]]:
    """One row per case and round, of a policy that was trained for ``training_steps``."""
    _run(work / "policy", f"trainer.num_steps={training_steps}", "evaluation.num_prompts=0", f"trainer.seed={seed}")
    for doubled in (False, True):
        _write_prompts(work / f"prompts-{doubled}.jsonl", doubled=doubled)

    def overrides(doubled: bool, steps: int) -> list[str]:
        return [
            f"policy.path={work}/policy/policy",
            "task.name=dataset",
            f"task.train_files=[{work}/prompts-{doubled}.jsonl]",
            "evaluation.num_prompts=0",
            "training.lr=1e-12",
            "trainer.checkpoint_interval_steps=0",
            f"trainer.num_steps={steps + WARM_UP_STEPS}",
            f"{_S}={_BOUND}",
            f"trainer.seed={seed}",
        ]

    def calibrated(number: int) -> Measured:
        _run(work / f"calibration-{number}", *overrides(False, 10 + _BOUND))
        return measured(work / f"calibration-{number}")

    rows, before = [], calibrated(0)
    for number, case in enumerate([*cases] * num_rounds, start=1):
        directory = work / f"case-{number}"
        words = [f"{key}={getattr(value, 'name', value)}" for key, value in case.what_if.keys.items()]
        _run(directory, *overrides(case.doubled, num_steps + 2 * _BOUND), *words)
        after = calibrated(number)
        rows.append(_row(case, (before, after), measured(directory)))
        print(rows[-1], flush=True)
        before = after
    return rows


def _row(case: Case, calibrations: Sequence[Measured], run: Measured) -> dict[str, Any]:
    """How much longer doubled answers are is not predicted: the same factor is asked of the plan."""
    planners = [Planner(known, num_processes=2) for known in calibrations]
    forecasts = []
    for known, planner in zip(calibrations, planners, strict=True):
        lengths = float(run.calls.num_tokens.mean() / known.calls.num_tokens.mean()) if case.doubled else 1.0
        forecasts += planner.forecasts([WhatIf(keys=case.what_if.keys, lengths=lengths)])
    first, second = (planner.accuracy for planner in planners)
    assert first is not None
    assert second is not None
    predicted = fmean(forecast.step_seconds for forecast in forecasts)
    return {
        "what": case.what,
        "predicted_step_s": predicted,
        "predicted_before_step_s": forecasts[0].step_seconds,
        "measured_step_s": run.mean("timing/step"),
        "low_s": fmean(forecast.low_seconds for forecast in forecasts),
        "high_s": fmean(forecast.high_seconds for forecast in forecasts),
        "error": predicted / run.mean("timing/step") - 1,
        "calibration_step_s": fmean((first.measured_seconds, second.measured_seconds)),
        "calibration_error": fmean((first.error, second.error)),
        "calibration_drift": second.measured_seconds / first.measured_seconds - 1,
    }


def _mean(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a case, of those of its rounds."""
    means = {key: fmean(row[key] for row in rounds) for key in rounds[0].keys() - {"what"}}
    means["error"] = means["predicted_step_s"] / means["measured_step_s"] - 1
    in_order = {key: means.get(key) for key in rounds[0]}
    return in_order | {"what": rounds[0]["what"], "round_errors": [round(row["error"], 3) for row in rounds]}


def _is_covered(row: dict[str, Any]) -> bool:
    return bool(row["low_s"] <= row["measured_step_s"] <= row["high_s"])


def _conditions_of_runs(keep: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Of the runs in ``keep``, if it has some: they are only forecast again."""
    keep.mkdir(parents=True, exist_ok=True)
    file = keep / "conditions.json"
    if not file.exists():
        file.write_text(json.dumps(now))
        return now
    kept: dict[str, Any] = json.loads(file.read_text())
    for name in ("steps", "rounds", "seed"):
        if kept[name] != now[name]:
            raise SystemExit(f"--{name} must be {kept[name]}, as of the runs in {keep}, got {now[name]}")
    return kept | {"forecast": {name: now[name] for name in ("commit", "is_modified")}}


def main() -> None:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30, help="measured optimizer steps of each case")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case")
    parser.add_argument(
        "--keep", type=Path, help="keep the runs in this directory; those that it has are not run again"
    )
    given = parser.parse_args()
    cases = [case for case in CASES if not given.quick or case.what == "S = 0"]
    num_steps, num_rounds, training_steps = (5, 1, 4) if given.quick else (given.steps, given.rounds, 40)
    before = conditions(steps=num_steps, rounds=num_rounds, seed=given.seed)
    with tempfile.TemporaryDirectory() as work:
        if given.keep is not None:
            before = _conditions_of_runs(given.keep, before)
        directory = (given.keep or Path(work)).resolve()
        single = measure(
            directory, num_steps, cases, num_rounds=num_rounds, seed=given.seed, training_steps=training_steps
        )
    rows = [_mean(single[number :: len(cases)]) for number in range(len(cases))]
    errors = [abs(row["error"]) for row in rows]
    before_errors = [abs(row["predicted_before_step_s"] / row["measured_step_s"] - 1) for row in rows]
    figures = {
        "error_before_median": median(before_errors),
        "error_before_max": max(before_errors),
        "error_median": median(errors),
        "error_max": max(errors),
        "covered": fmean(map(_is_covered, rows)),
        "single_error_median": median(abs(row["error"]) for row in single),
        "single_error_max": max(abs(row["error"]) for row in single),
        "single_covered": fmean(map(_is_covered, single)),
        "conditions": before,
    }
    report("Predicted and measured seconds per step", figures, rows, given.json, written={"single_rows": single})


if __name__ == "__main__":
    main()
