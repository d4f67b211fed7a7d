"""What staleness costs in learning, with each off-policy correction: the default task at several bounds, from the same weights.

A row is a run: ``correction`` names one of ``CORRECTIONS``, ``staleness`` is the bound, ``policy`` what holds it. ``seconds`` are of the
training loop, held-out prompts included; ``curve`` has (step, held-out reward), ``reward_before`` and ``reward_after`` are of more prompts.
``staleness_mean`` says how stale groups really were: finished groups may wait up to the bound, so that it is used. ``ess``,
``sequence_ess``, ``lr_scale``, ``masked`` and ``clipped`` are means over the steps.

Under ``against_no_staleness`` is, per correction and bound, the reward after training less that at the bound of 0 (mean of the differences
per seed), its standard error, and whether it is within two of these. With ``--json FILE`` each row is written as soon as it is there,
and those that FILE holds are not run again: a grid can be stopped and gone on with, or widened by ``--corrections``, ``--staleness``
and ``--seeds``.
"""

import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.report import arguments, conditions, file_to_write, report
from benchmarks.staleness_picture import draw_staleness_curves
from skyrl_async.composition.parts import Parts, TrainerCallbacks, make_trainer
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace import Trace

_PREFIX = "trainer.algorithm.off_policy_correction"
_LOSS = "trainer.algorithm.policy_loss_type"
_ESTIMATOR = "trainer.algorithm.advantage_estimator"


def _keys(loss: str, **values: object) -> tuple[str, ...]:
    return (f"{_LOSS}={loss}", *(f"{_PREFIX}.{key}={value}" for key, value in values.items()))


_UNCAPPED = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": "inf"}
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": _keys("ppo_clip"),
    "decoupled": _keys("decoupled_ppo", tis_ratio_type="token"),
    "token_tis": _keys("rollout_is", tis_ratio_type="token"),
    "token_tis_guard": (*_keys("rollout_is", tis_ratio_type="token"), "trainer.guard.scale_lr_by_ess=true"),
    "token_tis_min_ess": (*_keys("rollout_is", tis_ratio_type="token"), "trainer.guard.min_ess=0.3"),
    "sequence_tis": _keys("rollout_is", tis_ratio_type="sequence"),
    "mis": _keys(
        "rollout_is",
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high="inf",
        sequence_mask_metric="product",
        product_mask_low=0,
        product_mask_high=5,
    ),
    "icepop": _keys("rollout_is", **_UNCAPPED, token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=5),
    "geometric": _keys("ppo_clip", sequence_mask_metric="geometric"),
    "product": _keys("ppo_clip", sequence_mask_metric="product"),
    "outlier_veto": _keys("ppo_clip", outlier_token_is_threshold_low=1e-4, outlier_token_is_threshold_high=100),
    "opsm": _keys("ppo_clip", opsm_delta=0.01),
    "m2po": _keys("rollout_is", **_UNCAPPED, m2_threshold=0.04),
    "gae": (*_keys("ppo_clip"), f"{_ESTIMATOR}=gae"),
    "gae_unweighted": (*_keys("ppo_clip"), f"{_ESTIMATOR}=gae", "trainer.algorithm.vtrace_clip=null"),
    "forward_kl": (*_keys("ppo_clip"), "trainer.algorithm.distillation.divergence=forward_kl"),
}
"""Name -> overrides. ``none`` is PPO clipped around the engine's log-probs; ``guard`` scales steps by their effective sample size, and
``min_ess`` refuses those of a small one; ``gae`` is PPO with a critic, whose returns V-trace weighs or does not; ``forward_kl`` is for a
teacher, which the overrides name.
"""

