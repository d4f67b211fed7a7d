"""``POST /v1/chat/completions``.

Flows in: chat requests. Flows out: OpenAI replies, whole or streamed, with exact ids, log-probs and policy versions on
request. A request open while weights change is held by the sampler and finished: ``finish_reason`` is never ``abort``.
Does not know engines.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from skyrl_async.concurrency import run_together
from skyrl_async.errors import ConfigError, PromptTooLongError
from skyrl_async.inference.server.errors import ApiError
from skyrl_async.inference.server.schema import ChatCompletionRequest, Serving
from skyrl_async.inference.server.streaming import Emit, EventStream, until_disconnect
from skyrl_async.types import Completion, CompletionDelta, SamplingParams


def make_router(serving: Serving) -> APIRouter:
    """The chat surface over ``serving``."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        call = ChatCall.of(serving, body, request.headers.get("x-session-id"))
        if body.stream:
            return EventStream(call.stream, serving.keepalive_interval_s)
        return JSONResponse(await until_disconnect(request.receive, call.reply()))

    return router


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One request, its prompt rendered and known to fit."""

    serving: Serving
    body: ChatCompletionRequest
    prompt: tuple[int, ...]
    room: int
    """Tokens left for an answer, >= 1."""
    session_id: str | None
    id: str
    created: int

    @classmethod
    def of(cls, serving: Serving, body: ChatCompletionRequest, session_label: str | None) -> "ChatCall":
        """Render and check; ``ApiError`` or ``PromptTooLongError`` when it cannot be served."""
        if body.model not in (None, serving.model_name):
            raise ApiError(
                404,
                f"model {body.model!r} is not served here; the model is {serving.model_name!r}",
                code="model_not_found",
                param="model",
            )
        prompt = _render(serving, body)
        max_model_len = serving.sampler.max_model_len
        limit = min(max_model_len, body.max_total_tokens or max_model_len)
        if len(prompt) >= limit:
            raise PromptTooLongError(len(prompt), limit)
        return cls(
            serving=serving,
            body=body,
            prompt=prompt,
            room=limit - len(prompt),
            session_id=body.session_id or session_label,
            id=f"chatcmpl-{uuid4().hex}",
            created=int(time.time()),
        )

    async def reply(self) -> dict[str, Any]:
        """The whole answer: ``n`` independent generations."""
        completions = await run_together(
            {f"{self.id}-{i}": self._complete(self._sampling(i)) for i in range(self.body.num_choices)}
        )
        reply = self._envelope("chat.completion") | {
            "choices": [self._choice(i, completion) for i, completion in enumerate(completions)],
            "usage": self._usage(sum(len(completion.token_ids) for completion in completions)),
        }
        if self.body.return_token_ids:
            reply["prompt_token_ids"] = self.prompt
        return reply

    async def stream(self, emit: Emit) -> None:
        """The answer in chunks, those of ``n`` choices interleaved."""
        opening = {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}
        for i in range(self.body.num_choices):
            role = {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            emit(self._chunk([role]) | opening)
        counts = await run_together(
            {f"{self.id}-{i}": self._stream_choice(i, emit) for i in range(self.body.num_choices)}
        )
        if self.body.includes_usage:
            emit(self._chunk([]) | {"usage": self._usage(sum(counts))})

    def _sampling(self, index: int) -> SamplingParams:
        return self.body.sampling(index, self.room)

    async def _complete(self, sampling: SamplingParams) -> Completion:
        return await self.serving.sampler.generate_tokens(
            self.prompt, sampling, session_id=self.session_id, priority=self.body.priority or 0
        )

    async def _stream_choice(self, index: int, emit: Emit) -> int:
        """Emit one choice's chunks and return how many tokens it had."""
        num_tokens = 0
        deltas = self.serving.sampler.stream_tokens(
            self.prompt, self._sampling(index), session_id=self.session_id, priority=self.body.priority or 0
        )
        async for delta in deltas:
            num_tokens += len(delta.token_ids)
            choice = {
                "index": index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            emit(self._chunk([choice | self._provenance(delta)]))
        return num_tokens

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": self.serving.renderer.stop_string(
                completion.token_ids, completion.text, self._sampling(index).stop
            ),
        }
        if self.body.return_token_ids:
            choice["text_ends"] = self.serving.renderer.text_ends(completion.token_ids)
            choice["num_aborts"] = completion.num_aborts
        return choice | self._provenance(completion)

    def _provenance(self, block: Completion | CompletionDelta) -> dict[str, Any]:
        """Exact tokens of a choice or chunk; spans count from the block's first token."""
        if not self.body.return_token_ids:
            return {}
        return {
            "token_ids": block.token_ids,
            "token_logprobs": block.logprobs,
            "policy_versions": version_spans(block.versions),
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        spell = self.serving.renderer.token_bytes
        content = [
            {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw), "top_logprobs": []}
            for raw, logprob in zip(map(spell, token_ids), logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.model_name}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk") | {"choices": choices}
        return chunk | {"usage": None} if self.body.includes_usage else chunk

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": num_completion_tokens,
            "total_tokens": len(self.prompt) + num_completion_tokens,
        }


def _render(serving: Serving, body: ChatCompletionRequest) -> tuple[int, ...]:
    prefix = body.prefix_token_ids
    unknown = next((i for i in prefix or () if not 0 <= i < serving.renderer.vocab_size), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"prefix_token_ids must be in [0, {serving.renderer.vocab_size}), got {unknown}",
            param="prefix_token_ids",
        )
    try:
        if prefix is None:
            return serving.renderer.render(body.messages)
        return serving.renderer.render_next(body.messages, prefix)
    except ConfigError:  # the template's fault, not the client's, though also a ValueError
        raise
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="messages") from error


def version_spans(versions: Sequence[int]) -> list[dict[str, int]]:
    """Policy versions per token as runs ``{"version", "start", "end"}``, ``end`` excluded."""
    spans: list[dict[str, int]] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans
