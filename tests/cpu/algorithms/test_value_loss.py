"""The loss of a critic by hand, with and without clipping, and how much of the returns it explains, against numpy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_async.algorithms.batching import Row, collate
from skyrl_async.algorithms.figures import explained_variance, merge_figures
from skyrl_async.algorithms.value_loss import value_figures, value_loss
from skyrl_async.training.workers.dispatch import RankWork
from skyrl_async.training.workers.rank_losses import CriticLoss
from skyrl_async.types import Trajectory

CPU = torch.device("cpu")


def loss_of(value: float, old: float | None, towards: float, clip: float | None) -> tuple[float, float, bool]:
    """Of one token: its loss, its gradient, and whether it is clipped."""
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_values = None if old is None else torch.tensor([old], dtype=torch.float64)
    found = value_loss(values, old_values, torch.tensor([towards], dtype=torch.float64), clip)
    found.loss.sum().backward()
    assert values.grad is not None
    return found.loss.item(), values.grad.item(), found.is_clipped.item()


def row(returns: Sequence[float], values: Sequence[float] | None, weight: float = 1.0) -> Row:
    """Of sampled tokens alone."""
    length = len(returns)
    trajectory = Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * length,
        loss_mask=(1,) * length,
        logprobs=(-1.0,) * length,
        versions=(0,) * length,
        values=values,
        weight=weight,
        reward=0.0,
    )
    return Row(trajectory=trajectory, advantages=np.array(returns, np.float32))


@pytest.mark.parametrize(("old", "clip"), [(None, None), (1.0, None), (None, 0.5)])
def test_without_clipping_it_is_half_the_squared_error(old: float | None, clip: float | None) -> None:
    assert loss_of(2.0, old, 3.0, clip) == (0.5, -1.0, False)
    assert loss_of(2.0, old, -1.0, clip) == (4.5, 3.0, False)


@pytest.mark.parametrize(
    ("value", "towards", "expected"),
    [
        pytest.param(1.25, 2.0, (0.75**2 / 2, -0.75, False), id="inside"),
        pytest.param(0.75, 2.0, (1.25**2 / 2, -1.25, False), id="inside, away from the return"),
        pytest.param(2.0, 3.0, (1.5**2 / 2, 0.0, True), id="above, towards the return: no gradient"),
        pytest.param(0.0, -1.0, (1.5**2 / 2, 0.0, True), id="below, towards the return: no gradient"),
        pytest.param(0.0, 3.0, (3.0**2 / 2, -3.0, False), id="below, away from the return"),
        pytest.param(4.0, 1.25, (2.75**2 / 2, 2.75, False), id="above, past the return"),
    ],
)
def test_a_value_that_moved_further_than_the_clip_towards_its_return_has_no_gradient(
    value: float, towards: float, expected: tuple[float, float, bool]
) -> None:
    assert loss_of(value, 1.0, towards, 0.5) == expected


def test_rounding_clips_no_value_that_stayed_inside() -> None:
    values, returns = torch.linspace(-0.1, 0.1, 1001), torch.full((1001,), 3.0)
    assert not value_loss(values, torch.full_like(values, 0.15), returns, 0.5).is_clipped.any()


def test_a_row_counts_by_its_weight_in_the_gradient_and_as_one_in_the_figures() -> None:
    batch = collate([row([3.0, 0.0], [1.0, 1.0], weight=0.25), row([2.0], [1.5], weight=2.0)], CPU)
    values = torch.tensor([2.0, 1.0, 1.0], requires_grad=True)

    def as_given(*_: Any, **__: Any) -> Tensor:
        return values

    loss = CriticLoss(as_given, 0.75)(batch, RankWork)  # type: ignore[arg-type]
    loss.total.backward()
    assert values.grad is not None
    assert loss.total.item() == 0.25 * (1.25**2 + 1.0**2) / 2 + 2.0 * 1.0**2 / 2
    assert values.grad.tolist() == [0.0, 0.25 * 1.0, 2.0 * -1.0]
    figures = loss.figures()
    assert figures["loss_sum"] == (1.25**2 + 1.0**2 + 1.0**2) / 2
    assert (figures["clipped_sum"], figures["num_tokens"]) == (1.0, 3.0)
    assert (figures["values_sum"], figures["returns_sum"]) == (4.0, 5.0)


def explained(returns: np.ndarray, values: np.ndarray, *, has_old_values: bool = True) -> float:
    """From the figures of two micro-batches; the critic has moved on where rows have their old values."""
    sums: dict[str, Any] = {}
    for part in (slice(0, 3), slice(3, None)):
        batch = collate([row(returns[part].tolist(), values[part].tolist() if has_old_values else None)], CPU)
        now = torch.from_numpy(-values[part] if has_old_values else values[part])
        sums = merge_figures([sums, value_figures(value_loss(now, None, batch.returns, None), now, batch)])
    return explained_variance(sums)


@pytest.mark.parametrize("has_old_values", [True, False])
def test_the_explained_variance_is_one_of_a_perfect_critic_none_of_a_constant_one_and_numpys_of_a_wrong_one(
    has_old_values: bool,
) -> None:
    random = np.random.default_rng(0)
    returns, wrong = random.normal(2.0, 1.5, 8).astype(np.float32), random.normal(0.0, 3.0, 8).astype(np.float32)

    def of(values: np.ndarray) -> float:
        return explained(returns, values, has_old_values=has_old_values)

    assert of(returns) == pytest.approx(1.0)
    assert of(returns + np.float32(0.5)) == pytest.approx(1.0, abs=1e-6), "variance forgives what all values are off by"
    assert of(np.full(8, 0.25, np.float32)) == pytest.approx(0.0, abs=1e-9)
    exact = returns.astype(np.float64)
    assert of(wrong) == pytest.approx(1.0 - np.var(exact - wrong) / np.var(exact)) and of(wrong) < 0


@pytest.mark.parametrize("spread", [0.0, 1e-5])
def test_returns_that_do_not_vary_leave_nothing_to_explain(spread: float) -> None:
    returns = np.linspace(2.0 - spread, 2.0 + spread, 8, dtype=np.float32)
    assert explained(returns, np.arange(8, dtype=np.float32)) == 0.0
