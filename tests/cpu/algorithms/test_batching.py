"""Planning, packing and padding of micro-batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.algorithms.batching import Row, collate, plan_micro_batches
from skyrl_async.columns import repeated
from skyrl_async.types import Trajectory

CPU = torch.device("cpu")


def row(prompt: tuple[int, ...], response: tuple[int, ...], mask: tuple[int, ...], advantage: float) -> Row:
    trajectory = Trajectory(
        prompt_token_ids=prompt,
        response_token_ids=response,
        loss_mask=mask,
        logprobs=tuple(-float(token) if is_sampled else 0.0 for token, is_sampled in zip(response, mask, strict=True)),
        versions=tuple(7 if is_sampled else -1 for is_sampled in mask),
        reward=0.0,
    )
    return Row(trajectory=trajectory, advantages=repeated(advantage, len(response)))


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    micro_batch_tokens=st.integers(1, 2000),
    overhead_tokens=st.integers(0, 500),
    num_ranks=st.integers(1, 5),
)
def test_every_row_is_in_one_micro_batch_and_none_is_too_large(
    lengths: list[int], micro_batch_tokens: int, overhead_tokens: int, num_ranks: int
) -> None:
    plan = plan_micro_batches(
        lengths,
        micro_batch_tokens=micro_batch_tokens,
        overhead_tokens=overhead_tokens,
        num_ranks=num_ranks,
        is_packed=False,
    )
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(index for rank in plan for batch in rank for index in batch) == list(range(len(lengths)))
    for batch in (batch for rank in plan for batch in rank if len(batch) > 1):
        assert len(batch) * max(lengths[index] for index in batch) <= micro_batch_tokens
    sizes = [sum(len(batch) for batch in rank) for rank in plan]
    assert max(sizes) - min(sizes) <= 1


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9), overhead_tokens=st.integers(0, 60))
def test_no_split_of_the_sorted_rows_is_cheaper_than_the_plan(lengths: list[int], overhead_tokens: int) -> None:
    (plan,) = plan_micro_batches(
        lengths, micro_batch_tokens=120, overhead_tokens=overhead_tokens, num_ranks=1, is_packed=False
    )
    found = sum(len(batch) * max(lengths[i] for i in batch) + overhead_tokens for batch in plan)
    longest_first = sorted(lengths, reverse=True)

    def cheapest(start: int) -> int:
        if start == len(lengths):
            return 0
        costs = []
        for size in range(1, len(lengths) - start + 1):
            num_padded = size * longest_first[start]
            if size == 1 or num_padded <= 120:
                costs.append(num_padded + overhead_tokens + cheapest(start + size))
        return min(costs)

    assert found == cheapest(0)


def test_a_high_overhead_keeps_rows_together_and_none_puts_each_length_apart() -> None:
    def plan(overhead_tokens: int) -> list[list[int]]:
        return plan_micro_batches(
            [10, 100, 10, 90], micro_batch_tokens=4096, overhead_tokens=overhead_tokens, num_ranks=1, is_packed=False
        )[0]

    assert plan(10_000) == [[1, 3, 0, 2]]
    assert plan(0) == [[1], [3], [0, 2]]


def test_a_row_longer_than_the_limit_goes_alone() -> None:
    assert plan_micro_batches(
        [500, 10], micro_batch_tokens=100, overhead_tokens=10_000, num_ranks=1, is_packed=False
    ) == [[[0], [1]]]


def test_padding_follows_the_rows_and_only_sampled_tokens_are_predicted() -> None:
    batch = collate([row((1, 2), (3, 4, 5), (1, 0, 1), 0.5), row((6, 7, 8), (9,), (1,), -2.0)], CPU, is_packed=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    assert batch.positions.tolist() == [1, 3, 7]
    assert batch.targets.tolist() == [3, 5, 9]
    assert batch.row_indices.tolist() == [0, 0, 1]
    assert batch.behavior_logprobs.tolist() == [-3.0, -5.0, -9.0]
    assert batch.advantages.tolist() == [0.5, 0.5, -2.0]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.ref_logprobs is None and batch.old_logprobs is None
    assert batch.versions.tolist() == [7, 7, 7]


def test_log_probs_under_other_models_are_those_of_sampled_tokens_and_given_for_all_rows_or_none() -> None:
    first, second = row((1, 2), (3, 4, 5), (1, 0, 1), 0.5), row((6, 7, 8), (9,), (1,), -2.0)
    full = replace(first, trajectory=replace(first.trajectory, ref_logprobs=(-1.0, 0.0, -2.0), weight=0.5))
    other = replace(second, trajectory=replace(second.trajectory, ref_logprobs=(-3.0,), old_logprobs=(-4.0,)))
    batch = collate([full, other], CPU, is_packed=False)
    assert batch.ref_logprobs is not None and batch.ref_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert batch.old_logprobs is None
    assert batch.weights.tolist() == [0.5, 0.5, 1.0]
    with pytest.raises(ValueError, match="trajectory.ref_logprobs has 1 entries for 3 response tokens"):
        replace(first.trajectory, ref_logprobs=(-1.0,))


def test_weights_of_tokens_multiply_that_of_their_row_and_rows_without_them_stay_as_they_are() -> None:
    weighed, plain = row((1, 2), (3, 4, 5), (1, 0, 1), 0.5), row((6, 7, 8), (9,), (1,), -2.0)
    weighed = replace(
        weighed, trajectory=replace(weighed.trajectory, token_weights=np.array([2, 9, 0], np.float32), weight=0.5)
    )
    plain = replace(plain, trajectory=replace(plain.trajectory, weight=1 / 3))
    batch = collate([weighed, plain], CPU)
    assert batch.weights.tolist() == [1.0, 0.0, np.float32(1 / 3)]
    assert batch.advantages.tolist() == [0.5, 0.0, np.float32(-2 / 3)]
    assert batch.returns.tolist() == [0.5, 0.5, -2.0]
    one = replace(plain, trajectory=replace(plain.trajectory, token_weights=np.ones(1, np.float32)))
    assert collate([one], CPU).advantages.tolist() == collate([plain], CPU).advantages.tolist()


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    micro_batch_tokens=st.integers(1, 2000),
    num_ranks=st.integers(1, 5),
)
def test_packed_micro_batches_hold_their_rows_tokens_and_two_of_a_rank_would_not_fit_into_one(
    lengths: list[int], micro_batch_tokens: int, num_ranks: int
) -> None:
    plan = plan_micro_batches(
        lengths, micro_batch_tokens=micro_batch_tokens, overhead_tokens=80, num_ranks=num_ranks, is_packed=True
    )
    assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1
    assert sorted(index for rank in plan for batch in rank for index in batch) == list(range(len(lengths)))
    for rank in plan:
        sums = [sum(lengths[index] for index in batch) for batch in rank if batch]
        assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= micro_batch_tokens for batch in rank)
        assert all(here + there > micro_batch_tokens for here, there in itertools.pairwise(sums))


@st.composite
def rows_of_tokens(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 12))
    tokens = st.integers(1, 99)
    return row(
        tuple(draw(st.lists(tokens, min_size=1, max_size=5))),
        tuple(draw(st.lists(tokens, min_size=length, max_size=length))),
        tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
        draw(st.sampled_from([-1.0, 0.5])),
    )


@given(rows=st.lists(rows_of_tokens(), min_size=1, max_size=6), is_packed=st.booleans())
def test_every_sampled_token_is_predicted_once_by_the_token_before_it_in_its_row(
    rows: list[Row], is_packed: bool
) -> None:
    batch = collate(rows, CPU, is_packed=is_packed)
    tokens = batch.input_ids.flatten().tolist()
    assert len(set(batch.positions.tolist())) == len(batch.positions)
    found = iter(
        zip(
            batch.row_indices.tolist(),
            batch.positions.tolist(),
            batch.targets.tolist(),
            batch.behavior_logprobs.tolist(),
            batch.advantages.tolist(),
            strict=True,
        )
    )
    for index, each in enumerate(rows):
        trajectory = each.trajectory
        ids = [*trajectory.prompt_token_ids.tolist(), *trajectory.response_token_ids.tolist()]
        start = sum(other.num_tokens for other in rows[:index]) if is_packed else index * batch.input_ids.shape[1]
        assert tokens[start : start + len(ids)] == ids
        for offset, (token, is_sampled) in enumerate(
            zip(trajectory.response_token_ids, trajectory.loss_mask, strict=True)
        ):
            if is_sampled:
                before = start + len(trajectory.prompt_token_ids) + offset - 1
                assert next(found) == (index, before, token, -float(token), each.advantages[offset])
    assert next(found, None) is None
    assert batch.row_lengths == (tuple(each.num_tokens for each in rows) if is_packed else None)
    assert not is_packed or batch.input_ids.shape == (1, sum(each.num_tokens for each in rows))


@pytest.mark.parametrize("is_packed", [False, True])
def test_no_rows_make_an_idle_forward_of_one_token(is_packed: bool) -> None:
    batch = collate([], CPU, is_packed=is_packed)
    assert batch.input_ids.tolist() == [[0]] and batch.row_lengths is None
    assert batch.positions.numel() == batch.targets.numel() == batch.advantages.numel() == 0


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids must hold at least one token"):
        collate([row((), (3,), (1,), 0.5)], CPU, is_packed=False)
