"""Figures of tokens that workers report: how those of several become one, and what follows from a critic's. Without torch."""

from operator import add


def merge_figures(parts: list[dict[str, float]]) -> dict[str, float]:
    """Join figures of disjoint sets of tokens: keys in ``_max`` take the maximum, all others are added."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            join = max if key.endswith("_max") else add
            merged[key] = join(merged[key], value) if key in merged else value
    return merged


def explained_variance(sums: dict[str, float]) -> float:
    """``1 - Var(R - V) / Var(R)`` over the tokens of ``value_figures``: 1 of a perfect critic, 0 of a constant one.

    As OpenAI's Baselines report it. Above 0 the critic lessens the variance of advantages (EVPO, arXiv 2604.19485). 0 where R varies by
    less than 1e-4: V-trace leaves as much of returns that are all the same.
    """
    num = sums["num_tokens"]

    def variance(total: float, squares: float) -> float:
        return squares / num - (total / num) ** 2

    of_returns = variance(sums["returns_sum"], sums["returns_squares"])
    if of_returns <= 1e-8:
        return 0.0
    return 1.0 - variance(sums["residual_total"], sums["residual_squares"]) / of_returns
