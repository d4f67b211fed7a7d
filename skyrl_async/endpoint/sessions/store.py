"""All sessions of one front end, with the keys that reach them.

Only the digest of a key is kept. Finished and expired sessions are forgotten in time, so that the open ones bound the memory. Does not
know HTTP, engines or what is in a turn.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from hmac import compare_digest

from skyrl_async.endpoint.sessions.session import Session, SessionState
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionOutcome, SessionSampling, SessionSettings
from skyrl_async.errors import SessionNotFoundError

logger = logging.getLogger(__name__)

_NOT_TRAINED = (
    "session %s: tokens sampled under a grammar are not trained: their log-probs are of the tokens that it left, the trainer's of all; "
    "trainer.algorithm.policy_loss_type=decoupled_ppo or rollout_is trains them (said once)"
)
_NO_DIGEST = bytes(32)
"""Compared with if there is no session, so that a wrong id takes as long as a wrong secret."""


class SessionStore:
    """Creates, finds, finishes, expires and forgets sessions.

    Args:
        settings: how sessions are treated, and which front end this is.
        clock: seconds, never going back.
        max_finished: finished and expired sessions kept until they are deleted, >= 1; beyond it the one closed first is forgotten.
    """

    def __init__(self, settings: SessionSettings, *, clock: Callable[[], float], max_finished: int = 1000) -> None:
        self.settings = settings
        self._has_warned = False
        self.clock = clock
        self._key_start = f"sk-{settings.front_end}"
        self._max_finished = max_finished
        self._sessions: dict[str, Session] = {}
        self._digests: dict[str, bytes] = {}
        self._closed: dict[str, None] = {}
        """Ids of finished and expired sessions, in the order of closing."""
        self._totals: Counter[str] = Counter()

    def create(
        self,
        *,
        sampling: SessionSampling | None = None,
        priority: int = 0,
        label: str | None = None,
        limits: SessionLimits | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, which is not kept."""
        session_id, secret = secrets.token_hex(8), secrets.token_hex(24)
        key = f"{self._key_start}-{session_id}-{secret}"
        session = Session(
            session_id,
            limits=limits or self.settings.limits,
            now=self.clock(),
            sampling=sampling,
            priority=priority,
            label=label,
        )
        self._sessions[session_id] = session
        self._digests[session_id] = key_digest(key)
        self._totals["created"] += 1
        return session, key

    def authenticate(self, key: str) -> Session | None:
        """The session of a key, closed ones included (they refuse requests with a reason); None for any other key. Constant time."""
        session_id = key[len(self._key_start) + 1 :].partition("-")[0]
        is_right = compare_digest(key_digest(key), self._digests.get(session_id, _NO_DIGEST))
        return self._sessions.get(session_id) if is_right else None

    def get(self, session_id: str) -> Session:
        """The session of an id; ``SessionNotFoundError`` if it never was, was deleted or is forgotten."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(
                f"there is no session {session_id!r}: it was never created here, or was deleted, or "
                f"{self._max_finished} others were closed since"
            )
        return session

    def finish(self, session_id: str, outcome: SessionOutcome) -> Session:
        """End the session as ``Session.finish`` does, and return it; ``Session.rows`` makes its rows."""
        session = self.get(session_id)
        if session.expire(self.clock()):
            self._totals["expired"] += 1
        is_first = session.state is not SessionState.FINISHED
        is_constrained = any(turn.is_constrained for turn in session.tree.turns)
        if is_constrained and not (self.settings.trains_constrained or self._has_warned):
            self._has_warned = True
            logger.warning(_NOT_TRAINED, session_id)
        session.finish(outcome, self.settings)
        if is_first:
            self._totals["finished"] += 1
            self._keep_closed(session)
        return session

    def delete(self, session_id: str) -> None:
        """Delete a session, so that its key is unknown; no-op for an unknown id."""
        self._drop(session_id, "deleted")

    def sweep(self) -> list[Session]:
        """Expire the open sessions that are past a deadline, and return them."""
        now = self.clock()
        expired = [session for session in self._sessions.values() if session.expire(now)]
        self._totals["expired"] += len(expired)
        for session in expired:
            self._keep_closed(session)
        return expired

    def statistics(self) -> dict[str, float]:
        """Sessions by state and requests open now, and totals since the start."""
        states = Counter(session.state for session in self._sessions.values())
        now = {f"{state}_sessions": states[state] for state in SessionState if state is not SessionState.DELETED}
        totals = {
            f"{name}_total": self._totals[name] for name in ("created", "finished", "expired", "deleted", "forgotten")
        }
        num_requests = sum(session.num_requests_open for session in self._sessions.values())
        return {name: float(value) for name, value in (now | totals | {"open_requests": num_requests}).items()}

    def _keep_closed(self, session: Session) -> None:
        self._closed.pop(session.id, None)
        self._closed[session.id] = None
        while len(self._closed) > self._max_finished:
            self._drop(next(iter(self._closed)), "forgotten")

    def _drop(self, session_id: str, total: str) -> None:
        """Delete a session, and count it in ``total``; no-op for an unknown id."""
        self._closed.pop(session_id, None)
        self._digests.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.delete()
            self._totals[total] += 1


def front_end_of(key: str) -> int | None:
    """Index of the front end that holds the session of a key; None if it is no session's key."""
    parts = key.rsplit("-", 3)
    is_key = len(parts) == 4 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) <= 9
    return int(parts[1]) if is_key else None


def key_digest(key: str) -> bytes:
    """What is kept of a key."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
