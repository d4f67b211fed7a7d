"""How far each engine lags behind the trainer, in steps and in seconds. No I/O and no clock: callers say when things happened."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """One engine's lag."""

    steps: int
    """Optimizer steps completed and not yet served by the engine."""
    seconds: float
    """Time since the first of those steps was completed; 0 if there is none."""


class LagMonitor:
    """Computes lags from what the publisher reports; ``trained`` may also report steps that are not published."""

    def __init__(self) -> None:
        self._trained_at: dict[int, float] = {}
        self._newest: int | None = None
        self._served: dict[str, int] = {}
        self._largest = Lag(steps=0, seconds=0.0)
        """Largest since the last call of ``values``."""

    def trained(self, version: int, now: float) -> None:
        """The trainer holds ``version`` from ``now`` on. Later calls for the same version change nothing."""
        self._trained_at.setdefault(version, now)
        self._newest = version if self._newest is None else max(self._newest, version)

    def serves(self, engines: Collection[str], version: int, now: float) -> None:
        """The engines are exactly these, and serve ``version`` from ``now`` on."""
        self._record(now)
        self._served = dict.fromkeys(engines, version)
        self._forget_old()

    def joined(self, engine: str, version: int) -> None:
        """One more engine serves ``version``."""
        self._served[engine] = version

    def left(self, engine: str) -> None:
        """An engine is gone."""
        self._served.pop(engine, None)

    def lags(self, now: float) -> dict[str, Lag]:
        """Lag by engine name."""
        return {engine: self._lag(version, now) for engine, version in self._served.items()}

    def values(self, now: float) -> dict[str, float]:
        """The largest lag of any engine at any time since the last call, as metrics."""
        self._record(now)
        largest, self._largest = self._largest, Lag(steps=0, seconds=0.0)
        self._record(now)
        return {"weight_sync/lag_steps_max": float(largest.steps), "timing/weight_sync_lag_max": largest.seconds}

    def _lag(self, version: int, now: float) -> Lag:
        missing = [trained for trained in self._trained_at if trained > version]
        if self._newest is None or not missing:
            return Lag(steps=0, seconds=0.0)
        return Lag(steps=self._newest - version, seconds=now - min(self._trained_at[trained] for trained in missing))

    def _record(self, now: float) -> None:
        for lag in self.lags(now).values():
            steps, seconds = max(lag.steps, self._largest.steps), max(lag.seconds, self._largest.seconds)
            self._largest = Lag(steps=steps, seconds=seconds)

    def _forget_old(self) -> None:
        oldest = min(self._served.values(), default=self._newest or 0)
        self._trained_at = {version: at for version, at in self._trained_at.items() if version > oldest}
