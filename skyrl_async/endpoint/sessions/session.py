"""One session: its turns, how it samples, and when it accepts no more.

    open ──finish──> finished ──delete──> deleted
      └──expire──> expired ──finish (abandoned)──┘

Does not know keys, clocks, HTTP or how many sessions there are.
"""

import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import StrEnum
from functools import partial

from skyrl_async.endpoint.sessions.rows import rows
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionOutcome, SessionSampling, SessionSettings
from skyrl_async.endpoint.sessions.tree import TurnTree
from skyrl_async.errors import SessionClosedError, StateError
from skyrl_async.types import Trajectory


class SessionState(StrEnum):
    """A session's state. Only an open one accepts requests and turns."""

    OPEN = "open"
    FINISHED = "finished"
    EXPIRED = "expired"
    DELETED = "deleted"


@dataclass(eq=False, repr=False)
class Session:
    """One harness's conversation with the policy. Times are seconds of the caller's clock."""

    id: str
    """Unique; not secret."""
    _: KW_ONLY
    limits: SessionLimits
    """When it accepts no more."""
    now: InitVar[float]
    """Time of its creation."""
    sampling: SessionSampling | None = None
    """The trainer's; None leaves sampling to the requests."""
    priority: int = 0
    """Its requests' in the engines; smaller is served first."""
    label: str | None = None
    """For logs and status."""

    def __post_init__(self, now: float) -> None:
        self.state = SessionState.OPEN
        self._expired_because = ""
        self.tree = TurnTree()
        """What turns are matched against and, while the session is open, committed to."""
        self._rows: tuple[Trajectory, ...] = ()
        self._side_figures = (0, 0)
        self._make_rows: Callable[[], tuple[Trajectory, ...]] | None = None
        self._making_rows = threading.Lock()
        self._created_at = self._active_at = now
        self.num_requests = 0
        """Requests that came with its key, whatever became of them."""
        self.num_requests_open = 0
        self.num_overflows = 0
        self._num_turns_at_overflow: int | None = None
        self._was_refused = False

    def __repr__(self) -> str:
        return f"Session(id={self.id!r}, label={self.label!r}, state={str(self.state)!r}, num_turns={self.num_turns})"

    @property
    def is_open(self) -> bool:
        return self.state is SessionState.OPEN

    @property
    def num_turns(self) -> int:
        return self.tree.num_turns

    @property
    def num_sampled_tokens(self) -> int:
        return self.tree.num_sampled_tokens

    @property
    def was_cut_short(self) -> bool:
        """Whether a cap refused a request, or no turn was sampled since a prompt was too long for the model's context."""
        return self._was_refused or self._num_turns_at_overflow == self.num_turns

    @property
    def side_figures(self) -> tuple[int, int]:
        """(number of side requests, tokens sampled in them)."""
        if not self.tree.is_closed:
            turns = self.tree.side_requests
            self._side_figures = len(turns), sum(len(turn.addition.token_ids) for turn in turns)
        return self._side_figures

    def require_open(self, now: float) -> None:
        """Raise ``SessionClosedError`` if the session is closed, past a deadline or at a cap."""
        if not self.is_open:
            raise self._closed_because(self._expired_because or f"is {self.state}")
        overdue, capped = self._overdue(now), self._cap_reached()
        self._was_refused |= bool(capped)
        if reason := overdue or capped:
            raise self._closed_because(reason)

    def begin_request(self, now: float) -> None:
        """Begin a request. Raises what ``require_open`` does; then nothing has begun."""
        self.require_open(now)
        self.num_requests_open += 1

    def end_request(self, now: float) -> None:
        """End a request that began, however it ended; also after the session was closed."""
        if self.num_requests_open < 1:
            raise StateError(f"session {self.id} has no request open that could end")
        self.num_requests_open -= 1
        self._active_at = now

    def count_overflow(self) -> None:
        """Count a prompt that was too long for the model's context."""
        self.num_overflows += 1
        self._num_turns_at_overflow = self.num_turns

    def expire(self, now: float) -> bool:
        """Close the session if it is open and past a deadline; returns whether it was."""
        reason = self._overdue(now) if self.is_open else ""
        if reason:
            self.state = SessionState.EXPIRED
            self._expired_because = reason
        return bool(reason)

    def finish(self, outcome: SessionOutcome, settings: SessionSettings) -> None:
        """End the session, so that ``rows`` can be made; only the first call counts.

        Rows are abandoned if the session has expired. They are truncated if a cap refused a request or the last one did not fit the model's
        context. Raises ``SessionClosedError`` if the session is deleted.
        """
        if self.state is SessionState.FINISHED:
            return
        if self.state is SessionState.DELETED:
            raise self._closed_because(f"is {self.state}")
        self._side_figures = self.side_figures
        overruled = {
            "is_truncated": outcome.is_truncated or self.was_cut_short,
            "is_abandoned": outcome.is_abandoned or self.state is SessionState.EXPIRED,
        }
        self._make_rows = partial(rows, self.tree, outcome.model_copy(update=overruled), settings)
        self.state = SessionState.FINISHED

    def rows(self) -> tuple[Trajectory, ...]:
        """The rows of a finished session, none of any other. The first call makes them and drops the turns; it may run in a thread."""
        with self._making_rows:
            if self._make_rows is not None:
                self._rows, self._make_rows = self._make_rows(), None
                self.tree.close()
            return self._rows

    def delete(self) -> None:
        """Drop everything but figures."""
        self.state = SessionState.DELETED
        self._rows, self._make_rows = (), None
        self.tree.close()

    def _closed_because(self, reason: str) -> SessionClosedError:
        return SessionClosedError(f"session {self.id} {reason}; begin a new session")

    def _cap_reached(self) -> str:
        """The cap that refuses the next request, in words; empty if none does."""
        limits = self.limits
        if self.num_turns >= limits.max_turns:
            return f"has sampled {self.num_turns} turns, the most it may (max_turns={limits.max_turns})"
        if self.num_sampled_tokens >= limits.max_tokens:
            return f"has sampled {self.num_sampled_tokens} tokens, the most it may (max_tokens={limits.max_tokens})"
        if self.num_overflows >= limits.max_overflows:
            return (
                f"has overflowed the model's context {self.num_overflows} times, as often as it may "
                f"(max_overflows={limits.max_overflows})"
            )
        return ""

    def _overdue(self, now: float) -> str:
        """The deadline that is past, in words; empty if none is."""
        limits = self.limits
        if now >= self._created_at + limits.lifetime_s:
            return f"has expired: its lifetime of {limits.lifetime_s:g} s is over (lifetime_s)"
        if not self.num_requests_open and now >= self._active_at + limits.idle_timeout_s:
            return f"has expired: it was idle for {limits.idle_timeout_s:g} s (idle_timeout_s)"
        return ""
