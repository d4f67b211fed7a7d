"""Which engine serves the next request: a state machine without I/O.

Flows in: requests that start and end, engines that die. Flows out: an engine's name. Knows neither engines nor tokens.
"""

from collections import OrderedDict

from skyrl_async.errors import NoEngineError, StateError


class Router:
    """Least loaded first; a session stays with its engine while that lives, so that its prefix stays cached there.

    Args:
        engine_names: the engines there are at first, in order of preference between equals.
        max_sessions: sessions remembered; the least recently used is forgotten first and routed anew.
    """

    def __init__(self, engine_names: tuple[str, ...], *, max_sessions: int = 100_000) -> None:
        self._num_running: dict[str, int] = dict.fromkeys(engine_names, 0)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = max_sessions

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engines that requests may go to."""
        return tuple(self._num_running)

    def start(self, session_id: str | None = None) -> str:
        """Count one more request on the engine this returns. Raises ``NoEngineError`` when there is none."""
        if not self._num_running:
            raise NoEngineError(
                "no inference engine is left: every one has died; see the run's log for the first failure"
            )
        name = self._sessions.get(session_id) if session_id is not None else None
        if name is None or name not in self._num_running:
            name = min(self._num_running, key=self._num_running.__getitem__)
        if session_id is not None:
            self._remember(session_id, name)
        self._num_running[name] += 1
        return name

    def end(self, name: str) -> None:
        """One request on ``name`` is over; ignored when that engine was removed meanwhile."""
        if name not in self._num_running:
            return
        if self._num_running[name] == 0:
            raise StateError(f"{name} has no running request to end")
        self._num_running[name] -= 1

    def remove(self, name: str) -> None:
        """Send nothing more to ``name``. Idempotent."""
        self._num_running.pop(name, None)

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
