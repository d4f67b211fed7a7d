"""Which engine serves the next request: a state machine without I/O.

Flows in: requests that start and end, engines that come and go. Flows out: an engine's name. Knows neither engines nor tokens.
"""

from collections import OrderedDict
from collections.abc import Callable

from skyrl_async.errors import NoEngineError, StateError


class Router:
    """Least loaded first; a session stays with its engine while that lives, so that its prefix stays cached there.

    Args:
        engine_names: the engines there are at first, in order of preference between equals.
        max_sessions: sessions remembered; the least recently used is forgotten first and routed anew.
    """

    def __init__(self, engine_names: tuple[str, ...], *, max_sessions: int = 100_000) -> None:
        self._num_running: dict[str, int] = dict.fromkeys(engine_names, 0)
        self._num_leaving: dict[str, int] = {}
        """Requests that have yet to end, of engines that were removed."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = max_sessions

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engines that requests may go to."""
        return tuple(self._num_running)

    def start(
        self,
        session_id: str | None = None,
        *,
        load: Callable[[str], float] | None = None,
        wanted: str | None = None,
    ) -> str:
        """Count one more request on the engine this returns. Raises ``NoEngineError`` when there is none.

        ``load`` says how full an engine is, by default the number of its requests. The engine that is ``wanted`` is taken while
        it lives, and the session's from then on.
        """
        if not self._num_running:
            raise NoEngineError(
                "no inference engine is left: every one has died; see the run's log for the first failure"
            )
        name = wanted
        if name not in self._num_running and session_id is not None:
            name = self._sessions.get(session_id)
        if name is None or name not in self._num_running:
            name = min(self._num_running, key=load or self._num_running.__getitem__)
        if session_id is not None:
            self._remember(session_id, name)
        self._num_running[name] += 1
        return name

    def end(self, name: str) -> None:
        """One request on ``name`` is over, also when that engine was removed meanwhile."""
        counts = self._num_running if name in self._num_running else self._num_leaving
        if not counts.get(name):
            raise StateError(f"{name} has no running request to end")
        counts[name] -= 1
        if counts is self._num_leaving and not counts[name]:
            del counts[name]

    def is_free(self, name: str) -> bool:
        """Whether an engine of that name can be added: none has it, nor a request of one that had it."""
        return name not in self._num_running and name not in self._num_leaving

    def add(self, name: str) -> None:
        """Send requests to ``name`` too. Raises ``StateError`` for a name that is not free."""
        if not self.is_free(name):
            raise StateError(f"the name {name} is taken, by an engine or by requests that have yet to leave it")
        self._num_running[name] = 0

    def remove(self, name: str) -> None:
        """Send nothing more to ``name``; what runs there may end later. Idempotent."""
        if num_leaving := self._num_running.pop(name, 0):
            self._num_leaving[name] = num_leaving

    def num_running(self, name: str) -> int:
        """Requests now running on ``name``."""
        return self._num_running[name]

    def statistics(self) -> dict[str, float]:
        """Engines alive, requests running in all, and on the emptiest and the fullest."""
        loads = list(self._num_running.values()) or [0]
        return {
            "engines": float(len(self._num_running)),
            "running_requests": float(sum(loads)),
            "min_running_requests": float(min(loads)),
            "max_running_requests": float(max(loads)),
        }

    def _remember(self, session_id: str, name: str) -> None:
        self._sessions[session_id] = name
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
