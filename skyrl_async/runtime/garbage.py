"""Garbage collection in processes whose event loop must not stand still."""

import asyncio
import atexit
import gc

_INTERVAL_S = 0.02


def collect_rarely() -> None:
    """Exempt all present objects from garbage collection, and look for garbage among old objects seldom.

    Call it in the event loop, when all is started.

    A driver of thousands of groups in flight makes next to no cyclic garbage and holds millions of objects. With Python's thresholds one of
    64 groups stood still for .2 s at a time and took 1.4 times the processor's time. Thresholds count new objects less freed ones, so that
    none is passed while groups replace others: with 4,096 in flight 100,000 young objects were then looked at in one go, for .04 s and more
    (``benchmarks.driver``). So young objects are looked at every .02 s, once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 1_000, 100_000)
    atexit.register(gc.unfreeze)  # or libraries say at the end that they leak
    _collect_young(asyncio.get_running_loop())


def _collect_young(loop: asyncio.AbstractEventLoop) -> None:
    gc.collect(1)
    loop.call_later(_INTERVAL_S, _collect_young, loop)
