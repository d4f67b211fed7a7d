"""Groups at their end as rows of an Arrow table.

A training row is a table row; most samples have one, a sample whose history was rewritten has one per branch. A failed sample has one
without tokens. Columns of tokens are numpy's own memory, so that no value becomes a Python object.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_async.chat.turns import RowTurn
from skyrl_async.columns import Advantages, fields_of, is_repeated
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.types import Group, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

TurnsOf = Callable[[Trajectory], Sequence[RowTurn]]

ROW_COLUMNS: dict[str, np.dtype[Any]] = {
    "prompt_token_ids": np.dtype(np.int32),
    "response_token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "old_logprobs": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
    "teacher_logprobs": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "token_weights": np.dtype(np.float32),
    "token_rewards": np.dtype(np.float32),
}
"""Columns with one value per token, null where they are not kept: name -> dtype. Names and meanings are those of ``Trajectory``."""
TOKEN_COLUMNS = ROW_COLUMNS | {"advantages": np.dtype(np.float32)}
"""The same with the advantages of tokens, null where all that are trained have the one in ``advantage``."""
LONG_COLUMNS = ("turns", *TOKEN_COLUMNS)
"""What grows with the length of a sample, and is null in a row of figures alone."""
_FIELDS = {"reward": "float64", "shaped_reward": "float64", "weight": "float64", "old_version": "int32"} | {
    name: "int32" for name in ("num_turns", "num_aborts", "num_sampled_tokens")
}
"""Fields of a row that are columns of the same name: name -> type."""
_COPIED = (*_FIELDS, "is_truncated")
_FAILED = SimpleNamespace(**dict.fromkeys((*_COPIED, "versions")))
"""In place of the row that a failed sample has not."""


@cache
def schema() -> "pa.Schema":
    """Columns of the record."""
    import pyarrow as pa

    call = pa.struct({"id": pa.string(), "name": pa.string(), "arguments": pa.string()})
    turn = pa.struct(
        {
            "role": pa.string(),
            "text": pa.string(),
            "reward": pa.float64(),
            "start": pa.int32(),
            "end": pa.int32(),
            "tool_calls": pa.list_(call),
            "tool_call_id": pa.string(),
            "name": pa.string(),
            "engines": pa.list_(pa.string()),
            "engine_seconds": pa.float64(),
            "asked_at": pa.float64(),
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
            "logs": pa.string(),
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

    rows: list[Any] = []
    kept: list[Trajectory | None] = []
    advantages: list[Advantages | None] = []
    for _, ended, keeps_tokens in groups:
        trajectories, num_failed = ended.group.trajectories, len(ended.failed)
        rows += [*trajectories, *(_FAILED,) * num_failed]
        kept += [*(trajectories if keeps_tokens else (None,) * len(trajectories)), *(None,) * num_failed]
        advantages += [
            *(_by_token(ended.group) if keeps_tokens else (None,) * len(trajectories)),
            *(None,) * num_failed,
        ]
    found = [
        *zip(_COPIED, zip(*map(attrgetter(*_COPIED), rows), strict=True), strict=False),
        *zip(
            _FOUND,
            zip(*(values for first, ended, _ in groups for values in _found(first, ended)), strict=True),
            strict=False,
        ),
    ]
    columns = {name: pa.array(values, schema().field(name).type) for name, values in found}
    columns["policy_versions"] = _version_spans(rows)
    turns = [None if row is None or turns_of is None else _turns(row, turns_of(row)) for row in kept]
    columns["turns"] = pa.array(turns, schema().field("turns").type)
    for name, dtype in TOKEN_COLUMNS.items():
        of_rows = advantages if name == "advantages" else [None if row is None else getattr(row, name) for row in kept]
        columns[name] = _token_lists(of_rows, dtype)
    return pa.table([columns[name] for name in schema().names], schema=schema())


_FOUND = (
    *(
        "row",
        "step",
        "uid",
        "epoch",
        "admission_index",
        "scheduled_version",
        "staleness",
        "sample",
        "branch",
        "outcome",
    ),
    *("reason", "seconds", "engines", "advantage", "num_prompt_tokens", "num_response_tokens", "metrics", "logs"),
)


def _found(first: int, ended: EndedGroup) -> Iterator[tuple[Any, ...]]:
    """The values of the columns ``_FOUND`` in each row of a group."""
    group, numbers = ended.group, itertools.count(first)
    drawn = (None, None) if ended.outcome is Outcome.HELD_OUT else (group.epoch, group.admission_index)
    staleness = ended.step - 1 - group.scheduled_version if ended.outcome is Outcome.TRAINED else None
    common = (ended.step, group.uid, *drawn, group.scheduled_version, staleness)
    num_branches: dict[int, int] = {}
    for position, row in enumerate(group.trajectories):
        sample = position if row.sample_index is None else row.sample_index
        branch = num_branches[sample] = num_branches.get(sample, -1) + 1
        lengths = len(row.prompt_token_ids), len(row.response_token_ids)
        advantage = _mean(group.advantages[position], row) if group.advantages else None
        metrics = json.dumps(row.metrics, default=str) if row.metrics else None
        logs = json.dumps(row.logs) if row.logs else None
        known = (*_outcome(ended, row), *_work_of(group, sample), advantage, *lengths, metrics, logs)
        yield next(numbers), *common, sample, branch, *known
    failure = (Outcome.FAILED, _utf8(f"{type(ended.failure).__name__}: {ended.failure}"))
    for sample in ended.failed:
        yield next(numbers), *common, sample, None, *failure, *_work_of(group, sample), *[None] * 5


def _work_of(group: Group, sample: int) -> tuple[float, Sequence[str] | None]:
    """Its own seconds and engines; the group's seconds where its own are not known."""
    work = group.work.get(sample)
    return (group.generation_seconds, None) if work is None else (work.seconds, work.engines or None)


