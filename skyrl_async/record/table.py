"""Groups at their end as rows of an Arrow table.

A training row is a table row; most samples have one, a sample whose history was rewritten has one per branch. A failed sample has one
without tokens. Columns of tokens are numpy's own memory, so that no value becomes a Python object.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_async.chat.turns import RowTurn
from skyrl_async.columns import fields_of
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.types import Group, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

TurnsOf = Callable[[Trajectory], Sequence[RowTurn]]

TOKEN_COLUMNS: dict[str, np.dtype[Any]] = {
    "prompt_token_ids": np.dtype(np.int32),
    "response_token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "old_logprobs": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
}
"""Columns with one value per token, null where they are not kept: name -> dtype. Names and meanings are those of ``Trajectory``."""
LONG_COLUMNS = ("turns", *TOKEN_COLUMNS)
"""What grows with the length of a sample, and is null in a row of figures alone."""
_FIELDS = {"reward": "float64", "shaped_reward": "float64", "weight": "float64", "old_version": "int32"} | {
    name: "int32" for name in ("num_turns", "num_aborts", "num_sampled_tokens")
}
"""Fields of a row that are columns of the same name: name -> type."""


@cache
def schema() -> "pa.Schema":
    """Columns of the record."""
    import pyarrow as pa

    call = pa.struct({"id": pa.string(), "name": pa.string(), "arguments": pa.string()})
    turn = pa.struct(
        {
            "role": pa.string(),
            "text": pa.string(),
            "start": pa.int32(),
            "end": pa.int32(),
            "tool_calls": pa.list_(call),
            "tool_call_id": pa.string(),
            "name": pa.string(),
            "engines": pa.list_(pa.string()),
            "engine_seconds": pa.float64(),
        }
    )
    span = pa.struct({"version": pa.int32(), "start": pa.int32(), "end": pa.int32()})
    return pa.schema(
        {
            "row": pa.int64(),
            "step": pa.int32(),
            "outcome": pa.string(),
            "reason": pa.string(),
            "epoch": pa.int32(),
            "uid": pa.string(),
            "admission_index": pa.int64(),
            "sample": pa.int32(),
            "branch": pa.int32(),
            "scheduled_version": pa.int32(),
            "staleness": pa.int32(),
            "advantage": pa.float64(),
            "seconds": pa.float64(),
            "engines": pa.list_(pa.string()),
            "is_truncated": pa.bool_(),
            "num_prompt_tokens": pa.int32(),
            "num_response_tokens": pa.int32(),
            **{name: pa.type_for_alias(kind) for name, kind in _FIELDS.items()},
            "metrics": pa.string(),
            "policy_versions": pa.list_(span),
            "turns": pa.list_(turn),
            **{name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in TOKEN_COLUMNS.items()},
        }
    )


def table_of(groups: Sequence[tuple[int, EndedGroup, bool]], turns_of: TurnsOf | None = None) -> "pa.Table":
    """The rows of groups.

    Args:
        groups: (number of the first row, group, whether texts and tokens are kept).
        turns_of: splits a row into turns; None: texts are unknown, and ``turns`` is null.
    """
    import pyarrow as pa

    figures: list[dict[str, Any]] = []
    kept: list[Trajectory | None] = []
    for first, ended, keeps_tokens in groups:
        rows = list(_rows_of(ended))
        figures += [{"row": first + number, **row} for number, row in enumerate(rows)]
        trajectories = ended.group.trajectories if keeps_tokens else (None,) * len(ended.group.trajectories)
        kept += [*trajectories, *(None for _ in ended.failed)]
    columns = {name: pa.array([row.get(name) for row in figures], kind) for name, kind in _short_types().items()}
    turns = [None if row is None or turns_of is None else _turns(turns_of(row)) for row in kept]
    columns["turns"] = pa.array(turns, schema().field("turns").type)
    for name, dtype in TOKEN_COLUMNS.items():
        columns[name] = _lists([None if row is None else getattr(row, name) for row in kept], dtype)
    return pa.table([columns[name] for name in schema().names], schema=schema())


@cache
def _short_types() -> dict[str, "pa.DataType"]:
    return {field.name: field.type for field in schema() if field.name not in LONG_COLUMNS}


def _rows_of(ended: EndedGroup) -> Sequence[dict[str, Any]]:
    group = ended.group
    is_held_out = ended.outcome is Outcome.HELD_OUT
    common = {
        "step": ended.step,
        "epoch": None if is_held_out else group.epoch,
        "uid": group.uid,
        "admission_index": None if is_held_out else group.admission_index,
        "scheduled_version": group.scheduled_version,
    }
    if ended.outcome is Outcome.TRAINED:
        common["staleness"] = ended.step - 1 - group.scheduled_version
    rows: list[dict[str, Any]] = []
    num_branches: dict[int, int] = {}
    for position, row in enumerate(group.trajectories):
        sample = position if row.sample_index is None else row.sample_index
        outcome, reason = _outcome(ended, row)
        found = common | {name: getattr(row, name) for name in _FIELDS}
        found |= {
            "outcome": outcome,
            "reason": reason,
            **_work_of(group, sample),
            "sample": sample,
            "branch": num_branches.setdefault(sample, 0),
            "advantage": group.advantages[position] if group.advantages else None,
            "is_truncated": row.is_truncated,
            "num_prompt_tokens": len(row.prompt_token_ids),
            "num_response_tokens": len(row.response_token_ids),
            "metrics": json.dumps(row.metrics, default=str) if row.metrics else None,
            "policy_versions": row.versions.to_json(),
        }
        num_branches[sample] += 1
        rows.append(found)
    failed = common | {"outcome": Outcome.FAILED, "reason": _utf8(f"{type(ended.failure).__name__}: {ended.failure}")}
    return rows + [failed | _work_of(group, sample) | {"sample": sample} for sample in ended.failed]


def _work_of(group: Group, sample: int) -> dict[str, Any]:
    """Its own seconds and engines; the group's seconds where its own are not known."""
    work = group.work.get(sample)
    return {
        "seconds": group.generation_seconds if work is None else work.seconds,
        "engines": list(work.engines) if work and work.engines else None,
    }


