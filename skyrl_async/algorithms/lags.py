"""Figures per token lag: lags and what each token adds, in; sums, out."""

import torch
from torch import Tensor


def sums_by_lag(token_lags: Tensor, *values: Tensor) -> list[list[float]]:
    """For each lag up to the largest, the sums of ``values`` over its tokens, added in their order: CUDA's bincount has none.

    Args:
        token_lags: (N,) int64, >= 0, N >= 1: version being trained minus version sampled under.
        values: (N,) float64 each.
    """
    lags = token_lags.cpu()
    sums: list[list[float]] = torch.stack([torch.bincount(lags, weights=of.cpu()) for of in values]).T.tolist()
    return sums
