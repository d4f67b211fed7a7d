"""What a rank minimises over a micro-batch, and what it reports of it: of a policy, or of a critic."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.losses import token_figures
from skyrl_async.algorithms.objective import MicroBatchLoss, Objective
from skyrl_async.algorithms.off_policy import sample_size_figures
from skyrl_async.algorithms.value_loss import value_figures, value_loss
from skyrl_async.errors import TrainingError
from skyrl_async.training.backends.assembly import Reference
from skyrl_async.training.backends.token_logprobs import Entropies, TokenLogprobs, batch_logprobs
from skyrl_async.training.backends.token_values import TokenValues
from skyrl_async.training.workers.dispatch import RankWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of one micro-batch of N sampled tokens."""

    total: Tensor
    """() float32, to be minimised: a sum over tokens."""
    outputs: Tensor
    """(N,) float32 without gradient: the policy's log-probs in nats, or the critic's values."""
    figures: Callable[[], dict[str, float]]
    """Sums over the tokens, and maxima (keys end in ``_max``); N >= 1."""


class RankLoss(Protocol):
    """Runs a model over a micro-batch."""

    def __call__(self, batch: MicroBatch, work: RankWork) -> Loss:
        """Return its loss, with gradients where they are enabled."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The objective of a policy, with log-probs of its reference where rows came without."""

    token_logprobs: TokenLogprobs
    objective: Objective
    temperature: float
    reference: Reference | None

    def __call__(self, batch: MicroBatch, work: RankWork) -> Loss:
        """As ``RankLoss``."""
        ref_logprobs = batch.ref_logprobs
        if work.runs_reference:
            with opened(self.reference) as reference:
                ref_logprobs = batch_logprobs(reference, batch, temperature=self.temperature)
        objective, top = self.objective, batch.teacher_top_ids
        scores = self.token_logprobs.scores(
            batch.input_ids,
            batch.positions,
            batch.targets,
            temperature=self.temperature,
            entropies=Entropies.GRADIENTS if objective.entropy_coef else Entropies.VALUES,
            row_lengths=batch.row_lengths,
            top=top if top is not None and objective.teacher_coef else 0,
        )
        loss = objective(scores.logprobs, batch, ref_logprobs, scores.entropies, scores.top_logprobs)
        found = scores.logprobs.detach()
        figures = partial(_policy_figures, loss, found, scores.entropies.detach(), batch, work.version)
        return Loss(total=loss.total, outputs=found, figures=figures)


def _policy_figures(
    loss: MicroBatchLoss, logprobs: Tensor, entropies: Tensor, batch: MicroBatch, version: int
) -> dict[str, float]:
    lags = (version - batch.versions).clamp(min=0)  # (N,) versions between sampling and training
    figures = token_figures(loss.tokens, logprobs, batch.behavior_logprobs, lags)
    figures |= sample_size_figures(logprobs, batch, lags)
    if loss.corrected is not None:
        figures |= loss.corrected.figures(lags)
    return figures | {"entropy_sum": entropies.double().sum().item()} | loss.figures()


@dataclass(frozen=True, slots=True)
class CriticLoss:
    """The error of a critic's values, each row by its weight."""

    token_values: TokenValues
    value_clip: float | None

    def __call__(self, batch: MicroBatch, work: RankWork) -> Loss:
        """As ``RankLoss``."""
        values = self.token_values(batch.input_ids, batch.positions, row_lengths=batch.row_lengths)
        loss = value_loss(values, batch.old_values, batch.returns, self.value_clip)
        found = values.detach()
        total = (loss.loss * batch.weights).sum()
        return Loss(total=total, outputs=found, figures=partial(value_figures, loss, found, batch))


def opened(reference: Reference | None) -> contextlib.AbstractContextManager[TokenLogprobs]:
    """Open a reference. Raises ``TrainingError`` where there is none."""
    if reference is None:
        raise TrainingError("these workers hold no reference model; give them one, or ask workers that have it")
    return reference()
