"""Garbage collection in processes whose event loop must not stand still."""

import asyncio
import atexit
import gc
import itertools
from collections.abc import Iterator

_INTERVAL_S = 0.02
_INTERVALS_PER_LOOK = 10
_INTERVALS_PER_FULL_LOOK = 100_000


def collect_rarely() -> None:
    """Exempt all present objects from garbage collection, look for garbage among new ones now and then, and among all every half hour.

    Call it in the event loop, when all is started.

    A driver of thousands of groups in flight makes next to no cyclic garbage and holds millions of objects. With Python's thresholds one of
    64 groups stood still for .2 s at a time and took 1.4 times the processor's time. Thresholds count new objects less freed ones, so that
    none is passed while groups replace others: with 4,096 in flight 100,000 young objects were then looked at in one go, for .04 s and more
    (``benchmarks.driver``). Looking at every young object once, each .02 s, took 8 % of the driver's time. So every .02 s young objects
    become exempt; the tenth time they are looked at before, and each time as long as that finds garbage. Garbage that is missed stays until
    all objects are looked at, which takes a tenth of a second per million.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 1_000, 100_000)
    atexit.register(gc.unfreeze)  # or libraries say at the end that they leak
    _tend(asyncio.get_running_loop(), itertools.count(1), 0)


def _tend(loop: asyncio.AbstractEventLoop, intervals: Iterator[int], num_found: int) -> None:
    number = next(intervals)
    if number % _INTERVALS_PER_FULL_LOOK == 0:
        gc.unfreeze()
        gc.collect()
    elif num_found or number % _INTERVALS_PER_LOOK == 0:
        num_found = gc.collect(1)
    gc.freeze()
    loop.call_later(_INTERVAL_S, _tend, loop, intervals, num_found)