_IF_NAMED = ("token_tis_guard", "token_tis_min_ess", "gae", "gae_unweighted", "forward_kl")
"""Not run by default, and not corrections of their own."""
BOUNDS = (0, 1, 4, 8)
_KEY = ("correction", "seed", "staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run."""

    corrections: tuple[str, ...]
    bounds: tuple[int, ...]
    seeds: tuple[int, ...]
    policy: str
    num_steps: int
    num_eval_prompts: int
    overrides: tuple[str, ...]

    def lacking(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, list[int]]]:
        """(correction, seed, bounds that ``rows`` do not have), seed by seed, so that all of one are compared first."""
        known = {tuple(row[key] for key in _KEY) for row in rows}
        for seed in self.seeds:
            for correction in self.corrections:
                if bounds := [bound for bound in self.bounds if (correction, seed, bound) not in known]:
                    yield correction, seed, bounds

    def config(self, correction: str, seed: int) -> Config:
        """At the largest bound; ``measure`` takes others."""
        return from_overrides(
            f"trainer.seed={seed}",
            f"trainer.staleness_policy={self.policy}",
            f"trainer.num_steps={self.num_steps}",
            f"trainer.max_staleness_steps={max(self.bounds)}",
            "trainer.count_buffered_as_in_flight=false",
            f"trainer.eval_interval_steps={math.ceil(self.num_steps / 5)}",
            "trainer.checkpoint_interval_steps=0",
            "trainer.logprob_probe_interval_steps=0",
            f"evaluation.num_prompts={self.num_eval_prompts}",
            *CORRECTIONS[correction],
            *self.overrides,
        )


