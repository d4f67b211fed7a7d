"""The default task under the three schedules, and with reference log-probs inline, shared and separate: seconds to the same reward.

    sync ── one_step_off ── fully_async          ref_logp: none, inline (in the training step), shared (a stage on the policy workers,
                                                 as soon as a group is finished), separate (a stage on workers of its own)

Every row begins with the same weights, is evaluated every few steps on the same held-out prompts, and ends after the same number of
steps. ``seconds`` are of the training loop until an evaluation first reaches ``target_reward`` (null where none does), evaluations
included; ``utilisation`` is the share of the whole loop in which the policy workers computed gradients or steps.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, conditions, report
from skyrl_async.composition.parts import TrainerCallbacks, make_trainer
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the same job."""

    schedule: str
    ref_logp: str
    overrides: tuple[str, ...] = ()


_KL = ("trainer.algorithm.use_kl_loss=true",)
VARIANTS = (
    Variant(schedule="sync", ref_logp="none"),
    Variant(schedule="one_step_off", ref_logp="none"),
    Variant(schedule="fully_async", ref_logp="none"),
    Variant(schedule="fully_async", ref_logp="inline", overrides=(*_KL, "trainer.algorithm.ref_logp=inline")),
    Variant(schedule="fully_async", ref_logp="shared", overrides=_KL),
    Variant(schedule="fully_async", ref_logp="separate", overrides=(*_KL, "training.num_ref_workers=1")),
)


async def measure(config: Config, variant: Variant, target: float) -> dict[str, Any]:
    """Run one variant on processes of its own."""
    logged: list[tuple[float, dict[str, float]]] = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = Trace(None, time.monotonic)
        parts = await stack.enter_async_context(started_parts(config, directory, trace=trace, say=lambda text: None))
        trainer = make_trainer(
            config,
            parts,
            checkpoint_dir=directory / "checkpoints",
            callbacks=TrainerCallbacks(log=lambda step, values: logged.append((time.monotonic(), values))),
            trace=trace,
        )
        await trainer.run()
    began = next(moment for moment, values in logged if "reward/eval" in values)
    reached = [moment - began for moment, values in logged if values.get("reward/eval", 0.0) >= target]
    totals = trainer.totals
    return {
        "schedule": variant.schedule,
        "ref_logp": variant.ref_logp,
        "seconds": reached[0] if reached else None,
        "seconds_of_all_steps": totals.training_seconds,
        "reward_before": totals.reward_before,
        "reward_after": trainer.reward_after,
        "utilisation": totals.train_seconds / totals.training_seconds,
        "staleness_max": totals.staleness_max,
    }


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, help="optimizer steps of each variant (default 30; 8 with --quick)")
    parser.add_argument("--target", type=float, default=0.9, help="held-out reward to reach")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")
    options = parser.parse_args()
    num_steps = options.steps or (8 if options.quick else 30)
    under = conditions(
        seed=options.seed, num_steps=num_steps, target_reward=options.target, overrides=options.overrides
    )
    rows = []
    for variant in VARIANTS:
        config = from_overrides(
            f"trainer.schedule={variant.schedule}",
            f"trainer.num_steps={num_steps}",
            f"trainer.seed={options.seed}",
            "trainer.eval_interval_steps=4",
            "trainer.checkpoint_interval_steps=0",
            "evaluation.num_prompts=128",
            *variant.overrides,
            *options.overrides,
        )
        rows.append(asyncio.run(measure(config, variant, options.target)))
        print(f"{variant.schedule}, ref_logp {variant.ref_logp}: {rows[-1]}", flush=True)
    report("the default task under each schedule", {"conditions": under}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
