"""Trajectories in, micro-batches out: rows packed end to end, or padded on the right.

Packed rows waste nothing; they need a model that attends within each row. Padded rows carry no attention mask: under causal attention no
real token sees what comes after it, and logits are taken at sampled positions only. Padding costs time, and changes no number. The plan
of micro-batches is a pure function of the lengths, and the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_async.columns import Advantages, Mask, Weights, repeated
from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory with its advantages, or for a critic what its values are trained towards."""

    trajectory: Trajectory
    advantages: Advantages
    """(T,) float32, one per response token; read at the trained ones."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return self.trajectory.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows with N sampled tokens, as a (B, T) tensor: B rows padded to T tokens each, or all rows packed end to end (B = 1).

    N is 0 for the idle forward of a rank that has no rows.
    """

    input_ids: Tensor
    """(B, T) int64; padding is token 0."""
    row_lengths: tuple[int, ...] | None = None
    """Lengths of packed rows; None if rows are padded."""
    positions: Tensor
    """(N,) int64, indices into the B * T flattened positions: the logits there predict each sampled token."""
    targets: Tensor
    """(N,) int64, the sampled tokens."""
    row_indices: Tensor
    """(N,) int64, ascending: the row of each token, from 0."""
    behavior_logprobs: Tensor
    """(N,) float32, nats."""
    advantages: Tensor
    """(N,) float32, advantage times ``weights``: every policy loss is linear in a positive factor of the advantage."""
    returns: Tensor
    """(N,) float32, the column of the row without its weight: a critic's values are trained towards it."""
    weights: Tensor
    """(N,) float32, weight of the row times that of the token; it multiplies what else is summed over tokens."""
    versions: Tensor
    """(N,) int64, the policy version each token was sampled under."""
    ref_logprobs: Tensor | None
    """(N,) float32, nats; None if a row lacks them."""
    old_logprobs: Tensor | None
    """(N,) float32, nats; None if a row lacks them."""
    teacher_logprobs: Tensor | None = None
    """(N,) float32, nats; None if a row lacks them."""
    teacher_top_ids: Tensor | None = None
    """(N, K) int32: the teacher's likeliest tokens; None if a row lacks them."""
    teacher_top_logprobs: Tensor | None = None
    """(N, K + 1) or (N, K) float32, nats, as ``TopTokens.logprobs``; None if a row lacks them."""
    old_values: Tensor | None = None
    """(N,) float32: a critic's values when the row was finished; None if a row lacks them."""
    is_marked: Tensor | None = None
    """(N,) bool, tokens that ``covariance`` marked; None if a row lacks marks."""

    @property
    def num_rows(self) -> int:
        """Rows, packed or padded; rows without a sampled token count, and so does the one of an idle forward."""
        return len(self.input_ids) if self.row_lengths is None else len(self.row_lengths)


def plan_micro_batches(
    lengths: Sequence[int], *, micro_batch_tokens: int, overhead_tokens: int, num_ranks: int, is_packed: bool = False
) -> list[list[list[int]]]:
    """Distribute rows over ranks, and split each rank's share into micro-batches.

    Args:
        lengths: tokens per row, >= 1.
        micro_batch_tokens: most tokens of a micro-batch, padding included; a longer row gets a micro-batch of its own.
        overhead_tokens: fixed cost of a forward and backward, in tokens; a higher cost leads to fewer micro-batches.
        num_ranks: >= 1.
        is_packed: rows are packed end to end, so that a micro-batch has the tokens of its rows and no padding.

    Returns:
        Per rank a list of micro-batches, each a list of indices into ``lengths``. All ranks have the same number of micro-batches,
        because sharded forwards are collective; a rank with fewer rows has empty ones at the end.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    plans = []
    for rank in range(num_ranks):
        share = longest_first[rank::num_ranks]
        if is_packed:
            plans.append(_first_fit(share, lengths, micro_batch_tokens))
            continue
        sizes = _cheapest_split([lengths[index] for index in share], micro_batch_tokens, overhead_tokens)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        plans.append([share[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    num_forwards = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(num_forwards - len(plan))] for plan in plans]


def _first_fit(share: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Put each row, longest first, into the first micro-batch with room: at most 11/9 of the fewest possible micro-batches, plus one."""
    plan: list[list[int]] = []
    num_free: list[int] = []
    for index in share:
        fitting = (number for number, room in enumerate(num_free) if lengths[index] <= room)
        number = next(fitting, len(plan))
        if number == len(plan):
            plan.append([])
            num_free.append(micro_batch_tokens)
        plan[number].append(index)
        num_free[number] -= lengths[index]
    return plan


