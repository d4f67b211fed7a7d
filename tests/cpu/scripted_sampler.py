"""An endpoint whose sampler says what a test wrote down, for tests of the surfaces: a real uvicorn, a template with tools."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel
from starlette.applications import Starlette

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import TokenIds, VersionSpans, token_ids
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.parsing.answers import AnswerParts
from skyrl_async.endpoint.requests.generation import Answer, AnswerBlock
from skyrl_async.endpoint.requests.request_handler import Call
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.types import Completion, CompletionDelta, FinishReason, SamplingParams, ToolCall
from tests.cpu.chat_templates import qwen3
from tests.cpu.tiny_chat import END, spelled

RUN_KEY = "run-key"
CONTROLLER_KEY = "controller-key"
ENGINE = "engine-3"
"""Said to sample everything."""
TOKENIZER = qwen3()
RENDERER = ChatRenderer(TOKENIZER)


@dataclass
class ScriptedSampler:
    """Answers request i with script i (the last one again when they run out): blocks of text, one byte per token.

    The end of turn follows, unless a stop string or the budget ended the text. Block i of a script has policy version 7 + i
    and log-probs of -(i + 1) / 2.
    """

    scripts: Sequence[Sequence[str]] = (("hé", "llo"),)
    """A stop string must lie within one block."""
    max_model_len: int = 10_000
    failure: Exception | None = None
    """Raised after the first block."""
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    completions: list[tuple[int, ...]] = field(default_factory=list)
    """Token ids of the finished answers."""
    sampled: list[SamplingParams] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        deltas = [d async for d in self.stream_tokens(prompt_token_ids, sampling, session_id=session_id)]
        finish = deltas[-1].finish_reason
        assert finish is not None
        return Completion(
            prompt_token_ids=token_ids(prompt_token_ids),
            token_ids=np.concatenate([d.token_ids for d in deltas]),
            logprobs=np.concatenate([d.logprobs for d in deltas]),
            versions=VersionSpans.joined(d.versions for d in deltas),
            text="".join(d.text for d in deltas),
            finish_reason=finish,
            num_aborts=1,
            engines=deltas[-1].engines,
            engine_seconds=deltas[-1].engine_seconds,
            asked_at=deltas[-1].asked_at,
            top_logprobs=tuple(t for d in deltas for t in d.top_logprobs),
        )

    async def stream_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[CompletionDelta]:
        script = self.scripts[min(len(self.prompts), len(self.scripts) - 1)]
        self.prompts.append(tuple(token_ids(prompt_token_ids).tolist()))
        self.sampled.append(sampling)
        self.labels.append(session_id)
        room = sampling.max_tokens
        sent: list[int] = []
        for i, block in enumerate(script):
            delta = _delta(block, i, sampling, room, is_last=i == len(script) - 1)
            room -= len(delta.token_ids)
            sent += delta.token_ids.tolist()
            if delta.finish_reason is not None:
                self.completions.append(tuple(sent))
            yield delta
            if self.failure is not None:
                raise self.failure
            if delta.finish_reason is not None:
                return


def _delta(block: str, index: int, sampling: SamplingParams, room: int, *, is_last: bool) -> CompletionDelta:
    text, ids, finish = block, spelled(block), FinishReason.STOP if is_last else None
    stops = [string for string in sampling.stop if string in block]
    if stops:
        cut = block.index(stops[0])
        text, ids, finish = block[:cut], spelled(block[: cut + len(stops[0])]), FinishReason.STOP
    elif is_last:
        ids = (*ids, END)
    if len(ids) > room:
        ids, finish = ids[:room], FinishReason.LENGTH
        text = text.encode()[:room].decode(errors="ignore")
    logprob = -0.5 * (index + 1)
    return CompletionDelta(
        token_ids=ids,
        logprobs=(logprob,) * len(ids),
        versions=(7 + index,) * len(ids),
        text=text,
        finish_reason=finish,
        engines=(ENGINE,) if finish else (),
        engine_seconds=0.5 if finish else None,
        asked_at=100.0 if finish else None,
        top_logprobs=tuple(((i, logprob),) for i in ids) if sampling.num_top_logprobs else (),
    )


@dataclass(frozen=True, kw_only=True)
class PlannedAnswer:
    """A planned request whose answer is given; its stream has one character per block."""

    reasoning: str = ""
    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    prompt_token_ids: TokenIds = field(default_factory=lambda: token_ids((5,)))

    async def answer(self, index: int = 0) -> Answer:
        return Answer(
            parts=AnswerParts(content=self.text, reasoning=self.reasoning, tool_calls=tuple(self.tool_calls)),
            completion=Completion(prompt_token_ids=(5,), text="", finish_reason=FinishReason.STOP),
            finish_reason="stop",
            stop_reason=None,
            skips_special_tokens=True,
        )

    async def stream(self, index: int = 0) -> AsyncIterator[AnswerBlock]:
        delta = CompletionDelta(text="", finish_reason=None)
        for piece in self.reasoning:
            yield AnswerBlock(parts=AnswerParts(reasoning=piece), delta=delta, answer=None)
        for piece in self.text:
            yield AnswerBlock(parts=AnswerParts(content=piece), delta=delta, answer=None)
        answer = await self.answer()
        yield AnswerBlock(parts=AnswerParts(tool_calls=answer.parts.tool_calls), delta=delta, answer=answer)


async def reply_and_events(
    call_type: Callable[..., Call], body: BaseModel, answer: PlannedAnswer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a surface makes of an answer: the whole reply, and the events of its stream."""
    serving: Any = SimpleNamespace(renderer=RENDERER, model_name="policy")
    events: list[Any] = []
    await call_type([answer], body, serving).stream(events.append)
    return await call_type([answer], body, serving).reply(), events


@contextlib.asynccontextmanager
async def scripted_endpoint(sampler: ScriptedSampler) -> AsyncIterator[str]:
    """The URL of an endpoint that serves ``sampler`` under ``RUN_KEY`` and ``CONTROLLER_KEY``."""
    parser = AnswerParser.of(TOKENIZER, tool_call_parser="hermes", reasoning_parser="qwen3")
    app = create_app(sampler, RENDERER, api_keys=[RUN_KEY], controller_keys=[CONTROLLER_KEY], parser=parser)
    async with start_server(app) as (host, port):
        yield f"http://{host}:{port}"


@cache
def _shared_app() -> Starlette:
    return create_app(ScriptedSampler(), RENDERER, api_keys=[RUN_KEY])


async def refusal(path: str, body: Any) -> httpx.Response:
    """The answer to a body, or to a text that is none, which is refused before anything is sampled. No server is started for it."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Authorization": f"Bearer {RUN_KEY}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(_shared_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://endpoint", headers=headers) as client:
        return await client.post(path, content=content)


@contextlib.asynccontextmanager
async def training_session(url: str) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The key of a session, and the list that has its training rows after the block."""
    rows: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {CONTROLLER_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as controller:
        made = (await controller.post("/sessions")).json()
        yield made["api_key"], rows
        finished = await controller.post(f"/sessions/{made['id']}/finish", json={"reward": 1.0})
        rows.extend(finished.json()["trajectories"])
