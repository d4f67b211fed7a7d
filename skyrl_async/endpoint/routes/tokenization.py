"""``POST /tokenize`` and ``/detokenize``, as vLLM has them (also under ``/v1``).

Flows in: text, messages or ids. Flows out: ids or text. Does not know generation.
"""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from skyrl_async.endpoint.requests.context import Serving
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.validation import known_ids
from skyrl_async.endpoint.routes.schema import Checked, ToolDefinition, functions_of


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


def make_router(serving: Serving) -> APIRouter:
    """Text to ids and back, by the policy's tokenizer."""
    router = APIRouter(route_class=ParsedRoute)
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

    return router
