"""Which engine serves the next request: a state machine without I/O that knows engines by name."""

from collections import OrderedDict
from collections.abc import Callable

from skyrl_async.errors import NoEngineError, StateError


class Router:
    """Routes to the least loaded engine, then the one with fewest sessions; a session keeps its engine, where its prefix is cached.

    Args:
        engine_names: the first engines, in order of preference between equals.
        max_sessions: sessions remembered; past it the least recently used is forgotten, and routed anew.
        max_idle_s: a session whose last request began longer ago is forgotten, since some clients never say that one ends. An hour is
            longer than a turn takes.
    """

    def __init__(
        self, engine_names: tuple[str, ...], *, max_sessions: int = 100_000, max_idle_s: float = 3600.0
    ) -> None:
        self._num_running: dict[str, int] = dict.fromkeys(engine_names, 0)
        self._num_leaving: dict[str, int] = {}
        """Removed engines -> requests that have yet to end."""
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> engine and time of the last request, least recently used first; without removed engines."""
        self._num_sessions: dict[str, int] = dict.fromkeys(engine_names, 0)
        self._max_sessions = max_sessions
        self._max_idle_s = max_idle_s

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engines that requests may go to."""
        return tuple(self._num_running)

    def start(
        self,
        session_id: str | None = None,
        *,
        now: float = 0.0,
        load: Callable[[str], float] | None = None,
        wanted: str | None = None,
    ) -> str:
        """Choose an engine and count one more request on it. Raises ``NoEngineError`` if there is none.

        Args:
            session_id: keeps the engine of its last request.
            now: seconds, never decreasing.
            load: how full an engine is; by default the number of its requests. Sessions decide between equals.
            wanted: the engine to choose if it is alive, also for the session from then on.
        """
        if not self._num_running:
            raise NoEngineError(
                "no inference engine is left: every one has died; see the run's log for the first failure"
            )
        self._forget_idle(now)
        name = wanted
        if name not in self._num_running and session_id is not None:
            name, _ = self._sessions.get(session_id, (None, now))
        if name is None or name not in self._num_running:
            fullness = load or self._num_running.__getitem__
            name = min(self._num_running, key=lambda one: (fullness(one), self._num_sessions[one]))
        if session_id is not None:
            self._remember(session_id, name, now)
        self._num_running[name] += 1
        return name

    def end(self, name: str) -> None:
        """One request on ``name`` has ended, which may have been removed meanwhile."""
        counts = self._num_running if name in self._num_running else self._num_leaving
        if not counts.get(name):
            raise StateError(f"{name} has no running request to end")
        counts[name] -= 1
        if counts is self._num_leaving and not counts[name]:
            del counts[name]

    def end_session(self, session_id: str) -> None:
        """Forget a session. Idempotent; unknown ones are fine."""
        name, _ = self._sessions.pop(session_id, (None, 0.0))
        if name is not None:
            self._num_sessions[name] -= 1

    def is_free(self, name: str) -> bool:
        """Whether the name is unused, also by requests of a removed engine."""
        return name not in self._num_running and name not in self._num_leaving

    def add(self, name: str) -> None:
        """Send requests to ``name`` too. Raises ``StateError`` for a name in use."""
        if not self.is_free(name):
            raise StateError(f"the name {name} is taken, by an engine or by requests that have yet to leave it")
        self._num_running[name] = self._num_sessions[name] = 0

    def remove(self, name: str) -> None:
        """Send nothing more to ``name``. Its requests may end later, and its sessions are routed anew. Idempotent."""
        if num_leaving := self._num_running.pop(name, 0):
            self._num_leaving[name] = num_leaving
        if self._num_sessions.pop(name, 0):
            for session_id in [one for one, (engine, _) in self._sessions.items() if engine == name]:
                del self._sessions[session_id]

    def num_running(self, name: str) -> int:
        """Requests now running on ``name``."""
        return self._num_running[name]

    def statistics(self) -> dict[str, float]:
        """Engines, sessions with an engine, and requests running: in all, and on the emptiest and the fullest engine."""
        loads = list(self._num_running.values()) or [0]
        return {
            "engines": float(len(self._num_running)),
            "routed_sessions": float(len(self._sessions)),
            "running_requests": float(sum(loads)),
            "min_running_requests": float(min(loads)),
            "max_running_requests": float(max(loads)),
        }

    def _remember(self, session_id: str, name: str, now: float) -> None:
        self.end_session(session_id)
        self._sessions[session_id] = (name, now)
        self._num_sessions[name] += 1
        if len(self._sessions) > self._max_sessions:
            self.end_session(next(iter(self._sessions)))

    def _forget_idle(self, now: float) -> None:
        while self._sessions:
            session_id, (_, used) = next(iter(self._sessions.items()))
            if now - used <= self._max_idle_s:
                return
            self.end_session(session_id)
