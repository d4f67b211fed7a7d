"""What the surfaces share: their route, the two shapes of their replies, and parts of these.

    sampling_route ──> ChoicesCall   chat · completions: choices, each with its own chunks
                   └─> ItemsCall     messages · responses: one answer as items, written one after the other

A surface adds its wire format. Does not know engines or sessions.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, Generic, TypeVar
from uuid import uuid4

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import TokenIds
from skyrl_async.endpoint.parsing.answers import AnswerParts
from skyrl_async.endpoint.requests.fields import ignored_metadata
from skyrl_async.endpoint.requests.generation import Answer, AnswerBlock, Planned
from skyrl_async.endpoint.requests.guard import checked_body
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, in_thread_if
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.request_handler import Call, Serving
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.schema import SamplingFields
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Completion, CompletionDelta, FinishReason, ToolCall

B = TypeVar("B", bound=SamplingFields)


def sampling_route(
    serving: Serving,
    path: str,
    body_type: type[B],
    call_type: Callable[[Sequence[Planned], B, Serving], Call],
    *,
    style: EventStyle = EventStyle.openai,
) -> Route:
    """The route of a surface that samples. ``style``: how its streams are written."""

    async def sample(request: Request) -> Response:
        body = checked_body(request, body_type)
        serving.require_model(body.model)
        requests = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> Call:
            return call_type(await planner.plan(requests), body, serving)

        return await serving.handle(request, call, style=style if body.stream else None)

    return Route(path, sample, methods=["POST"])


@dataclass(slots=True)
class Written:
    """What a stream has written of one choice."""

    num_blocks: int = 0
    num_characters: int = 0
    """Characters that tokens with log-probs begin, those that are held back included."""
    num_calls: int = 0


class ChoicesCall(ABC, Generic[B]):
    """One request whose answer is choices, ``n`` of each prompt in the order of prompts: OpenAI's two completion formats."""

    id_prefix: str
    objects: tuple[str, str]
    """``object`` of a whole reply and of a chunk."""

    def __init__(self, planned: Sequence[Planned], body: B, serving: Serving) -> None:
        self._choices = [(plan, i) for plan in planned for i in range(body.n)]
        self._num_prompt_tokens = sum(len(plan.prompt_token_ids) for plan in planned)
        self._body = body
        self._renderer = serving.renderer
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time.time()), "model": serving.model_name}
        self.extra: dict[str, Any] = {}
        """Fields after the choices."""

    @abstractmethod
    def whole(self, plan: Planned, answer: Answer) -> dict[str, Any]:
        """The surface's own fields of a whole choice."""

    @abstractmethod
    def piece(self, plan: Planned, block: AnswerBlock, written: Written) -> dict[str, Any]:
        """The surface's own fields of one block of a choice."""

    @abstractmethod
    def logprobs(self, tokens: Completion | CompletionDelta, written: Written) -> dict[str, Any] | None:
        """The log-probs of a whole choice, or of a block after what is ``written``; None unless asked for."""

    def chunks(self, index: int, plan: Planned, block: AnswerBlock, written: Written) -> list[dict[str, Any]]:
        """The chunks for one block of a choice."""
        own = self.piece(plan, block, written)
        return [self.chunk(self._choice(index, own, block.delta, block.answer, written))]

    async def reply(self) -> dict[str, Any]:
        """The whole answer."""
        answers = await run_together(
            {f"{self._head['id']}-{i}": plan.answer(n) for i, (plan, n) in enumerate(self._choices)}
        )
        completions = [answer.completion for answer in answers]

        def choices() -> list[dict[str, Any]]:
            return [
                self._choice(i, self.whole(plan, answer), answer.completion, answer)
                for i, ((plan, _), answer) in enumerate(zip(self._choices, answers, strict=True))
            ]

        written = await in_thread_if(choices, is_long=sum(map(_num_logprobs, completions)) > LONG_TEXT)
        head = self._head | {"object": self.objects[0]}
        return head | {"choices": written, "usage": self._usage(completions)} | self.extra

    async def stream(self, emit: Emit) -> None:
        """The answer in chunks; those of all choices are interleaved."""
        completions = await run_together(
            {f"{self._head['id']}-{i}": self._stream_choice(i, emit) for i in range(len(self._choices))}
        )
        if self._body.stream_options.include_usage:
            emit(self.chunk() | {"usage": self._usage(completions)})

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """A chunk of choices."""
        chunk = self._head | {"object": self.objects[1], "choices": choices}
        return chunk | {"usage": None} if self._body.stream_options.include_usage else chunk

    def _choice(
        self,
        index: int,
        own: dict[str, Any],
        tokens: Completion | CompletionDelta,
        answer: Answer | None,
        written: Written | None = None,
    ) -> dict[str, Any]:
        logprobs = self.logprobs(tokens, written or Written())
        origin = provenance(tokens) if self._body.return_token_ids else {}
        finish_reason, stop_reason = (None, None) if answer is None else (answer.finish_reason, answer.stop_reason)
        ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        return {"index": index, **own, "logprobs": logprobs} | ends | origin

    async def _stream_choice(self, index: int, emit: Emit) -> Completion:
        """Emit one choice's chunks, and return its completion."""
        plan, choice_of_prompt = self._choices[index]
        written = Written()
        async with aclosing(plan.stream(choice_of_prompt)) as blocks:
            async for block in blocks:
                for chunk in self.chunks(index, plan, block, written):
                    emit(chunk)
                written.num_blocks += 1
                written.num_calls += len(block.parts.tool_calls)
        assert block.answer is not None, "a stream ends with its answer"
        return block.answer.completion

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """OpenAI's ``usage``, with the prompt tokens that were cached for the first choice of each prompt."""
        num_sampled = sum(len(completion.token_ids) for completion in completions)
        num_cached = sum(completion.num_cached_tokens for completion in completions[:: self._body.n])
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens": num_sampled,
            "total_tokens": self._num_prompt_tokens + num_sampled,
        }


