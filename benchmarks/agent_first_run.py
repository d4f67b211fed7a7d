"""Held-out reward before and after a run of ``examples/agent_first_run``, through a harness that is not ours, with three seeds.

Each seed has a warm start of its own, with nothing cached. ``seconds``: from the command to its end, warm start and both evaluations
included, and the making of Harbor's own environment unless ``--harbor-python`` names one. ``curve``: (seconds since the run began, mean
reward of the trained samples) of each step.

``--quick`` runs one seed: some four minutes.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.report import arguments, conditions, file_to_write, report
from examples.agent_first_run.make import make

_README = Path(__file__).parents[1] / "examples" / "agent_first_run" / "README.md"
_MADE = "outputs/agent_first_run"
_SEEDS = 3
_COLORS = ("#3b6fb6", "#e08a2e", "#3d9a6d")


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
    return {"seed": seed, "seconds": seconds, **figures_of(run_dir)}


def figures_of(run_dir: Path) -> dict[str, Any]:
    """What a run's files say."""
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    curve = [(step["time_s"], step["reward/mean"]) for step in steps if "reward/mean" in step]
    return {name: summary[name] for name in ("reward_before", "reward_after")} | {"curve": curve}


def draw(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw the reward of every seed over time, with the held-out rewards before and after."""
    figure = Figure(figsize=(7.6, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, color in zip(rows, _COLORS, strict=False):
        seconds, rewards = zip(*row["curve"], strict=True)
        axes.plot(seconds, rewards, color=color, linewidth=1.4, alpha=0.8, label=f"seed {row['seed']}")
        ends = (row["seconds"] - seconds[-1]) / 2
        held_out = [row["reward_before"], row["reward_after"]]
        axes.scatter([max(0.0, seconds[0] - ends), seconds[-1] + ends], held_out, color=color, s=42, zorder=3)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the run began", fontsize=9)
    axes.set_ylabel("reward", fontsize=9)
    axes.set_title("Terminus-2, unmodified, in the local sandbox, on two cores", loc="left", fontsize=11)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right", title="dots: held-out tasks", title_fontsize=8.5)
    figure.savefig(png)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--harbor-python", help="of an environment with Harbor; default: one that is made for each seed"
    )
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which are deleted otherwise")
    parser.add_argument("--plot", type=file_to_write, help="draw the rewards to this picture")
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
    if options.plot is not None:
        draw(rows, options.plot)
    table = [{name: value for name, value in row.items() if name != "curve"} for row in rows]
    report("a first run through a harness", figures, table, options.json, written={"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
