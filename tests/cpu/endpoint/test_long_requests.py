"""Requests that are long, or late: what they may not do to others. Real sockets; what takes long is held by an event, never timed."""

import asyncio
import gc
import json
import math
import threading
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from benchmarks import endpoint_freeze
from skyrl_async.chat import ChatRenderer
from skyrl_async.chat.spelling import Speller
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests.json_text import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_VALUES,
    TooManyValuesError,
    encode_json,
    json_bytes,
    parse_stepwise,
)
from skyrl_async.endpoint.requests.long_work import LONG_BODY
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.forwarding import Forwarding
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.types import Trajectory
from tests.cpu.scripted_sampler import CONTROLLER_KEY, RUN_KEY, ScriptedSampler
from tests.cpu.session_endpoint import PARSER, TOKENIZER, check_exact, endpoint, error_of, user
from tests.cpu.tiny_chat import make_tokenizer
from tests.patience import PATIENCE_S

LONG = "hello 12 " * 29_000
BODIES = {
    "/v1/chat/completions": {"messages": [user(LONG)]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"max_tokens": 5, "messages": [user(LONG)]},
}
COUNTED = {
    "/v1/tokenize": {"prompt": LONG},
    "/v1/messages/count_tokens": {"messages": [user(LONG)]},
}
MANY = {"messages": [user("hello " * 100)] * 400}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