class ItemsCall(ABC, Generic[B]):
    """One request whose answer is items, written one after the other with the same code whole and streamed.

    An answer without calls always has a text, even an empty one.
    """

    kinds: tuple[str, str]
    """The surface's names for reasoning and for text."""
    shows_reasoning = True

    def __init__(self, planned: Sequence[Planned], body: B, serving: Serving) -> None:
        (self._planned,) = planned
        self._body = body
        self._renderer = serving.renderer
        self._model_name = serving.model_name
        self._name = uuid4().hex
        """Shared by the ids of the answer and its items."""
        self._items: list[dict[str, Any]] = []
        """Those that are finished."""
        self._open: str | None = None
        """The kind of text that is being written."""
        self._pieces: list[str] = []
        self._is_cut = False
        self._emit: Emit = lambda _: None

    async def reply(self) -> dict[str, Any]:
        """The whole answer."""
        answer = await self._planned.answer()
        return await in_thread_if(lambda: self._written(answer), is_long=_num_logprobs(answer.completion) > LONG_TEXT)

    async def stream(self, emit: Emit) -> None:
        """The answer in events."""
        self._emit = emit
        is_begun = False
        async with aclosing(self._planned.stream()) as blocks:
            async for block in blocks:
                if not is_begun:  # not before: until the first event a failure has a status of its own
                    self.begin()
                    is_begun = True
                self._write(block.parts, block.delta)
        assert block.answer is not None, "a stream ends with its answer"
        self._finish(block.answer)

    def _written(self, answer: Answer) -> dict[str, Any]:
        self._write(answer.parts, answer.completion)
        return self._finish(answer)

    def _write(self, parts: AnswerParts, tokens: Completion | CompletionDelta) -> None:
        self.add_tokens(tokens)
        texts = (parts.reasoning if self.shows_reasoning else "", parts.content)
        for kind, text in zip(self.kinds, texts, strict=True):
            if text:
                self._open_text(kind)
                self._pieces.append(text)
                self.add_text(kind, text)
        for call in parts.tool_calls:
            self._close_text()
            self.add_call(call)

    def _finish(self, answer: Answer) -> dict[str, Any]:
        if not answer.parts.tool_calls:
            self._open_text(self.kinds[1])
        self._is_cut = answer.completion.finish_reason is FinishReason.LENGTH
        self._close_text()
        return self.finish(answer)

    def _open_text(self, kind: str) -> None:
        if self._open != kind:
            self._close_text()
            self._open = kind
            self.begin_text(kind)

    def _close_text(self) -> None:
        kind, self._open = self._open, None
        text, self._pieces = "".join(self._pieces), []
        if kind is not None:
            self.end_text(kind, text)

    def add_tokens(self, tokens: Completion | CompletionDelta) -> None:
        """Take the tokens of a block, before its text."""

    @abstractmethod
    def begin(self) -> None:
        """Announce the answer."""

    @abstractmethod
    def begin_text(self, kind: str) -> None:
        """Announce an item of text."""

    @abstractmethod
    def add_text(self, kind: str, text: str) -> None:
        """Add a piece to it."""

    @abstractmethod
    def end_text(self, kind: str, text: str) -> None:
        """End it; ``text`` is all of it."""

    @abstractmethod
    def add_call(self, call: ToolCall) -> None:
        """Write a whole call."""

    @abstractmethod
    def finish(self, answer: Answer) -> dict[str, Any]:
        """End the answer and return it."""


