"""Attacks a virtual run at random, and counts what it survives.

Flows in: how many faults, a seed. Flows out: counts, and the audit. Does not know what a fault does.
"""

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skyrl_async.simulator.run import SimulationSettings
from tests.chaos.audit import Audit
from tests.chaos.virtual import SETTINGS, VirtualFault, VirtualRun

logger = logging.getLogger(__name__)


class Survivals:
    """Counts the faults that a run has survived: after which it has completed a further step."""

    def __init__(self, run: VirtualRun) -> None:
        self._run = run
        self._open: list[int] = []
        """The step of each fault after which the run has not gone on yet."""
        self.last_step = 0
        """The furthest one seen; a run that is resumed stands before it."""
        self.num_faults = 0
        self.num_survived = 0

    def strike(self, fault: VirtualFault) -> None:
        """Let it happen. Raises what ended the run."""
        self.num_faults += 1
        self._open.append(self._look())
        self._run.happen(fault)

    def go_on(self, seconds: float) -> None:
        """Let virtual time pass. Raises what ended the run."""
        self._run.go_on(seconds)
        num_open, last_step = len(self._open), self._look()
        self._open = [step for step in self._open if step >= last_step]
        self.num_survived += num_open - len(self._open)

    def give_up(self) -> None:
        """The run has ended: after the last faults it does not go on."""
        self._open.clear()

    def _look(self) -> int:
        self.last_step = max(self.last_step, self._run.step)
        return self.last_step


@contextlib.contextmanager
def without_syncing() -> Iterator[None]:
    """Nothing is synced to disk: a fault is a call, and takes no page cache with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualAttack:
    """What became of a run under random faults."""

    survived: int
    """Faults after which it went on."""
    interrupted: int
    """See ``VirtualRun.num_interrupted``."""
    saved: int
    """See ``VirtualRun.num_saved``."""
    audit: Audit


def attack_virtually(
    directory: Path, *, num_faults: int, seed: int, settings: SimulationSettings = SETTINGS
) -> VirtualAttack:
    """A run under ``num_faults`` random faults, audited at the end. One that ends is resumed from its last checkpoint."""
    rng = random.Random(seed)
    with without_syncing():
        run = VirtualRun(directory, replace(settings, seed=seed))
        run.go_on(30.0)
        survivals = Survivals(run)
        for _ in range(num_faults):
            fault = rng.choice(list(VirtualFault))
            with _resumed(run, survivals, after=str(fault)):
                survivals.strike(fault)
                survivals.go_on(rng.expovariate(1 / 5.0))
        run.repair_disk()
        with _resumed(run, survivals, after="the last fault"):
            survivals.go_on(300.0)
        found = run.audit()
        run.close()
    return VirtualAttack(
        survived=survivals.num_survived, interrupted=run.num_interrupted, saved=run.num_saved, audit=found
    )


@contextlib.contextmanager
def _resumed(run: VirtualRun, survivals: Survivals, *, after: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.critical("the run ended after this: %s", after, exc_info=True)
        survivals.give_up()
        run.start_over()