def _outcome(ended: EndedGroup, row: Trajectory) -> tuple[Outcome, str | None]:
    failure = _utf8(row.logs["failure"] or "no reason given") if row.is_abandoned and "failure" in row.logs else None
    if ended.outcome is not Outcome.TRAINED:
        is_failure = failure is not None and ended.outcome in (Outcome.FAILED, Outcome.HELD_OUT)
        return (Outcome.FAILED, failure) if is_failure else (ended.outcome, ended.reason)
    if row.is_abandoned:
        return Outcome.ABANDONED, failure or "its harness ended without a reward"
    if row.is_overlong:
        return Outcome.MASKED, "a length limit cut it"
    if not row.num_sampled_tokens:
        return Outcome.MASKED, "all of its tokens are masked"
    return Outcome.TRAINED, ended.reason


def _mean(advantages: Advantages, row: Trajectory) -> float | None:
    """Mean over the trained tokens; None without any."""
    if not row.num_sampled_tokens:
        return None
    return float(advantages[0] if is_repeated(advantages) else advantages[row.loss_mask].mean(dtype=np.float64))


def _by_token(group: Group) -> list[Advantages | None]:
    """Columns of a group's rows; None where a row's tokens have one advantage."""
    rows = group.advantages or (None,) * len(group.trajectories)
    return [None if of_row is None or is_repeated(of_row) else of_row for of_row in rows]


def _turns(row: Trajectory, turns: Sequence[RowTurn]) -> list[dict[str, Any]]:
    num_prompt, rewards = len(row.prompt_token_ids), row.turn_rewards
    earned = {num_prompt + span.start: rewards[span.index] for span in row.turn_spans} if rewards else {}
    return [
        fields_of(turn)
        | {
            "reward": next((value for start, value in earned.items() if turn.start <= start < turn.end), None),
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


def _token_lists(columns: Sequence[np.ndarray[Any, Any] | None], dtype: np.dtype[Any]) -> "pa.Array":
    """A list of values per row, null where there is no column."""
    import pyarrow as pa

    found = [column for column in columns if column is not None]
    if not found:
        return pa.nulls(len(columns), pa.list_(pa.from_numpy_dtype(dtype)))
    # Arrow keeps its memory for later columns: to touch new memory first takes longer than to copy tokens there.
    values = np.frombuffer(pa.allocate_buffer(sum(map(len, found)) * dtype.itemsize), dtype)
    np.concatenate(found, out=values)
    if dtype == np.bool_:
        bits = pa.py_buffer(np.packbits(values, bitorder="little"))
        inner = pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])
    else:
        inner = pa.array(values)
    return _lists(columns, inner)


def _version_spans(rows: Sequence[Any]) -> "pa.Array":
    """The runs of versions as ``VersionSpans.to_json`` has them, null where a row has none."""
    import pyarrow as pa

    runs = [None if row.versions is None else row.versions.spans for row in rows]
    versions, ends = np.array([run for of_row in runs for run in of_row or ()], np.int32).reshape(-1, 2).T
    offsets = _offsets(runs)
    starts = np.roll(ends, 1)
    starts[offsets[:-1][np.diff(offsets) > 0]] = 0
    span = schema().field("policy_versions").type.value_type
    return _lists(runs, pa.StructArray.from_arrays([versions, starts, ends], fields=list(span)))


def _lists(rows: Sequence[Collection[Any] | None], values: "pa.Array") -> "pa.Array":
    """A list per row of ``values``, which has those of all rows one after the other; null for None."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(_offsets(rows), values, mask=pa.array([row is None for row in rows], pa.bool_()))


def _offsets(rows: Sequence[Collection[Any] | None]) -> np.ndarray[Any, Any]:
    return np.cumsum([0, *(0 if row is None else len(row) for row in rows)], dtype=np.int32)
