"""Each off-policy correction against its formula in plain Python, with bounds on pi / mu and not on its inverse."""

import math
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skyrl_async.algorithms.corrections import (
    Rows,
    geometric_mask,
    m2_mask,
    opsm_mask,
    outlier_mask,
    product_mask,
    sequence_tis,
    token_mask,
    token_tis,
)

Sampled = list[list[tuple[float, float]]]
"""Rows of (log pi - log mu, advantage)."""

log_ratios = st.floats(-3, 3, width=32)
sampled_rows = st.lists(
    st.lists(st.tuples(log_ratios, st.floats(-2, 2, width=32)), min_size=1, max_size=8), min_size=1, max_size=5
)


def tensors(sampled: Sampled) -> tuple[Tensor, Tensor, Rows]:
    """Log-ratios, advantages and rows of all tokens."""
    tokens = torch.tensor([token for row in sampled for token in row], dtype=torch.float32)
    indices = torch.tensor([index for index, row in enumerate(sampled) for _ in row])
    return tokens[:, 0], tokens[:, 1], Rows(indices=indices, num_rows=len(sampled))


def per_row(sampled: Sampled, value: Callable[[list[float]], float]) -> list[float]:
    """What ``value`` says of the ratios of each row, once per token."""
    return [value([math.exp(ratio) for ratio, _ in row]) for row in sampled for _ in row]


def kept(mask: Tensor) -> list[bool]:
    return mask.tolist()


@given(sampled_rows)
def test_the_weight_of_a_token_is_the_smaller_of_its_ratio_and_the_cap(sampled: Sampled) -> None:
    ratio, _, _ = tensors(sampled)
    weights = token_tis(ratio, high=2.0)
    expected = [min(math.exp(r), 2.0) for row in sampled for r, _ in row]
    assert weights.values.tolist() == pytest.approx(expected, abs=1e-6)
    assert weights.is_cut.tolist() == [math.exp(r) > 2.0 for row in sampled for r, _ in row]


@given(sampled_rows)
def test_the_weight_of_a_sequence_is_the_smaller_of_the_product_of_its_ratios_and_the_cap(sampled: Sampled) -> None:
    ratio, _, rows = tensors(sampled)
    weights = sequence_tis(ratio, rows, high=5.0)
    assert weights.values.tolist() == pytest.approx(per_row(sampled, lambda r: min(math.prod(r), 5.0)), abs=1e-6)


@given(sampled_rows)
def test_each_mask_keeps_what_its_formula_says(sampled: Sampled) -> None:
    ratio, _, rows = tensors(sampled)
    tokens = [math.exp(r) for row in sampled for r, _ in row]
    assert kept(token_mask(ratio, low=0.5, high=5.0)) == [0.5 <= r <= 5.0 for r in tokens]
    products = per_row(sampled, math.prod)
    assert kept(product_mask(ratio, rows, low=0.5, high=2.0)) == [0.5 <= p <= 2.0 for p in products]
    means = per_row(sampled, lambda r: math.prod(r) ** (1 / len(r)))
    assert kept(geometric_mask(ratio, rows, low=0.7, high=1.3)) == [0.7 <= m <= 1.3 for m in means]
    smallest, largest = per_row(sampled, min), per_row(sampled, max)
    expected = [0.3 <= low and high <= 4.0 for low, high in zip(smallest, largest, strict=True)]
    assert kept(outlier_mask(ratio, rows, low=0.3, high=4.0)) == expected


@given(sampled_rows)
def test_opsm_leaves_out_tokens_of_negative_advantage_in_rows_that_the_policy_would_no_longer_say(
    sampled: Sampled,
) -> None:
    ratio, advantages, rows = tensors(sampled)
    distances = [fmean(-r for r, _ in row) for row in sampled for _ in row]
    expected = [
        not (advantage < 0 and distance > 0.1)
        for distance, (_, advantage) in zip(distances, (token for row in sampled for token in row), strict=True)
    ]
    assert kept(opsm_mask(ratio, advantages, rows, delta=0.1)) == expected


