"""What a tiny policy learns from a warm-started teacher, and how long it takes: real runs of both divergences.

A policy learns from the sampled tokens alone, from the teacher's 16 likeliest at each place (``top_k``), or beside rewards. The teacher saw
worked answers alone, and is hardly trained after that. Each command begins with an empty cache. ``seconds`` are of the whole command, warm
start and both evaluations included; ``cpu_seconds`` of all its processes. Rewards are of held-out prompts. A run has one seed, and all
kinds have 32 samples a step: the rows show that each learns, not which one is best. ``--quick`` leaves the forward divergence out: some
four minutes.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, conditions, report

_KEY = "trainer.algorithm.distillation"
TEACHER = ("policy.warm_start.terse_share=0", "trainer.num_steps=1")
ALONE = ("generator.n_samples_per_prompt=1", "trainer.policy_mini_batch_size=32")
TOP_16 = (*ALONE, f"{_KEY}.top_k=16")
WITH_REWARDS = (f"{_KEY}.use_rewards=true", "generator.n_samples_per_prompt=8", "trainer.policy_mini_batch_size=4")
_PR_SET_CHILD_SUBREAPER = 36


def run(name: str, words: list[str], directory: Path) -> dict[str, Any]:
    """Run a command to the end of its last process. Exits, and shows its output, if it fails."""
    output_dir = directory / name
    words = [*words, f"trainer.output_dir={output_dir}", f"cache_dir={directory / f'{name}-cache'}"]
    before, began = _cpu_seconds(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_async.main", *words], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    summary = json.loads((output_dir / "summary.json").read_text())
    rewards = {key: summary[key] for key in ("reward_before", "reward_after")}
    return rewards | {"steps": summary["steps"], "seconds": seconds, "cpu_seconds": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    """CPU seconds of all processes that descend from this one, once they have ended. Ray's become children of this one when Ray ends."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    before = conditions(seed=given.seed, teacher=TEACHER, alone=ALONE, top_16=TOP_16, with_rewards=WITH_REWARDS)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    kinds = {"alone": ALONE, "alone, `top_k=16`": TOP_16, "with rewards": WITH_REWARDS}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        directory, seed = Path(work), f"trainer.seed={given.seed}"
        teacher = run("teacher", [*TEACHER, seed], directory)
        for divergence in ("reverse_kl",) if given.quick else ("reverse_kl", "forward_kl"):
            for kind, overrides in kinds.items():
                words = [
                    f"{_KEY}.teachers={{t: {directory / 'teacher' / 'policy'}}}",
                    f"{_KEY}.divergence={divergence}",
                    f"trainer.num_steps={given.steps}",
                    *(seed, *overrides),
                ]
                found = run(f"run-{len(rows)}", words, directory)
                rows.append({"divergence": divergence, "kind": kind} | found)
                print(rows[-1], flush=True)
    report("What a policy learns from a teacher", {"conditions": before, "teacher": teacher}, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
