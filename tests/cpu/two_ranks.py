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

from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import PolicyOverRanks
from skyrl_async.training.workers.rank import PolicyRank

NUM_RANKS = 2
DEADLINE_S = 280.0
T = TypeVar("T")
Scenario = Callable[[Callable[[TrainingSettings], "OneOfTwo"], Path], Awaitable[None]]
"""Takes what makes policies over both ranks, one after the other, and a directory to leave results in."""


class OneOfTwo(PolicyOverRanks):
    """``training.protocol.Policy`` as each of both ranks sees it: both make the same calls and get the same answers."""

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__(settings, num_ranks=NUM_RANKS)
        self.index = dist.get_rank()
        self.rank = PolicyRank(settings, rank=self.index, num_ranks=NUM_RANKS)
        self.rank.start()

    async def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        is_called = self.index < len(arguments)
        mine = getattr(self.rank, method)(*arguments[self.index]) if is_called else None
        return _of_both(mine)[: len(arguments)]

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
    rank_process.join(
        rank=int(index),
        num_ranks=NUM_RANKS,
        store=dist.FileStore(f"{directory}/store", NUM_RANKS),
        device=torch.device("cpu"),
        timeout_s=DEADLINE_S,
    )
    scenario: Scenario = getattr(importlib.import_module(module), function)
    asyncio.run(scenario(OneOfTwo, Path(directory)))
    rank_process.leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])
