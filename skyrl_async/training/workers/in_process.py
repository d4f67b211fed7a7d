"""``Policy`` over one rank in this process, for tests and examples. Calls block the event loop while they compute."""

from collections.abc import Sequence
from pathlib import Path

from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import LogprobDispatch, split_work
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate


class InProcessPolicy:
    """Implements ``training.protocol.Policy``; several may live in one process."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._rank = PolicyRank(settings)
        self._rank.start()
        self._is_closed = False

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """As ``Policy``."""
        (work,) = split_work(trajectories, advantages, version, settings=self._settings, num_ranks=1)
        return {"num_tokens": 0.0} | self._rank.forward_backward(work)

    async def step(self, denominator: float) -> dict[str, float]:
        """As ``Policy``."""
        return self._rank.step(denominator)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As ``Policy``."""
        return self._rank.logprobs(token_ids)

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """As ``Policy``."""
        dispatch = LogprobDispatch.of(trajectories, model, settings=self._settings, num_ranks=1)
        return dispatch.join([self._rank.logprobs_of(dispatch.works[0])])

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by a published version's, if the policy does not train."""
        self._rank.load_weights(update)

    async def gather_weights(self, version: int) -> int:
        """As ``Policy``."""
        return self._rank.gather_weights(version)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """As ``Policy``."""
        return self._rank.send_weights(version, directory, bucket_bytes)

    async def save(self, directory: Path) -> None:
        """As ``Policy``."""
        self._rank.save(directory)

    async def load(self, directory: Path) -> None:
        """As ``Policy``."""
        self._rank.load(directory)

    async def export_hf(self, directory: Path) -> None:
        """As ``Policy``."""
        self._rank.export_hf(directory)

    async def close(self) -> None:
        """Leave the process group. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._rank.close()
