"""A policy small enough to be enumerated: two tokens out of three, the second given the first. Means under it are exact."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

VOCABULARY = range(3)
Outcome = tuple[int, int]
OUTCOMES: tuple[Outcome, ...] = tuple(product(VOCABULARY, repeat=2))  # type: ignore[assignment]
REWARDS = {
    outcome: value for outcome, value in zip(OUTCOMES, [0.3, -1.0, 0.0, 2.0, 0.5, -0.2, 1.0, 0.0, 0.7], strict=True)
}
IS_RIGHT = {outcome: float(outcome in {(0, 1), (2, 2), (1, 0)}) for outcome in OUTCOMES}


def logits_of(seed: int) -> Tensor:
    """(4, 3) float64: of the first token, and of the second after each first one."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logprobs(logits: Tensor, outcome: Outcome) -> Tensor:
    """(2,) nats, of each token given those before it."""
    first, second = outcome
    logs = logits.log_softmax(-1)
    return torch.stack([logs[0, first], logs[1 + first, second]])


def probability(logits: Tensor, outcome: Outcome) -> Tensor:
    return token_logprobs(logits, outcome).sum().exp()


def expected(logits: Tensor, values: dict[Outcome, float]) -> Tensor:
    """The mean of ``values`` under the policy, with its gradient."""
    return torch.stack([probability(logits, outcome) * values[outcome] for outcome in OUTCOMES]).sum()


def policy_gradient(logits: Tensor, values: dict[Outcome, float]) -> Tensor:
    """(4, 3): of the mean of ``values``, by the chain rule through the probabilities; no score is taken."""
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected(leaf, values), leaf)
    return gradient


def groups_of(size: int, logits: Tensor) -> Iterator[tuple[float, tuple[Outcome, ...]]]:
    """Every group of ``size`` independent samples, with its probability."""
    chances = {outcome: probability(logits, outcome).item() for outcome in OUTCOMES}
    for group in product(OUTCOMES, repeat=size):
        chance = 1.0
        for outcome in group:
            chance *= chances[outcome]
        yield chance, group


def scores(logits: Tensor) -> dict[Outcome, Tensor]:
    """(4, 3) each: the gradient of an outcome's log-probability."""
    leaf = logits.clone().requires_grad_()
    return {outcome: torch.autograd.grad(token_logprobs(leaf, outcome).sum(), leaf)[0] for outcome in OUTCOMES}


def mean_of_estimator(
    logits: Tensor, size: int, advantages: Callable[[tuple[Outcome, ...]], Sequence[float]]
) -> Tensor:
    """(4, 3): what a group's advantages times scores, divided by its size, are in the mean."""
    of = scores(logits)
    total = torch.zeros_like(logits)
    for chance, group in groups_of(size, logits):
        for outcome, advantage in zip(group, advantages(group), strict=True):
            total += chance * advantage / size * of[outcome]
    return total