class HeldRenderer(ChatRenderer):
    """Tokenizes a long text when it is let go on, and notes in which threads it spells tokens."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.spells_in_main_thread: set[bool] = set()

    def encode(self, text: str, **limits: Any) -> tuple[int, ...]:
        if len(text) > 100_000:
            self.has_begun.set()
            self.may_go_on.wait(PATIENCE_S)
        return super().encode(text, **limits)

    def token_bytes(self, token_id: int) -> bytes:
        self.spells_in_main_thread.add(threading.current_thread() is threading.main_thread())
        return super().token_bytes(token_id)


@asynccontextmanager
async def served(renderer: ChatRenderer, sampler: ScriptedSampler, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(sampler, renderer, api_keys=[RUN_KEY], controller_keys=[CONTROLLER_KEY], parser=PARSER, **settings)
    async with start_server(app) as (host, port):
        headers = {"Authorization": f"Bearer {CONTROLLER_KEY}"}
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers, timeout=PATIENCE_S) as client:
            yield client


async def key_of_a_session(client: httpx.AsyncClient) -> dict[str, str]:
    made = (await client.post("/sessions")).json()
    return {"Authorization": f"Bearer {made['api_key']}"}


@pytest.mark.parametrize(("path", "body"), [*BODIES.items(), ("/v1/chat/completions", MANY)])
async def test_a_prompt_that_cannot_fit_is_refused_by_its_length(path: str, body: dict[str, Any]) -> None:
    async with endpoint(ScriptedSampler(max_model_len=100)) as served:
        session = await served.begin()
        response = await session.http.post(path, json=body)
        status = await session.status()
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 100 tokens, but the prompt has at least " in error["message"]
    assert "(context_length_exceeded)" in error["message"]
    assert status["num_overflows"] == 1 and status["was_cut_short"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_body_that_no_prompt_of_the_context_needs_is_an_overflow_before_it_is_parsed(path: str) -> None:
    body = b'{"not JSON' + b" " * (2**18 + 64 * 100)
    async with endpoint(ScriptedSampler(max_model_len=100)) as served:
        session = await served.begin()
        response = await session.http.post(path, content=body, headers={"Content-Type": "application/json"})
        status = await session.status()
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 100 tokens, but the body has more than 268544 bytes" in error["message"]
    assert status["num_overflows"] == 1


async def test_a_session_whose_bodies_are_always_too_long_ends_like_one_with_long_prompts() -> None:
    body = b" " * (2**18 + 64 * 100 + 1)
    async with endpoint(ScriptedSampler(max_model_len=100)) as served:
        session = await served.begin()
        answers = [await session.http.post("/v1/chat/completions", content=body) for _ in range(4)]
        status = await session.status()
    assert [answer.status_code for answer in answers] == [400, 400, 400, 401]
    assert "overflowed the model's context 3 times" in error_of(answers[-1])["message"]
    assert status["num_overflows"] == 3


async def test_a_session_ends_with_as_many_metrics_as_one_likes() -> None:
    metrics = {f"a figure of the agent's {i}": float(i) for i in range(1000)}
    async with endpoint(ScriptedSampler()) as served:
        session = await served.begin()
        await session.http.post("/v1/chat/completions", json={"messages": [user()]})
        (row,) = await session.finish(metrics=metrics)
    assert row["metrics"].items() >= metrics.items()


async def test_a_definition_of_a_tool_counts_as_prompt() -> None:
    async with endpoint(ScriptedSampler(max_model_len=100)) as served, served.client(RUN_KEY) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [user()], "tools": [TOOL]})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


def variant(normalizer: Any = None, pre_tokenizer: Any = None, added: Sequence[AddedToken] = ()) -> Any:
    tokenizer = make_tokenizer()
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    return tokenizer


LETTERS = [
    "hello",
    "assistant",
    " again",
    "<|im_end|>",
    "e\u0301",
    "\u03b1\u0313\u0300\u0345",
    "\u1100\u1161\u11a8",
    "\U0001f600",
    "日本",
    "\ud800",
]
PLAIN = variant()
COMPOSING = variant(normalizers.NFC())


@given(st.lists(st.one_of(st.sampled_from(LETTERS), st.text(max_size=5)), max_size=200).map("".join))
def test_no_text_has_fewer_tokens_than_the_bound_from_its_length(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    for tokenizer in (PLAIN, COMPOSING):
        speller = Speller(tokenizer)
        assert speller.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
        assert speller.fewest_tokens("x" * 10_000) > 100


@pytest.mark.parametrize(
    "tokenizer",
    [
        variant(normalizers.Strip()),
        variant(normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" +"), " ")])),
        variant(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
        ),
        variant(pre_tokenizer=pre_tokenizers.Whitespace()),
        variant(added=[AddedToken("<mask>", lstrip=True)]),
    ],
)
def test_no_bound_is_known_where_a_token_may_stand_for_any_number_of_characters(tokenizer: Any) -> None:
    assert Speller(tokenizer).fewest_tokens("x" * 10_000) == 0


@pytest.mark.parametrize(("path", "body"), [*BODIES.items(), *COUNTED.items()])
async def test_others_are_answered_while_a_long_text_is_tokenized(path: str, body: dict[str, Any]) -> None:
    renderer = HeldRenderer()
    async with served(renderer, ScriptedSampler(max_model_len=10**6)) as client, asyncio.TaskGroup() as group:
        held_by, other = await key_of_a_session(client), await key_of_a_session(client)
        held = group.create_task(client.post(path, json=body, headers=held_by))
        assert await asyncio.to_thread(renderer.has_begun.wait, PATIENCE_S)
        assert (await client.get("/health")).status_code == 200
        medium = {"messages": [user("hello " * 5000)]}
        for asked in ({"messages": [user()]}, medium):
            assert (await client.post("/v1/chat/completions", json=asked, headers=other)).status_code == 200
        assert not held.done()
        renderer.may_go_on.set()
    assert held.result().status_code == 200


async def test_a_text_that_is_too_long_to_be_counted_is_413() -> None:
    async with endpoint(ScriptedSampler(max_model_len=100)) as served, served.client(RUN_KEY) as client:
        response = await client.post("/v1/tokenize", json={"prompt": "x" * (2**22 + 1)})
    assert response.status_code == 413
    assert "at most 4194304 characters are tokenized at once" in error_of(response)["message"]


async def test_a_refused_prompt_leaves_nothing_in_memory() -> None:
    body = json.dumps({"messages": [user("hello 12 " * 300_000)]}).encode()
    async with endpoint(ScriptedSampler(max_model_len=100)) as served:
        session = await served.begin()
        headers = {"Content-Type": "application/json"}
        await session.http.post("/v1/chat/completions", content=body, headers=headers)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(2):
                await session.http.post("/v1/chat/completions", content=body, headers=headers)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert kept < 2.5 * len(body), "the requests themselves may wait for a collection, not what was made of them"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
async def test_what_is_parsed_or_written_in_steps_is_the_same(value: Any) -> None:
    much = {"v": value, "long": [value] * 600, "ids": list(range(25_000))}
    text = json.dumps(much)
    if "Infinity" not in text and text.count("[") + text.count("{") < MAX_CONTAINERS:
        assert parse_stepwise(text) == much
    assert await encode_json(much) == json_bytes(much)


@pytest.mark.parametrize("num_tokens", [0, 3, 5000])
async def test_columns_are_written_as_lists(num_tokens: int) -> None:
    lists = {"ids": list(range(num_tokens)), "logprobs": [-0.5, *[-math.inf] * num_tokens], "mask": [1] * num_tokens}
    columns = {name: np.array(values, np.float32 if name == "logprobs" else np.int32) for name, values in lists.items()}
    assert await encode_json(columns) == json_bytes(columns) == json_bytes(lists)


@pytest.mark.parametrize("end", ["", "]", "nul]", '"\\x"]', "]]"])
def test_what_is_no_json_is_refused_alike_in_steps(end: str) -> None:
    text = "[" + "1," * 30_000 + end
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as found:
        parse_stepwise(text)
    assert (found.value.msg, found.value.pos) == (expected.value.msg, expected.value.pos)


@pytest.mark.parametrize(
    "many", ["[]," * MAX_CONTAINERS, "{}," * MAX_CONTAINERS, "0," * MAX_VALUES, '"",' * MAX_VALUES]
)
async def test_a_body_of_more_values_than_anyone_needs_is_413(many: str) -> None:
    text = f'{{"messages": [{many}[],{{}},1,2,""]}}'
    with pytest.raises(TooManyValuesError):
        parse_stepwise(text)
    if many.startswith("["):
        async with endpoint(ScriptedSampler()) as served, served.client(RUN_KEY) as client:
            response = await client.post(
                "/v1/chat/completions", content=text, headers={"Content-Type": "application/json"}
            )
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 980])
@pytest.mark.parametrize("num_padding", [0, LONG_BODY])
async def test_what_is_nested_too_deep_for_templates_is_refused_however_long_the_body_is(
    depth: int, num_padding: int
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": "nested"}}
    nested = '{"a":' * (depth - 5) + "[]" + "}" * (depth - 5)
    body = json.dumps({"messages": [user()], "tools": [tool], "pad": "x" * num_padding}).replace('"nested"', nested)
    async with endpoint(ScriptedSampler()) as served, served.client(RUN_KEY) as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == (200 if depth == MAX_DEPTH else 400)
    if depth > MAX_DEPTH:
        assert error_of(response)["code"] == "invalid_value"


async def test_a_long_answer_with_log_probs_is_written_in_a_thread() -> None:
    renderer = HeldRenderer()
    sampler = ScriptedSampler(scripts=[["hello" * 1000]])
    async with served(renderer, sampler) as client:
        body = {"messages": [user()], "logprobs": True}
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        assert len(reply["choices"][0]["logprobs"]["content"]) == 5001
        assert renderer.spells_in_main_thread == {False}
        sampler.scripts = [["hi"]]
        reply = (await client.post("/v1/chat/completions", json=body)).json()
    assert [token["token"] for token in reply["choices"][0]["logprobs"]["content"]] == ["h", "i", "<|im_end|>"]


async def test_a_long_session_has_exact_rows() -> None:
    sampler = ScriptedSampler(scripts=[["hello" * 1000, "x"], ["again" * 1000, "y"]])
    async with endpoint(sampler, session_settings=None) as served:
        session = await served.begin()
        reply = await session.reply([user()])
        await session.reply([user(), reply, user("more")])
        (row,), again = await asyncio.gather(session.finish(), session.finish())
    check_exact(row, sampler)
    assert again == [row]


async def test_rows_are_made_and_written_in_a_thread_however_little_was_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    make_rows = Session.rows

    def rows(session: Session) -> tuple[Trajectory, ...]:
        threads.append(threading.current_thread())
        return make_rows(session)

    monkeypatch.setattr(Session, "rows", rows)
    async with endpoint(ScriptedSampler(max_model_len=100_000)) as served:
        session = await served.begin()
        for text in ("first ", "second "):
            await session.post([user(text * 3000)])
        assert len(await session.finish()) == 2
    assert threads and threading.main_thread() not in threads


async def receive_all(host: str, port: int, *sent: bytes) -> bytes:
    """What a server says to the last of ``sent`` until it closes the connection; the others are answered by ``/health``."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            *whole, last = sent
            for request in whole:
                writer.write(request)
                await reader.readuntil(b'"ok"}')
            writer.write(last)
            return await reader.read()
    finally:
        writer.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        ([HEAD[:40]], "header"),
        ([HEALTH + b"\r\n", HEALTH], "header"),
        ([HEAD + f"Authorization: Bearer {RUN_KEY}\r\nContent-Length: 50\r\n\r\n".encode() + b'{"messages"'], "body"),
    ],
)
async def test_a_request_that_is_sent_half_is_408(sent: list[bytes], part: str) -> None:
    app = create_app(ScriptedSampler(), HeldRenderer(), api_keys=[RUN_KEY], server=ServerConfig(request_timeout_s=0.05))
    async with start_server(app, server=ServerConfig(request_timeout_s=0.05)) as address:
        answer = await receive_all(*address, *sent)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in answer.lower()
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"
    assert f"the {part}" in error["message"] and "0.05 s (server.request_timeout_s)" in error["message"]


