"""What asynchrony gains: the default job as a plain loop, at staleness 0 (streamed) and at 4, in one run on the same processes.

The plain loop generates a whole mini-batch, trains on it, publishes, and only then generates the next. From its own generation
time Tg and training time Tt the ideal of any overlap is ``(Tg + Tt) / max(Tg, Tt)``; ``share_of_ideal`` is how much of that
the run at staleness 4 reaches. It is no limit: the plain loop also stands still for the longest answer of each mini-batch, with few
requests left in the engine. Every variant begins from the same weights and trains the same number of groups, and each figure is the
median over rounds in which the variants take turns.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import arguments, conditions, report
from skyrl_async.composition.parts import Parts, TrainerCallbacks, make_trainer
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the same job."""

    name: str
    max_staleness_steps: int
    stream_mini_batch: bool


VARIANTS = (
    Variant(name="plain loop", max_staleness_steps=0, stream_mini_batch=False),
    Variant(name="S=0, streamed", max_staleness_steps=0, stream_mini_batch=True),
    Variant(name="S=4", max_staleness_steps=4, stream_mini_batch=True),
)


async def measure(config: Config, variant: Variant, parts: Parts, start: Path, num_eval_prompts: int) -> dict[str, Any]:
    """Train one variant from the weights in ``start``."""
    trainer_config = replace(
        config.trainer,
        max_staleness_steps=variant.max_staleness_steps,
        stream_mini_batch=variant.stream_mini_batch,
        eval_interval_steps=0,
        checkpoint_interval_steps=0,
        logprob_probe_interval_steps=0,
    )
    evaluation = replace(config.evaluation, num_prompts=num_eval_prompts)
    seconds = {"generate": 0.0, "train": 0.0}
    logged: list[dict[str, float]] = []
    await parts.policy.load(start)
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            replace(config, trainer=trainer_config, evaluation=evaluation),
            parts,
            checkpoint_dir=Path(directory),
            callbacks=TrainerCallbacks(log=lambda step, values: logged.append(values)),
            trace=Trace(None, time.monotonic),
        )
        await trainer.run()
    steps = [values for values in logged if "timing/step" in values]
    for values, before in zip(steps, [{}, *steps], strict=False):
        # Sending and loading go on while the next step waits for groups; with nothing else to overlap, they are part of that wait.
        seconds["generate"] += values["timing/wait_for_groups"] - _seconds_beside(before)
        seconds["train"] += sum(values[f"timing/{n}"] for n in ("forward_backward", "optimizer_step", "publish"))
    return {
        "variant": variant.name,
        "seconds": trainer.totals.training_seconds + _seconds_beside(steps[-1]),
        "waited_for_groups_s": max(0.0, seconds["generate"]),
        "train_and_publish_s": seconds["train"],
        "groups": trainer.totals.trained_groups,
        "tokens": trainer.totals.trained_tokens,
        "staleness_max": trainer.totals.staleness_max,
        "reward_before": trainer.totals.reward_before,
        "reward_after": trainer.reward_after,
    }


def _seconds_beside(step: dict[str, float]) -> float:
    """Of a step's publish, what goes on beside the next one: the copy is a part of the step itself."""
    return step.get("timing/publish", 0.0) - step.get("timing/gather", 0.0)


async def run(config: Config, num_eval_prompts: int, num_rounds: int) -> list[dict[str, Any]]:
    """All variants, in turns, over the same engines and policy workers; a row for each run."""
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = await stack.enter_async_context(
            started_parts(config, directory, trace=Trace(None, time.monotonic), say=lambda text: print(f"[{text}]"))
        )
        await parts.policy.save(directory / "start")
        for _, variant in product(range(num_rounds), VARIANTS):
            rows.append(await measure(config, variant, parts, directory / "start", num_eval_prompts))
            print(f"{variant.name}: {rows[-1]['seconds']:.1f} s", flush=True)
    return rows


def medians(rows: list[dict[str, Any]], variant: Variant) -> dict[str, Any]:
    """One row for the rounds of a variant."""
    same = [row for row in rows if row["variant"] == variant.name]
    return {name: value if name == "variant" else median(row[name] for row in same) for name, value in same[0].items()}


def ideal_speedup(plain: dict[str, Any]) -> float:
    """Of any overlap of what the plain loop does in turns."""
    generate, train = plain["waited_for_groups_s"], plain["train_and_publish_s"]
    return float((generate + train) / max(generate, train))


def shares_of_ideal(runs: list[dict[str, Any]]) -> list[float]:
    """Of each round, from its own plain loop."""
    plain, fast = ([row for row in runs if row["variant"] == v.name] for v in (VARIANTS[0], VARIANTS[-1]))
    return [round(p["seconds"] / f["seconds"] / ideal_speedup(p), 3) for p, f in zip(plain, fast, strict=True)]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, help="optimizer steps of each variant (default 45; 12 with --quick)")
    parser.add_argument("--rounds", type=int, help="runs of each variant (default 3; 1 with --quick)")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration, such as engine.pause_mode=keep")
    options = parser.parse_args()
    num_steps = options.steps or (12 if options.quick else 45)
    num_rounds = options.rounds or (1 if options.quick else 3)
    config = from_overrides(f"trainer.num_steps={num_steps}", f"trainer.seed={options.seed}", *options.overrides)
    under = conditions(
        seed=options.seed,
        num_steps=num_steps,
        num_rounds=num_rounds,
        is_quick=options.quick,
        overrides=options.overrides,
    )
    runs = asyncio.run(run(config, 64 if options.quick else 256, num_rounds))
    plain, streamed, fast = rows = [medians(runs, variant) for variant in VARIANTS]
    ideal = ideal_speedup(plain)
    speedup = plain["seconds"] / fast["seconds"]
    figures = {
        "speedup": speedup,
        "speedup_at_staleness_0": plain["seconds"] / streamed["seconds"],
        "ideal_speedup": ideal,
        "share_of_ideal": speedup / ideal,
        "reward_plain": plain["reward_after"],
        "reward_async": fast["reward_after"],
        "share_of_ideal_by_round": shares_of_ideal(runs),
        "conditions": under,
    }
    report("the default job, three ways", figures, rows, options.json, written={"runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
