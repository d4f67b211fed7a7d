"""What surrounds generation: ``/v1/models``, ``/health``, ``/metrics``, ``/tokenize`` and ``/detokenize``.

The last two follow vLLM and are served under ``/v1`` as well.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from skyrl_async.endpoint.requests.fields import known_ids
from skyrl_async.endpoint.requests.guard import checked_body
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import ChatToolFields, Checked

Statistics = Callable[[], Mapping[str, float]]
"""Returns figures by name."""


class TokenizeRequest(ChatToolFields):
    """A body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Checked[dict[str, Any]] | None = Field(default=None, min_length=1)
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages, not both and not neither")
        return self


class DetokenizeRequest(BaseModel):
    """A body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Checked[int]


def routes(serving: Serving, statistics: Statistics, created: int) -> list[Route]:
    """The routes around generation. ``created``: the model's age for clients, Unix seconds."""
    model: dict[str, Any] = {
        "id": serving.model_name,
        "object": "model",
        "created": created,
        "owned_by": "skyrl_async",
        "max_model_len": serving.sampler.max_model_len,
    }

    async def list_models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def retrieve_model(request: Request) -> Response:
        serving.require_model(request.path_params["name"])
        return JSONResponse(model)

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_request: Request) -> Response:
        return PlainTextResponse(prometheus_text(statistics()), media_type="text/plain; version=0.0.4")

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", retrieve_model),
        Route("/health", health),
        Route("/metrics", metrics),
        *_tokenization(serving),
    ]


def _tokenization(serving: Serving) -> list[Route]:
    renderer = serving.renderer

    async def tokenize(request: Request) -> Response:
        body = checked_body(request, TokenizeRequest)
        serving.require_model(body.model)
        tools = body.chat_tools() or None

        def answer() -> dict[str, Any]:
            if body.messages is None:
                ids = renderer.encode(body.prompt or "")
            else:
                ids = renderer.render(body.messages, tools=tools, add_generation_prompt=body.add_generation_prompt)
            reply: dict[str, Any] = {"count": len(ids), "max_model_len": serving.sampler.max_model_len, "tokens": ids}
            if body.return_token_strs:
                reply["token_strs"] = [renderer.token_bytes(i).decode(errors="replace") for i in ids.tolist()]
            return reply

        return await serving.tokenize(request, (body.prompt, body.messages, tools), answer)

    async def detokenize(request: Request) -> Response:
        body = checked_body(request, DetokenizeRequest)
        serving.require_model(body.model)
        tokens = known_ids(body.tokens, renderer.vocab_size, param="tokens")
        return await serving.tokenize(request, body.tokens, lambda: {"prompt": renderer.decode(tokens)})

    served = {"/tokenize": tokenize, "/detokenize": detokenize}
    return [Route(prefix + path, serve, methods=["POST"]) for prefix in ("", "/v1") for path, serve in served.items()]


def prometheus_text(figures: Mapping[str, float]) -> str:
    """Figures as gauges ``skyrl_async_<name>`` in Prometheus' text format."""
    lines = []
    for name, value in figures.items():
        metric = "skyrl_async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f"{metric} {float(value)!r}"]
    return "\n".join(lines) + "\n"
