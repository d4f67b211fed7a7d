"""``/sessions``: a controller makes, shows, rewards and deletes sessions here.

A session's own key is refused here: a harness must not reward itself. Does not know generation.
"""

import asyncio
import contextlib
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.guard import checked_body
from skyrl_async.endpoint.requests.json_text import StrictJSONResponse, json_bytes_stepwise
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.settings import SessionOutcome, SessionSampling
from skyrl_async.errors import SessionNotFoundError
from skyrl_async.types import Trajectory


class LimitsBody(BaseModel):
    """Limits of one session; the server's apply where one is left out."""

    max_turns: int | None = Field(default=None, ge=1, lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**63)
    idle_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    lifetime_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class CreateSession(BaseModel):
    """A body of ``POST /sessions``."""

    sampling: SessionSampling | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    label: str | None = None
    limits: LimitsBody | None = None


_SHOWN = (
    *("id", "label", "state", "num_turns", "num_sampled_tokens", "num_requests", "num_requests_open", "num_overflows"),
    "was_cut_short",
)
_ROW = (
    *("prompt_token_ids", "response_token_ids", "loss_mask", "logprobs", "reward", "weight", "num_turns", "num_aborts"),
    *("is_truncated", "is_abandoned", "metrics", "turn_rewards", "token_rewards"),
)


def routes(serving: Serving) -> list[Route]:
    """The controller's routes."""
    store = serving.sessions

    async def create_session(request: Request) -> Response:
        body = checked_body(request, CreateSession)
        asked = body.limits.model_dump(exclude_none=True) if body.limits else {}
        session, key = store.create(
            sampling=body.sampling,
            priority=body.priority,
            label=body.label,
            limits=replace(store.settings.limits, **asked),
        )
        created = {
            "id": session.id,
            "api_key": key,
            "base_url": f"{request.base_url}v1",
            "model": serving.model_name,
            "max_model_len": serving.sampler.max_model_len,
            "state": "open",
        }
        return StrictJSONResponse(created, 201)

    async def show_session(request: Request) -> Response:
        session = store.get(request.path_params["id"])
        return StrictJSONResponse(_shown(session, has_left_out=not store.settings.trains_side_requests))

    async def finish_session(request: Request) -> Response:
        try:
            outcome = checked_body(request, SessionOutcome)
        except ApiError as error:
            raise replace(error, message=f"session {request.path_params['id']}: {error.message}") from None
        session = store.get(request.path_params["id"])
        try:
            outcome.turn_rewards(session.tree.num_turn_tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param="rewards", code="invalid_value") from None
        serving.end_session(session)
        store.finish(session.id, outcome)

        def finished() -> bytes:
            rows = [_row(row) for row in session.rows()]
            return json_bytes_stepwise({"id": session.id, "state": "finished", "trajectories": rows})

        return Response(await asyncio.to_thread(finished), media_type="application/json")

    async def delete_session(request: Request) -> Response:
        session_id = request.path_params["id"]
        with contextlib.suppress(SessionNotFoundError):
            serving.end_session(store.get(session_id))
        store.delete(session_id)
        return Response(status_code=204)

    return [
        Route("/sessions", create_session, methods=["POST"]),
        Route("/sessions/{id}", show_session),
        Route("/sessions/{id}", delete_session, methods=["DELETE"]),
        Route("/sessions/{id}/finish", finish_session, methods=["POST"]),
    ]


def _shown(session: Session, *, has_left_out: bool) -> dict[str, Any]:
    num_side_requests, num_side_tokens = session.side_figures if has_left_out else (0, 0)
    newest, messages = session.tree.newest
    return {name: getattr(session, name) for name in _SHOWN} | {
        "num_turn_tokens": session.tree.num_turn_tokens,
        "num_side_requests": num_side_requests,
        "num_side_tokens": num_side_tokens,
        "messages": messages,
        "message_turns": session.tree.newest_turns,
        "last_text": None if newest is None else newest.addition.text,
        "last_finish_reason": None if newest is None else newest.addition.finish_reason,
    }


def _row(row: Trajectory) -> dict[str, Any]:
    columns = {"loss_mask": row.loss_mask.view(np.int8), "policy_versions": row.versions.to_json()}
    parts = {"turn_spans": list(map(asdict, row.turn_spans)), "messages": list(map(asdict, row.messages))}
    return {name: getattr(row, name) for name in _ROW} | columns | parts
