"""Which engine each running request belongs in: a state machine without I/O.

    oldest requests ─> engine-0: few, fast     ...     newest requests ─> engine-n: many, slow

An engine serves each of its requests the faster, the fewer it has; a trainer that holds a staleness bound waits for its oldest
group, and under any other policy the oldest are what is masked, given up or too old. So every engine gets the same *weight* of
requests instead of the same number, and an old request weighs more: the oldest share an engine with few others. A weight update is
the moment to move them, since it makes every key and value be computed anew.

Flows in: requests that start and end, with their priorities. Flows out: loads for the router, and at a weight update the moves that
put requests right. Does not know engines, and of a priority only that smaller is older.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_async.types import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """How unequal engines are."""

    oldest_weight: float
    """What the oldest requests weigh, >= 1; the newest weigh 1, those between ``oldest_weight ** (age / oldest_age)``."""
    oldest_age: int
    """Priorities between the newest request and one of full weight, >= 1."""


def default_oldest_weight(max_staleness_steps: int, *, is_waited_for: bool) -> float:
    """What pays on long-tailed lengths, by ``benchmarks/staleness_policies.py``.

    Args:
        max_staleness_steps: >= 0.
        is_waited_for: whether training waits for its oldest groups; elsewhere their tails are merely the better for being over sooner.
    """
    return 1.5 * (max_staleness_steps + 1) if is_waited_for else 2.0


@dataclass(slots=True)
class _Running:
    call: EngineRequest
    engine: str
    weight: float


class Placement:
    """The requests of one client.

    Args:
        settings: None weighs all alike and moves none.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self._settings = settings
        self._running: dict[str, _Running] = {}
        self._weights: dict[str, float] = {}
        self._newest = 0
        self._newest_at_update = -1
        self._expected = 0
        """What the newest priority will be at the next update if as many come as between the last two: ages count from there."""
        self._num_started = 0
        self._wanted: dict[str, str] = {}

    def weight_of(self, priority: int) -> float:
        """Of a request now."""
        if self._settings is None:
            return 1.0
        if priority > self._newest_at_update:
            return 1.0
        age = min(1.0, (self._expected - priority) / self._settings.oldest_age)
        return float(self._settings.oldest_weight**age)

    def load(self, engine: str) -> float:
        """Weight of the requests in an engine; sums that differ by rounding alone are equal."""
        return round(self._weights.get(engine, 0.0), 6)

    def wanted_engine(self, generation_id: str) -> str | None:
        """Where it is to go on after it was moved; None leaves that to the router."""
        return self._wanted.pop(generation_id, None)

    def start(self, generation_id: str, call: EngineRequest, engine: str) -> None:
        """A generation runs in ``engine`` from now on."""
        self._newest = max(self._newest, call.priority)
        running = _Running(call, engine, self.weight_of(call.priority))
        self._running[generation_id] = running
        self._weights[engine] = self._weights.get(engine, 0.0) + running.weight
        self._num_started += call.num_sampled_tokens == 0

    def end(self, generation_id: str) -> None:
        """It has ended, or left its engine."""
        running = self._running.pop(generation_id)
        self._weights[running.engine] -= running.weight

    def forget(self, engine: str) -> None:
        """It has gone, with its last request."""
        self._weights.pop(engine, None)

    def rearrange(self, engines: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Engine -> calls in it that are to end, to go on in another engine; called at a weight update.

        The oldest fill the first engine up to its share of all weight, and so on. Room is kept for as many new requests as
        came since the last update.
        """
        if self._settings is None or len(engines) < 2:
            return {}
        self._wanted.clear()
        num_new, self._num_started = self._num_started, 0
        self._expected = self._newest + self._newest - max(0, self._newest_at_update)
        self._newest_at_update = self._newest
        oldest_first = sorted(self._running.items(), key=lambda item: item[1].call.priority)
        weights = [self.weight_of(running.call.priority) for _, running in oldest_first]
        share = (sum(weights) + num_new) / len(engines)
        leaving: dict[str, list[str]] = {}
        placed = 0.0
        for (generation_id, running), weight in zip(oldest_first, weights, strict=True):
            target = engines[min(int(placed / share), len(engines) - 1)]
            placed += weight
            if target != running.engine and running.call.sampling.is_resumable:
                leaving.setdefault(running.engine, []).append(running.call.request_id)
                self._wanted[generation_id] = target
            self._weights[running.engine] += weight - running.weight
            running.weight = weight
        return leaving
