"""The client of the control API: sessions that begin, end and are let go of, at endpoints that work, fail and vanish."""

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.responses import JSONResponse, Response

from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.errors import GenerationError, InvalidResultError, OutageError, SessionNotFoundError
from skyrl_async.generators.agent.sessions import AgentSession, SessionPool
from skyrl_async.runtime.outages import Outages
from skyrl_async.types import SamplingParams, ToolCall
from tests.cpu.agent_endpoint import CONTROLLER_KEY, StandIn, refusal, stand_in
from tests.patience import PATIENCE_S

SAMPLING = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=("x",))


def say_hi(messages: list[dict[str, Any]]) -> str:
    return "hi"


async def chat(session: AgentSession) -> str:
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=session.model, messages=[{"role": "user", "content": "hello"}]
        )
    return str(reply.choices[0].message.content)


async def cancelled_in_session(pool: SessionPool) -> None:
    """A block that is cancelled as soon as its session is there."""
    deadline = asyncio.timeout(None)
    try:
        async with deadline, pool.session():
            deadline.reschedule(0)
            await asyncio.Event().wait()
    except TimeoutError:
        assert deadline.expired()


@contextmanager
def unserved_url() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unserved.getsockname()[1]}"


async def test_a_finished_session_gives_exact_rows_and_is_deleted() -> None:
    async with stand_in(say_hi) as endpoint, SessionPool([endpoint.root], CONTROLLER_KEY) as pool:
        async with pool.session(sampling=SAMPLING, priority=7, label="p-0", lifetime_s=90) as session:
            assert await chat(session) == "hi"
            assert (await session.status())["last_text"] == "hi"
            (row,) = await session.finish(0.5, metrics={"fine": 1.0, "endless": math.inf}, is_truncated=True)
        assert (row.prompt_token_ids.tolist(), row.response_token_ids.tolist()) == ([1, 2], [ord("h"), ord("i")])
        assert (row.loss_mask.tolist(), row.logprobs.tolist()) == ([True, True], [-0.5, -0.5])
        assert tuple(row.versions) == (3, 4)
        assert (row.reward, row.is_truncated, row.num_turns, row.num_aborts) == (0.5, True, 1, 2)
        assert (row.metrics, row.is_abandoned, row.sample_index) == ({"fine": 1.0}, False, None)
        (said,) = row.messages
        assert (said.tool_calls, said.engines) == ((ToolCall(name="f", arguments="{}"),), ("engine-5",))
        (served,) = endpoint.sessions.values()
        assert served.is_deleted
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "max_tokens": 9}
        limits = {"idle_timeout_s": 90, "lifetime_s": 90}
        assert served.asked == {"sampling": sampling, "priority": 7, "label": "p-0", "limits": limits}


async def test_finishing_again_gives_the_rows_of_the_first_time() -> None:
    async with stand_in(say_hi) as endpoint, SessionPool([endpoint.root], CONTROLLER_KEY) as pool:
        async with pool.session() as session:
            await chat(session)
            first = await session.finish(1.0)
            assert await session.finish(0.0) is first
        assert session.trajectories is first


async def test_a_session_left_without_a_reward_is_abandoned_and_its_rows_are_known() -> None:
    async with stand_in(say_hi) as endpoint, SessionPool([endpoint.root], CONTROLLER_KEY) as pool:
        sessions = []

        async def fail() -> None:
            async with pool.session() as session:
                sessions.append(session)
                await chat(session)
                assert session.trajectories == ()
                raise RuntimeError("of the harness")

        with pytest.raises(RuntimeError, match="of the harness"):
            await fail()
        (session,) = sessions
        (row,) = session.trajectories
        assert row.is_abandoned and row.num_sampled_tokens == 0
        assert endpoint.sessions[session.id].is_deleted


async def test_a_cancelled_block_deletes_its_session_at_once() -> None:
    async with stand_in(say_hi) as endpoint, SessionPool([endpoint.root], CONTROLLER_KEY) as pool:
        await cancelled_in_session(pool)
        (served,) = endpoint.sessions.values()
        assert served.is_deleted and served.state == "open"


