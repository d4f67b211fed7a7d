"""One session: its turns, how it samples, and when it accepts no more.

    open ──finish──> finished ──delete──> deleted
      └──expire──> expired ──finish (abandoned)──┘

Flows in: requests that begin and end, overflows, the time. Flows out: whether a request may begin, the tree that turns are committed
to, and the rows of a finished session. Does not know keys, clocks, HTTP or how many sessions there are.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from skyrl_async.endpoint.sessions.rows import BranchPolicy, rows
from skyrl_async.endpoint.sessions.tree import TurnTree
from skyrl_async.errors import SessionClosedError, StateError
from skyrl_async.types import FinishReason, Message, SamplingParams, Trajectory


class SessionState(StrEnum):
    """Where a session stands. Only an open one accepts requests and turns."""

    OPEN = "open"
    FINISHED = "finished"
    EXPIRED = "expired"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a session may use; ``ValueError`` names a field that is no positive number."""

    max_turns: int = 1000
    """Turns sampled; the next request is refused. Requests in flight at that moment still count."""
    max_tokens: int = 1_000_000
    """Tokens sampled in all turns."""
    idle_timeout_s: float = 600.0
    """Time without an open request after which the session expires."""
    lifetime_s: float = 7200.0
    """Age at which it expires, open requests or not."""
    max_overflows: int = 3
    """Prompts too long for the model's context; the next request is refused."""
    max_concurrent_requests: int = 16
    """Requests sampled at once; whoever serves them lets more wait in line."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_overflows", "max_concurrent_requests"):
            _require(_is_number(getattr(self, name), int) and getattr(self, name) >= 1, name, "an integer >= 1", self)
        for name in ("idle_timeout_s", "lifetime_s"):
            _require(_is_number(getattr(self, name), int, float) and getattr(self, name) > 0, name, "> 0 seconds", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSampling:
    """How the trainer samples a session, whatever the harness asks; ranges as in ``SamplingParams``, checked likewise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    """Most new tokens of a turn; a request may ask for fewer. None: what the request asks."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _require(_is_number(getattr(self, name), int, float), name, "a number", self)
        _require(self.temperature >= 0, "temperature", ">= 0", self)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self)
        _require(_is_number(self.top_k, int) and self.top_k >= 0, "top_k", "an integer >= 0", self)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self)
        is_fine = self.max_tokens is None or (_is_number(self.max_tokens, int) and self.max_tokens >= 1)
        _require(is_fine, "max_tokens", "an integer >= 1 or null", self)

    def applied_to(self, asked: SamplingParams) -> SamplingParams:
        """The request's parameters with the trainer's distribution in place of the harness's.

        Penalties are off, because log-probs recomputed by the trainer know none, and so is the seed: harnesses that all send the same
        would make a group of equal samples.
        """
        return replace(
            asked,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            ignore_eos=False,
            seed=None,
            max_tokens=asked.max_tokens if self.max_tokens is None else min(asked.max_tokens, self.max_tokens),
        )


class Session:
    """One harness's conversation with the policy. Times are seconds of the caller's clock.

    Args:
        session_id: unique; not secret.
        sampling: the trainer's; None leaves sampling to the requests.
        priority: of its requests in the engines; smaller is served first.
        label: for logs and status.
        limits: when it accepts no more.
        now: it is created now.
    """

    def __init__(
        self,
        session_id: str,
        *,
        limits: SessionLimits,
        now: float,
        sampling: SessionSampling | None = None,
        priority: int = 0,
        label: str | None = None,
    ) -> None:
        self.id = session_id
        self.sampling = sampling
        self.priority = priority
        self.label = label
        self.limits = limits
        self._state = SessionState.OPEN
        self._expired_because = ""
        self._tree = TurnTree()
        self._rows: tuple[Trajectory, ...] = ()
        self._side_figures = (0, 0)
        self._make_rows: Callable[[], tuple[Trajectory, ...]] | None = None
        self._making_rows = threading.Lock()
        self._created_at = self._active_at = now
        self._num_requests_open = 0
        self._num_overflows = 0
        self._num_turns_at_overflow: int | None = None
        self._was_refused = False

    def __repr__(self) -> str:
        return f"Session(id={self.id!r}, label={self.label!r}, state={str(self._state)!r}, num_turns={self.num_turns})"

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def is_open(self) -> bool:
        return self._state is SessionState.OPEN

    @property
    def tree(self) -> TurnTree:
        """What turns are matched against and committed to; ``SessionClosedError`` unless the session is open."""
        self._check_open()
        return self._tree

    @property
    def num_turns(self) -> int:
        return self._tree.num_turns

    @property
    def num_sampled_tokens(self) -> int:
        return self._tree.num_sampled_tokens

    @property
    def has_constrained_turns(self) -> bool:
        """Whether a grammar constrained a turn; False once the turns are let go of."""
        return any(turn.is_constrained for turn in self._tree.turns)

    @property
    def num_requests_open(self) -> int:
        return self._num_requests_open

    @property
    def num_overflows(self) -> int:
        return self._num_overflows

    @property
    def was_cut_short(self) -> bool:
        """By a cap, or by the model's context: no turn was sampled since a prompt was too long."""
        return self._was_refused or self._num_turns_at_overflow == self.num_turns

    @property
    def side_figures(self) -> tuple[int, int]:
        """Side requests among the turns, and the tokens sampled in them."""
        if not self._tree.is_closed:
            turns = self._tree.side_requests
            self._side_figures = len(turns), sum(len(turn.addition.token_ids) for turn in turns)
        return self._side_figures

    @property
    def newest_messages(self) -> tuple[Message, ...]:
        """The conversation of the newest turn, its reply included; empty without turns. Side requests are none here and below."""
        return self._tree.newest_messages

    @property
    def last_text(self) -> str | None:
        """What the policy wrote in the newest turn, as it was sampled; None without turns."""
        newest = self._tree.newest_turn
        return None if newest is None else newest.addition.text

    @property
    def last_finish_reason(self) -> FinishReason | None:
        """What ended the newest turn; None without turns."""
        newest = self._tree.newest_turn
        return None if newest is None else newest.addition.finish_reason

    def begin_request(self, now: float) -> None:
        """A request arrives. ``SessionClosedError`` when the session is closed, past a deadline or at a cap; then it did not begin."""
        self._check_open()
        overdue, capped = self._overdue(now), self._cap_reached()
        self._was_refused |= bool(capped)
        reason = overdue or capped
        if reason:
            raise SessionClosedError(f"session {self.id} {reason}; begin a new session")
        self._num_requests_open += 1

    def end_request(self, now: float) -> None:
        """A request that began is over, however it ended; also after the session was closed."""
        if self._num_requests_open < 1:
            raise StateError(f"session {self.id} has no request open that could end")
        self._num_requests_open -= 1
        self._active_at = now

    def count_overflow(self) -> None:
        """A prompt was too long for the model's context."""
        self._num_overflows += 1
        self._num_turns_at_overflow = self.num_turns

    def expire(self, now: float) -> bool:
        """Close an open session that is past a deadline; whether it was."""
        reason = self._overdue(now) if self.is_open else ""
        if reason:
            self._state = SessionState.EXPIRED
            self._expired_because = reason
        return bool(reason)

    def finish(
        self,
        *,
        reward: float,
        branches: BranchPolicy = BranchPolicy.ALL,
        trains_constrained: bool = False,
        trains_side_requests: bool = False,
        metrics: Mapping[str, float] | None = None,
        is_truncated: bool = False,
        is_abandoned: bool = False,
    ) -> tuple[Trajectory, ...]:
        """The session's rows; the first call counts, later ones get the same. The turns are let go of, figures remain.

        Rows are abandoned when the session has expired, and truncated when a cap refused a request or the last one did not fit the
        model's context. Raises ``ValueError`` for a reward that is no finite number, ``SessionClosedError`` when it is deleted.
        """
        self.end(
            reward=reward,
            branches=branches,
            trains_constrained=trains_constrained,
            trains_side_requests=trains_side_requests,
            metrics=metrics,
            is_truncated=is_truncated,
            is_abandoned=is_abandoned,
        )
        return self.rows()

    def end(
        self,
        *,
        reward: float,
        branches: BranchPolicy = BranchPolicy.ALL,
        trains_constrained: bool = False,
        trains_side_requests: bool = False,
        metrics: Mapping[str, float] | None = None,
        is_truncated: bool = False,
        is_abandoned: bool = False,
    ) -> None:
        """``finish`` without its rows, which ``rows`` makes."""
        if self._state is SessionState.FINISHED:
            return
        if self._state is SessionState.DELETED:
            self._check_open()
        if not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number, got {reward!r}")
        self._side_figures = self.side_figures
        self._make_rows = partial(
            rows,
            self._tree,
            reward=reward,
            branches=branches,
            trains_constrained=trains_constrained,
            trains_side_requests=trains_side_requests,
            metrics=metrics,
            is_truncated=is_truncated or self.was_cut_short,
            is_abandoned=is_abandoned or self._state is SessionState.EXPIRED,
        )
        self._state = SessionState.FINISHED

    def rows(self) -> tuple[Trajectory, ...]:
        """The rows of a finished session, none of any other. The first call makes them, which may be in a thread."""
        with self._making_rows:
            if self._make_rows is not None:
                self._rows, self._make_rows = self._make_rows(), None
                self._tree.close()
            return self._rows

    def delete(self) -> None:
        """Let go of everything but figures."""
        self._state = SessionState.DELETED
        self._rows, self._make_rows = (), None
        self._tree.close()

    def _check_open(self) -> None:
        if not self.is_open:
            reason = self._expired_because or f"is {self._state}"
            raise SessionClosedError(f"session {self.id} {reason}; begin a new session")

    def _cap_reached(self) -> str:
        """Which cap refuses the next request, in words; empty when none does."""
        limits = self.limits
        if self.num_turns >= limits.max_turns:
            return f"has sampled {self.num_turns} turns, the most it may (max_turns={limits.max_turns})"
        if self.num_sampled_tokens >= limits.max_tokens:
            return f"has sampled {self.num_sampled_tokens} tokens, the most it may (max_tokens={limits.max_tokens})"
        if self._num_overflows >= limits.max_overflows:
            return (
                f"has overflowed the model's context {self._num_overflows} times, as often as it may "
                f"(max_overflows={limits.max_overflows})"
            )
        return ""

    def _overdue(self, now: float) -> str:
        """Which deadline is past, in words; empty when none is."""
        limits = self.limits
        if now >= self._created_at + limits.lifetime_s:
            return f"has expired: its lifetime of {limits.lifetime_s:g} s is over (lifetime_s)"
        if not self._num_requests_open and now >= self._active_at + limits.idle_timeout_s:
            return f"has expired: it was idle for {limits.idle_timeout_s:g} s (idle_timeout_s)"
        return ""


def _is_number(value: object, *kinds: type) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, kinds) and not isinstance(value, bool) and not is_nan


def _require(is_fine: bool, name: str, expected: str, owner: object) -> None:
    if not is_fine:
        raise ValueError(f"{name} must be {expected}, got {getattr(owner, name)!r}")
