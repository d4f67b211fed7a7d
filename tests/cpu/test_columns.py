"""Columns with one value per token, and policy versions as runs: per token, joined, cut and on the wire."""

import pickle
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import (
    Mask,
    TokenIds,
    TopTokens,
    VersionSpans,
    begins_with,
    column,
    have_equal_fields,
    token_ids,
)
from skyrl_async.types import OPTIONAL_COLUMNS, CompletionDelta, FinishReason, RowMessage, Trajectory, TurnSpan

VERSIONS = st.lists(st.integers(-1, 2), max_size=12)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ((), np.int32, []),
        ((5, 6), np.int32, [5, 6]),
        (range(3), np.int32, [0, 1, 2]),
        (np.array([5, 6], np.int64), np.int32, [5, 6]),
        ([], np.float32, []),
        (np.array([]), np.int32, []),
        ([-1, 0.5], np.float32, [-1.0, 0.5]),
        ((1, 0), np.bool_, [True, False]),
        ([True, False], np.bool_, [True, False]),
    ],
)
def test_a_column_has_its_dtype_and_the_values_that_it_is_made_from(
    values: Any, dtype: type[np.generic], expected: list[Any]
) -> None:
    made = column(values, dtype)
    assert made.dtype == dtype and made.tolist() == expected
    with pytest.raises(ValueError, match="read-only"):
        made[:] = 0


def test_an_array_of_the_right_dtype_is_not_copied_and_stays_writable_for_its_owner() -> None:
    owned = np.array([1, 2, 3], np.int32)
    made = token_ids(owned)
    assert np.shares_memory(made, owned) and owned.flags.writeable
    assert token_ids(made) is made


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((0.5,), np.int32),
        (("1",), np.int32),
        ((None,), np.int32),
        (((1, 2),), np.int32),
        ((0.5,), np.bool_),
        (("1",), np.float32),
    ],
)
def test_values_of_another_kind_are_refused_by_the_columns_name(values: Any, dtype: type[np.generic]) -> None:
    with pytest.raises(ValueError, match=f"^row.ids must be a sequence of {np.dtype(dtype).name}, got "):
        column(values, dtype, "row.ids")


@given(whole=st.lists(st.integers(0, 1), max_size=5), begin=st.lists(st.integers(0, 1), max_size=5))
def test_a_column_begins_with_the_first_of_its_values(whole: list[int], begin: list[int]) -> None:
    assert begins_with(token_ids(whole), token_ids(begin)) == (whole[: len(begin)] == begin)


@dataclass(eq=False)
class Row:
    ids: TokenIds
    mask: Mask | None
    name: str = ""

    __eq__ = have_equal_fields


def test_dataclasses_are_equal_where_their_columns_and_other_fields_are() -> None:
    def row(ids: tuple[int, ...] = (1, 2), mask: tuple[int, ...] | None = (1, 0), name: str = "") -> Row:
        return Row(token_ids(ids), None if mask is None else column(mask, np.bool_), name)

    assert row() == row() and row(mask=None) == row(mask=None)
    others = (row(ids=(1, 3)), row(ids=(1,)), row(mask=(1, 1)), row(mask=None), row(name="other"), None, 7)
    assert not any(row() == other or other == row() for other in others)


@given(versions=VERSIONS)
def test_versions_become_runs_and_come_back_per_token(versions: list[int]) -> None:
    spans = VersionSpans.of(versions)
    dense = np.asarray(spans)
    assert dense.dtype == np.int32 and dense.tolist() == list(spans) == versions
    assert len(spans) == len(versions) and spans.distinct == set(versions)
    assert all(one != other for (one, _), (other, _) in pairwise(spans.spans))
    assert VersionSpans.of(dense) == VersionSpans.of(spans) == pickle.loads(pickle.dumps(spans)) == spans


@given(parts=st.lists(VERSIONS, max_size=4))
def test_runs_are_joined_as_their_versions_are(parts: list[list[int]]) -> None:
    joined = VersionSpans.joined(VersionSpans.of(part) for part in parts)
    assert joined == VersionSpans.of([version for part in parts for version in part])


