"""The rows of a step whose loss or gradient is not finite, written to files for study: one row per line.

Knows neither losses nor gradients.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from skyrl_async.algorithms.batching import Row
from skyrl_async.columns import json_list


@dataclass(kw_only=True, eq=False)
class TrainedRows:
    """The rows that one rank has trained since its last step."""

    directory: str | None
    """For the files; None: rows are not written."""
    outputs: str = "policy_logprobs"
    """What the rank computes for each sampled token, in the files."""
    _micro_batches: list[tuple[tuple[Row, ...], Tensor]] = field(default_factory=list, init=False)
    _version: int = field(default=0, init=False)

    def add(self, rows: Sequence[Row], outputs: Tensor, version: int) -> None:
        """Add a micro-batch. ``outputs``: (N,) float32 of its sampled tokens; ``version`` of the policy is trained."""
        self._micro_batches.append((tuple(rows), outputs))
        self._version = version

    def clear(self) -> None:
        """Forget the rows: the step is over."""
        self._micro_batches.clear()

    def save(self) -> str:
        """Write the rows; returns a sentence that says where they are. Collective: every rank has written on return."""
        if self.directory is None:
            return "Nobody asked for the step's rows"
        path = failure = None
        try:
            path = self._write(Path(self.directory))
        except OSError as error:
            failure = f"those of rank {dist.get_rank()} could not be written: {error}"
        of_ranks: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (path, failure))
        paths = [path for path, _ in of_ranks if path is not None]
        where = f"are in {' and '.join(paths)}" if paths else "are lost"
        failures = [failure for _, failure in of_ranks if failure is not None]
        return "; ".join([f"The step's rows, with their log-probs and advantages, {where}", *failures])

    def _write(self, directory: Path) -> str | None:
        """Write ``version_<v>_rank_<r>.jsonl``: each row's inputs and the model's outputs. Returns its path; None without rows.

        Log-probs are nats, one per response token; ``outputs`` are null for tokens that the policy did not sample. Numbers that are not
        finite are written as NaN and Infinity, which Python reads.
        """
        if not self._micro_batches:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"version_{self._version:06d}_rank_{dist.get_rank()}.jsonl"
        path.write_text("".join(json.dumps(line, default=json_list) + "\n" for line in self._lines()))
        return str(path)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for rows, outputs in self._micro_batches:
            values = iter(outputs.tolist())
            for row in rows:
                trajectory = row.trajectory
                yield {
                    "prompt_token_ids": trajectory.prompt_token_ids,
                    "response_token_ids": trajectory.response_token_ids,
                    "loss_mask": trajectory.loss_mask,
                    "versions": trajectory.versions,
                    "behavior_logprobs": trajectory.logprobs,
                    "old_logprobs": trajectory.old_logprobs,
                    "ref_logprobs": trajectory.ref_logprobs,
                    "marks": trajectory.marks,
                    "values": trajectory.values,
                    self.outputs: [
                        next(values) if is_sampled else None for is_sampled in trajectory.loss_mask.tolist()
                    ],
                    "reward": trajectory.reward,
                    "advantages": row.advantages,
                    "weight": trajectory.weight,
                    "token_weights": trajectory.token_weights,
                }
