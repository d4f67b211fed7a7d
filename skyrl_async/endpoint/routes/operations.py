"""What surrounds generation: ``/v1/models``, ``/health``, ``/metrics``, ``/tokenize`` and ``/detokenize``.

The last two follow vLLM and are served under ``/v1`` as well.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import JSONResponse, PlainTextResponse, Response

from skyrl_async.endpoint.requests.fields import known_ids
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import Checked, ToolDefinition, functions_of

Statistics = Callable[[], Mapping[str, float]]
"""Returns figures by name."""


class TokenizeRequest(BaseModel):
    """A body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Checked[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: Checked[ToolDefinition] | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages, not both and not neither")
        return self


class DetokenizeRequest(BaseModel):
    """A body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Checked[int]


def make_router(serving: Serving, statistics: Statistics, created: int) -> APIRouter:
    """The routes around generation. ``created``: the model's age for clients, Unix seconds."""
    router = APIRouter(route_class=ParsedRoute)
    model: dict[str, Any] = {
        "id": serving.model_name,
        "object": "model",
        "created": created,
        "owned_by": "skyrl_async",
        "max_model_len": serving.sampler.max_model_len,
    }

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        serving.require_model(name)
        return JSONResponse(model)

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus_text(statistics()), media_type="text/plain; version=0.0.4")

    _add_tokenization(router, serving)
    return router


def _add_tokenization(router: APIRouter, serving: Serving) -> None:
    renderer = serving.renderer

    @router.post("/v1/tokenize")
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        serving.require_model(body.model)
        tools = functions_of(body.tools) or None

        def answer() -> dict[str, Any]:
            if body.messages is None:
                ids = renderer.encode(body.prompt or "")
            else:
                ids = renderer.render(
                    body.messages, tools=tools, add_generation_prompt=body.add_generation_prompt is not False
                )
            reply: dict[str, Any] = {"count": len(ids), "max_model_len": serving.sampler.max_model_len, "tokens": ids}
            if body.return_token_strs:
                reply["token_strs"] = [renderer.token_bytes(i).decode(errors="replace") for i in ids]
            return reply

        return await serving.tokenize(request, (body.prompt, body.messages, tools), answer)

    @router.post("/v1/detokenize")
    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        serving.require_model(body.model)
        tokens = known_ids(body.tokens, renderer.vocab_size, param="tokens")
        return await serving.tokenize(request, tokens, lambda: {"prompt": renderer.decode(tokens)})


def prometheus_text(figures: Mapping[str, float]) -> str:
    """Figures as gauges ``skyrl_async_<name>`` in Prometheus' text format."""
    lines = []
    for name, value in figures.items():
        metric = "skyrl_async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f"{metric} {float(value)!r}"]
    return "\n".join(lines) + "\n"