def algorithm_1_of_m2po(row: list[tuple[float, float]], threshold: float) -> list[bool]:
    """As printed in the paper, its batch being one row."""
    mask = [True] * len(row)
    trusted = {
        i for i, (ratio, advantage) in enumerate(row) if (ratio > 0 and advantage > 0) or (ratio < 0 > advantage)
    }
    while trusted and fmean(row[i][0] ** 2 for i in trusted) > threshold:
        largest = max(trusted, key=lambda i: (row[i][0] ** 2, i))
        mask[largest] = False
        trusted.remove(largest)
    return mask


@given(sampled_rows, st.sampled_from([0.0407, 0.503, 2.013]))  # that no sum of drawn squares is up to rounding
def test_m2po_masks_as_its_algorithm_does_in_each_row(sampled: Sampled, threshold: float) -> None:
    ratio, advantages, rows = tensors(sampled)
    expected = [keep for row in sampled for keep in algorithm_1_of_m2po(row, threshold)]
    assert kept(m2_mask(ratio, advantages, rows, threshold=threshold)) == expected


@given(sampled_rows)
def test_m2po_within_rows_holds_the_bound_of_the_paper_over_the_whole_batch(sampled: Sampled) -> None:
    ratio, advantages, rows = tensors(sampled)
    is_kept = m2_mask(ratio, advantages, rows, threshold=0.04) & (ratio * advantages > 0)
    if is_kept.any():
        assert ratio[is_kept].square().mean().item() <= 0.04 + 1e-6


def test_mis_and_icepop_are_a_weight_without_a_cap_and_a_mask() -> None:
    ratio = torch.tensor([0.2, 0.5, 1.0, 5.0, 6.0]).log()
    rows = Rows(indices=torch.tensor([0, 0, 0, 1, 1]), num_rows=2)
    icepop = token_tis(ratio, high=math.inf).values * token_mask(ratio, low=0.499, high=5.001)
    assert icepop.tolist() == pytest.approx([0.0, 0.5, 1.0, 5.0, 0.0], abs=1e-6)
    token_mis = token_tis(ratio, high=math.inf).values * token_mask(ratio, low=0.0, high=2.0)
    assert token_mis.tolist() == pytest.approx([0.2, 0.5, 1.0, 0.0, 0.0], abs=1e-6)
    sequence_mis = sequence_tis(ratio, rows, high=math.inf).values * product_mask(ratio, rows, low=0.0, high=2.0)
    assert sequence_mis.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.0, 0.0], abs=1e-6)


@given(sampled_rows)
def test_masks_with_infinite_bounds_change_nothing(sampled: Sampled) -> None:
    ratio, advantages, rows = tensors(sampled)
    masks = [mask(ratio, rows, low=0.0, high=math.inf) for mask in (product_mask, geometric_mask, outlier_mask)]
    masks += [
        token_mask(ratio, low=0.0, high=math.inf),
        opsm_mask(ratio, advantages, rows, delta=math.inf),
        m2_mask(ratio, advantages, rows, threshold=math.inf),
    ]
    assert all(mask.all() for mask in masks)


def test_bounds_are_on_the_policy_over_its_sampler_and_not_on_the_inverse() -> None:
    likelier, less_likely = torch.tensor([math.log(4.0)]), torch.tensor([math.log(0.25)])
    alone, penalised = Rows(indices=torch.tensor([0]), num_rows=1), torch.tensor([-1.0])
    for mask in (product_mask, geometric_mask, outlier_mask):
        assert kept(mask(likelier, alone, low=0.5, high=5.0)) == [True]
        assert kept(mask(less_likely, alone, low=0.5, high=5.0)) == [False]
        assert kept(mask(likelier, alone, low=0.2, high=2.0)) == [False]
    assert kept(token_mask(likelier, low=0.5, high=5.0)) == [True]
    assert kept(token_mask(less_likely, low=0.5, high=5.0)) == [False]
    assert kept(opsm_mask(less_likely, penalised, alone, delta=0.5)) == [False]
    assert kept(opsm_mask(likelier, penalised, alone, delta=0.5)) == [True]
    assert token_tis(less_likely, high=2.0).values.item() == pytest.approx(0.25, abs=1e-6)
    assert sequence_tis(likelier, alone, high=2.0).values.item() == 2.0


