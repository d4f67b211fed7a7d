"""A real endpoint with sessions, and clients of it: what its tests begin with. Its sampler is scripted, and held or failing on demand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.types import CompletionDelta, SamplingParams
from tests.cpu.scripted_sampler import CONTROLLER_KEY, RENDERER, RUN_KEY, TOKENIZER, ScriptedSampler

PARSER = AnswerParser.of(TOKENIZER, tool_call_parser="hermes", reasoning_parser="qwen3")
RETRY_HEADER = "x-stainless-retry-count"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def user(text: str = "hello") -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class HeldSampler(ScriptedSampler):
    """Waits before its first block while it ``is_held``, or before its last one; answers cost a failure if one is set."""

    is_held: bool = False
    holds_last_block: bool = False
    failure: Exception | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a generation begins."""
    num_begun: int = 0
    num_cancelled: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[CompletionDelta]:
        self.num_begun += 1
        self.asked.set()
        blocks = super().stream_tokens(prompt_token_ids, sampling, session_id=session_id)
        try:
            if self.is_held and not self.holds_last_block:
                await self.release.wait()
            if self.failure is not None:
                raise self.failure
            async for block in blocks:
                if block.finish_reason is not None and self.is_held and self.holds_last_block:
                    await self.release.wait()
                yield _forced(block) if sampling.structured else block
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise


def _forced(block: CompletionDelta) -> CompletionDelta:
    """Every second token as a grammar forces it: with certainty."""
    return replace(block, logprobs=tuple(0.0 if i % 2 else p for i, p in enumerate(block.logprobs)))


@dataclass
class OpenSession:
    """A session as its harness and its controller have it."""

    id: str
    key: str
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    controller: httpx.AsyncClient

    async def chat(self, messages: Sequence[Any], **arguments: Any) -> Any:
        return await self.openai.chat.completions.create(model="policy", messages=list(messages), **arguments)

    async def post(self, messages: Sequence[Any], *, retry: int | None = None, **fields: Any) -> httpx.Response:
        headers = {} if retry is None else {RETRY_HEADER: str(retry)}
        return await self.http.post(
            "/v1/chat/completions", json={"messages": list(messages), **fields}, headers=headers
        )

    async def reply(self, messages: Sequence[Any], *, is_streamed: bool = False, **arguments: Any) -> dict[str, Any]:
        """The reply as a message that can be sent back, through the openai client."""
        if not is_streamed:
            completion = await self.chat(messages, **arguments)
            message: dict[str, Any] = completion.choices[0].message.model_dump(exclude_none=True)
            return message
        return joined([chunk async for chunk in await self.chat(messages, stream=True, **arguments)])

    async def status(self) -> dict[str, Any]:
        return dict((await self.controller.get(f"/sessions/{self.id}")).json())

    async def finish(self, reward: float = 1.0, **fields: Any) -> list[dict[str, Any]]:
        response = await self.controller.post(f"/sessions/{self.id}/finish", json={"reward": reward, **fields})
        assert response.status_code == 200, response.text
        return list(response.json()["trajectories"])


@dataclass
class Endpoint:
    """An endpoint that serves."""

    url: str
    serving: Serving
    controller: httpx.AsyncClient
    stack: contextlib.AsyncExitStack

    async def begin(self, **body: Any) -> OpenSession:
        response = await self.controller.post("/sessions", json=body)
        assert response.status_code == 201, response.text
        made = response.json()
        client = AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"], max_retries=0)
        http = self.client(made["api_key"])
        for opened in (client, http):
            await self.stack.enter_async_context(opened)
        return OpenSession(made["id"], made["api_key"], client, http, self.controller)

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers)


@contextlib.asynccontextmanager
async def endpoint(
    sampler: ScriptedSampler, *, around: Callable[[ASGIApp], ASGIApp] = lambda app: app, **settings: Any
) -> AsyncIterator[Endpoint]:
    """An endpoint under ``RUN_KEY`` and ``CONTROLLER_KEY``; ``around`` puts another application before it."""
    keys = {"api_keys": [RUN_KEY], "controller_keys": [CONTROLLER_KEY]}
    app = create_app(sampler, RENDERER, **{**keys, "parser": PARSER, **settings})
    async with contextlib.AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(start_server(around(app)))
        url = f"http://{host}:{port}"
        controller = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {CONTROLLER_KEY}"})
        await stack.enter_async_context(controller)
        yield Endpoint(url, app.state.serving, controller, stack)


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """The chunks of a stream as the message they are."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        message["content"] += delta.content or ""
        reasoning = (delta.model_extra or {}).get("reasoning_content")
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        for call in delta.tool_calls or ():
            message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return message


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; its end as None."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


def check_exact(row: dict[str, Any], sampler: ScriptedSampler) -> None:
    """``row`` is the conversation of all the sampler's turns, each continuing the one before, and nothing else."""
    prompts, completions = sampler.prompts, sampler.completions
    for (prompt, completion), after in zip(pairwise_turns(sampler), prompts[1:], strict=True):
        assert after[: len(prompt) + len(completion)] == prompt + completion
    whole = prompts[-1] + completions[-1]
    assert tuple(row["prompt_token_ids"]) == prompts[0]
    assert tuple(row["response_token_ids"]) == whole[len(prompts[0]) :]
    mask = [0] * len(whole)
    for prompt, completion in zip(prompts, completions, strict=True):
        mask[len(prompt) : len(prompt) + len(completion)] = [1] * len(completion)
    assert row["loss_mask"] == mask[len(prompts[0]) :]
    versions = [span["version"] for span in row["policy_versions"] for _ in range(span["start"], span["end"])]
    assert [version >= 7 for version in versions] == [bool(sampled) for sampled in row["loss_mask"]]
    assert row["logprobs"] == [-0.5 * (version - 6) if version >= 7 else 0.0 for version in versions]


def pairwise_turns(sampler: ScriptedSampler) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and completion of every turn that another one follows."""
    turns = list(zip(sampler.prompts, sampler.completions, strict=True))
    return [turn for turn, _ in pairwise(turns)]