async def run(plan: Plan, rows: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """A row for each run that ``rows`` lack. Processes are started once per correction and seed."""
    for correction, seed, bounds in plan.lacking(rows):
        config = plan.config(correction, seed)
        async with contextlib.AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trace = Trace(None, time.monotonic)
            parts = await stack.enter_async_context(
                started_parts(config, directory, trace=trace, say=lambda text: None)
            )
            models = {"policy": parts.policy, "critic": parts.critic} if parts.critic else {"policy": parts.policy}
            for name, model in models.items():
                await model.save(directory / "start" / name)
            for bound in bounds:
                for name, model in models.items():
                    await model.load(directory / "start" / name)
                row = {"staleness": bound, "correction": correction, "policy": plan.policy, "seed": seed}
                yield row | await measure(config, bound, parts)


async def measure(config: Config, bound: int, parts: Parts) -> dict[str, Any]:
    """Train from where the policy stands under a bound on staleness."""
    logged: list[tuple[int, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            replace(config, trainer=replace(config.trainer, max_staleness_steps=bound)),
            parts,
            checkpoint_dir=Path(directory),
            callbacks=TrainerCallbacks(log=lambda step, values: logged.append((step, values))),
            trace=Trace(None, time.monotonic),
        )
        await trainer.run()
    totals = trainer.totals

    def mean(name: str) -> float | None:
        values = [values[name] for _, values in logged if name in values]
        return fmean(values) if values else None

    return {
        "reward_before": totals.reward_before,
        "reward_after": trainer.reward_after,
        "seconds": totals.training_seconds,
        "steps": trainer.trained_version,
        "staleness_mean": totals.staleness_sum / totals.trained_groups,
        "staleness_max": totals.staleness_max,
        "ess": mean("policy/ess"),
        "sequence_ess": mean("policy/sequence_ess"),
        "lr_scale": mean("policy/lr_scale"),
        "masked": mean("policy/correction_masked"),
        "clipped": mean("policy/clip_frac"),
        "all_masked_steps": totals.all_masked_steps,
        "curve": [[step, values["reward/eval"]] for step, values in logged if "reward/eval" in values],
    }


def against_no_staleness(rows: Sequence[dict[str, Any]], num_eval_prompts: int) -> list[dict[str, Any]]:
    """Per correction and bound above 0, how far the reward after training is from that at a bound of 0, seed by seed.

    The standard error is that of the mean difference over seeds, and no less than what drawing the held-out answers leaves.
    """
    after = {(row["correction"], row["staleness"], row["seed"]): row["reward_after"] for row in rows}
    found = []
    for correction, bound in dict.fromkeys((row["correction"], row["staleness"]) for row in rows):
        seeds = [s for c, b, s in after if (c, b) == (correction, bound) and (correction, 0, s) in after]
        if bound == 0 or not seeds:
            continue
        stale, fresh = ([after[correction, b, seed] for seed in seeds] for b in (bound, 0))
        differences = [s - f for s, f in zip(stale, fresh, strict=True)]
        drawing = math.sqrt(sum(r * (1 - r) for r in (*stale, *fresh)) / num_eval_prompts) / len(seeds)
        error = max(drawing, stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0)
        difference = fmean(differences)
        found.append(
            {
                "correction": correction,
                "staleness": bound,
                "seeds": len(seeds),
                "reward_difference": difference,
                "standard_error": error,
                "is_within_noise": abs(difference) <= 2 * error,
            }
        )
    return found


def known_rows(path: Path | None, plan: Plan) -> list[dict[str, Any]]:
    """Of an earlier invocation. Exits where that ran another job."""
    if path is None or not path.exists():
        return []
    written = json.loads(path.read_text())
    rows, overrides = list(written["rows"]), written["conditions"]["overrides"]
    if overrides != list(plan.overrides):
        sys.exit(f"{path} holds rows of other overrides ({' '.join(overrides) or 'none'}); name another file")
    if any((row["steps"], row["policy"]) != (plan.num_steps, plan.policy) for row in rows):
        sys.exit(f"{path} holds rows of other --steps or another --policy; name another file")
    return rows


def publish(plan: Plan, rows: Sequence[dict[str, Any]], under: dict[str, Any], options: Namespace) -> None:
    """Print, write and draw what there is."""
    figures = {"against_no_staleness": against_no_staleness(rows, plan.num_eval_prompts), "conditions": under}
    plain = [{key: value for key, value in row.items() if key not in ("curve", "commit")} for row in rows]
    report("the default task, stale", figures, plain, options.json, written={"rows": list(rows)})
    if options.plot is not None:
        draw_staleness_curves(rows, options.plot)


async def run_all(plan: Plan, rows: list[dict[str, Any]], under: dict[str, Any], options: Namespace) -> None:
    async for row in run(plan, list(rows)):
        rows.append(row | {"commit": under["commit"]})
        print(f"{row['correction']} seed {row['seed']} S={row['staleness']}: {row['reward_after']:.3f}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"conditions": under, "rows": rows}, indent=2) + "\n")


def parser() -> ArgumentParser:
    options = arguments(__doc__ or "")
    options.add_argument(
        "--corrections", nargs="+", choices=CORRECTIONS, help=f"only these (default: all but {', '.join(_IF_NAMED)})"
    )
    options.add_argument("--staleness", nargs="+", type=int, help="bounds (default 0 1 4 8)")
    options.add_argument("--seeds", nargs="+", type=int, help="default: three, from --seed on")
    options.add_argument("--policy", default="wait", help="trainer.staleness_policy")
    options.add_argument("--steps", type=int, help="optimizer steps of each run (default 25; 8 with --quick)")
    options.add_argument("--plot", type=file_to_write, help="draw the curves to this picture")
    options.add_argument("overrides", nargs="*", help="key=value of the configuration, before the options")
    return options


def main() -> int:
    options = parser().parse_args()
    is_quick = options.quick
    plan = Plan(
        corrections=tuple(
            options.corrections
            or (("icepop",) if is_quick else (name for name in CORRECTIONS if name not in _IF_NAMED))
        ),
        bounds=tuple(options.staleness or ((0, 4) if is_quick else BOUNDS)),
        seeds=tuple(options.seeds or range(options.seed, options.seed + (1 if is_quick else 3))),
        policy=options.policy,
        num_steps=options.steps or (8 if is_quick else 25),
        num_eval_prompts=64 if is_quick else 256,
        overrides=tuple(options.overrides),
    )
    under = conditions(
        is_quick=is_quick,
        num_steps=plan.num_steps,
        num_eval_prompts=plan.num_eval_prompts,
        overrides=list(plan.overrides),
        corrections={name: list(CORRECTIONS[name]) for name in plan.corrections},
    )
    rows = known_rows(options.json, plan)
    asyncio.run(run_all(plan, rows, under, options))
    publish(plan, rows, under, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
