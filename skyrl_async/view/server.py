"""Serves the page. A process of its own that only reads files.

GET /                                   the page
GET /api/overview                       runs, alarms, differing settings; asked every two seconds
GET /api/series?run=0&names=a,b         figures by step; &by=step&begin=10&end=20: only those between
GET /api/samples?run=0&begin=0          figures of rows, at most 50,000 per answer
GET /api/sample?run=0&row=17            one row: texts, tokens, log-probs
GET /api/find?run=0&words=...           rows with these words in a text; &begin=17: from that row on
GET /api/spans?run=0&begin=0&end=60     spans of the trace

Answers are JSON, but for the page. An error is ``{"error": "..."}``. A server that other machines can reach wants the token of its address
with each request, in the query or as a cookie.
"""

import hmac
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.view.run import EMPTY, ViewedRun, differences

PAGE = Path(__file__).with_name("page")
LOOPBACK = ("127.0.0.1", "localhost")
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_COOKIE = "skyrl_async_view"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
"""Text of a sample that got into the page as code would not run."""


def overview(runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """All runs at a glance; ``error`` is why one cannot be read."""
    settings = [run.settings() for run in runs] if len(runs) > 1 else [{}]
    counts = Counter(run.name for run in runs)
    names = [run.name if counts[run.name] == 1 else str(run.directory) for run in runs]

    def at_a_glance(run: ViewedRun) -> dict[str, Any]:
        try:
            return run.overview()
        except (SkyRLAsyncError, OSError) as error:  # the other runs are shown
            return EMPTY | {"directory": str(run.directory), "error": str(error)}

    found = [
        at_a_glance(run) | {"name": name, "has_settings": bool(of_run)}
        for run, name, of_run in zip(runs, names, settings, strict=True)
    ]
    return {"runs": found, "differences": differences(settings)}


def make_app(runs: Sequence[ViewedRun], token: str | None = None) -> Starlette:
    """The application. With a ``token``, every request must bring it; without one, only names of this machine are answered."""

    def answers(answer: Callable[[ViewedRun, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            def found() -> Any:
                return answer(runs[_integer(request, "run", 0, len(runs) - 1)], request)

            return await _respond(found)

        return respond

    async def all_runs(_: Request) -> Response:
        return await _respond(lambda: overview(runs))

    async def page(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    def series(run: ViewedRun, request: Request) -> Any:
        asked = request.query_params
        by = asked.get("by", "step")
        if by not in ("step", "time_s"):
            raise ValueError(f"by must be step or time_s, got {by!r}")
        return run.series(asked.get("names", "").split(","), by, _number(request, "begin"), _number(request, "end"))

    def samples(run: ViewedRun, request: Request) -> Any:
        return run.samples(_integer(request, "begin", 0))

    def sample(run: ViewedRun, request: Request) -> Any:
        return run.sample(_integer(request, "row", None))

    def find(run: ViewedRun, request: Request) -> Any:
        return run.find(request.query_params.get("words", ""), _integer(request, "begin", 0))

    def spans(run: ViewedRun, request: Request) -> Any:
        return run.spans(_number(request, "begin"), _number(request, "end"))

    routes = [
        Route("/", page),
        Route("/api/overview", all_runs),
        *(Route(f"/api/{name.__name__}", answers(name)) for name in (series, samples, sample, find, spans)),
        Mount("/", StaticFiles(directory=PAGE)),
    ]
    guard = (
        Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)  # a page elsewhere may name this one
        if token is None
        else Middleware(_TokenRequired, token=token)
    )
    return Starlette(routes=routes, middleware=[guard, Middleware(_Headers)])


async def _respond(answer: Callable[[], Any]) -> Response:
    try:
        status, found = 200, await run_in_threadpool(answer)
    except ValueError as error:
        status, found = 400, {"error": str(error)}
    except LookupError as error:
        status, found = 404, {"error": str(error)}
    except (SkyRLAsyncError, OSError) as error:
        status, found = 500, {"error": str(error)}
    return _answer(found, status)


def _answer(found: Any, status: int) -> Response:
    return Response(msgspec.json.encode(found), status, media_type="application/json")


def _integer(request: Request, name: str, default: int | None, highest: int | None = None) -> int:
    given = request.query_params.get(name)
    if given is None and default is not None:
        return default
    if given is None or not given.isdecimal() or (highest is not None and int(given) > highest):
        expected = "a whole number" if highest is None else f"a number from 0 to {highest}"
        raise ValueError(f"{name} must be {expected}, got {given!r}")
    return int(given)


def _number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    try:
        return None if given is None else float(given)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {given!r}") from None


class _Headers:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"content-security-policy", _POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _TokenRequired:
    """Takes the token from the address, and from then on from a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        cookie_name = f"{_COOKIE}_{request.url.port}"  # cookies are of a host, whatever the port
        given = request.query_params.get("token") or request.cookies.get(cookie_name, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            why = "the address must end with ?token=..., as the command printed it"
            is_data = request.url.path.startswith("/api/")
            await (_answer({"error": why}, 403) if is_data else Response(why, 403))(scope, receive, send)
            return

        async def send_with_cookie(message: Any) -> None:
            if message["type"] == "http.response.start" and "token" in request.query_params:
                cookie = f"{cookie_name}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"].append((b"set-cookie", cookie.encode()))
            await send(message)

        await self._app(scope, receive, send_with_cookie)


def serve(runs: Sequence[ViewedRun], *, host: str, port: int, say: Callable[[str], object]) -> None:
    """Serve until interrupted; ``say`` is given the page's address once it is there.

    Raises ``ConfigError`` if the port is in use.
    """
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    try:
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} of {host} cannot be had ({error}); choose another --port (0: any free one) or --host"
        ) from None
    with listening:
        name = socket.gethostname() if host in _ALL_ADDRESSES else f"[{host}]" if ":" in host else host
        say(f"http://{name}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else ""))
        uvicorn.Server(uvicorn.Config(make_app(runs, token), log_level="warning", lifespan="off")).run([listening])
