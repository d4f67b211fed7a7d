"""Writes ``trained_groups.jsonl``, one line per trained group; claims about staleness and the ledger can be checked with it.

    {"step": 3, "epoch": 0, "uid": "1f3a", "admission_index": 17, "scheduled_version": 1, "trained_version": 2, "rows": [...]}

The file survives ``kill -9``, and a resumed run continues it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_async.metrics.record_file import RecordFile
from skyrl_async.metrics.tracker import begin_rows
from skyrl_async.types import Group, Trajectory
from skyrl_async.version_spans import spans_of

_FIELDS = (
    *("sample_index", "reward", "weight", "num_turns", "num_sampled_tokens", "num_aborts"),
    *("is_truncated", "is_abandoned", "is_overlong"),
)
"""Fields of a row that are written under their own names."""
_TOKENS = ("prompt_token_ids", "response_token_ids", "loss_mask", "logprobs")


class TrainedGroupsLog(RecordFile):
    """Writes ``trained_groups.jsonl``.

    Args:
        path: path of the file.
        resume_step: keep the lines up to that step and continue after them; None begins a new file. The file stays as it was until
            ``begin`` is called or the first group is logged.
        has_tokens: also write ids, loss mask and all log-probs of every row (some 20 bytes per token, and 20 more for each kind of
            log-probs beside the behavior's).
    """

    def __init__(self, path: Path, resume_step: float | None = None, *, has_tokens: bool = False) -> None:
        super().__init__(path, lambda: begin_rows(path, resume_step))
        self._has_tokens = has_tokens

    def log(self, version: int, groups: Sequence[Group]) -> None:
        """Append the groups of step ``version + 1``, which were trained at policy ``version``."""
        for group in groups:
            self.append(json.dumps(self._line(version, group)) + "\n")

    def _line(self, version: int, group: Group) -> dict[str, Any]:
        return {
            "step": version + 1,
            **{name: getattr(group, name) for name in ("epoch", "uid", "admission_index", "scheduled_version")},
            "trained_version": version,
            "generation_seconds": round(group.generation_seconds, 3),
            "rows": [self._row(row) for row in group.trajectories],
        }

    def _row(self, row: Trajectory) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(row, name) for name in _FIELDS} | {
            "num_prompt_tokens": len(row.prompt_token_ids),
            "num_response_tokens": len(row.response_token_ids),
            "policy_versions": spans_of(row.versions),
        }
        optional: dict[str, Any] = {"shaped_reward": row.shaped_reward, "old_version": row.old_version}
        if self._has_tokens:
            values |= {name: getattr(row, name) for name in _TOKENS}
            optional |= {"ref_logprobs": row.ref_logprobs, "old_logprobs": row.old_logprobs}
        return values | {name: value for name, value in optional.items() if value is not None}
