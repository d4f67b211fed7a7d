"""What was trained, group by group: ``trained_groups.jsonl``, from which every claim about staleness and the ledger can be checked.

    {"step": 3, "epoch": 0, "uid": "1f3a", "admission_index": 17, "scheduled_version": 1, "trained_version": 2, "rows": [...]}

Flows in: the groups of a step once it is complete. Flows out: one line per group, in a file that survives ``kill -9`` and goes on
after a resume. Does not know how groups were generated, nor what their rewards mean.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_async.metrics.record_file import RecordFile
from skyrl_async.metrics.tracker import begin_rows
from skyrl_async.types import Group, Trajectory
from skyrl_async.version_spans import spans_of


class TrainedGroupsLog:
    """Writes ``trained_groups.jsonl``.

    Args:
        path: of the file.
        resume_step: keep the lines up to that step, and go on after them; None begins a new file. It stays as it was until ``begin``,
            or the first group.
        has_tokens: write ids, loss mask and all log-probs of every row too (some 20 bytes per token, and as many again for each
            kind of log-probs beside the behavior's).
    """

    def __init__(self, path: Path, resume_step: float | None = None, *, has_tokens: bool = False) -> None:
        self._file = RecordFile(path, lambda: begin_rows(path, resume_step))
        self._has_tokens = has_tokens

    def begin(self) -> None:
        """The run goes on: forget the lines past its first step."""
        self._file.begin()

    def log(self, version: int, groups: Sequence[Group]) -> None:
        """Append the groups that were trained at policy ``version``: those of step ``version + 1``."""
        for group in groups:
            self._file.append(json.dumps(self._line(version, group)) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _line(self, version: int, group: Group) -> dict[str, Any]:
        return {
            "step": version + 1,
            "epoch": group.epoch,
            "uid": group.uid,
            "admission_index": group.admission_index,
            "scheduled_version": group.scheduled_version,
            "trained_version": version,
            "generation_seconds": round(group.generation_seconds, 3),
            "rows": [self._row(row) for row in group.trajectories],
        }

    def _row(self, row: Trajectory) -> dict[str, Any]:
        values: dict[str, Any] = {
            "sample_index": row.sample_index,
            "reward": row.reward,
            "weight": row.weight,
            "num_turns": row.num_turns,
            "num_prompt_tokens": len(row.prompt_token_ids),
            "num_response_tokens": len(row.response_token_ids),
            "num_sampled_tokens": row.num_sampled_tokens,
            "num_aborts": row.num_aborts,
            "is_truncated": row.is_truncated,
            "is_abandoned": row.is_abandoned,
            "is_overlong": row.is_overlong,
            "policy_versions": spans_of(row.versions),
        }
        if row.shaped_reward is not None:
            values["shaped_reward"] = row.shaped_reward
        if row.old_version is not None:
            values["old_version"] = row.old_version
        if self._has_tokens:
            values |= {
                "prompt_token_ids": row.prompt_token_ids,
                "response_token_ids": row.response_token_ids,
                "loss_mask": row.loss_mask,
                "logprobs": row.logprobs,
            }
            recomputed = {"ref_logprobs": row.ref_logprobs, "old_logprobs": row.old_logprobs}
            values |= {name: logprobs for name, logprobs in recomputed.items() if logprobs is not None}
        return values
