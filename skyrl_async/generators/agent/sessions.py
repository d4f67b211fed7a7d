"""Client of the endpoint's session API: creates, rewards and finishes sessions, for generators anywhere.

Flows in: addresses of endpoints and their controller key. Flows out: sessions with their own keys for harnesses, and training rows.
Does not know the clients of a session, nor the endpoint's storage.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from json import JSONDecodeError
from typing import Any, Self, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import (
    GenerationError,
    InvalidResultError,
    OutageError,
    SessionClosedError,
    SessionNotFoundError,
    SkyRLAsyncError,
)
from skyrl_async.rollout.group_state import from_json
from skyrl_async.runtime.outages import Outages, Resending
from skyrl_async.types import RowMessage, SamplingParams, Trajectory, TurnSpan

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CALL_TIMEOUT_S = 60.0
_NUM_CONNECT_RETRIES = 2
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
_HURRIED_RELEASE_S = 1.0
"""Most seconds for deleting a session after a cancellation or an outage; otherwise the session expires."""


_NOT_ACCEPTED = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)
"""Errors after which a request is sent to the next front end."""


class SessionPool:
    """Creates sessions at one or more front ends of an endpoint, round robin.

    Calls are sent again after a refused or broken connection (a creation to the next front end), for as long as an outage may last.
    Every call but the creation is idempotent, and a session created twice expires unused.
    """

    def __init__(
        self,
        urls: Sequence[str],
        controller_key: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        outages: Outages | None = None,
        outage_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            urls: roots of the front ends, without ``/v1``; at least one.
            controller_key: may create, reward and finish sessions; never goes to a harness.
            transport: carries the calls; None is TCP.
            outages: the end of an outage is awaited before a call is sent again; None: unknown.
            outage_timeout_s: how long an unanswered call is sent again.
        """
        if not urls:
            raise ValueError("urls must name at least one endpoint, got none")
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._next_url = itertools.cycle(range(len(self._urls)))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._resending = Resending(outages or Outages(), outage_timeout_s)
        # A transport of its own also keeps proxies of the environment out of the way.
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {controller_key}"},
            timeout=_CALL_TIMEOUT_S,
            transport=transport or httpx.AsyncHTTPTransport(retries=_NUM_CONNECT_RETRIES, limits=limits),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Open sessions stay open until they expire."""
        await self._client.aclose()

    @asynccontextmanager
    async def session(
        self,
        *,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        label: str | None = None,
        lifetime_s: float | None = None,
    ) -> AsyncIterator["AgentSession"]:
        """A session that exists during the block.

        A block without ``finish`` or ``abandon`` abandons the session at its end, so that ``trajectories`` are known. After a
        cancellation or an outage the session is only deleted, within a second. Deletion is best effort, since sessions expire.

        Args:
            sampling: the trainer's parameters; they replace the harness's.
            priority: of its requests; smaller is served first.
            label: name in the endpoint's log.
            lifetime_s: it expires then, and not for being idle; None: as the endpoint is configured.

        Raises:
            GenerationError: the endpoint fails or refuses, or (``OutageError``) cannot be reached. The session's methods raise the same,
                and ``SessionError`` if the session is gone or closed.
        """
        limits = None if lifetime_s is None else {"idle_timeout_s": lifetime_s, "lifetime_s": lifetime_s}
        session = await self._create(sampling, {"priority": priority, "label": label, "limits": limits})
        is_hurried = False
        try:
            yield session
        except (asyncio.CancelledError, OutageError):
            is_hurried = True
            raise
        finally:
            await session._release(is_hurried=is_hurried)

    async def _create(self, sampling: SamplingParams | None, others: Mapping[str, Any]) -> "AgentSession":
        asked = None if sampling is None else {name: getattr(sampling, name) for name in _SAMPLING}
        body = {**others, "sampling": asked}
        first = next(self._next_url)
        roots = (*self._urls[first:], *self._urls[:first])
        roots = roots if len(roots) > 1 else roots * 2
        read, expected = (
            partial(AgentSession, self._client, self._resending),
            "id, api_key, base_url, model and max_model_len",
        )
        send = partial(_ask, self._client, "POST", roots, "/sessions", body, read, expected)
        return await self._resending.until_answered(send)


class AgentSession:
    """A conversation, possibly with several branches, at the endpoint under its own key."""

    def __init__(self, client: httpx.AsyncClient, resending: Resending, root: str, created: Mapping[str, Any]) -> None:
        """``created`` is the endpoint's answer; raises ``KeyError`` or ``TypeError`` if it lacks a field."""
        self.id, self.api_key = created["id"], created["api_key"]
        self.base_url, self.model = created["base_url"], created["model"]
        self.max_model_len = int(created["max_model_len"])
        self._client = client
        self._resending = resending
        self._is_releasing = False
        self._root = root
        self._trajectories: tuple[Trajectory, ...] | None = None

    def __repr__(self) -> str:
        return f"AgentSession(id={self.id!r}, base_url={self.base_url!r}, model={self.model!r})"

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Training rows, one per kept branch; empty until the session is finished or abandoned."""
        return self._trajectories or ()

    async def status(self) -> dict[str, Any]:
        """Return the session's state, counts, ``messages`` of the newest turn's conversation, and ``last_text``."""
        return await self._ask("GET", "", None, lambda _, found: dict(found), "an object")

    async def finish(
        self,
        reward: float,
        *,
        turn_rewards: Sequence[float | NDArray[np.float64]] = (),
        metrics: Mapping[str, float] | None = None,
        is_truncated: bool = False,
    ) -> tuple[Trajectory, ...]:
        """Reward and close the session; returns its training rows. A second call returns the same rows.

        Args:
            reward: finite; ``ValueError`` names the session otherwise.
            turn_rewards: what the first turns earned, in the order of replies, each a number or (T,) of its sampled tokens; they sum to
                ``reward``. Empty: only the whole is known.
            metrics: figures of the episode; values that are not finite are left out, since JSON cannot hold them.
            is_truncated: a budget ended it, not the policy.
        """
        for name, of in [("reward", reward), *((f"turn_rewards[{turn}]", of) for turn, of in enumerate(turn_rewards))]:
            values = np.atleast_1d(of)
            for token in np.flatnonzero(~np.isfinite(values)):
                place = f" for token {token}" if np.ndim(of) else ""
                raise ValueError(f"{name} of session {self.id} must be finite, got {values[token]}{place}")
        rewards = [{"turn": turn, "value": np.asarray(value).tolist()} for turn, value in enumerate(turn_rewards)]
        return await self._finish(reward, metrics, is_truncated=is_truncated, rewards=rewards)

    async def abandon(self, *, metrics: Mapping[str, float] | None = None) -> tuple[Trajectory, ...]:
        """Close the session without a reward; returns its rows, all masked."""
        return await self._finish(0.0, metrics, is_abandoned=True)

    async def _finish(self, reward: float, metrics: Mapping[str, float] | None, **how: Any) -> tuple[Trajectory, ...]:
        if self._trajectories is None:
            numbers = {name: _number(f"metrics[{name!r}]", value) for name, value in (metrics or {}).items()}
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            body = {"reward": _number("reward", reward), "metrics": finite, **how}
            self._trajectories = await self._ask("POST", "/finish", body, _rows, "training rows")
        return self._trajectories

    async def _release(self, *, is_hurried: bool) -> None:
        """Abandon the session if it is open, and delete it. Failures are logged: the block's own result matters more."""
        self._is_releasing = True
        try:
            async with asyncio.timeout(_HURRIED_RELEASE_S if is_hurried else None):
                try:
                    if not is_hurried:
                        await self.abandon()
                finally:
                    await self._ask("DELETE", "", None, lambda *_: None, "nothing")
        except (TimeoutError, SkyRLAsyncError) as error:
            logger.warning("session %s could not be released, and will expire: %s", self.id, repr(error))

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[str, Any], T], expected: str
    ) -> T:
        roots, path = (self._root, self._root), f"/sessions/{self.id}{path}"
        send = partial(_ask, self._client, method, roots, path, body, read, expected)
        return await (send() if self._is_releasing else self._resending.until_answered(send))