def _cheapest_split(lengths: Sequence[int], micro_batch_tokens: int, overhead_tokens: int) -> list[int]:
    """Cut the descending ``lengths`` into runs that minimise padded tokens plus overhead; returns their sizes. Dynamic programming."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # cost and sizes for the first rows, by their number
    for end in range(1, len(lengths) + 1):
        costs = []
        for size in range(1, end + 1):
            num_padded = size * lengths[end - size]
            if size > 1 and num_padded > micro_batch_tokens:
                break
            costs.append((best[end - size][0] + num_padded + overhead_tokens, -size))
        cost, negative_size = min(costs)
        best.append((cost, [*best[end + negative_size][1], -negative_size]))
    return best[-1][1]


def collate(rows: Sequence[Row], device: torch.device, *, is_packed: bool = False) -> MicroBatch:
    """Lay out ``rows`` as one micro-batch on ``device``. Without rows it is the idle micro-batch: one token, N = 0.

    Raises:
        ValueError: a row has no prompt; nothing predicts its first token.
    """
    lengths = [row.num_tokens for row in rows]
    shape = (1, sum(lengths)) if is_packed else (len(rows), max(lengths, default=0))
    input_ids = torch.zeros(shape if rows else (1, 1), dtype=torch.int64)
    starts = [sum(lengths[:i]) if is_packed else i * shape[1] for i in range(len(rows))]
    flat_ids = input_ids.numpy().reshape(-1)  # shares its memory
    is_before_sampled: Mask = np.zeros(len(flat_ids), dtype=np.bool_)
    for row, start in zip(rows, starts, strict=True):
        prompt, response = row.trajectory.prompt_token_ids, row.trajectory.response_token_ids
        if not len(prompt):
            raise ValueError("trajectory.prompt_token_ids must hold at least one token, got none")
        first = start + len(prompt)
        flat_ids[start:first], flat_ids[first : first + len(response)] = prompt, response
        is_before_sampled[first - 1 : first - 1 + len(response)] = row.trajectory.loss_mask
    positions = torch.from_numpy(np.flatnonzero(is_before_sampled))
    num_sampled = torch.tensor([row.trajectory.num_sampled_tokens for row in rows], dtype=torch.int64)
    row_indices = torch.arange(len(rows)).repeat_interleave(num_sampled)
    weights = torch.tensor([row.trajectory.weight for row in rows], dtype=torch.float64)[row_indices]
    if any(row.trajectory.token_weights is not None for row in rows):
        weights *= torch.from_numpy(_joined([_token_weights(row) for row in rows], np.float32))
    given = torch.from_numpy(_joined([row.advantages[row.trajectory.loss_mask] for row in rows], np.float32))
    return MicroBatch(
        input_ids=input_ids.to(device),
        row_lengths=tuple(lengths) if is_packed and rows else None,
        positions=positions.to(device),
        targets=input_ids.flatten()[positions + 1].to(device),
        row_indices=row_indices.to(device),
        behavior_logprobs=_of_sampled(rows, "logprobs", np.float32, device),
        advantages=(weights * given).float().to(device),
        returns=given.to(device),
        weights=weights.float().to(device),
        versions=_of_sampled(rows, "versions", np.int64, device),
        ref_logprobs=_unless_lacking(rows, "ref_logprobs", np.float32, device),
        old_logprobs=_unless_lacking(rows, "old_logprobs", np.float32, device),
        teacher_logprobs=_unless_lacking(rows, "teacher_logprobs", np.float32, device),
        **_teacher_top(rows, device),
        old_values=_unless_lacking(rows, "values", np.float32, device),
        is_marked=_unless_lacking(rows, "marks", np.bool_, device),
    )


def _of_sampled(rows: Sequence[Row], name: str, dtype: type[np.generic], device: torch.device) -> Tensor:
    """(N,) ``dtype``: what a trajectory's field ``name``, one value per response token, has for sampled tokens."""
    chosen = [np.asarray(getattr(row.trajectory, name))[row.trajectory.loss_mask] for row in rows]
    return torch.from_numpy(_joined(chosen, dtype)).to(device)


def _token_weights(row: Row) -> Weights:
    """(n,) weights of a row's sampled tokens, without the row's own."""
    weights, mask = row.trajectory.token_weights, row.trajectory.loss_mask
    return repeated(1.0, row.trajectory.num_sampled_tokens) if weights is None else weights[mask]


def _joined(columns: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *columns])


def _unless_lacking(rows: Sequence[Row], name: str, dtype: type[np.generic], device: torch.device) -> Tensor | None:
    """``_of_sampled``, or None if a row lacks the field."""
    is_lacking = any(getattr(row.trajectory, name) is None for row in rows)
    return None if is_lacking else _of_sampled(rows, name, dtype, device)


def _teacher_top(rows: Sequence[Row], device: torch.device) -> dict[str, Tensor]:
    """``teacher_top_ids`` and ``teacher_top_logprobs``; nothing if a row lacks them, or there is none."""
    pairs = [(row.trajectory.loss_mask, row.trajectory.teacher_top) for row in rows]
    chosen = [(top.ids[mask], top.logprobs[mask]) for mask, top in pairs if top is not None]
    if not rows or len(chosen) < len(rows):
        return {}
    ids, logprobs = (torch.from_numpy(np.concatenate(each)).to(device) for each in zip(*chosen, strict=True))
    return {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}
