"""Which engine each running request belongs in: a state machine without I/O.

    oldest requests ─> engine-0: few, fast     ...     newest requests ─> engine-n: many, slow

An engine with fewer requests serves each of them faster. A trainer that holds a staleness bound waits for its oldest group; under any other
policy the oldest groups are masked, dropped or too old. So every engine gets the same *weight* of requests instead of the same number, and
an old request weighs more: the oldest share an engine with few others. Requests move at weight updates, when keys and values are computed
anew in any case. Of a priority only this is known: smaller is older.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_async.types import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """Weights of requests by age."""

    oldest_weight: float
    """Weight of the oldest requests, >= 1. The newest weigh 1, others ``oldest_weight ** (age / oldest_age)``."""
    oldest_age: int
    """Difference in priority between the newest request and one of full weight, >= 1."""


def default_oldest_weight(max_staleness_steps: int, *, is_waited_for: bool) -> float:
    """The best weight on long-tailed lengths, by ``benchmarks/staleness_policies.py``.

    Args:
        max_staleness_steps: >= 0.
        is_waited_for: whether training waits for its oldest groups; otherwise their early end is merely useful.
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
        settings: None: all requests weigh the same, and none is moved.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self._settings = settings
        self._running: dict[str, _Running] = {}
        self._weights: dict[str, float] = {}
        self._newest = 0
        self._newest_at_update = -1
        self._expected = 0
        """The newest priority expected at the next update, if as many requests come as since the last one. Ages count from it."""
        self._num_started = 0
        self._wanted: dict[str, str] = {}

    def weight_of(self, priority: int) -> float:
        """Weight of a request now."""
        if self._settings is None:
            return 1.0
        if priority > self._newest_at_update:
            return 1.0
        age = min(1.0, (self._expected - priority) / self._settings.oldest_age)
        return float(self._settings.oldest_weight**age)

    def load(self, engine: str) -> float:
        """Weight of the requests in an engine, rounded so that equal sums compare equal."""
        return round(self._weights.get(engine, 0.0), 6)

    def wanted_engine(self, generation_id: str) -> str | None:
        """The engine in which a moved generation continues; None leaves that to the router."""
        return self._wanted.pop(generation_id, None)

    def start(self, generation_id: str, call: EngineRequest, engine: str) -> None:
        """A generation runs in ``engine`` from now on."""
        self._newest = max(self._newest, call.priority)
        running = _Running(call, engine, self.weight_of(call.priority))
        self._running[generation_id] = running
        self._weights[engine] = self._weights.get(engine, 0.0) + running.weight
        self._num_started += call.num_sampled_tokens == 0

    def end(self, generation_id: str) -> None:
        """The generation has ended, or left its engine."""
        running = self._running.pop(generation_id)
        self._weights[running.engine] -= running.weight

    def forget(self, engine: str) -> None:
        """The engine is gone, and its last request has ended."""
        self._weights.pop(engine, None)

    def rearrange(self, engines: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Engine -> its calls to end, so that they continue in another engine. Called at a weight update.

        The oldest requests fill the first engine up to its share of all weight, and so on. Space is left for as many new requests as came
        since the last update.
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
