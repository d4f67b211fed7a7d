"""The life of one engine in a fleet: a state machine without I/O and without a clock.

starting ──> serving ──> dead ──> restarting ──> serving
   └─────────────────────┘ └──restarts used up──> given_up            any of these ──> leaving
"""

from enum import Enum

from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.errors import StateError

_MAX_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 64


class EngineState(Enum):
    """State of an engine."""

    starting = "starting"
    """Boots for the first time; takes no requests."""
    serving = "serving"
    dead = "dead"
    restarting = "restarting"
    """Another engine boots in its place; takes no requests."""
    given_up = "given_up"
    """Dead for good."""
    leaving = "leaving"
    """Is removed: takes no requests, and has those that cannot continue elsewhere."""


class EngineLife:
    """Counts deaths and restarts of one engine.

    Args:
        config: how often it is started again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.state = EngineState.starting
        self.num_restarts = 0
        self.num_missed = 0
        """Heartbeat intervals without an answer, in total."""
        self._num_deaths_in_a_row = 0

    def answer(self) -> None:
        """A heartbeat was answered."""
        self._num_deaths_in_a_row = 0

    def miss(self) -> None:
        """A heartbeat was not answered within an interval."""
        self.num_missed += 1

    def die(self) -> None:
        """The engine is dead."""
        self._move({EngineState.starting, EngineState.serving, EngineState.restarting}, EngineState.dead)
        self._num_deaths_in_a_row += 1

    def restart(self) -> float | None:
        """Use one restart; returns the seconds to wait before it, or None if none is left."""
        if self.num_restarts >= self._config.max_restarts:
            self._move({EngineState.dead, EngineState.restarting}, EngineState.given_up)
            return None
        is_again = self.state is EngineState.restarting
        self._move({EngineState.dead, EngineState.restarting}, EngineState.restarting)
        self._num_deaths_in_a_row += is_again
        self.num_restarts += 1
        num_doublings = min(self._num_deaths_in_a_row - 1, _MAX_DOUBLINGS)
        return float(min(self._config.restart_backoff_s * 2**num_doublings, _MAX_BACKOFF_S))

    def serve(self) -> None:
        """The engine takes requests from now on."""
        self._move({EngineState.starting, EngineState.restarting}, EngineState.serving)

    def leave(self) -> None:
        """The engine is removed."""
        self._move(set(EngineState) - {EngineState.leaving}, EngineState.leaving)

    def _move(self, allowed: set[EngineState], to: EngineState) -> None:
        if self.state not in allowed:
            raise StateError(f"an engine that is {self.state.value} cannot become {to.value}")
        self.state = to