async def test_a_connection_that_says_nothing_is_closed_without_an_answer() -> None:
    app = create_app(ScriptedSampler(), HeldRenderer(), api_keys=[RUN_KEY])
    async with start_server(app, server=ServerConfig(request_timeout_s=0.05)) as address:
        assert await receive_all(*address, b"") == b""


async def test_a_forwarded_body_has_the_same_limits() -> None:
    forwarding: list[Forwarding] = []

    def around(app: Any) -> Forwarding:
        forwarding.append(Forwarding(app, 1, ServerConfig(max_body_bytes=1000, request_timeout_s=0.05)))
        return forwarding[0]

    async with endpoint(ScriptedSampler()) as owner, endpoint(ScriptedSampler(), around=around) as other:
        forwarding[0].connect((owner.url, other.url))
        session = await owner.begin()
        body = json.dumps({"messages": [user()]}).encode()
        headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}

        async with httpx.AsyncClient(base_url=other.url, headers=headers, timeout=PATIENCE_S) as client:
            whole = await client.post("/v1/chat/completions", content=body)
            large = await client.post("/v1/chat/completions", content=b"x" * 1001)
            shown = await client.get("/v1/models")
            asked = HEAD + f"Authorization: Bearer {session.key}\r\nContent-Length: 50\r\n\r\n".encode() + body[:10]
            host, _, port = other.url.removeprefix("http://").partition(":")
            late = await receive_all(host, int(port), asked)
        await forwarding[0].close()
    assert [whole.status_code, large.status_code, shown.status_code] == [200, 413, 200]
    assert late.startswith(b"HTTP/1.1 408 ")


