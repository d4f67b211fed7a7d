"""How many groups may be in flight before engines run out of cache: a state machine without I/O and without a clock.

    heartbeat with preemptions  ──> limit = 3/4 of the groups in flight ──drained──> listens again
    step without any, nor queue, nor full cache ──> limit + 2 %, where it held groups back

An engine whose cache of keys and values is full preempts a running request, drops what it has cached and computes it again later. Such work
is lost, and how much room answers need is not known before they are there. So the limit is found as congestion of a network is: slowly up,
fast down. It is a simpler form of prime-rl's ``concurrency.py``: with one cut and without an estimate of an episode's tokens, for which
groups of ours differ too much.

- A cut is relative to the groups that are in flight, not to the limit, which may be far above them. A quarter fewer of them free a
  quarter of the cache: more than answers in flight grow by meanwhile, and less than the half of a congested network, which would leave
  engines idle. Other shares were not measured.
- While more groups are in flight than the limit, preemptions tell of the limit before: nothing is cut again.
- It grows by 2 % a step, at least by one group, so that a limit that is cut by a quarter is back after 15 steps, and passes the edge by
  little. Requests that wait inside an engine say that more would only wait longer, a cache that running requests fill to nine tenths that
  one more would preempt another as they grow, and groups below the limit that it holds nothing back.
"""

from dataclasses import dataclass, field

from skyrl_async.inference.protocol import EngineLoad

CUT = 0.75
GROWTH = 1.02
FULL = 0.9
"""Use of the engines' caches, in the mean, from which on the limit does not grow."""


@dataclass(eq=False)
class CacheLimit:
    """The most groups in flight."""

    most: int
    """It begins with, and never exceeds, so many; >= 1."""
    least: int = 1
    """It is never below, >= 1."""
    limit: int = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict, init=False)
    """Engine -> preemptions at its last heartbeat."""
    _step: int = field(default=0, init=False)
    _is_draining: bool = field(default=False, init=False)
    _is_clear: bool = field(default=True, init=False)
    """Whether nothing waited or was preempted, and no cache was full, since the last growth, or the last step that could have had one."""

    def __post_init__(self) -> None:
        self.limit = self.most

    def observe(self, engine: str, load: EngineLoad, of_all: EngineLoad, *, in_flight: int, step: int) -> bool:
        """Take an engine's heartbeat. Returns whether the limit was cut.

        Args:
            engine: its name.
            load: what it says; counts begin anew where an engine does.
            of_all: what the engines said last, together.
            in_flight: groups.
            step: completed optimizer steps.
        """
        has_preempted = load.num_preemptions > self._seen.get(engine, 0)
        self._seen[engine] = load.num_preemptions
        has_room = not of_all.num_waiting and of_all.cache_use < FULL
        self._is_clear = self._is_clear and not has_preempted and has_room
        if self._is_draining:
            self._is_draining = in_flight > self.limit
        elif has_preempted:
            before, self.limit = self.limit, min(self.limit, max(self.least, int(CUT * in_flight)))
            self._is_draining = in_flight > self.limit
            return self.limit < before
        if step > self._step:
            self._step = step
            if self._is_clear and in_flight >= self.limit:
                self.limit = min(self.most, max(self.limit + 1, int(GROWTH * self.limit)))
            self._is_clear = True
        return False
