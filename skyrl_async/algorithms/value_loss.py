"""The loss of a critic: its values and what they are trained towards in, one loss per token and figures out."""

import torch
from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.losses import TokenLoss


def value_loss(values: Tensor, old_values: Tensor | None, returns: Tensor, value_clip: float | None) -> TokenLoss:
    """``max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2`` per token.

    The clipped form is that of OpenAI's PPO (Engstrom et al., arXiv 2005.12729, section 3), as in SkyRL and verl: a value that has moved
    by more than ``value_clip`` towards its return has no gradient.

    Args:
        values: (N,) float32, of the critic being trained, with gradient.
        old_values: (N,) float32, when the row was finished; None does not clip.
        returns: (N,) float32.
        value_clip: > 0, in units of the reward; None does not clip.
    """
    error = (values - returns).square()
    if value_clip is None or old_values is None:
        return TokenLoss(loss=error / 2, is_clipped=torch.zeros_like(values, dtype=torch.bool))
    moved = values - old_values
    kept = moved.clamp(-value_clip, value_clip)
    clipped = (old_values + kept - returns).square()
    # Inside the clip both errors are equal but for rounding.
    return TokenLoss(loss=torch.maximum(error, clipped) / 2, is_clipped=(kept != moved) & (clipped > error))


@torch.no_grad()
def value_figures(loss: TokenLoss, values: Tensor, batch: MicroBatch) -> dict[str, float]:
    """Sums over N >= 1 tokens, from which ``explained_variance`` and the means of a step are made.

    The residual is of the values from which advantages were computed, where the rows have them.
    """
    returns = batch.returns.double()
    residual = returns - (values if batch.old_values is None else batch.old_values).double()
    sums = {
        "loss_sum": loss.loss.double().sum(),
        "clipped_sum": loss.is_clipped.double().sum(),
        "values_sum": values.double().sum(),
        "returns_sum": returns.sum(),
        "returns_squares": returns.square().sum(),
        "residual_total": residual.sum(),
        "residual_squares": residual.square().sum(),
    }
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) | {"num_tokens": float(len(values))}
