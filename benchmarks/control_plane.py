"""What admission costs as workers grow: the staleness manager against one that wakes every waiter, in one run.

Half of the workers have a group in flight and half wait for admission. Groups end one by one, each in a turn of the event loop of
its own, and each makes room for one more. The manager wakes the first waiter; the baseline keeps the same accounts, so that its
capacity rule is the same, behind an ``asyncio.Condition`` and wakes all (``notify_all``), of whom one is admitted. Seconds are of
the processor, the two take turns, and a row holds the median over the rounds.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from benchmarks.report import arguments, conditions, report
from skyrl_async.rollout.staleness import Admission, _AsyncStalenessManager

NUM_WORKERS = (10, 100, 1_000, 10_000)
MIN_RATIO = 10.0


class Admits(Protocol):
    """Lets one group in for each that has ended."""

    async def acquire(self) -> Admission:
        """Wait for admission."""
        ...

    async def finish(self, admission: Admission) -> None:
        """The group has ended, and was trained on at once."""
        ...


class WakesOne:
    """The staleness manager as it is.

    Args:
        num_places: groups in flight at once, and groups per optimizer step.
    """

    def __init__(self, num_places: int) -> None:
        self._manager = _AsyncStalenessManager(num_places, num_places, 1)
        self._num_places = num_places
        self._num_trained = 0

    @property
    def has_room(self) -> bool:
        """The rule admits one more."""
        return self._manager.capacity > 0

    async def acquire(self) -> Admission:
        """Wait in line."""
        return await self._manager.acquire_submission_slot()

    async def finish(self, admission: Admission) -> None:
        """Free the place; every mini-batch makes a version."""
        await self._manager.on_rollout_accepted(admission)
        await self._manager.on_rollout_trained(admission.index)
        self._num_trained += 1
        if self._num_trained % self._num_places == 0:
            await self._manager.notify_capacity_change(self._manager.served_version + 1)


class WakesEveryone:
    """The same accounts; whoever waits is woken by every group that ends, and looks for itself.

    Args:
        num_places: as in ``WakesOne``.
    """

    def __init__(self, num_places: int) -> None:
        self._accounts = WakesOne(num_places)
        self._changed = asyncio.Condition()

    async def acquire(self) -> Admission:
        """Wait until a look finds room."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._accounts.has_room)
            return await self._accounts.acquire()

    async def finish(self, admission: Admission) -> None:
        """Free the place and wake everyone."""
        async with self._changed:
            await self._accounts.finish(admission)
            self._changed.notify_all()


async def admissions_per_s(make: Callable[[int], Admits], num_workers: int, seconds: float) -> float:
    """Admissions per second of processor time, measured for so long, once half of the workers are in and half wait."""
    manager, in_flight, num_admitted = make(num_workers // 2), deque[asyncio.Future[None]](), 0
    loop = asyncio.get_running_loop()

    async def work() -> None:
        nonlocal num_admitted
        while True:
            admission = await manager.acquire()
            num_admitted += 1
            group = loop.create_future()
            in_flight.append(group)
            await group
            await manager.finish(admission)

    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(), name=f"worker-{i}") for i in range(num_workers)]
        await asyncio.sleep(0)
        assert len(in_flight) == num_workers // 2
        num_before, started = num_admitted, time.process_time()
        while time.process_time() - started < seconds:
            if in_flight:
                in_flight.popleft().set_result(None)
            await asyncio.sleep(0)
        rate = (num_admitted - num_before) / (time.process_time() - started)
        for worker in workers:
            worker.cancel()
    return rate


def measure(num_workers: int, *, num_rounds: int, seconds: float) -> dict[str, Any]:
    """One row: both managers in turn, medians over the rounds."""
    rates: dict[type[Admits], list[float]] = {WakesOne: [], WakesEveryone: []}
    for _ in range(num_rounds):
        for kind, found in rates.items():
            found.append(asyncio.run(admissions_per_s(kind, num_workers, seconds)))
    one, everyone = (median(found) for found in rates.values())
    return {
        "workers": num_workers,
        "admissions_per_s": one,
        "baseline_admissions_per_s": everyone,
        "ratio": one / everyone,
    }


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    num_rounds, seconds = (3, 0.5) if options.quick else (7, 2.0)
    under = conditions(num_rounds=num_rounds, seconds_per_round=seconds, is_quick=options.quick)
    rows = [measure(num, num_rounds=num_rounds, seconds=seconds) for num in NUM_WORKERS]
    first, last = rows[0], rows[-1]
    figures = {
        "flatness": last["admissions_per_s"] / first["admissions_per_s"],
        "ratio_at_most_workers": last["ratio"],
        "is_goal_met": last["ratio"] >= MIN_RATIO,
        "conditions": under,
    }
    report("admissions per second", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