@pytest.mark.slow
async def test_a_cancelled_block_waits_a_second_at_most_for_an_endpoint_that_hangs() -> None:
    app = FastAPI()

    @app.post("/sessions")
    async def create() -> Response:
        return JSONResponse({"id": "s", "api_key": "k", "base_url": "b", "model": "m", "max_model_len": 9})

    @app.delete("/sessions/s")
    async def hang() -> None:
        await asyncio.Event().wait()

    async with start_server(app) as (host, port), SessionPool([f"http://{host}:{port}"], "k") as pool:
        started = asyncio.get_running_loop().time()
        await cancelled_in_session(pool)
        assert asyncio.get_running_loop().time() - started < 1.5


async def test_new_sessions_go_to_the_front_ends_in_turn() -> None:
    async with stand_in(say_hi) as first, stand_in(say_hi) as second:
        async with SessionPool([first.root, f"{second.root}/"], CONTROLLER_KEY) as pool:
            for _ in range(4):
                async with pool.session() as session:
                    await session.finish(0.0)
        assert [len(endpoint.sessions) for endpoint in (first, second)] == [2, 2]


async def test_a_front_end_that_refuses_connections_is_passed_over() -> None:
    with unserved_url() as unserved:
        async with stand_in(say_hi) as endpoint, SessionPool([unserved, endpoint.root], CONTROLLER_KEY) as pool:
            async with pool.session() as session:
                await session.finish(0.0)
            assert session.base_url == f"{endpoint.root}/v1"


@pytest.mark.slow
async def test_an_endpoint_that_is_not_there_is_named() -> None:
    with unserved_url() as unserved:
        async with SessionPool([unserved], "key") as pool:
            with pytest.raises(GenerationError, match=rf"POST {unserved}/sessions failed: ConnectError"):
                async with pool.session():
                    raise AssertionError("there is no session")


class Breaking(httpx.AsyncBaseTransport):
    """Lets a connection break in each first try of a request, after it was sent."""

    def __init__(self, app: FastAPI) -> None:
        self._inner = httpx.ASGITransport(app)
        self.seen: set[tuple[str, str]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if (request.method, request.url.path) in self.seen:
            return response
        self.seen.add((request.method, request.url.path))
        raise httpx.ReadError("connection reset")


async def test_a_request_whose_connection_breaks_is_sent_again() -> None:
    endpoint = StandIn(say_hi)
    transport = Breaking(endpoint.app)
    async with SessionPool(["http://endpoint"], CONTROLLER_KEY, transport=transport) as pool, pool.session() as session:
        await session.status()
        assert await session.finish(1.0) == ()
    assert endpoint.sessions["s1"].finish["reward"] == 1.0
    assert endpoint.sessions["s1"].is_deleted and len(transport.seen) == 4


class Down(httpx.AsyncBaseTransport):
    """Nothing answers until an outage is over."""

    def __init__(self, app: Any, outages: Outages, error: Exception) -> None:
        self.transport = httpx.ASGITransport(app)
        self.outages = outages
        self.error = error
        self.num_unanswered = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.outages.num_over:
            return await self.transport.handle_async_request(request)
        self.num_unanswered += 1
        asyncio.get_running_loop().call_soon(self.outages.end, "front end 0")
        raise self.error


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadTimeout("frozen")])
async def test_calls_that_an_outage_keeps_from_being_answered_are_made_again_after_it(error: Exception) -> None:
    endpoint, outages = StandIn(say_hi), Outages()
    outages.begin("front end 0")
    transport = Down(endpoint.app, outages, error)
    pool = SessionPool(
        ["http://endpoint"], CONTROLLER_KEY, transport=transport, outages=outages, outage_timeout_s=PATIENCE_S
    )
    async with pool, pool.session() as session:
        assert await session.finish(1.0) == ()
    assert list(endpoint.sessions) == ["s0"] and transport.num_unanswered >= 1