@given(versions=VERSIONS, start=st.none() | st.integers(-15, 15), stop=st.none() | st.integers(-15, 15))
def test_runs_are_cut_as_their_versions_are(versions: list[int], start: int | None, stop: int | None) -> None:
    assert VersionSpans.of(versions)[start:stop] == VersionSpans.of(versions[start:stop])


@given(version=st.integers(-1, 2), num_tokens=st.integers(0, 5))
def test_a_constant_version_is_that_of_every_token(version: int, num_tokens: int) -> None:
    assert VersionSpans.constant(version, num_tokens) == VersionSpans.of([version] * num_tokens)


def test_versions_that_are_no_integers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^row\.versions must be a sequence of int32, got float64"):
        VersionSpans.of([0.5], "row.versions")  # type: ignore[list-item]


@given(versions=VERSIONS)
def test_spans_come_back_as_the_versions_they_were_made_of(versions: list[int]) -> None:
    spans = VersionSpans.of(versions).to_json()
    assert tuple(VersionSpans.from_json(spans, len(versions))) == tuple(versions)
    assert all(one["version"] != other["version"] for one, other in pairwise(spans))
    assert all(type(value) is int for span in spans for value in span.values()), "as JSON wants them"


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([{"version": 1, "start": 0, "end": 0}], "adjoining spans from 0"),
        ([{"version": 1, "start": 1, "end": 2}], "adjoining spans from 0"),
        ([{"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 0, "end": 2}], "adjoining spans from 0"),
        ([{"version": "1", "start": 0, "end": 2}], "adjoining spans from 0"),
        ([{"version": 1, "end": 2}], "adjoining spans from 0"),
        (["0-2"], "adjoining spans from 0"),
        ([{"version": 1, "start": 0, "end": 1}], "cover 1 of 2 tokens"),
    ],
)
def test_spans_that_do_not_tile_the_tokens_are_refused(spans: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"policy_versions .*{complaint}"):
        VersionSpans.from_json(spans, 2)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_engines_output_crosses_processes_as_it_is(num_tokens: int) -> None:
    output = CompletionDelta(
        token_ids=range(num_tokens),
        logprobs=[-0.25] * num_tokens,
        versions=VersionSpans.constant(4, num_tokens),
        finish_reason=FinishReason.STOP,
        text="so",
    )
    crossed = pickle.loads(pickle.dumps(output))
    assert type(crossed) is CompletionDelta and crossed == output
    assert crossed.token_ids.dtype == np.int32 and not crossed.logprobs.flags.writeable


def test_a_row_goes_to_a_model_with_the_columns_that_are_named_and_without_turns_and_texts() -> None:
    top = TopTokens(ids=np.zeros((2, 1), np.int32), logprobs=np.zeros((2, 2), np.float32))
    columns: dict[str, Any] = {name: np.ones(2, np.float32) for name in OPTIONAL_COLUMNS} | {
        "teacher_top": top,
        "marks": np.ones(2, bool),
    }
    whole = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2, 3),
        loss_mask=(1, 1),
        logprobs=(-1.0, -2.0),
        versions=(0, 0),
        reward=2.0,
        turn_rewards=(2.0,),
        turn_spans=(TurnSpan(index=0, start=0, end=2),),
        weight=0.5,
        logs={"failure": "none"},
        metrics={"steps": 1.0},
        messages=(RowMessage(role="user", start=0),),
        **columns,
    )
    sent = whole.with_only("values")
    assert {name for name in OPTIONAL_COLUMNS if getattr(sent, name) is not None} == {"values"}
    assert (sent.turn_rewards, sent.turn_spans, sent.logs, sent.metrics, sent.messages) == ((), (), {}, {}, ())
    assert (sent.weight, sent.reward, sent.response_token_ids.tolist()) == (0.5, 2.0, [2, 3])
