"""What must hold of a run, read from its files alone: the record of samples, the newest checkpoint, the metrics.

Flows in: a run directory. Flows out: counts of what was lost, trained twice, torn or past the bound. Knows nothing of faults.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from skyrl_async.metrics.tracker import read_steps
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import read_samples

_OF_TRAINED_GROUPS = (Outcome.TRAINED, Outcome.MASKED, Outcome.ABANDONED)

MAX_LOGPROB_GAP = 0.01
"""Nats by which engine and trainer may differ on a token of the version that is trained, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Of a run up to its newest checkpoint; all but the first two must be 0."""

    steps: int
    trained: int
    """Groups."""
    lost: int
    """Prompts of complete epochs that were neither trained nor counted as failed or filtered, and groups that only one of checkpoint
    and record knows."""
    failed: int
    trained_twice: int
    """Groups beyond the first of one prompt in one epoch."""
    torn_versions: int
    """Rows whose tokens' versions go back, come from the future or from before the admission; steps in which engine and trainer
    disagreed on tokens of the same version."""
    over_bound: int
    """Groups staler than the bound."""
    damaged_steps: int
    """Steps missing from the record, or without a full mini-batch."""

    def problems(self) -> dict[str, int]:
        """What is not as it must be."""
        return {name: count for name, count in asdict(self).items() if name not in ("steps", "trained") and count}


def audit(run_dir: Path, *, uids: set[str], mini_batch_size: int, max_staleness_steps: int) -> Audit:
    """Check the run's record against its newest checkpoint."""
    state = _newest_state(run_dir)
    keys: Counter[tuple[int, str]] = Counter()
    sizes: Counter[int] = Counter()
    num_torn = num_over = 0
    for line in trained_groups(run_dir, state["step"]):
        keys[line["epoch"], line["uid"]] += 1
        sizes[line["step"]] += 1
        num_torn += _is_torn(line)
        num_over += line["step"] - 1 - line["scheduled_version"] > max_staleness_steps
    ledger = state["dataloader"]["ledger"]
    failed = ledger["totals"]["failed"]
    open_epochs = {int(epoch): states for epoch, states in ledger["epochs"].items()}
    complete = {(epoch, uid) for epoch in range(ledger["next_epoch"]) if epoch not in open_epochs for uid in uids}
    claimed = {(epoch, uid) for epoch, states in open_epochs.items() for uid in states["trained"]}
    recorded = {key for key in keys if key[0] in open_epochs}
    left_out = failed + ledger["totals"]["filtered"]
    left_out_in_open = sum(len(states["failed"]) + len(states["filtered"]) for states in open_epochs.values())
    missing = len(complete - keys.keys()) - (left_out - left_out_in_open)
    return Audit(
        steps=state["step"],
        trained=keys.total(),
        lost=abs(missing) + len(claimed ^ recorded),
        failed=failed,
        trained_twice=sum(count - 1 for count in keys.values()),
        torn_versions=num_torn + _num_disagreements(run_dir),
        over_bound=num_over,
        damaged_steps=sum(sizes[step] != mini_batch_size for step in range(1, state["step"] + 1)),
    )


_GROUP = ("step", "epoch", "uid", "admission_index", "scheduled_version")


def trained_groups(
    run_dir: Path, last_step: float = math.inf, columns: Sequence[str] = ("policy_versions",)
) -> list[dict[str, Any]]:
    """The groups trained up to a step, in order, with these columns of their ``rows``."""
    names = [*_GROUP, "outcome", *columns]
    rows = [row for row in read_samples(run_dir, names).to_pylist() if row["outcome"] in _OF_TRAINED_GROUPS]
    return [
        {**dict(zip(_GROUP, key, strict=True)), "rows": [{name: row[name] for name in columns} for row in of_group]}
        for key, of_group in groupby(rows, key=itemgetter(*_GROUP))
        if key[0] <= last_step
    ]


def _is_torn(line: dict[str, Any]) -> bool:
    for row in line["rows"]:
        versions = [span["version"] for span in row["policy_versions"] if span["version"] >= 0]
        if versions != sorted(versions):
            return True
        if versions and not line["scheduled_version"] <= versions[0] <= versions[-1] < line["step"]:
            return True
    return False


def _num_disagreements(run_dir: Path) -> int:
    gaps = [row.get("policy/lag0_logprob_gap_max", 0.0) for row in read_steps(run_dir / "metrics.jsonl")]
    return sum(gap > MAX_LOGPROB_GAP for gap in gaps)


def _newest_state(run_dir: Path) -> dict[str, Any]:
    checkpoints = run_dir / "checkpoints"
    step = (checkpoints / "latest_ckpt_global_step.txt").read_text().strip()
    state: dict[str, Any] = json.loads((checkpoints / f"global_step_{step}" / "trainer_state.json").read_text())
    return state
