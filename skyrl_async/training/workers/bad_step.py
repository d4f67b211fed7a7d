"""The rows of a step whose numbers stopped being numbers, written down for study.

Flows in: micro-batches as they are trained. Flows out: nothing, or a file with a row per line. Knows neither losses nor gradients.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from skyrl_async.algorithms.batching import Row


class TrainedRows:
    """What one rank has trained since its last step."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[tuple[Row, ...], Tensor]] = []
        self._version = 0

    def add(self, rows: Sequence[Row], logprobs: Tensor, version: int) -> None:
        """``logprobs``: (N,) float32, nats, of the rows' sampled tokens under the policy that is trained; ``version``: its version."""
        self._micro_batches.append((tuple(rows), logprobs.detach()))
        self._version = version

    def clear(self) -> None:
        """The step is done."""
        self._micro_batches.clear()

    def write(self, directory: Path, rank: int) -> str | None:
        """Write ``version_<v>_rank_<r>.jsonl`` under ``directory``: what the rank was given of each row, and what it made of it.

        Returns its path; None, and nothing is written, where the rank had no row.

        Log-probs are nats, one per response token, those of the policy that is trained null where it did not sample. What is not finite is
        written as NaN and Infinity, as Python reads them. Raises ``OSError``.
        """
        if not self._micro_batches:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"version_{self._version:06d}_rank_{rank}.jsonl"
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
