"""A stand-in for the endpoint, for tests of what talks to it: its control API and chat completions over real HTTP, no model.

Every character of a reply is a token; a session's turns are one conversation. What the real one does is tested with it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from skyrl_async.endpoint.server.serve import start_server

CONTROLLER_KEY = "controller-secret"
Say = Callable[[list[dict[str, Any]]], str]
"""The policy: its reply to a conversation."""


@dataclass
class StandInSession:
    """What the stand-in knows of one session."""

    id: str
    asked: dict[str, Any]
    state: str = "open"
    is_deleted: bool = False
    num_requests: int = 0
    num_overflows: int = 0
    cap_reached: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    finish: dict[str, Any] = field(default_factory=dict)


class StandIn:
    """The endpoint: ``sessions`` in the order of their creation; ``max_turns`` is the cap of each, ``max_chars`` of each reply."""

    def __init__(self, say: Say, *, max_turns: int = 100, max_chars: int = 1000) -> None:
        self.say = say
        self.max_turns = max_turns
        self.max_chars = max_chars
        self.root = ""
        self.sessions: dict[str, StandInSession] = {}
        self.asked = asyncio.Event()
        """Some harness has asked for a reply."""
        self.held: asyncio.Event | None = None
        """Replies wait for it."""
        self.app = FastAPI()
        self._names = itertools.count()
        self._add_control()
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])

    def _add_control(self) -> None:
        routes: dict[tuple[str, str], Any] = {
            ("POST", "/sessions"): self._create,
            ("GET", "/sessions/{name}"): self._show,
            ("POST", "/sessions/{name}/finish"): self._finish,
            ("DELETE", "/sessions/{name}"): self._delete,
        }
        for (method, path), route in routes.items():
            self.app.add_api_route(path, route, methods=[method])

    async def _create(self, request: Request) -> Response:
        if _key(request) != CONTROLLER_KEY:
            return refusal(401, "this key is not the controller's")
        session = StandInSession(id=f"s{next(self._names)}", asked=await request.json())
        self.sessions[session.id] = session
        created = {
            "id": session.id,
            "api_key": f"sk-{session.id}",
            "base_url": f"{self.root}/v1",
            "model": "policy",
            "max_model_len": 1000,
        }
        return JSONResponse({**created, "state": "open"}, 201)

    async def _show(self, name: str) -> Response:
        session = self.sessions[name]
        return JSONResponse(
            {
                "id": name,
                "state": session.state,
                "num_turns": len(session.replies),
                "num_turn_tokens": [len(text) for text in session.replies],
                "num_requests": session.num_requests,
                "num_overflows": session.num_overflows,
                "was_cut_short": bool(session.cap_reached),
                "messages": session.messages,
                "message_turns": list(_sampled(session)),
                "last_text": session.replies[-1] if session.replies else None,
                "last_finish_reason": session.finish_reason,
                "num_side_requests": 1,
                "num_side_tokens": 14,
            }
        )

    async def _finish(self, name: str, request: Request) -> Response:
        session = self.sessions.get(name)
        if session is None or session.is_deleted:
            return refusal(404, f"there is no session {name}", "session_not_found")
        if not session.finish:
            session.state, session.finish = "finished", await request.json()
        return JSONResponse({"id": name, "state": "finished", "trajectories": _rows(session)})

    async def _delete(self, name: str) -> Response:
        self.sessions[name].is_deleted = True
        return Response(status_code=204)

    async def _chat(self, request: Request) -> Response:
        session = self.sessions.get(_key(request).removeprefix("sk-"))
        if session is None or session.state != "open" or session.is_deleted:
            return refusal(401, "no open session has this key")
        session.num_requests += 1
        if len(session.replies) >= self.max_turns:
            session.cap_reached = f"has sampled {self.max_turns} turns, the most it may"
            return refusal(401, session.cap_reached, "session_closed")
        body = await request.json()
        self.asked.set()
        if self.held is not None:
            await self.held.wait()
        said = self.say(body["messages"])
        session.finish_reason = "length" if len(said) > self.max_chars else "stop"
        reply = {"role": "assistant", "content": said[: self.max_chars]}
        session.replies.append(reply["content"])
        session.messages = [*body["messages"], reply]
        choice = {"index": 0, "message": reply, "finish_reason": session.finish_reason}
        return JSONResponse(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        )


@asynccontextmanager
async def stand_in(say: Say, **limits: int) -> AsyncIterator[StandIn]:
    """The endpoint on a socket."""
    endpoint = StandIn(say, **limits)
    async with start_server(endpoint.app) as (host, port):
        endpoint.root = f"http://{host}:{port}"
        yield endpoint


def refusal(status: int, message: str, code: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _sampled(session: StandInSession) -> Iterator[int | None]:
    """For each message the turn that sampled it; replies are taken to be in the conversation in order."""
    place = 0
    for message in session.messages:
        is_reply = message["role"] == "assistant" and message["content"] in session.replies[place:]
        place = session.replies.index(message["content"], place) + 1 if is_reply else place
        yield place - 1 if is_reply else None


def _rows(session: StandInSession) -> list[dict[str, Any]]:
    text = "".join(session.replies)
    if not text:
        return []
    is_abandoned = session.finish.get("is_abandoned", False)
    versions = [-1] * len(text) if is_abandoned else [3] + [4] * (len(text) - 1)
    return [
        {
            "prompt_token_ids": [1, 2],
            "response_token_ids": [ord(character) for character in text],
            "loss_mask": [int(not is_abandoned)] * len(text),
            "logprobs": [-0.5] * len(text),
            "policy_versions": [
                {"version": v, "start": versions.index(v), "end": versions.index(v) + versions.count(v)}
                for v in dict.fromkeys(versions)
            ],
            "reward": session.finish["reward"],
            "weight": 1.0,
            "num_turns": len(session.replies),
            "num_aborts": 2,
            "is_truncated": session.finish.get("is_truncated", False),
            "is_abandoned": is_abandoned,
            "metrics": session.finish["metrics"],
            "messages": [
                {"role": "assistant", "start": 2, "is_reply": True, "tool_calls": [{"name": "f", "arguments": "{}"}]}
                | {"engines": ["engine-5"], "engine_seconds": 0.25}
            ],
        }
    ]
