"""Versions per token and their runs on the wire."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.version_spans import spans_of, versions_of


@given(versions=st.lists(st.integers(-1, 2)).map(tuple))
def test_spans_come_back_as_the_versions_they_were_made_of(versions: tuple[int, ...]) -> None:
    spans = spans_of(versions)
    assert versions_of(spans, len(versions)) == versions
    assert all(one["version"] != other["version"] for one, other in pairwise(spans))


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
        versions_of(spans, 2)
