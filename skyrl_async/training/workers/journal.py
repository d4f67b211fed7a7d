"""What the policy was asked since its last checkpoint, kept so that it can be asked again.

Flows in: the calls that change the policy, after they succeeded. Flows out: the same calls, in order. Pickled: some 20 bytes per
token, a fraction of what the objects take. Does no I/O, and knows neither workers nor checkpoints.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsCall:
    """One ``Policy.forward_backward``."""

    pickled: bytes

    def arguments(self) -> tuple[Sequence[Trajectory], Sequence[float], int]:
        """Equal to those of the call, floats to the last bit."""
        trajectories, advantages, version = pickle.loads(self.pickled)
        return trajectories, advantages, version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One ``Policy.step``."""

    denominator: float
    grad_norm: float
    """As it answered: doing it again must give the same."""


class CallJournal:
    """Grows by one entry per call; ``cut`` forgets what a checkpoint holds. Positions count from the first call ever.

    ``max_bytes`` is when it calls itself full; it goes on taking calls then, up to the next step.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._calls: list[GradientsCall | StepCall] = []
        self._num_forgotten = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """Calls held."""
        return len(self._calls)

    def __iter__(self) -> Iterator[GradientsCall | StepCall]:
        return iter(self._calls)

    @property
    def num_steps(self) -> int:
        """Optimizer steps held."""
        return sum(isinstance(call, StepCall) for call in self._calls)

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint should take its place."""
        return self.num_bytes > self._max_bytes

    @property
    def last_step(self) -> int:
        """Position after the last step held: a checkpoint holds everything before it, and no gradients after it."""
        after = (i for i in range(len(self._calls), 0, -1) if isinstance(self._calls[i - 1], StepCall))
        return self._num_forgotten + next(after, 0)

    def add_gradients(self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int) -> None:
        """Remember a ``forward_backward``."""
        pickled = pickle.dumps((tuple(trajectories), tuple(advantages), version), pickle.HIGHEST_PROTOCOL)
        self._calls.append(GradientsCall(pickled=pickled))
        self.num_bytes += len(pickled)

    def add_step(self, denominator: float, grad_norm: float) -> None:
        """Remember a ``step``."""
        self._calls.append(StepCall(denominator=denominator, grad_norm=grad_norm))

    def cut(self, position: int) -> None:
        """Forget what is before ``position``; nothing where that was forgotten already."""
        num_calls = max(0, position - self._num_forgotten)
        forgotten = islice(self._calls, num_calls)
        self.num_bytes -= sum(len(call.pickled) for call in forgotten if isinstance(call, GradientsCall))
        del self._calls[:num_calls]
        self._num_forgotten += num_calls

    def clear(self) -> None:
        """Forget everything."""
        self.cut(self._num_forgotten + len(self._calls))