async def test_a_session_that_an_outage_ended_is_only_deleted() -> None:
    endpoint = StandIn(say_hi)
    pool = SessionPool(["http://endpoint"], CONTROLLER_KEY, transport=httpx.ASGITransport(endpoint.app))

    async def play() -> None:
        async with pool, pool.session():
            raise OutageError("the endpoint is gone")

    with pytest.raises(OutageError):
        await play()
    assert endpoint.sessions["s0"].is_deleted and not endpoint.sessions["s0"].finish


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (refusal(500, "the disk is full"), "POST http://endpoint/sessions was answered 500: the disk is full"),
        (Response("<html>", 502), "was answered 502: '<html>'"),
        (refusal(401, "wrong key"), "was answered 401: wrong key"),
        (Response("no json"), "must answer with id, api_key, base_url, model and max_model_len, got 'no json'"),
        (
            JSONResponse({"id": "s"}),
            "must answer with id, api_key, base_url, model and max_model_len, got .*: KeyError: 'api_key'",
        ),
        (JSONResponse(["s"]), "must answer with id"),
    ],
)
async def test_an_endpoint_that_fails_or_refuses_is_named_with_what_was_asked(answer: Response, complaint: str) -> None:
    app = FastAPI()

    @app.post("/sessions")
    async def create() -> Response:
        return answer

    async with SessionPool(["http://endpoint"], "key", transport=httpx.ASGITransport(app)) as pool:
        with pytest.raises(GenerationError, match=complaint):
            async with pool.session():
                raise AssertionError("there is no session")


@pytest.mark.parametrize(
    ("trajectories", "complaint"),
    [
        ([{"prompt_token_ids": [1]}], "missing .* 'response_token_ids'"),
        (None, "TypeError"),
        ("versions", "policy_versions cover 1 of 2 tokens"),
        ("gap", "adjoining spans from 0"),
        ("mask", "loss_mask has 1 entries for 2 response tokens"),
    ],
)
async def test_invalid_rows_fail_the_rollout(trajectories: Any, complaint: str) -> None:
    row = {
        "prompt_token_ids": [1],
        "response_token_ids": [2, 3],
        "loss_mask": [1] if trajectories == "mask" else [1, 1],
        "logprobs": [0.0, 0.0],
        "policy_versions": [
            {"version": 0, "start": int(trajectories == "gap"), "end": 1 + (trajectories != "versions")}
        ],
        "reward": 0.0,
        "weight": 1.0,
        "num_turns": 1,
        "num_aborts": 0,
        "is_truncated": False,
        "is_abandoned": False,
        "metrics": {},
    }
    app = FastAPI()

    @app.post("/sessions")
    async def create() -> Response:
        return JSONResponse({"id": "s", "api_key": "k", "base_url": "b", "model": "m", "max_model_len": 9})

    @app.post("/sessions/s/finish")
    async def finish() -> Response:
        return JSONResponse({"trajectories": [row] if isinstance(trajectories, str) else trajectories})

    @app.delete("/sessions/s")
    async def delete() -> None:
        pass

    async with (
        SessionPool(["http://endpoint"], "key", transport=httpx.ASGITransport(app)) as pool,
        pool.session() as session,
    ):
        with pytest.raises(GenerationError, match=f"must answer with training rows.*{complaint}"):
            await session.finish(1.0)


async def test_a_session_that_is_gone_is_an_error_of_its_own() -> None:
    async with (
        stand_in(say_hi) as endpoint,
        SessionPool([endpoint.root], CONTROLLER_KEY) as pool,
        pool.session() as session,
    ):
        endpoint.sessions[session.id].is_deleted = True
        with pytest.raises(SessionNotFoundError, match="answered 404: there is no session s0"):
            await session.finish(1.0)


async def test_a_reward_must_be_finite_and_no_key_is_shown() -> None:
    async with (
        stand_in(say_hi) as endpoint,
        SessionPool([endpoint.root], CONTROLLER_KEY) as pool,
        pool.session() as session,
    ):
        with pytest.raises(ValueError, match=f"reward of session {session.id} must be finite, got nan"):
            await session.finish(math.nan)
        said = rf"turn_rewards\[1\] of session {session.id} must be finite, got inf for token 1"
        with pytest.raises(ValueError, match=said):
            await session.finish(1.0, turn_rewards=(1.0, [0.0, math.inf]))
        with pytest.raises(InvalidResultError, match=r"metrics\['tools'\] of a session must be a number, got 'two'"):
            await session.finish(1.0, metrics={"tools": "two"})
        await session.finish(np.float32(1.0), metrics={"tools": np.int64(2)})
        assert session.api_key not in repr(session)


def test_a_pool_needs_an_endpoint() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        SessionPool([], "key")
