"""Trainer and engines that take each other's cores, as on a laptop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRAINING_CORES, ENGINE_CORES, PUBLISH_CORES = 1.0, 1.2, 0.8
"""That a training worker takes, an engine with its client, and an update while it is sent and prepared."""
_BACKGROUND_CORES = 0.2
"""That the trainer's event loop takes."""


def slowdown(num_wanted: float, num_cores: int) -> float:
    """Seconds of a computation on a shared machine over its seconds alone, >= 1: cores are shared evenly.

    The cores above were chosen for the default job on two cores, where an engine's iterations took 1.1 to 1.3 times as long beside training
    as alone (1.2 here), 1.4 to 1.6 beside an update too (1.6), 1.2 beside another engine (1.3) and 1.7 beside that and training (1.8);
    gradients took 47 us per token beside an idle engine, 53 to 60 beside one that samples (1.2) and 86 beside two (1.8).

    Args:
        num_wanted: cores that all computations take together.
        num_cores: that there are.
    """
    return max(1.0, (num_wanted + _BACKGROUND_CORES) / num_cores)


class SharedMachine:
    """Who computes now, on ``num_cores``."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._computing: dict[str, float] = {}
        """Process -> cores that it takes."""
        self._listeners: list[Callable[[], None]] = []

    @property
    def slowdown(self) -> float:
        """Seconds of a computation over its seconds alone, for everything that computes now."""
        return slowdown(sum(self._computing.values()), self._num_cores)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` right before every change, and once more right after it."""
        self._listeners.append(on_change)

    def set_computing(self, name: str, is_computing: bool, cores: float) -> None:
        """The process ``name`` begins to compute, or ends. Idempotent."""
        if is_computing == (name in self._computing):
            return
        for on_change in self._listeners:
            on_change()
        if is_computing:
            self._computing[name] = cores
        else:
            del self._computing[name]
        for on_change in self._listeners:
            on_change()


@contextmanager
def computing(machine: SharedMachine | None, name: str, cores: float) -> Iterator[float]:
    """The process ``name`` computes in the block. Yields the slowdown at its begin; 1 without a shared machine."""
    if machine is None:
        yield 1.0
        return
    machine.set_computing(name, True, cores)
    try:
        yield machine.slowdown
    finally:
        machine.set_computing(name, False, cores)
