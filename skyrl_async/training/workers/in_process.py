"""``Policy`` over one rank in this process, for tests and examples. Calls block the event loop while they compute."""

from collections.abc import Sequence
from typing import Any

from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import PolicyOverRanks
from skyrl_async.training.workers.rank import PolicyRank


class InProcessPolicy(PolicyOverRanks):
    """Implements ``training.protocol.Policy``; several may live in one process."""

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__(settings, num_ranks=1)
        self._rank = PolicyRank(settings)
        self._rank.start()
        self._is_closed = False

    async def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self._rank, method)(*own) for own in arguments]

    async def close(self) -> None:
        """Leave the process group. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._rank.close()
