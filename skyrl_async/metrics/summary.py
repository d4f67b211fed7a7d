"""The figures at the end of a run, as ``summary.json`` (``evaluation.json`` for a run that trained nothing) and as a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from skyrl_async.metrics.tracker import replace_file

_LABELS = {
    "reward_before": ("held-out reward before", "{:.3f}"),
    "reward_after": ("held-out reward after", "{:.3f}"),
    "reward/eval": ("held-out reward", "{:.3f}"),
    "reward/eval_standard_error": ("  standard error", "{:.3f}"),
    "steps": ("optimizer steps", "{:,.0f}"),
    "seconds": ("run time", "{:.1f} s"),
    "boot_seconds": ("  of which until training began", "{:.1f} s"),
    "training_seconds": ("  of which the training loop", "{:.1f} s"),
    "train_seconds": ("    of which gradients and steps", "{:.1f} s"),
    "tokens_generated": ("tokens generated", "{:,.0f}"),
    "tokens_trained": ("tokens trained", "{:,.0f}"),
    "trained_groups": ("groups trained", "{:,.0f}"),
    "staleness_mean": ("staleness, mean", "{:.2f} steps"),
    "staleness_max": ("staleness, largest", "{:.0f} steps"),
    "staleness_wait_seconds": ("waited to hold the staleness bound", "{:.1f} s"),
    "groups_over_bound": ("groups past the staleness bound", "{:,.0f}"),
    "over_bound_frac": ("  as a share", "{:.1%}"),
    "staleness_bound": ("  in words", "{}"),
    "masked_frac": ("tokens masked for their age", "{:.1%}"),
    "requeued_groups": ("groups aborted and requeued", "{:,.0f}"),
    "filtered_groups": ("groups left out, all rewards equal", "{:,.0f}"),
    "all_masked_steps": ("steps without a token to train on", "{:,.0f}"),
    "refused_steps": ("steps refused by trainer.guard.min_ess", "{:,.0f}"),
    "length_ratio": ("mean length trained / generated", "{:.3f}"),
    "wasted_tokens": ("tokens thrown away", "{:,.0f}"),
    "failed_groups": ("groups failed", "{:,.0f}"),
    "failed_samples": ("failed samples of other groups", "{:,.0f}"),
    "cut_short_samples": ("agents that failed of a cap or a cut answer, trained as truncated", "{:,.0f}"),
    "side_tokens": ("tokens of agents' side requests", "{:,.0f}"),
    "retries": ("rollouts tried again", "{:,.0f}"),
    "policy_restarts": ("policy workers restarted", "{:,.0f} times"),
    "critic_restarts": ("critic workers restarted", "{:,.0f} times"),
    "resumed_trajectories": ("running trajectories resumed", "{:,.0f}"),
    "restarted_trajectories": ("  begun anew instead", "{:,.0f}"),
    "pause_seconds_median": ("generation paused per publish, median", "{:.3f} s"),
    "throughput_beside_validation": ("training throughput during validation / without", "{:.2f}"),
    "trainer_idle_frac": ("trainer idle", "{:.0%}"),
    "checkpoint": ("checkpoint", "{}"),
}


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary`` as JSON, whole or not at all."""
    replace_file(path, json.dumps(dict(summary), indent=2, default=str) + "\n")


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return a table: known figures in a fixed order and with units, then all others (paths)."""
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    for key, (label, pattern) in _LABELS.items():
        if key in summary:
            table.add_row(label, "-" if summary[key] is None else pattern.format(summary[key]))
    for key, value in summary.items():
        if key not in _LABELS:
            table.add_row(key.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else str(value))
    return table
