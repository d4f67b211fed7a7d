"""The endpoint as clients meet it: a real uvicorn on a real socket, the real openai client, and raw HTTP.

The sampler is scripted (given blocks of bytes as tokens, held or failing on demand); the real engine comes elsewhere.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests import streaming
from skyrl_async.endpoint.routes.operations import prometheus_text
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import ConfigError, NoEngineError
from skyrl_async.types import SamplingParams
from tests.cpu.scripted_sampler import ScriptedSampler, refusal
from tests.cpu.session_endpoint import HeldSampler, error_of
from tests.cpu.tiny_chat import END, RENDERER, spelled
from tests.patience import PATIENCE_S

KEY = "right-key"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Running:
    """An endpoint that serves, and clients of it."""

    url: str
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def chat(self, **arguments: Any) -> Any:
        return await self.openai.chat.completions.create(**{"model": "policy", "messages": HELLO, **arguments})

    async def post(self, body: Any, path: str = "/v1/chat/completions", **arguments: Any) -> httpx.Response:
        return await self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **arguments)


@contextlib.asynccontextmanager
async def endpoint(sampler: ScriptedSampler | None = None, **settings: Any) -> AsyncIterator[Running]:
    app = create_app(
        sampler or ScriptedSampler(max_model_len=100), RENDERER, **{"api_keys": ["other", KEY], **settings}
    )
    async with start_server(app) as (host, port):
        url = f"http://{host}:{port}"
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
            httpx.AsyncClient(base_url=url, headers=headers) as http,
        ):
            yield Running(url=url, openai=client, http=http)


async def test_a_chat_is_answered_with_text_usage_and_finish_reason() -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as running:
        reply = await running.chat()
    assert reply.choices[0].message.content == "héllo"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.model == "policy"
    prompt = tuple(RENDERER.render(HELLO))
    assert sampler.prompts == [prompt]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 7)
    assert reply.usage.total_tokens == len(prompt) + 7
    assert sampler.sampled == [SamplingParams(max_tokens=sampler.max_model_len - len(prompt), reports_logprobs=False)]
    assert "token_ids" not in reply.choices[0].model_extra


async def test_a_stream_brings_the_same_text_in_pieces_and_usage_at_the_end() -> None:
    async with endpoint() as running:
        chunks = [c async for c in await running.chat(stream=True, stream_options={"include_usage": True})]
    assert [c.choices[0].delta.content for c in chunks[:-1]] == ["", "hé", "llo"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 7
    assert {c.id for c in chunks} == {chunks[0].id}


async def test_a_stream_ends_with_done_and_no_usage_unless_asked() -> None:
    async with endpoint() as running:
        response = await running.post({"messages": HELLO, "stream": True})
    events = response.text.strip().split("\n\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_n_choices_are_sampled_independently(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as running:
        reply = await running.chat(n=3, temperature=0, seed=5, stream=is_streamed)
        if is_streamed:
            texts = ["", "", ""]
            async for chunk in reply:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            assert [choice.index for choice in reply.choices] == [0, 1, 2]
            assert reply.usage.completion_tokens == 21
            texts = [choice.message.content for choice in reply.choices]
    assert texts == ["héllo"] * 3
    assert sorted(sampling.seed or 0 for sampling in sampler.sampled) == [5, 6, 7]


async def test_logprobs_name_each_token_its_bytes_and_its_value() -> None:
    async with endpoint() as running:
        reply = await running.chat(logprobs=True)
        with_likeliest = await running.chat(logprobs=True, top_logprobs=3)
        chunks = [c async for c in await running.chat(logprobs=True, stream=True)]
    content = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content[:-1]) == "héllo".encode()
    assert [token.token for token in content[-2:]] == ["o", "<|im_end|>"]
    assert [token.logprob for token in content] == [-0.5] * 3 + [-1.0] * 4
    assert content[0].top_logprobs == []
    likeliest = with_likeliest.choices[0].logprobs.content[0].top_logprobs
    assert [(token.token, token.logprob) for token in likeliest] == [("h", -0.5)]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == content


async def test_token_ids_log_probs_and_versions_come_on_request() -> None:
    async with endpoint() as running:
        reply = await running.chat(extra_body={"return_token_ids": True})
        chunks = [c async for c in await running.chat(stream=True, extra_body={"return_token_ids": True})]
        spelled_out = await running.chat(extra_body={"return_token_ids": True, "skip_special_tokens": False})
    extra = reply.choices[0].model_extra
    assert tuple(reply.model_extra["prompt_token_ids"]) == tuple(RENDERER.render(HELLO))
    assert tuple(extra["token_ids"]) == (*spelled("héllo"), END)
    assert extra["token_logprobs"] == [-0.5] * 3 + [-1.0] * 4
    assert extra["policy_versions"] == [{"version": 7, "start": 0, "end": 3}, {"version": 8, "start": 3, "end": 7}]
    assert extra["text_ends"] == [1, 2, 3, 4, 5, 6, 6]
    assert spelled_out.choices[0].model_extra["text_ends"][-1] == 6 + len("<|im_end|>")
    assert extra["num_aborts"] == 1
    assert tuple(chunks[0].model_extra["prompt_token_ids"]) == tuple(RENDERER.render(HELLO))
    assert [c.choices[0].model_extra["policy_versions"] for c in chunks[1:]] == [
        [{"version": 7, "start": 0, "end": 3}],
        [{"version": 8, "start": 0, "end": 4}],
    ]
    assert [i for c in chunks[1:] for i in c.choices[0].model_extra["token_ids"]] == extra["token_ids"]


@pytest.mark.parametrize("stop", ["lo", ["lo", "zz"]])
async def test_a_stop_string_is_left_out_of_the_text_and_named(stop: Any) -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as running:
        reply = await running.chat(stop=stop)
        chunks = [chunk async for chunk in await running.chat(stop=stop, stream=True)]
    assert reply.choices[0].message.content == "hél"
    assert reply.choices[0].model_extra["stop_reason"] == "lo"
    assert chunks[-1].choices[0].model_extra["stop_reason"] == "lo"
    assert sampler.sampled[0].stop == (("lo",) if isinstance(stop, str) else ("lo", "zz"))


async def test_sampling_parameters_are_understood_and_null_means_the_default() -> None:
    sampler = ScriptedSampler()
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 4, "top_p": 0.5, "top_k": -1}
    nulls = dict.fromkeys(("n", "stop", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_tokens"))
    async with endpoint(sampler) as running:
        assert (await running.post(body | {"min_p": 0.1, "tools": [], "cache_salt": "x"})).status_code == 200
        assert (await running.post({"messages": HELLO, **nulls})).status_code == 200
    assert sampler.sampled == [
        SamplingParams(max_tokens=4, top_p=0.5, min_p=0.1, reports_logprobs=False),
        SamplingParams(max_tokens=sampler.max_model_len - len(RENDERER.render(HELLO)), reports_logprobs=False),
    ]


async def test_content_may_be_parts_null_or_absent_and_messages_in_any_order() -> None:
    sampler = ScriptedSampler()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "system", "content": "b"},
    ]
    async with endpoint(sampler) as running:
        assert (await running.post({"messages": messages})).status_code == 200
    plain = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "b"},
    ]
    assert sampler.prompts == [tuple(RENDERER.render(plain))]


async def test_a_session_label_is_passed_on_from_body_or_header() -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as running:
        await running.chat(extra_body={"session_id": "a"})
        await running.chat(extra_headers={"X-Session-ID": "b"})
        await running.chat()
    assert sampler.labels == ["a", "b", None]


async def test_prefix_token_ids_are_continued_without_tokenizing_sampled_text_again() -> None:
    sampler = ScriptedSampler()
    messages = [*HELLO, {"role": "assistant", "content": "héllo"}, {"role": "user", "content": "again"}]
    prefix = [*RENDERER.render(HELLO).tolist(), *spelled("héllo"), END]
    async with endpoint(sampler) as running:
        reply = await running.chat(messages=messages, extra_body={"prefix_token_ids": prefix, "return_token_ids": True})
    prompt = reply.model_extra["prompt_token_ids"]
    assert prompt[: len(prefix)] == prefix
    assert tuple(prompt) == tuple(RENDERER.render_next(messages, prefix))
    assert sampler.prompts == [tuple(prompt)]
    assert tuple(prompt) != tuple(RENDERER.render(messages))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"max_total_tokens": 10}])
async def test_an_overlong_prompt_gets_the_body_that_harnesses_recognise(
    is_streamed: bool, fields: dict[str, int]
) -> None:
    async with endpoint() as running:
        with pytest.raises(openai.BadRequestError) as caught:
            await running.chat(messages=[{"role": "user", "content": "x" * 100}], stream=is_streamed, extra_body=fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "This model's maximum context length is 100 tokens" in str(caught.value)
    assert "context_length_exceeded" in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "n": 0}, "n"),
        ({"messages": HELLO, "stop": [""]}, "stop"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": HELLO, "prefix_token_ids": [1]}, "messages"),
        ({"messages": HELLO, "prefix_token_ids": [99999]}, "prefix_token_ids"),
        (b"{not json", None),
        (b"[]", None),
    ],
)
async def test_a_wrong_body_is_refused_with_the_field_named(body: Any, param: str | None) -> None:
    response = await refusal("/v1/chat/completions", body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split(".")[0] == (param or "")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, got -1"),
        ({"stop": ["a", 5]}, "stop.1: Input should be a valid string, got 5"),
        ({"stop": 5}, "stop: Input should be a valid string, or Input should be a valid list, got 5"),
    ],
)
async def test_a_refusal_shows_the_value_and_the_kind_that_it_nearly_is(fields: Any, complaint: str) -> None:
    assert error_of(await refusal("/v1/chat/completions", {"messages": HELLO, **fields}))["message"] == complaint


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "JSON has no NaN"),
        (b'{"messages": [{"role": "user", "x": [-Infinity]}]}', "JSON has no -Infinity"),
        (rb'{"messages": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "must be JSON in UTF-8, got byte 0xff at 43"),
        ('{"messages": []}'.encode("utf-16"), "must be JSON in UTF-8"),
        (b"[" * 100_000, "recursion"),
        (b"", "Field required"),
    ],
)
async def test_what_only_looks_like_json_is_refused_with_the_reason(body: bytes, complaint: str) -> None:
    response = await refusal("/v1/chat/completions", body)
    assert response.status_code == 400
    assert complaint in error_of(response)["message"]


async def test_text_about_what_json_lacks_is_text() -> None:
    body = rb'{"messages": [{"role": "user", "content": "NaN \\ud83d \ud83d\ude00 Infinity \u0000"}]}'
    sampler = ScriptedSampler()
    async with endpoint(sampler) as running:
        assert (await running.post(body)).status_code == 200
    assert "NaN \\ud83d \U0001f600 Infinity \0" in RENDERER.decode(sampler.prompts[0])


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer " + "k" * 5000])
async def test_without_a_valid_key_everything_but_health_is_401(authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    async with endpoint() as running, httpx.AsyncClient(base_url=running.url, headers=headers) as client:
        for path in ("/v1/models", "/metrics", "/v1/nowhere", "/openapi.json"):
            response = await client.get(path)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/health")).status_code == 200


async def test_any_of_the_keys_is_accepted_and_no_keys_mean_no_check() -> None:
    async with endpoint() as running:
        assert (await running.http.get("/v1/models", headers={"Authorization": "Bearer other"})).status_code == 200
    async with endpoint(api_keys=[]) as running, httpx.AsyncClient() as stranger:
        assert (await stranger.get(f"{running.url}/v1/models")).status_code == 200


async def test_models_tell_the_context_length() -> None:
    async with endpoint(server=ServerConfig(model_name="org/model")) as running:
        (listed,) = (await running.openai.models.list()).data
        retrieved = await running.openai.models.retrieve("org/model")
        with pytest.raises(openai.NotFoundError, match="'other' is not served here; the model is 'org/model'"):
            await running.openai.models.retrieve("other")
        with pytest.raises(openai.NotFoundError) as caught:
            await running.chat(model="other")
    assert listed == retrieved
    assert (listed.id, listed.model_extra["max_model_len"]) == ("org/model", 100)
    assert caught.value.code == "model_not_found"


async def test_unknown_paths_and_methods_get_openai_error_bodies() -> None:
    async with endpoint() as running:
        nowhere = await running.http.get("/v1/nowhere")
        method = await running.http.get("/v1/chat/completions")
    assert (nowhere.status_code, error_of(nowhere)["code"]) == (404, "not_found")
    assert "/v1/nowhere" in error_of(nowhere)["message"]
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


async def test_a_body_above_the_limit_is_413_announced_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with endpoint(server=ServerConfig(max_body_bytes=1000)) as running:
        announced = await running.post(b"x" * 1001)
        unannounced = await running.http.post("/v1/chat/completions", content=chunks())
        assert (await running.post({"messages": HELLO})).status_code == 200
    for response in (announced, unannounced):
        assert response.status_code == 413
        error = error_of(response)
        assert error["code"] == "request_too_large"
        assert "1000 bytes (server.max_body_bytes)" in error["message"]


async def test_without_an_engine_the_answer_is_503() -> None:
    async with endpoint(ScriptedSampler(failure=NoEngineError("no engine is left"))) as running:
        response = await running.post({"messages": HELLO})
    assert (response.status_code, error_of(response)["type"]) == (503, "server_error")


async def test_an_unexpected_failure_is_500_without_its_details_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(ScriptedSampler(failure=RuntimeError("a secret"))) as running:
        response = await running.post({"messages": HELLO})
    assert response.status_code == 500
    assert "RuntimeError" in error_of(response)["message"]
    assert "secret" not in response.text
    assert "a secret" in caplog.text


async def test_a_failure_in_mid_stream_becomes_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    texts: list[str] = []

    async def read(running: Running) -> None:
        async for chunk in await running.chat(stream=True):
            texts.append(chunk.choices[0].delta.content)

    async with endpoint(ScriptedSampler(failure=RuntimeError("a secret"))) as running:
        with pytest.raises(openai.APIError, match="the server failed unexpectedly"):
            await read(running)
    assert texts == ["", "hé"]
    assert "a secret" in caplog.text


async def test_a_silent_stream_is_kept_alive_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_INTERVAL_S", 0.01)
    sampler = HeldSampler(is_held=True)
    async with (
        endpoint(sampler) as running,
        running.http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response,
    ):
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count(": keepalive") == 2:
                sampler.release.set()
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_cancels_its_generation(is_streamed: bool) -> None:
    sampler = HeldSampler(is_held=True)
    async with endpoint(sampler) as running:
        leaving = asyncio.ensure_future(running.post({"messages": HELLO, "stream": is_streamed}))
        await sampler.asked.wait()
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(PATIENCE_S):
            await sampler.cancelled.wait()
        sampler.is_held = False
        assert (await running.post({"messages": HELLO})).status_code == 200


async def test_a_held_request_is_finished_when_it_goes_on() -> None:
    sampler = HeldSampler(is_held=True)
    async with endpoint(sampler) as running, asyncio.TaskGroup() as group:
        held = group.create_task(running.chat())
        await sampler.asked.wait()
        sampler.release.set()
    assert held.result().choices[0].message.content == "héllo"


async def test_metrics_are_prometheus_text() -> None:
    async with endpoint(statistics=lambda: {"engine-0/requests": 3, "policy_version": 2.0}) as running:
        response = await running.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text.splitlines()[:4] == [
        "# TYPE skyrl_async_engine_0_requests gauge",
        "skyrl_async_engine_0_requests 3.0",
        "# TYPE skyrl_async_policy_version gauge",
        "skyrl_async_policy_version 2.0",
    ]
    assert prometheus_text({}) == "\n"


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with start_server(create_app(ScriptedSampler(), RENDERER, api_keys=[])) as (host, port):
        with pytest.raises(ConfigError, match=rf"server.port {port} is in use on {host}; choose another, or 0"):
            async with start_server(create_app(ScriptedSampler(), RENDERER, api_keys=[]), host, port):
                raise AssertionError


async def test_a_host_that_is_not_here_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"server.host"):
        async with start_server(create_app(ScriptedSampler(), RENDERER, api_keys=[]), "192.0.2.1"):
            raise AssertionError


async def test_a_failing_block_is_raised_bare_and_the_server_stops() -> None:
    with pytest.raises(ZeroDivisionError):
        async with endpoint() as running:
            raise ZeroDivisionError
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as client:
            await client.get(f"{running.url}/health")


async def test_stopping_ends_requests_that_are_still_open() -> None:
    sampler = HeldSampler(is_held=True)
    async with start_server(create_app(sampler, RENDERER, api_keys=[]), server=ServerConfig(shutdown_timeout_s=0)) as (
        host,
        port,
    ):
        client = httpx.AsyncClient()
        open_request = asyncio.ensure_future(
            client.post(f"http://{host}:{port}/v1/chat/completions", json={"messages": HELLO})
        )
        await sampler.asked.wait()
    assert sampler.cancelled.is_set()
    with contextlib.suppress(httpx.HTTPError):
        await open_request
    await client.aclose()
