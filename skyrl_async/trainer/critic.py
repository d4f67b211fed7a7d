"""Trains a critic beside the policy: on the same groups, in the same optimizer steps.

Does not know how returns are computed.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_async.algorithms.figures import explained_variance, merge_figures
from skyrl_async.metrics.step import StepFigures
from skyrl_async.training.protocol import CRITIC_COLUMNS, WAIT_SECONDS, Critic
from skyrl_async.types import Group

LeaseCritic = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(kw_only=True, eq=False)
class CriticTraining:
    """One critic, and what its current step has come to."""

    critic: Critic
    warmup_steps: int = 0
    """First optimizer steps in which it alone is trained."""
    lease: LeaseCritic = nullcontext
    """Holds its devices while it computes; no wait where it has them for itself, or the training stage holds them."""
    _sums: dict[str, Any] = field(default_factory=dict, init=False)
    _num_tokens: int = field(default=0, init=False)

    async def add_gradients(self, group: Group, figures: StepFigures) -> None:
        """Train on the tokens of a group that have returns, each with the same weight.

        Args:
            group: as it is trained: with ``returns``, without the tokens that the staleness policy masks.
            figures: of the step.
        """
        rows = [
            replace(row.with_only(*CRITIC_COLUMNS), loss_mask=row.loss_mask & ~np.isnan(returns), weight=1.0)
            for row, returns in zip(group.trajectories, group.returns, strict=True)
        ]
        self._num_tokens += sum(row.num_sampled_tokens for row in rows)
        async with self.lease():
            sums = await self.critic.forward_backward(rows, group.returns, figures.current_version)
        sums.pop(WAIT_SECONDS, None)
        self._sums = merge_figures([self._sums, sums])

    async def step(self, figures: StepFigures) -> None:
        """Take the critic's optimizer step, and add its figures to the step's. A step without a token changes nothing."""
        num, sums = self._num_tokens, self._sums
        self._num_tokens, self._sums = 0, {}
        async with self.lease():
            taken = await self.critic.step(float(max(num, 1)), 1.0 if num else 0.0)
        figures.critic = {"critic/grad_norm": taken["grad_norm"], "critic/lr": taken["lr"]}
        if num:
            figures.critic |= {
                "critic/loss": sums["loss_sum"] / num,
                "critic/clip_frac": sums["clipped_sum"] / num,
                "critic/values_mean": sums["values_sum"] / num,
                "critic/returns_mean": sums["returns_sum"] / num,
                "critic/explained_variance": explained_variance(sums),
            }
