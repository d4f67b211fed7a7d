"""The calls to the policy since the last checkpoint, which a restart of its workers makes again.

Calls are kept pickled, after they succeeded: some 9 bytes per token, 4 more for advantages that differ within an answer and
for each kind of log-probs beside the engine's, and those of a teacher's likeliest tokens. Knows nothing of workers.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_async.columns import Advantages, is_repeated
from skyrl_async.training.protocol import Policy
from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One ``Policy.step``."""

    denominator: float
    lr_scale: float
    grad_norm: float
    """The answer. Repeating the step must give the same."""


class CallJournal:
    """The calls since the last checkpoint. Positions count from the first call ever.

    Args:
        max_bytes: above this ``is_full``. The journal still takes calls, up to the next step.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._calls: list[bytes | StepCall] = []
        """Steps, and pickled arguments of ``Policy.forward_backward``."""
        self._num_dropped = 0

    def __len__(self) -> int:
        """Number of calls held."""
        return len(self._calls)

    @property
    def num_bytes(self) -> int:
        """Size of the pickled calls."""
        return sum(len(call) for call in self._calls if isinstance(call, bytes))

    @property
    def num_steps(self) -> int:
        """Optimizer steps held."""
        return sum(isinstance(call, StepCall) for call in self._calls)

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint should replace the journal."""
        return self.num_bytes > self._max_bytes

    @property
    def last_step(self) -> int:
        """Position after the last step held. A checkpoint holds everything before it and no gradients after it."""
        after = (i for i in range(len(self._calls), 0, -1) if isinstance(self._calls[i - 1], StepCall))
        return self._num_dropped + next(after, 0)

    def add_gradients(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> None:
        """Append a ``forward_backward``."""
        # A pickle would hold a repeated number once per token.
        columns = tuple(
            float(of[0]) if isinstance(of, np.ndarray) and len(of) and is_repeated(of) else of for of in advantages
        )
        self._calls.append(pickle.dumps((tuple(trajectories), columns, version), pickle.HIGHEST_PROTOCOL))

    def add_step(self, denominator: float, lr_scale: float, grad_norm: float) -> None:
        """Append a ``step``."""
        self._calls.append(StepCall(denominator=denominator, lr_scale=lr_scale, grad_norm=grad_norm))

    async def replay(self, policy: Policy) -> float:
        """Make the calls again, with floats equal to the last bit; returns the largest relative difference of a step's gradient norm."""
        difference = 0.0
        for call in self._calls:
            if isinstance(call, bytes):
                await policy.forward_backward(*pickle.loads(call))
            else:
                grad_norm = (await policy.step(call.denominator, call.lr_scale))["grad_norm"]
                difference = max(difference, abs(grad_norm - call.grad_norm) / max(abs(call.grad_norm), 1e-12))
        return difference

    def cut(self, position: int) -> None:
        """Drop the calls before ``position``. Idempotent."""
        num_calls = max(0, position - self._num_dropped)
        del self._calls[:num_calls]
        self._num_dropped += num_calls

    def clear(self) -> None:
        """Drop all calls."""
        self.cut(self._num_dropped + len(self._calls))
