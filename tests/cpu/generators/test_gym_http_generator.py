"""What the HTTP generator refuses: replies that cannot be trained on, and endpoints that fail.

Whole episodes through it are in test_gym_generator.py. Here a small application on a real uvicorn gives the wrong
answers.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai import DEFAULT_CONNECTION_LIMITS
from openai.types.chat import ChatCompletion
from starlette.requests import Request
from starlette.responses import JSONResponse

from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import GenerationError, NoEngineError
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.runtime import outages as outages_module
from skyrl_async.runtime.outages import Backoff, Outages
from skyrl_async.types import Prompt, SamplingParams
from skyrl_gym_http import SkyRLGymHTTPGenerator
from skyrl_gym_http.generator import parse_reply
from tests.patience import PATIENCE_S

Change = Callable[[dict[str, Any]], None]


def reply(change: Change = lambda body: None) -> dict[str, Any]:
    """A right reply of three tokens, changed."""
    body: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc"},
                "finish_reason": "stop",
                "token_ids": [3, 4, 5],
                "token_logprobs": [-1.0, -2.0, -3.0],
                "text_ends": [1, 2, 3],
                "policy_versions": [{"version": 4, "start": 0, "end": 1}, {"version": 6, "start": 1, "end": 3}],
            }
        ],
    }
    change(body)
    return body


def choice(**fields: Any) -> Change:
    return lambda body: body["choices"][0].update(fields)


def test_a_right_reply_becomes_a_turn_with_a_version_per_token() -> None:
    turn = parse_reply(ChatCompletion.model_validate(reply()))
    assert turn.completion.prompt_token_ids.tolist() == [1, 2]
    assert turn.completion.token_ids.tolist() == [3, 4, 5]
    assert tuple(turn.completion.versions) == (4, 6, 6)
    assert turn.completion.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert turn.text == "abc"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda body: body.pop("prompt_token_ids"), "no prompt_token_ids; base_url must be an endpoint of skyrl_async"),
        (lambda body: body["choices"][0].pop("token_ids"), "no token_ids"),
        (choice(token_logprobs=[-1.0]), "token_logprobs has 1 entries for 3 token ids"),
        (choice(text_ends=[1, 2, 3, 4]), "text_ends has 4 entries for 3 token ids"),
        (choice(policy_versions=[{"version": 4, "start": 0, "end": 2}]), "policy_versions cover 2 of 3 tokens"),
        (choice(policy_versions=[{"version": 4, "start": 1, "end": 3}]), "adjoining spans from 0"),
        (choice(policy_versions=[{"start": 0, "end": 3}]), "the reply's policy_versions must be adjoining spans"),
        (choice(finish_reason="tool_calls"), "must be stop or length, got 'tool_calls'"),
        (choice(token_ids=[], token_logprobs=[], text_ends=[], policy_versions=[]), "at least one token, got none"),
        (lambda body: body["choices"].append(body["choices"][0]), "one choice, got 2"),
    ],
)
async def test_a_reply_that_cannot_be_trained_on_fails_the_rollout(change: Change, complaint: str) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return JSONResponse(reply(change))

    async with start_server(app) as (host, port):
        with pytest.raises(GenerationError, match=complaint):
            await play(f"http://{host}:{port}/v1")


async def test_a_prompt_that_does_not_continue_the_last_turn_fails_the_rollout() -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return JSONResponse(reply())

    async with start_server(app) as (host, port):
        with pytest.raises(GenerationError, match="must begin with the 5 ids of prefix_token_ids"):
            await play(f"http://{host}:{port}/v1", num_turns=2)


async def test_an_endpoint_that_refuses_is_named_with_its_words() -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return JSONResponse({"error": {"message": "wrong key", "type": "x", "param": None, "code": None}}, 401)

    async with start_server(app) as (host, port):
        with pytest.raises(GenerationError, match=rf"http://{host}:{port}/v1/chat/completions failed: .*wrong key"):
            await play(f"http://{host}:{port}/v1", outage_timeout_s=PATIENCE_S)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages_module, "_PAUSES", Backoff(base_s=0.01, max_s=0.01))


def no_engine() -> JSONResponse:
    error = {"message": "no inference engine", "type": "server_error", "param": None, "code": "no_engine"}
    return JSONResponse({"error": error}, 503)


@pytest.mark.usefixtures("short_pauses")
async def test_a_request_that_found_no_engine_is_sent_again_when_there_is_one() -> None:
    app, outages, asked = FastAPI(), Outages(), asyncio.Queue[None]()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        asked.put_nowait(None)
        return no_engine() if outages.num_over == 0 else JSONResponse(reply())

    outages.begin("no engine")
    async with start_server(app) as (host, port), asyncio.TaskGroup() as tasks:
        tasks.create_task(play(f"http://{host}:{port}/v1", outages=outages, outage_timeout_s=PATIENCE_S))
        await asked.get()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asked.get()
        outages.end("no engine")
    assert asked.qsize() == 1


async def test_a_request_waits_for_no_engine_that_will_not_come() -> None:
    app, outages = FastAPI(), Outages()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return no_engine()

    outages.give_up("no engine", "every restart is used up")
    async with start_server(app) as (host, port):
        with pytest.raises(NoEngineError, match="every restart is used up"):
            await play(f"http://{host}:{port}/v1", outages=outages, outage_timeout_s=PATIENCE_S)


@pytest.mark.usefixtures("short_pauses")
async def test_a_request_whose_endpoint_dies_is_sent_again_to_its_successor() -> None:
    app, is_broken = FastAPI(), asyncio.Event()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return JSONResponse(reply())

    def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        is_broken.set()

    dying = await asyncio.start_server(die, "127.0.0.1", 0)
    port = dying.sockets[0].getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(play(f"http://127.0.0.1:{port}/v1", outage_timeout_s=PATIENCE_S))
        await is_broken.wait()
        dying.close()
        await dying.wait_closed()
        async with start_server(app, "127.0.0.1", port):
            await playing


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        return JSONResponse(reply())

    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unserved.getsockname()[1]}")
        async with start_server(app) as (host, port):
            await play(f"http://{host}:{port}/v1")


async def test_a_request_may_take_as_long_as_its_group() -> None:
    app, timeouts = FastAPI(), list[str | None]()

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> JSONResponse:
        timeouts.append(request.headers.get("x-stainless-read-timeout"))  # the client says how long it waits
        return JSONResponse(reply())

    async with start_server(app) as (host, port):
        await play(f"http://{host}:{port}/v1")
    assert timeouts == [None]


async def test_all_samples_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = type(DEFAULT_CONNECTION_LIMITS)(max_connections=2)
    monkeypatch.setattr(openai._base_client, "DEFAULT_CONNECTION_LIMITS", few)
    app, all_open = FastAPI(), asyncio.Barrier(3)

    @app.post("/v1/chat/completions")
    async def answer() -> JSONResponse:
        await all_open.wait()
        return JSONResponse(reply())

    async with asyncio.timeout(PATIENCE_S), start_server(app) as (host, port):
        await play(f"http://{host}:{port}/v1", num_samples=3)


async def test_an_endpoint_that_is_not_there_is_named() -> None:
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unserved.getsockname()[1]}/v1"
        with pytest.raises(GenerationError, match=f"{url}/chat/completions failed: APIConnectionError"):
            await play(url)


class Chat:
    """An environment of ``num_turns`` turns."""

    is_fast = True

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.num_turns -= 1
        return {"observations": [], "reward": 1.0, "done": self.num_turns == 0}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


async def play(url: str, num_turns: int = 1, num_samples: int = 1, **settings: Any) -> None:
    generator = SkyRLGymHTTPGenerator(url, "key", "policy", lambda name, extras: Chat(num_turns), **settings)
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "hello"},), env_class="chat")
    try:
        sampling = SamplingParams(max_tokens=9)
        await generator.generate(GroupRequest(prompt=prompt, num_samples=num_samples, sampling=sampling))
    finally:
        await generator.close()
