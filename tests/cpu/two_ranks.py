"""Two processes over gloo that each run one rank of a policy, for tests that compare them with one rank in the tests' own process.

One pair of processes serves all test modules of a session, one scenario after another: to start them takes longer than most scenarios.
Run as a module it is one of the two.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import PolicyOverRanks
from skyrl_async.training.workers.rank import PolicyRank
from tests.cpu.forked_workers import forking_executable

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


class RankPair:
    """Both processes. They are started by the first scenario, and again by the next one after a scenario that failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, scenario: Scenario, directory: Path) -> None:
        """Run a module's function in both processes at once; what they say is in the error where one fails."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([scenario.__module__, scenario.__name__, str(directory)]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if answers != ["done\n"] * NUM_RANKS:
            self.close()
            logs = (self._directory / f"rank_{index}.log" for index in range(NUM_RANKS))
            pytest.fail("\n".join(log.read_text()[-3000:] for log in logs))

    def _start(self) -> None:
        (self._directory / "store").unlink(missing_ok=True)
        for index in range(NUM_RANKS):
            with (self._directory / f"rank_{index}.log").open("w") as log:
                process = subprocess.Popen(
                    [*forking_executable(), __file__, str(self._directory), str(index)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            self._processes.append(process)

    def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.communicate()


def _serve(directory: str, index: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is for the log
    rank_process.join(
        rank=int(index),
        num_ranks=NUM_RANKS,
        store=dist.FileStore(f"{directory}/store", NUM_RANKS),
        device=torch.device("cpu"),
        timeout_s=DEADLINE_S,
    )
    for line in sys.stdin:
        module, function, target = json.loads(line)
        scenario: Scenario = getattr(importlib.import_module(module), function)
        asyncio.run(scenario(OneOfTwo, Path(target)))
        print("done", file=answers, flush=True)
    rank_process.leave()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
