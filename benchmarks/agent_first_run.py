"""Held-out reward before and after a run of ``examples/agent_first_run``, through a harness that is not ours, with three seeds.

Each seed has a warm start of its own, with nothing cached. ``seconds``: from the command to its end, warm start and both evaluations
included; Harbor's own environment is there (``--harbor-python``, or the one in the cache).
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, conditions, report
from examples.agent_first_run.make import make

_README = Path(__file__).parents[1] / "examples" / "agent_first_run" / "README.md"
_MADE = "outputs/agent_first_run"
_SEEDS = 3


def overrides() -> list[str]:
    """The settings of the example's command."""
    command = re.search(r"^uv run -m skyrl_async\.main (.*)$", _README.read_text().replace("\\\n", ""), re.MULTILINE)
    assert command is not None
    return shlex.split(command[1])


def measured_run(seed: int, directory: Path, more: list[str]) -> dict[str, Any]:
    """Run the example; raises ``RuntimeError`` if it fails."""
    run_dir = directory / f"seed-{seed}"
    words = [word.replace(_MADE, str(directory / "tasks")) for word in overrides()]
    where = [f"trainer.output_dir={run_dir}", f"trainer.seed={seed}", f"cache_dir={run_dir}-cache"]
    began = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "skyrl_async.main", *words, *where, *more], check=False).returncode
    seconds = time.monotonic() - began
    if code:
        raise RuntimeError(f"the run ended with {code}; {run_dir / 'run.log'} says why")
    summary = json.loads((run_dir / "summary.json").read_text())
    names = ("reward_before", "reward_after")
    return {"seed": seed, **{name: summary[name] for name in names}, "seconds": seconds}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--harbor-python", help="of an environment with Harbor; default: one that is made and kept")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which are deleted otherwise")
    options = parser.parse_args()
    more = [f"generator.harbor.python={options.harbor_python}"] if options.harbor_python else []
    under = conditions(seed=options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        make(directory / "tasks")
        seeds = range(options.seed, options.seed + (1 if options.quick else _SEEDS))
        rows = [measured_run(seed, directory, more) for seed in seeds]
    figures = {
        "harness": "terminus-2 of harbor 0.26.0",
        "reward_before": max(row["reward_before"] for row in rows),
        "reward_after": min(row["reward_after"] for row in rows),
        "seconds": max(row["seconds"] for row in rows),
        "conditions": under,
    }
    report("a first run through a harness", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
