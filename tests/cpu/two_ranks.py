"""Two processes over gloo that each run one rank of a policy, for tests that compare them with one rank in the tests' own process.

One pair of processes does all that a test module wants of two ranks: to start them takes longer than that. Run as a module it is one
of the two.
"""

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from skyrl_async.algorithms.losses import merge_figures
from skyrl_async.training.backends import process_group
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import LogprobDispatch, split_work
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

NUM_RANKS = 2
DEADLINE_S = 280.0
T = TypeVar("T")
Scenario = Callable[[Callable[[TrainingSettings], "OneOfTwo"], Path], Awaitable[None]]
"""Takes what makes policies over both ranks, one after the other, and a directory to leave results in."""


class OneOfTwo:
    """``training.protocol.Policy`` as each of both ranks sees it: both make the same calls and get the same answers."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.index = dist.get_rank()
        self._settings = settings
        self.rank = PolicyRank(settings, rank=self.index, num_ranks=NUM_RANKS)
        self.rank.start()

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        works = split_work(trajectories, advantages, version, settings=self._settings, num_ranks=NUM_RANKS)
        return {"num_tokens": 0.0} | merge_figures(_of_both(self.rank.forward_backward(works[self.index])))

    async def step(self, num_tokens: float) -> dict[str, float]:
        return self.rank.step(num_tokens)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self.rank.logprobs(token_ids)

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        dispatch = LogprobDispatch.of(trajectories, model, settings=self._settings, num_ranks=NUM_RANKS)
        return dispatch.join(_of_both(self.rank.logprobs_of(dispatch.works[self.index])))

    async def gather_weights(self, version: int) -> int:
        return self.rank.gather_weights(version)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        is_first = self.index == 0
        update = _of_both(self.rank.send_weights(version, directory, bucket_bytes) if is_first else None)[0]
        assert update is not None
        return update

    async def save(self, directory: Path) -> None:
        self.rank.save(directory)

    async def load(self, directory: Path) -> None:
        self.rank.load(directory)

    async def export_hf(self, directory: Path) -> None:
        self.rank.export_hf(directory)

    async def close(self) -> None:
        self.rank.close()


def _of_both(mine: T) -> list[T]:
    answers: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(answers, mine)
    return answers


def run_two_ranks(scenario: Scenario, directory: Path) -> None:
    """Run a module's function in two processes at once; what they say is in the error where one fails."""
    command = [sys.executable, "-m", "tests.cpu.two_ranks", scenario.__module__, scenario.__name__, str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [directory / f"rank_{index}.log" for index in range(NUM_RANKS)]
    processes = []
    for index, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(subprocess.Popen([*command, str(index)], stdout=output, stderr=output, env=environment))
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * NUM_RANKS, "\n".join(log.read_text()[-3000:] for log in logs)


def _main(module: str, function: str, directory: str, index: str) -> None:
    process_group.join(
        rank=int(index),
        num_ranks=NUM_RANKS,
        store=dist.FileStore(f"{directory}/store", NUM_RANKS),
        device=torch.device("cpu"),
        timeout_s=DEADLINE_S,
    )
    scenario: Scenario = getattr(importlib.import_module(module), function)
    asyncio.run(scenario(OneOfTwo, Path(directory)))
    process_group.leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])