async def _ask(
    client: httpx.AsyncClient,
    method: str,
    roots: Sequence[str],
    path: str,
    body: Mapping[str, Any] | None,
    read: Callable[[str, Any], T],
    expected: str,
) -> T:
    """Send a request to the first of ``roots`` that accepts it, and ``read`` that root's JSON answer (None without content).

    Raises ``SessionNotFoundError``, ``SessionClosedError``, ``OutageError`` or ``GenerationError``, each with the request.
    """
    for num_tries, root in enumerate(roots, start=1):
        asked = f"{method} {root}{path}"
        try:
            response = await client.request(method, f"{root}{path}", json=body)
        except httpx.HTTPError as error:
            if num_tries == len(roots) or not isinstance(error, _NOT_ACCEPTED):
                kind = OutageError if isinstance(error, (*_NOT_ACCEPTED, httpx.TimeoutException)) else GenerationError
                raise kind(f"{asked} failed: {type(error).__name__}: {error}") from error
            logger.info("%s is sent again: %r", asked, error)
            continue
        if not response.is_success:
            code, words = _refusal(response)
            raise _REFUSALS.get(code, GenerationError)(f"{asked} was answered {response.status_code}: {words}")
        try:
            return read(root, response.json() if response.content else None)
        except (KeyError, TypeError, ValueError) as error:
            is_json = not isinstance(error, JSONDecodeError)  # an answer that is JSON may hold a session's key
            found = f"others: {type(error).__name__}: {error}" if is_json else repr(response.text[:200])
            raise GenerationError(f"{asked} must answer with {expected}, got {found}") from error
    raise AssertionError("unreachable")


_REFUSALS: dict[str, type[SkyRLAsyncError]] = {
    "session_not_found": SessionNotFoundError,
    "session_closed": SessionClosedError,
}


def _refusal(response: httpx.Response) -> tuple[str, str]:
    """Code and message of an error body."""
    try:
        error = response.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", repr(response.text[:200])


def _number(name: str, value: Any) -> float:
    """A number of any kind, such as numpy's. Raises ``InvalidResultError``."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidResultError(f"{name} of a session must be a number, got {value!r}") from error


def _rows(_root: str, found: Any) -> tuple[Trajectory, ...]:
    return tuple(_trajectory(**row) for row in found["trajectories"])


def _trajectory(
    *,
    response_token_ids: Any,
    policy_versions: list[Any],
    turn_rewards: Sequence[float] = (),
    turn_spans: Sequence[Any] = (),
    messages: Sequence[Any] = (),
    **others: Any,
) -> Trajectory:
    """A row from its fields as JSON."""
    versions = VersionSpans.from_json(policy_versions, len(response_token_ids))
    said = from_json(tuple[RowMessage, ...], messages, "messages")
    return Trajectory(
        response_token_ids=response_token_ids,
        versions=versions,
        turn_rewards=tuple(turn_rewards),
        turn_spans=from_json(tuple[TurnSpan, ...], turn_spans, "turn_spans"),
        messages=said,
        **others,
    )
