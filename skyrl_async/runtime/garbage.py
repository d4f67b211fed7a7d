"""Garbage collection in processes whose event loop must not stand still."""

import atexit
import gc


def collect_rarely() -> None:
    """Exempt all present objects from garbage collection, and look for garbage among old objects seldom. Call it when all is started.

    A driver of thousands of groups in flight makes next to no cyclic garbage and holds millions of objects. With Python's thresholds one of
    64 groups stood still for .2 s at a time and took 1.4 times the processor's time; with rare collections of many young objects one of
    4,096 groups stood still for .5 to .7 s (``benchmarks.driver``).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 10_000)
    atexit.register(gc.unfreeze)  # or libraries say at the end that they leak
