"""Which engine each request belongs in: a state machine without I/O that knows engines by name.

    oldest requests ─> one engine: few, fast     ...     newest requests ─> another engine: many, slow

An engine with fewer requests serves each of them faster. A trainer that holds a staleness bound waits for its oldest group; under any other
policy the oldest groups are masked, dropped or too old. So every engine gets the same *weight* of requests instead of the same number, and
an old request weighs more: the oldest share an engine with few others. Requests move at weight updates, when keys and values are computed
anew in any case. Of a priority only this is known: smaller is older.

A new request goes to the engine to which it was moved, else to its session's, else to the one with the least weight, then with the fewest
sessions.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
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


class Sessions:
    """The engine of each session's last request, where its prefix is cached.

    Args:
        max_sessions: sessions remembered; past it the least recently used is forgotten.
        max_idle_s: a session whose last request began longer ago is forgotten, since some clients never say that one ends. An hour is
            longer than a turn takes.
    """

    def __init__(self, *, max_sessions: int = 100_000, max_idle_s: float = 3600.0) -> None:
        self._engines: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> engine and time of the last request, least recently used first."""
        self.num_in: defaultdict[str, int] = defaultdict(int)
        """Engine -> sessions remembered of it."""
        self._max_sessions = max_sessions
        self._max_idle_s = max_idle_s

    def __len__(self) -> int:
        return len(self._engines)

    def engine_of(self, session_id: str | None, now: float) -> str | None:
        """The session's engine, unless it is forgotten. ``now``: seconds, never decreasing."""
        while self._engines and now - next(iter(self._engines.values()))[1] > self._max_idle_s:
            self.end(next(iter(self._engines)))
        found = None if session_id is None else self._engines.get(session_id)
        return None if found is None else found[0]

    def remember(self, session_id: str, engine: str, now: float) -> None:
        """The session's last request goes to ``engine``."""
        self.end(session_id)
        self._engines[session_id] = (engine, now)
        self.num_in[engine] += 1
        if len(self._engines) > self._max_sessions:
            self.end(next(iter(self._engines)))

    def end(self, session_id: str) -> None:
        """Forget a session. Idempotent; unknown ones are fine."""
        if found := self._engines.pop(session_id, None):
            self.num_in[found[0]] -= 1

    def forget(self, engine: str) -> None:
        """Forget the sessions of an engine that is gone."""
        if self.num_in.pop(engine, 0):
            for session_id in [one for one, (name, _) in self._engines.items() if name == engine]:
                del self._engines[session_id]


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
        self.sessions = Sessions()
        self._running: dict[str, _Running] = {}
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._newest = 0
        self._newest_at_update = -1
        self._expected = 0
        """The newest priority expected at the next update, if as many requests come as since the last one. Ages count from it."""
        self._num_started = 0
        self._wanted: dict[str, str] = {}

    def weight_of(self, priority: int) -> float:
        """Weight of a request now."""
        if self._settings is None or priority > self._newest_at_update:
            return 1.0
        age = min(1.0, (self._expected - priority) / self._settings.oldest_age)
        return round(self._settings.oldest_weight**age, 6)

    def load(self, engine: str) -> float:
        """Weight of the requests in an engine."""
        return self._weights.get(engine, 0.0)

    def _add(self, engine: str, weight: float) -> None:
        """Add to an engine's weight, rounded as weights are, so that equal sums compare equal."""
        self._weights[engine] = round(self.load(engine) + weight, 6)

    def choose(self, engines: Collection[str], generation_id: str, session_id: str | None, now: float) -> str:
        """The engine of a generation's next call, out of at least one; also its session's from then on."""
        session_engine = self.sessions.engine_of(session_id, now)
        engine = self._wanted.pop(generation_id, None)
        if engine not in engines:
            engine = session_engine
        if engine is None or engine not in engines:
            least = min(map(self._weights.__getitem__, engines))
            emptiest = [one for one in engines if self._weights[one] == least]
            engine = min(emptiest, key=self.sessions.num_in.__getitem__)
        if session_id is not None:
            self.sessions.remember(session_id, engine, now)
        return engine

    def start(self, generation_id: str, call: EngineRequest, engine: str) -> None:
        """A generation runs in ``engine`` from now on."""
        self._newest = max(self._newest, call.priority)
        running = _Running(call, engine, self.weight_of(call.priority))
        self._running[generation_id] = running
        self._add(engine, running.weight)
        self._num_started += call.num_sampled_tokens == 0

    def end(self, generation_id: str) -> None:
        """The generation has ended, or left its engine."""
        running = self._running.pop(generation_id)
        self._add(running.engine, -running.weight)

    def engine_of(self, generation_id: str) -> str | None:
        """The engine of a generation; None if it is in none."""
        running = self._running.get(generation_id)
        return None if running is None else running.engine

    def forget(self, engine: str) -> None:
        """The engine is gone, and its last request has ended."""
        self._weights.pop(engine, None)

    def rearrange(self, engines: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Engine -> its calls to end, so that they continue in another engine. Called at a weight update.

        The oldest requests fill one engine up to its share of all weight, the next ones another, and so on. Space is left for as many new
        requests as came since the last update.
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
        blocks: list[dict[str, _Running]] = [{} for _ in engines]
        placed = 0.0
        for (generation_id, running), weight in zip(oldest_first, weights, strict=True):
            blocks[min(int(placed / share), len(engines) - 1)][generation_id] = running
            placed += weight
            self._add(running.engine, weight - running.weight)
            running.weight = weight
        leaving: dict[str, list[str]] = {}
        for target, block in zip(_engines_of(blocks, engines), blocks, strict=True):
            for generation_id, running in block.items():
                if target != running.engine and running.call.sampling.is_resumable:
                    leaving.setdefault(running.engine, []).append(running.call.request_id)
                    self._wanted[generation_id] = target
        return leaving


def _engines_of(blocks: Sequence[Mapping[str, _Running]], engines: Sequence[str]) -> list[str]:
    """An engine for each block: one that has many of its requests already, so that few have to move."""
    there = Counter((number, running.engine) for number, block in enumerate(blocks) for running in block.values())
    chosen: dict[int, str] = {}
    free = dict.fromkeys(engines)
    for (number, engine), _ in there.most_common():
        if number not in chosen and engine in free:
            chosen[number] = engine
            del free[engine]
    left = iter(free)
    return [chosen[number] if number in chosen else next(left) for number in range(len(blocks))]
