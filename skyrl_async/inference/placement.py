"""Which engine each request belongs in: a state machine without I/O that knows engines by name.

    oldest requests ─> one engine: few, fast     ...     newest requests ─> another engine: many, slow

An engine with fewer requests serves each of them faster. A trainer that holds a staleness bound waits for its oldest group; under any other
policy the oldest groups are masked, dropped or too old. So every engine gets the same *weight* of requests instead of the same number, and
an old request weighs more: the oldest share an engine with few others. Requests move at weight updates, when keys and values are computed
anew in any case. Of a priority only this is known: smaller is older.

A new request goes to the engine to which it was moved, else to the cheapest. It slows down itself and all others in an engine, by its share
of every step and by the prefill of its tokens that are not cached there: an engine where n run costs ``(1 + n) (SHARE_TOKENS + uncached)``.
So a turn of a session follows the turns before it, and the samples of a group each other, until another engine is so much emptier that it
pays to compute the prefix there; a weight update leaves nothing cached and makes every move free. Sessions need no names.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from skyrl_async.inference.prefix_index import Prefixes, PrefixIndex, prefixes_of
from skyrl_async.types import EngineRequest

SHARE_TOKENS = 512
"""Tokens whose prefill costs an engine's requests as much as one more request beside them does. Of 128, 256, 512, 1,024 and 4,096 it was
the best or close to it on the modelled engines of ``benchmarks/routing.py``; real ones were not tried with others."""


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
    prefixes: Prefixes


class Placement:
    """The requests of one client.

    Args:
        settings: None: all requests weigh the same, and none is moved.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self._settings = settings
        self.caches = PrefixIndex()
        self._running: dict[str, _Running] = {}
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._places: dict[str, int] = {}
        """Engine -> its place among those that take requests; empty when they are to be ranked anew."""
        self._emptiest_first: list[tuple[float, int, int, str]] = []
        """Heap of (weight, cached blocks, place, engine), with one entry of each that is true; others are old."""
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
        self._note(engine)

    def _note(self, engine: str) -> None:
        """The engine's weight or cache has changed."""
        if (place := self._places.get(engine)) is not None:
            heappush(self._emptiest_first, (self.load(engine), self.caches.num_blocks(engine), place, engine))

    def choose(self, engines: Mapping[str, object], generation_id: str, call: EngineRequest) -> str:
        """The engine of a generation's next call, out of at least one. It runs there from now on.

        ``engines`` are the same as before, unless ``engines_changed`` was called.
        """
        prefixes = prefixes_of(call.prompt_token_ids)
        engine = self._wanted.pop(generation_id, "")
        if engine not in engines:
            engine = self._cheapest(engines, len(call.prompt_token_ids), prefixes)
        self.start(generation_id, call, engine, prefixes)
        return engine

    def _cheapest(self, engines: Mapping[str, object], num_tokens: int, prefixes: Prefixes) -> str:
        """The cheapest of the emptiest engine and those with the longest cached prefix."""
        emptiest = self._emptiest(engines)
        num_cached, holders = self.caches.longest(prefixes)
        best, price = emptiest, self._price(emptiest, num_tokens - self.caches.num_cached(emptiest, prefixes))
        for engine in holders:
            if engine in engines and (found := self._price(engine, num_tokens - num_cached)) < price:
                best, price = engine, found
        return best

    def _emptiest(self, engines: Mapping[str, object]) -> str:
        """The engine with the least weight, of these with the fewest cached blocks; from a heap, because there may be a thousand."""
        if not self._places or len(self._emptiest_first) > 8 * len(engines) + 64:
            self._places = {engine: place for place, engine in enumerate(engines)}
            self._emptiest_first = []
            for engine in engines:
                self._note(engine)
        while True:
            weight, num_blocks, _, engine = self._emptiest_first[0]
            if (weight, num_blocks) == (self.load(engine), self.caches.num_blocks(engine)):
                return engine
            heappop(self._emptiest_first)

    def _price(self, engine: str, num_uncached: int) -> float:
        return (1 + self.load(engine)) * (SHARE_TOKENS + num_uncached)

    def start(self, generation_id: str, call: EngineRequest, engine: str, prefixes: Prefixes = ()) -> None:
        """A generation runs in ``engine`` from now on."""
        self._newest = max(self._newest, call.priority)
        running = _Running(call, engine, self.weight_of(call.priority), prefixes)
        self._running[generation_id] = running
        self._add(engine, running.weight)
        self._num_started += call.num_sampled_tokens == 0
        if prefixes:
            self.caches.add(engine, prefixes)
            self._note(engine)

    def engines_changed(self) -> None:
        """``choose`` gets other engines from now on."""
        self._places = {}

    def weights_updated(self) -> None:
        """All that engines had cached is gone, but for what running calls compute anew."""
        self._places = {}
        self.caches.clear()
        for running in self._running.values():
            self.caches.add(running.engine, running.prefixes)

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
        self._places = {}
        self._weights.pop(engine, None)
        self.caches.forget(engine)

    def rearrange(self, engines: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Engine -> its calls to end, so that they continue in another engine. Called at a weight update.

        The oldest requests fill one engine up to its share of all weight, the next ones another, and so on. Space is left for as many new
        requests as came since the last update.
        """
        if self._settings is None:
            return {}
        self._wanted.clear()
        num_new, self._num_started = self._num_started, 0
        self._expected = self._newest + self._newest - max(0, self._newest_at_update)
        self._newest_at_update = self._newest
        if len(engines) < 2:
            return {}
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
