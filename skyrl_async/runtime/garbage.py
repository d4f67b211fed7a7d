"""Garbage collection in processes whose event loop must not stand still."""

import gc


def collect_rarely() -> None:
    """Exempt all present objects from garbage collection, and look for garbage seldom. Call it when all is started.

    With Python's thresholds a driver of 64 groups in flight stood still for .2 s at a time and took 1.4 times the processor's time
    (``benchmarks.driver``).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