async def test_a_request_is_forwarded_past_the_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarding: list[Forwarding] = []

    def around(app: Any) -> Forwarding:
        with monkeypatch.context() as environment:
            environment.setenv("HTTP_PROXY", "http://127.0.0.1:9")
            environment.delenv("NO_PROXY", raising=False)
            environment.delenv("no_proxy", raising=False)
            forwarding.append(Forwarding(app, 1, ServerConfig()))
        return forwarding[0]

    async with endpoint(ScriptedSampler()) as owner, endpoint(ScriptedSampler(), around=around) as other:
        forwarding[0].connect((owner.url, other.url))
        session = await owner.begin()
        async with other.client(session.key) as client:
            response = await client.post("/v1/chat/completions", json={"messages": [user()]})
        await forwarding[0].close()
    assert response.status_code == 200, response.text


@pytest.mark.slow
async def test_a_stream_goes_on_beside_a_huge_body() -> None:
    """The bound is generous: machines are shared. Tokenizing this body takes seconds."""
    with endpoint_freeze.front_end(512) as served:
        row = await endpoint_freeze.measure(served, "prompt", num_bodies=1, mib=4, settle_s=0.5)
    assert row["statuses"] in ({400: 1}, {401: 1})
    assert row["longest_gap_s"] < 2 and row["longest_health_s"] < 2
    assert row["rss_after_mib"] < row["rss_before_mib"] + 300