_LEAST_LOGPROB = -9999.0
"""OpenAI and vLLM write -inf so: JSON has no infinity."""


def _num_logprobs(completion: Completion) -> int:
    return len(completion.token_ids) + sum(map(len, completion.top_logprobs))


def provenance(block: Completion | CompletionDelta) -> dict[str, Any]:
    """Exact tokens of a choice or block. Version spans count from its first token."""
    return {"token_ids": block.token_ids, "token_logprobs": block.logprobs, "policy_versions": block.versions.to_json()}


def extra_fields(prompt_token_ids: TokenIds, ignored_tools: Sequence[str], *, has_ids: bool) -> dict[str, Any]:
    """Fields that the surface's own replies lack: the prompt's ids if ``has_ids``, and the ignored tools if there are any."""
    metadata = {"metadata": ignored_metadata(ignored_tools)} if ignored_tools else {}
    return ({"prompt_token_ids": prompt_token_ids} if has_ids else {}) | metadata


def chat_logprobs(
    block: Completion | CompletionDelta, renderer: ChatRenderer, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a chat choice or chunk; ``as_ids`` writes tokens as ``token_id:5``."""
    ids, logprobs = block.token_ids.tolist(), np.maximum(block.logprobs, _LEAST_LOGPROB).tolist()
    listed = {*ids, *(token_id for position in block.top_logprobs for token_id, _ in position)}
    known = {i: (_token(i, renderer, as_ids), list(renderer.token_bytes(i))) for i in listed}

    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        token, raw = known[token_id]
        return {"token": token, "logprob": logprob, "bytes": raw}

    content = [spelled(token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]
    for entry, likeliest in zip(content, block.top_logprobs or repeat(()), strict=False):
        entry["top_logprobs"] = [spelled(other, max(value, _LEAST_LOGPROB)) for other, value in likeliest]
    return {"content": content, "refusal": None}


def _token(token_id: int, renderer: ChatRenderer, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else renderer.token_bytes(token_id).decode(errors="replace")


def completion_logprobs(
    block: Completion | CompletionDelta, renderer: ChatRenderer, written: Written, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a text completion's choice, or of a chunk after what is ``written``, whose characters it counts on."""
    token_ids = block.token_ids.tolist()
    spelled = [renderer.token_bytes(i) for i in token_ids]
    *begun, written.num_characters = accumulate(map(_num_begun, spelled), initial=written.num_characters)
    likeliest = [
        {_token(i, renderer, as_ids): max(value, _LEAST_LOGPROB) for i, value in position}
        for position in block.top_logprobs
    ]
    return {
        "tokens": [_token(i, renderer, as_ids) for i in token_ids],
        "token_logprobs": block.logprobs,
        "top_logprobs": likeliest or None,
        # A token that begins within a character stands where that one does.
        "text_offset": [max(0, num - sum(map(_is_inside, raw[:1]))) for raw, num in zip(spelled, begun, strict=True)],
    }


def _num_begun(raw: bytes) -> int:
    """Characters of UTF-8 whose first byte is among these."""
    return len(raw) - sum(map(_is_inside, raw))


def _is_inside(byte: int) -> bool:
    """Whether it continues a character of UTF-8."""
    return byte & 0xC0 == 0x80