def _outcome(ended: EndedGroup, row: Trajectory) -> tuple[Outcome, str | None]:
    if ended.outcome is not Outcome.TRAINED:
        return ended.outcome, ended.reason
    if row.is_abandoned:
        return Outcome.ABANDONED, "its harness ended without a reward"
    if row.is_overlong:
        return Outcome.MASKED, "a length limit cut it"
    if not row.num_sampled_tokens:
        return Outcome.MASKED, "all of its tokens are masked"
    return Outcome.TRAINED, None


def _turns(turns: Sequence[RowTurn]) -> list[dict[str, Any]]:
    return [
        fields_of(turn)
        | {
            "tool_calls": [{name: _utf8(text) for name, text in fields_of(call).items()} for call in turn.tool_calls],
            "tool_call_id": _utf8(turn.tool_call_id),
            "name": _utf8(turn.name),
            "engines": turn.engines or None,
        }
        for turn in turns
    ]


def _utf8(text: str | None) -> str | None:
    """Text from outside with escapes for the halves of surrogate pairs, which no UTF-8 has; None for an empty one."""
    return text.encode(errors="backslashreplace").decode() if text else None


def _lists(columns: Sequence[np.ndarray[Any, Any] | None], dtype: np.dtype[Any]) -> "pa.Array":
    """A list of values per row, null where there is no column."""
    import pyarrow as pa

    lengths = [0 if column is None else len(column) for column in columns]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.concatenate([np.empty(0, dtype), *(column for column in columns if column is not None)])
    is_kept = np.array([column is not None for column in columns], bool)
    if dtype == np.bool_:
        bits = pa.py_buffer(np.packbits(values, bitorder="little"))
        inner = pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])
    else:
        inner = pa.Array.from_buffers(pa.from_numpy_dtype(dtype), len(values), [None, pa.py_buffer(values)])
    buffers = [pa.py_buffer(np.packbits(is_kept, bitorder="little")), pa.py_buffer(offsets)]
    return pa.ListArray.from_buffers(pa.list_(inner.type), len(columns), buffers, children=[inner])