@pytest.mark.parametrize("behavior", [0.1, 0.3, 0.37])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.9, 1.1), (0.99, 1.01), (0.3, 3.0)])
def test_bounds_belong_to_what_is_kept(low: float, high: float, behavior: float) -> None:
    at_bounds = torch.tensor([behavior * low, behavior * high]).log() - torch.tensor(behavior).log()
    beyond = at_bounds + torch.tensor([-1e-4, 1e-4])
    alone = Rows(indices=torch.tensor([0, 1]), num_rows=2)
    assert kept(token_mask(at_bounds, low=low, high=high)) == [True, True]
    assert kept(token_mask(beyond, low=low, high=high)) == [False, False]
    for mask in (product_mask, geometric_mask, outlier_mask):
        assert kept(mask(at_bounds, alone, low=low, high=high)) == [True, True]
        assert kept(mask(beyond, alone, low=low, high=high)) == [False, False]
    less_likely, penalised = at_bounds[:1], torch.tensor([-1.0])
    first = Rows(indices=torch.tensor([0]), num_rows=1)
    assert kept(opsm_mask(less_likely, penalised, first, delta=-math.log(low))) == [True]
    assert kept(m2_mask(less_likely, penalised, first, threshold=math.log(low) ** 2)) == [True]


@pytest.mark.parametrize("wild", [math.inf, -math.inf, math.nan, 300.0])
def test_a_row_without_a_finite_ratio_changes_nothing_in_the_others(wild: float) -> None:
    healthy = torch.tensor([0.1, 0.1, 0.9, -0.1])
    ratio, advantages = torch.cat([torch.tensor([wild]), healthy]), torch.tensor([wild, 1.0, 1.0, 1.0, -1.0])
    alone, rows = (Rows(indices=torch.tensor(of), num_rows=max(of) + 1) for of in ([0, 0, 0, 1], [0, 1, 1, 1, 2]))
    bounds = {"low": 0.5, "high": 2.0}
    for mask in (product_mask, geometric_mask, outlier_mask):
        assert kept(mask(ratio, rows, **bounds))[1:] == kept(mask(healthy, alone, **bounds))
    assert kept(token_mask(ratio, **bounds))[1:] == kept(token_mask(healthy, **bounds))
    found = sequence_tis(ratio, rows, high=5.0).values[1:]
    assert torch.equal(found, sequence_tis(healthy, alone, high=5.0).values)
    for of_tokens in (advantages, advantages.nan_to_num(-1.0)):
        assert kept(m2_mask(ratio, of_tokens, rows, threshold=0.04))[1:] == [True, True, False, True]
        found = kept(opsm_mask(ratio, of_tokens, rows, delta=0.05))[1:]
        assert found == kept(opsm_mask(healthy, of_tokens[1:], alone, delta=0.05))


def test_a_wild_ratio_has_a_finite_weight_and_no_tokens_are_no_trouble() -> None:
    wild = torch.tensor([300.0, -300.0])
    weights = token_tis(wild, high=math.inf).values
    assert weights.isfinite().all() and weights[1] < 1e-100
    none, rows = torch.empty(0), Rows(indices=torch.empty(0, dtype=torch.int64), num_rows=1)
    assert sequence_tis(none, rows, high=2.0).values.numel() == 0
    assert (
        geometric_mask(none, rows, low=0.5, high=2.0).numel() == m2_mask(none, none, rows, threshold=1.0).numel() == 0
    )


def test_a_log_prob_that_is_no_number_gives_weights_that_are_none() -> None:
    weights = token_tis(torch.tensor([math.nan, 0.0]), high=2.0).values
    assert weights.isnan().tolist() == [True, False]
