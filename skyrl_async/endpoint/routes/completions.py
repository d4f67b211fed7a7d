"""``POST /v1/completions``: raw prompts, as text or as token ids.

In a session each one is a turn without parent. Does not know engines or sessions.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.fields import refused
from skyrl_async.endpoint.requests.generation import Answer, GenerationRequest, Planned
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, in_thread_if
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.response_parts import completion_logprobs, provenance, usage
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.routes.schema import Checked, Label, ResponseFormat, SamplingFields
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Completion, CompletionDelta

_MAX_CHOICES = 1024


class CompletionRequest(SamplingFields):
    """A body of ``POST /v1/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    prompt: str | Checked[int] | Checked[str] | Checked[Checked[int]]
    session_id: Label | list[Label] | None = None  # type: ignore[assignment]
    """One label for all prompts, or one for each."""
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    suffix: str | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _is_served(self) -> "CompletionRequest":
        if self.suffix:
            raise ValueError("suffix is not served; leave it out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: log-probs are of sampled tokens; leave one of them out")
        return self

    @property
    def prompts(self) -> "list[str] | list[list[int]]":
        """The prompts as a list, also if there is one."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts: list[str] | list[list[int]] = [prompt] if is_one else prompt
        return prompts

    def labels(self, header: str | None) -> list[str | None]:
        """The session label of each prompt. ``ApiError`` unless there is one label, or as many as prompts."""
        num_prompts = len(self.prompts)
        if not isinstance(self.session_id, list):
            return [self.label(header)] * num_prompts
        if len(self.session_id) != num_prompts:
            message = f"must be one label, or one for each of {num_prompts} prompts, got {len(self.session_id)}"
            raise refused("session_id", message)
        return [str(label) for label in self.session_id]

    def to_generation(self, prompt_token_ids: tuple[int, ...], session_label: str | None) -> GenerationRequest:
        """One prompt's request without its wire format."""
        structured = self.response_format.structured if self.response_format else None
        return GenerationRequest(
            prompt_token_ids=prompt_token_ids,
            sampling=self.sampling(
                self.max_tokens, structured, self.logprobs or 0, shows_logprobs=self.logprobs is not None
            ),
            bad_words=tuple(self.bad_words or ()),
            session_label=session_label,
            priority=self.priority or 0,
        )


def make_router(serving: Serving) -> APIRouter:
    """The route of text completions."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        serving.require_model(body.model)
        label = request.headers.get("x-session-id")

        async def call(planner: Planner) -> CompletionCall:
            return CompletionCall(await _plan(planner, body, label), body, serving.renderer, serving.model_name)

        return await serving.handle(request, call, is_stream=bool(body.stream))

    return router


async def _plan(planner: Planner, body: CompletionRequest, label: str | None) -> list[Planned]:
    """One plan per prompt."""
    prompts = body.prompts
    if len(prompts) * body.num_choices > _MAX_CHOICES:
        raise _refused(f"prompts times n must be <= {_MAX_CHOICES}, got {len(prompts)} * {body.num_choices}")
    encoded = iter(await planner.encode([prompt for prompt in prompts if isinstance(prompt, str)]))
    ids = [next(encoded) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    if not ids or not all(ids):
        raise _refused("prompt must hold at least one token, got none")
    labels = zip(ids, body.labels(label), strict=True)
    return [await planner.plan(body.to_generation(prompt, one)) for prompt, one in labels]


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="prompt")


class CompletionCall:
    """One request in OpenAI's completions format: ``n`` choices of each prompt, in the order of prompts."""

    def __init__(
        self, planned: list[Planned], body: CompletionRequest, renderer: ChatRenderer, model_name: str
    ) -> None:
        self._choices = [(plan, i) for plan in planned for i in range(body.num_choices)]
        self._num_prompt_tokens = sum(len(plan.prompt_token_ids) for plan in planned)
        self._body = body
        self._renderer = renderer
        self._common = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }

    async def reply(self) -> dict[str, Any]:
        """The whole answer."""
        answers = await run_together(
            {f"{self._common['id']}-{index}": plan.answer(i) for index, (plan, i) in enumerate(self._choices)}
        )
        num_tokens = sum(len(answer.completion.token_ids) for answer in answers)
        choices = await in_thread_if(
            lambda: [self._choice(index, answer) for index, answer in enumerate(answers)],
            is_long=num_tokens * (1 + (self._body.logprobs or 0)) > LONG_TEXT,
        )
        return self._common | {"choices": choices, "usage": self._usage([answer.completion for answer in answers])}

    async def stream(self, emit: Emit) -> None:
        """The answer in chunks; those of all choices are interleaved."""
        completions = await run_together(
            {f"{self._common['id']}-{i}": self._stream_choice(i, emit) for i in range(len(self._choices))}
        )
        if self._body.includes_usage:
            emit(self._chunk([]) | {"usage": self._usage(completions)})

    def _usage(self, choices: Sequence[Completion]) -> dict[str, Any]:
        """Reports the prompt tokens that were cached for the first choice of each prompt."""
        num_cached = sum(choice.num_cached_tokens for choice in choices[:: self._body.num_choices])
        return usage(self._num_prompt_tokens, sum(len(choice.token_ids) for choice in choices), num_cached)

    async def _stream_choice(self, index: int, emit: Emit) -> Completion:
        """Emit one choice's chunks, and return its completion."""
        plan, choice_of_prompt = self._choices[index]
        echo, num_characters = self._echo(plan), 0
        async with aclosing(plan.stream(choice_of_prompt)) as blocks:
            async for block in blocks:
                delta = block.delta
                choice = {
                    "index": index,
                    "text": echo + block.content,
                    "logprobs": self._logprobs(delta, num_characters),
                    "finish_reason": block.finish_reason,
                }
                num_characters += len(block.content)
                echo = ""
                emit(self._chunk([choice | self._provenance(plan, delta)]))
        assert block.answer is not None, "a stream ends with its answer"
        return block.answer.completion

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        plan, _ = self._choices[index]
        choice = {
            "index": index,
            "text": self._echo(plan) + (answer.content or ""),
            "logprobs": self._logprobs(answer.completion, 0),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        return choice | self._provenance(plan, answer.completion)

    def _echo(self, plan: Planned) -> str:
        return self._renderer.decode(plan.prompt_token_ids) if self._body.echo else ""

    def _provenance(self, plan: Planned, block: Completion | CompletionDelta) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": plan.prompt_token_ids} | provenance(block)

    def _logprobs(self, block: Completion | CompletionDelta, offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return completion_logprobs(block, self._renderer, offset, as_ids=bool(self._body.return_tokens_as_token_ids))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._common | {"choices": choices}
        return chunk | {"usage": None} if self._body.includes_usage else chunk
