"""Recognises the resends of a session's requests, so that each request is sampled once and answered as often as it is sent.

A request is known by its idempotency key, or else by path and body. A resend is marked by its key or by an SDK's retry header. It

    joins     the request it repeats while that one is in flight, or was sampled to its end for a connection that broke
    replays   the answer that a client was already sent
    begins    a new request in all other cases: equal requests without a mark are separate samples
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from starlette.requests import Request

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.guard import body_of
from skyrl_async.endpoint.requests.shared_request import Produce, SharedRequest

_RETRY_HEADER = "x-stainless-retry-count"
"""How the SDKs of OpenAI and Anthropic mark a resend."""
_KEY_HEADERS = ("idempotency-key", "x-idempotency-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """What tells one request from another."""

    body: bytes
    """Digest of path and body."""
    key: bytes | None
    """Digest of its idempotency key."""
    is_resend: bool
    """The client's SDK counts it as a retry."""

    @property
    def name(self) -> bytes:
        """Shared by a request and its resends."""
        return self.body if self.key is None else self.key


def identity_of(request: Request) -> RequestIdentity:
    """The identity of ``request``."""
    count = request.headers.get(_RETRY_HEADER, "")
    key = next((request.headers[name] for name in _KEY_HEADERS if request.headers.get(name)), None)
    return RequestIdentity(
        body=body_of(request.scope).digest,
        key=None if key is None else hashlib.sha256(b"key\0" + key.encode()).digest(),
        is_resend=count.isdecimal() and bool(count.strip("0")),
    )


class SessionRequests:
    """The requests that one session has in flight, and the newest ones it had.

    Args:
        max_concurrent_requests: generations at once, and idempotency keys remembered: a resending client has no more requests open.
    """

    def __init__(self, max_concurrent_requests: int) -> None:
        self.limit = asyncio.Semaphore(max_concurrent_requests)
        self._in_flight: dict[bytes, list[SharedRequest]] = {}
        """By name; several under one name are separate samples."""
        self._max_keys = max_concurrent_requests
        self._bodies: dict[bytes, bytes] = {}
        """Key -> body, of the newest keys."""
        self._replies: dict[bytes, Produce] = {}
        """Key -> its answer, to be replayed."""
        self._last: tuple[bytes, Produce] | None = None
        """Name and answer of the request without a key that was delivered last."""
        self._unread: tuple[bytes, SharedRequest] | None = None
        """The newest request that was sampled to its end when its connection broke, with its name."""
        self._cut_off: Counter[bytes] = Counter()
        """Names of the newest requests whose broken connections cancelled their sampling, less their resends."""

    def require_same_body(self, identity: RequestIdentity) -> None:
        """Raise ``ApiError`` if the key came with another body."""
        if identity.key is not None and self._bodies.get(identity.key, identity.body) != identity.body:
            raise ApiError(
                400,
                "this idempotency key came with another body before; send each request under a key of its own",
                code="idempotency_error",
                param="Idempotency-Key",
            )

    def replay(self, identity: RequestIdentity) -> Produce | None:
        """The answer that a client was already sent, if this request resends that one and nothing equal is in flight."""
        name = identity.name
        if identity.key is not None:
            return self._replies.get(identity.key)
        if not identity.is_resend or self._last is None or self._last[0] != name:
            return None
        return None if name in self._in_flight or self._cut_off[name] else self._last[1]

    def join(self, identity: RequestIdentity) -> SharedRequest | None:
        """The request that this one resends: one whose connection broke or, for a marked resend, one in flight."""
        name = identity.name
        if self._unread is not None and self._unread[0] == name:
            unread, self._unread = self._unread[1], None
            self._add(identity, unread)
            return unread
        if not identity.is_resend and identity.key is None:
            return None
        if self._cut_off[name]:  # it resends that one, and none that is in flight
            self._cut_off[name] -= 1
            return None
        alive = next((one for one in self._in_flight.get(name, ()) if not one.has_failed), None)
        if alive is not None:  # last in line from now on: several resends do not all join the same one
            self._in_flight[name].remove(alive)
            self._in_flight[name].append(alive)
        return alive

    def begin(self, identity: RequestIdentity, produce: Produce, commit: Callable[[], None]) -> SharedRequest:
        """A new request in flight; ``commit`` is called once a client has its whole answer."""
        # Once an equal request without a mark is answered, what was cut off before that one will not be resent.
        num_given_up = 0 if identity.is_resend else self._cut_off[identity.name]

        def delivered(shared: SharedRequest) -> None:
            commit()
            self._delivered(identity, shared)
            if num_given_up:
                self._cut_off[identity.name] = max(0, self._cut_off[identity.name] - num_given_up)

        if self._last is not None and self._last[0] == identity.name:
            self._last = None  # from now on it is this one that would be resent
        shared = SharedRequest(produce, on_delivered=delivered, on_abandoned=partial(self._abandoned, identity))
        self._add(identity, shared)
        return shared

    def cancel(self, reason: Exception) -> None:
        """Cancel all requests in flight: their clients are told ``reason``."""
        for shared in [*chain.from_iterable(self._in_flight.values())]:
            shared.cancel(reason)

    def _add(self, identity: RequestIdentity, shared: SharedRequest) -> None:
        """Record that ``shared`` is in flight."""
        self._in_flight.setdefault(identity.name, []).append(shared)
        if identity.key is not None:
            self._bodies[identity.key] = identity.body
            while len(self._bodies) > self._max_keys:
                oldest = next(iter(self._bodies))
                del self._bodies[oldest]
                self._replies.pop(oldest, None)

    def _abandoned(self, identity: RequestIdentity, shared: SharedRequest) -> None:
        """The last client of ``shared`` disconnected without its answer."""
        name = identity.name
        self._remove(name, shared)
        if shared.is_done and not shared.has_failed:
            self._unread = name, shared
        elif not shared.has_failed:
            if name not in self._cut_off:
                self._cut_off.clear()
            self._cut_off[name] += 1

    def _delivered(self, identity: RequestIdentity, shared: SharedRequest) -> None:
        """A client has the whole answer."""
        self._remove(identity.name, shared)
        if identity.key is None:
            self._last = identity.name, shared.replay()
        elif identity.key in self._bodies:
            self._replies[identity.key] = shared.replay()

    def _remove(self, name: bytes, shared: SharedRequest) -> None:
        equal = self._in_flight.get(name, [])
        if shared in equal:
            equal.remove(shared)
        if not equal:
            self._in_flight.pop(name, None)
