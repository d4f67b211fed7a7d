"""The rows of a step whose loss or gradient is not finite, written to files for study: one row per line.

Knows neither losses nor gradients.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from skyrl_async.algorithms.batching import Row


class TrainedRows:
    """The rows that one rank has trained since its last step.

    Args:
        directory: for the files; None: rows are not written.
        rank: this rank.
        num_ranks: of the policy.
    """

    def __init__(self, directory: str | None, *, rank: int, num_ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._num_ranks = num_ranks
        self._micro_batches: list[tuple[tuple[Row, ...], Tensor]] = []
        self._version = 0

    def add(self, rows: Sequence[Row], logprobs: Tensor, version: int) -> None:
        """Add a micro-batch. ``logprobs``: (N,) float32, nats, of its sampled tokens under the policy at ``version``, which is trained."""
        self._micro_batches.append((tuple(rows), logprobs.detach()))
        self._version = version

    def clear(self) -> None:
        """Forget the rows: the step is over."""
        self._micro_batches.clear()

    def save(self) -> str:
        """Write the rows; returns a sentence that says where they are. Collective: every rank has written on return."""
        if self._directory is None:
            return "Nobody asked for the step's rows"
        path = failure = None
        try:
            path = self._write(Path(self._directory))
        except OSError as error:
            failure = f"those of rank {self._rank} could not be written: {error}"
        of_ranks: list[tuple[str | None, str | None]] = [(None, None)] * self._num_ranks
        dist.all_gather_object(of_ranks, (path, failure))
        paths = [path for path, _ in of_ranks if path is not None]
        where = f"are in {' and '.join(paths)}" if paths else "are lost"
        failures = [failure for _, failure in of_ranks if failure is not None]
        return "; ".join([f"The step's rows, with their log-probs and advantages, {where}", *failures])

    def _write(self, directory: Path) -> str | None:
        """Write ``version_<v>_rank_<r>.jsonl``: each row's inputs and the policy's log-probs. Returns its path; None without rows.

        Log-probs are nats, one per response token; the policy's are null for tokens that it did not sample. Numbers that are not finite are
        written as NaN and Infinity, which Python reads.
        """
        if not self._micro_batches:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"version_{self._version:06d}_rank_{self._rank}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self._lines()))
        return str(path)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for rows, logprobs in self._micro_batches:
            values = iter(logprobs.tolist())
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
                    "policy_logprobs": [next(values) if is_sampled else None for is_sampled in trajectory.loss_mask],
                    "reward": trajectory.reward,
                    "advantage": row.advantage,
                    "weight": trajectory.weight,
                }
