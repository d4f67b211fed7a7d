"""Who may do what with a session, how it ends, and what becomes of requests sent twice or given up: through a real endpoint."""

import asyncio
import contextlib
import gc
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests import streaming
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionSettings
from skyrl_async.errors import NoEngineError, RequestRefusedError
from tests.cpu.scripted_sampler import CONTROLLER_KEY, RENDERER, RUN_KEY
from tests.cpu.session_endpoint import (
    PARSER,
    RETRY_HEADER,
    TOOL,
    Endpoint,
    HeldSampler,
    OpenSession,
    endpoint,
    error_of,
    events_of,
    user,
)
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
HELLO = {"messages": [user()]}


@pytest.fixture
def sampler() -> HeldSampler:
    """Says another letter each time."""
    return HeldSampler(scripts=tuple((letter,) for letter in "abcdefghij"))


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_a_sessions_key_opens_its_own_v1_and_nothing_else(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        own, other = await served.begin(), await served.begin()
        allowed = [
            await own.http.get("/v1/models"),
            await own.http.post("/v1/tokenize", json={"prompt": "x"}),
            await own.http.post(f"/sessions/{own.id}{CHAT}", json=HELLO),
        ]
        forbidden = [
            await own.http.request(method, path, json={"reward": 1.0})
            for method, path in (
                ("POST", "/sessions"),
                ("GET", f"/sessions/{own.id}"),
                ("POST", f"/sessions/{own.id}/finish"),
                ("DELETE", f"/sessions/{own.id}"),
                ("POST", f"/sessions/{other.id}/finish"),
                ("GET", "/metrics"),
                ("POST", "/tokenize"),
                ("GET", "/openapi.json"),
            )
        ]
        foreign = await own.http.post(f"/sessions/{other.id}{CHAT}", json=HELLO)
        turns = [(await session.status())["num_turns"] for session in (own, other)]
    assert [response.status_code for response in allowed] == [200] * 3
    assert [response.status_code for response in forbidden] == [403] * 8
    assert {error_of(response)["code"] for response in forbidden} == {"forbidden"}
    assert (foreign.status_code, error_of(foreign)["code"]) == (401, "invalid_api_key")
    assert turns == [1, 0]


async def test_the_controllers_key_opens_sessions_and_the_runs_does_not(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served, served.client(RUN_KEY) as run, served.client("nobody") as nobody:
        session = await served.begin(label="a label")
        statuses = [(await client.post("/sessions")).status_code for client in (served.controller, run, nobody)]
        shown = [
            (await client.get(f"/sessions/{session.id}")).status_code for client in (served.controller, run, nobody)
        ]
        sampled = [(await client.post(CHAT, json=HELLO)).status_code for client in (served.controller, run, nobody)]
        inside = await run.post(f"/sessions/{session.id}{CHAT}", json=HELLO)
        assert (await session.status())["label"] == "a label"
    assert (statuses, shown, sampled) == ([201, 403, 401], [200, 403, 401], [200, 200, 401])
    assert inside.status_code == 401


async def test_without_keys_every_client_is_the_controller_unless_it_sends_a_sessions_key(sampler: HeldSampler) -> None:
    async with endpoint(sampler, api_keys=[], controller_keys=[]) as served, served.client(None) as stranger:
        session = await served.begin()
        assert (await stranger.get(f"/sessions/{session.id}")).status_code == 200
        assert (await session.http.get(f"/sessions/{session.id}")).status_code == 403
        await stranger.delete(f"/sessions/{session.id}")
        assert (await session.http.get("/sessions/x")).status_code == 401


async def test_a_finish_is_idempotent_and_the_first_reward_counts(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        await session.post([user()])
        first = await session.finish(0.25, metrics={"a": 1})
        second = await session.finish(9.0)
        state = (await session.status())["state"]
    assert first == second and first[0]["reward"] == 0.25
    assert state == "finished"


async def test_single_turns_are_rewarded_and_found_in_the_rows(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        for text in ("a", "b", "c"):
            await session.post([user(text)])
        url = f"/sessions/{session.id}/finish"
        rewards = [{"turn": 2, "value": 0.5}, {"turn": 0, "value": -1.0}, {"turn": 2, "value": 0.25}]
        wrong = [
            {"rewards": [{"turn": 3, "value": 1.0}]},
            {"rewards": rewards, "reward": 1.0},
            {"rewards": [{"turn": -1, "value": 1.0}]},
            {"rewards": [{"turn": 0, "value": "much"}]},
            {"rewards": 1.0},
            {"metrics": {"a": 1.0}},
            {"rewards": [{"turn": 1, "value": [1.0]}]},
            {"rewards": [{"turn": 1, "value": [1.0, "much"]}]},
            {"rewards": [{"turn": 1, "value": [0.0, 10**400]}]},
            {"rewards": [{"turn": 1, "value": [1e308, 1e308]}], "reward": 1.0},
            {"rewards": [{"turn": 1, "value": [1e39, 0.0]}]},
            {"reward": 1e39},
            {"rewards": [{"turn": 0, "value": 1.0}, {"turn": 2, "value": ["0", "inf"]}]},
            {"reward": "nan"},
        ]
        refused = [(await session.controller.post(url, json=body)) for body in wrong]
        as_text = [{"turn": one["turn"], "value": str(one["value"])} for one in rewards]
        finished = (await session.controller.post(url, json={"rewards": as_text})).json()["trajectories"]
        again = (await session.controller.post(url, json={"rewards": rewards})).json()["trajectories"]
    assert [answer.status_code for answer in refused] == [400] * 14
    said = [answer.json()["error"]["message"] for answer in refused]
    assert "rewards name turn 3, but the session has 3 turns, counted from 0" in said[0]
    assert "reward must be the sum of rewards (-0.25), or be left out, got 1" in said[1]
    assert "reward" in said[5]
    assert "rewards have 1 values for turn 1, but it has 2 sampled tokens" in said[6]
    assert "rewards are too large: each must be between -1e30 and 1e30, got 1e+308" in said[9]
    assert "got 1e+39" in said[10] and "reward is too large" in said[11]
    assert "rewards must be finite, got inf for turn 2, token 1" in said[12]
    assert "reward must be a finite number, got nan" in said[13]
    assert all(session.id in text for text in said[12:])
    assert [(row["reward"], row["turn_rewards"]) for row in finished] == [(-0.25, [-1.0, 0.0, 0.75])] * 3
    assert [[span["index"] for span in row["turn_spans"]] for row in finished] == [[0], [1], [2]]
    assert again == finished


async def test_single_tokens_are_rewarded_beside_whole_turns(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        history = [user("a")]
        for text in ("b", "c"):
            reply = await session.post(history)
            history += [reply.json()["choices"][0]["message"], user(text)]
        assert (await session.status())["num_turn_tokens"] == [2, 2]
        rewards = [{"turn": 0, "value": [0.25, -0.5]}, {"turn": 1, "value": 1.0}]
        url = f"/sessions/{session.id}/finish"
        (row,) = (await session.controller.post(url, json={"rewards": rewards})).json()["trajectories"]
    assert (row["reward"], row["turn_rewards"]) == (0.75, [-0.25, 1.0])
    (first, second), by_token = row["turn_spans"], row["token_rewards"]
    assert by_token[first["start"] : first["end"]] == [0.25, -0.5]
    assert by_token[second["start"] : second["end"]] == [0.0, 1.0]
    assert math.fsum(by_token) == row["reward"]


async def test_after_the_end_a_session_refuses_with_401_and_says_why(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        await session.finish()
        finished = [await session.post([user()], stream=stream) for stream in (False, True)]
        with pytest.raises(openai.AuthenticationError, match="is finished; begin a new session"):
            await session.chat([user()])
        deletions = [await served.controller.delete(f"/sessions/{session.id}") for _ in range(2)]
        deleted = await session.post([user()])
        gone = await served.controller.get(f"/sessions/{session.id}")
    assert [(r.status_code, error_of(r)["code"]) for r in finished] == [(401, "session_closed")] * 2
    assert [(r.status_code, r.content) for r in deletions] == [(204, b"")] * 2
    assert (deleted.status_code, error_of(deleted)["code"]) == (401, "invalid_api_key")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "session_not_found")
    assert sampler.num_begun == 0


@pytest.mark.parametrize("ends", ["finish", "delete"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_requests_in_flight_end_with_the_session(sampler: HeldSampler, is_streamed: bool, ends: str) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served, asyncio.TaskGroup() as group:
        session = await served.begin()
        asking = group.create_task(session.post([user()], stream=is_streamed))
        await sampler.asked.wait()
        if ends == "finish":
            assert await session.finish() == []
        else:
            await served.controller.delete(f"/sessions/{session.id}")
        response = await asking
        await sampler.cancelled.wait()
    assert (response.status_code, error_of(response)["code"]) == (401, "session_closed")
    assert "was closed while this request was open" in error_of(response)["message"]


async def test_a_stream_in_flight_ends_with_an_error_event(sampler: HeldSampler) -> None:
    sampler.scripts, sampler.is_held, sampler.holds_last_block = (("a", "b"),), True, True
    async with endpoint(sampler) as served:
        session = await served.begin()
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="was closed while this request was open"):
            await finish_in_mid_stream(session, texts)
    assert texts == ["", "a"]


async def finish_in_mid_stream(session: OpenSession, texts: list[str]) -> None:
    async for chunk in await session.chat([user()], stream=True):
        texts.append(chunk.choices[0].delta.content)
        if texts[-1] == "a":
            assert await session.finish() == []


@pytest.mark.parametrize(("limits", "cap"), [({"max_turns": 2}, "max_turns=2"), ({"max_tokens": 3}, "max_tokens=3")])
async def test_a_cap_refuses_the_next_request_by_name(sampler: HeldSampler, limits: dict[str, int], cap: str) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin(limits=limits)
        answered = [await session.post([user()]) for _ in range(2)]
        refused = await session.post([user()])
        rows = await session.finish()
    assert [response.status_code for response in answered] == [200, 200]
    assert (refused.status_code, error_of(refused)["code"]) == (401, "session_closed")
    assert cap in error_of(refused)["message"]
    assert len(rows) == 2 and all(row["is_truncated"] for row in rows)


async def test_overflows_are_told_exactly_and_counted(sampler: HeldSampler) -> None:
    sampler.max_model_len = 100
    long = [user("x" * 200)]
    async with endpoint(sampler) as served:
        session = await served.begin()
        await session.post([user()])
        told = [await session.post(long, stream=stream) for stream in (False, True, False)]
        refused = await session.post([user()])
        status = await session.status()
        (row,) = await session.finish()
    for response in told:
        assert response.status_code == 400
        error = error_of(response)
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert error["message"].startswith("This model's maximum context length is 100 tokens")
        assert "context_length_exceeded" in error["message"]
    assert (refused.status_code, status["num_overflows"]) == (401, 3)
    assert "overflowed the model's context 3 times" in error_of(refused)["message"]
    assert row["is_truncated"]


async def test_a_prompt_above_the_requests_own_limit_is_no_overflow_of_the_model(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        await session.post([user()])
        refused = [await session.post([user()], max_total_tokens=5, stream=stream) for stream in (False, True) * 2]
        status = await session.status()
        (row,) = await session.finish()
    for response in refused:
        error = error_of(response)
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_total_tokens")
        assert error["message"].startswith("max_total_tokens is 5 tokens, but the prompt has at least ")
    assert (status["num_overflows"], status["was_cut_short"], row["is_truncated"]) == (0, False, False)


@contextlib.asynccontextmanager
async def aging(sampler: HeldSampler) -> AsyncIterator[tuple[Endpoint, list[float]]]:
    """An endpoint whose sessions live by a clock of the test's."""
    now = [0.0]
    limits = SessionLimits(idle_timeout_s=10.0, lifetime_s=100.0)
    async with endpoint(sampler, clock=lambda: now[0], session_settings=SessionSettings(limits=limits)) as served:
        yield served, now


async def test_an_idle_session_expires_and_its_rows_train_nothing(sampler: HeldSampler) -> None:
    async with aging(sampler) as (served, now):
        idle, busy = await served.begin(), await served.begin()
        await idle.post([user()])
        await until(lambda: served.serving.sessions.statistics()["open_requests"] == 0)
        now[0] = 9.0
        await busy.post([user()])
        now[0] = 18.0
        expired = served.serving.sessions.sweep()
        refused, answered = await idle.post([user("more")]), await busy.post([user("more")])
        states = [(await session.status())["state"] for session in (idle, busy)]
        (row,) = await idle.finish()
    assert [session.id for session in expired] == [idle.id]
    assert (refused.status_code, answered.status_code) == (401, 200)
    assert "idle for 10 s" in error_of(refused)["message"]
    assert states == ["expired", "open"]
    assert row["is_abandoned"] and not any(row["loss_mask"])


async def test_a_request_keeps_its_session_from_being_idle_but_not_from_its_lifetime(sampler: HeldSampler) -> None:
    sampler.is_held = True
    async with aging(sampler) as (served, now), asyncio.TaskGroup() as group:
        session = await served.begin()
        asking = group.create_task(session.post([user()]))
        await sampler.asked.wait()
        now[0] = 99.0
        assert served.serving.sessions.sweep() == []
        now[0] = 100.0
        (expired,) = served.serving.sessions.sweep()
        served.serving.end_session(expired)
        assert (await asking).status_code == 401
        assert await session.finish() == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_marked_resend_is_replayed_and_an_unmarked_one_sampled_anew(
    sampler: HeldSampler, is_streamed: bool
) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        first = await session.post([user()], stream=is_streamed)
        replays = [await session.post([user()], stream=is_streamed, retry=retry) for retry in (1, 2)]
        status = await session.status()
        again = await session.post([user()], stream=is_streamed, retry=0)
        other = await session.post([user("other")], stream=is_streamed, retry=1)
        late = await session.post([user()], stream=is_streamed, retry=1)
        rows = await session.finish()
        metrics = (await served.controller.get("/metrics")).text
    assert [replay.content for replay in replays] == [first.content] * 2
    assert status["num_turns"] == 1
    assert len({response.content for response in (first, again, other, late)}) == 4
    assert len(sampler.prompts) == len(rows) == 4
    assert "skyrl_async_replays_total 2.0" in metrics


async def test_the_resend_of_a_request_that_failed_is_not_answered_with_the_reply_to_an_equal_one(
    sampler: HeldSampler,
) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        await session.post([user()])
        sampler.failure = RuntimeError("it broke")
        assert (await session.post([user()])).status_code == 500
        sampler.failure = None
        assert (await session.post([user()], retry=1)).status_code == 200
        assert (await session.status())["num_turns"] == 2


async def test_turns_with_raw_prompts_are_trained_beside_a_turn_with_tools(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin()
        for prompt in ("first", "second"):
            await session.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 400})
        await session.post([{"role": "system", "content": "another"}, user()], tools=[TOOL])
        status, found = await session.status(), await session.finish()
    assert (status["num_turns"], status["num_side_requests"]) == (3, 0)
    assert all(any(row["loss_mask"]) for row in found) and len(found) == 3


async def test_a_reply_lost_at_the_last_turn_of_a_cap_is_still_replayed(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin(limits={"max_turns": 1})
        first = await session.post([user()])
        replay = await session.post([user()], retry=1)
        await session.finish()
        closed = await session.post([user()], retry=1)
    assert replay.content == first.content
    assert closed.status_code == 401


class LosesFirstReply:
    """An application before the endpoint's, which tells the first client of chats that the endpoint is unavailable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_lost = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_lost or not scope["path"].endswith(CHAT):
            await self._app(scope, receive, send)
            return
        self._is_lost = True

        async def drop(message: Message) -> None:
            pass

        await self._app(scope, receive, drop)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after-ms", b"1")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_sdk_resends_what_was_lost_and_gets_what_was_sampled(sampler: HeldSampler, is_streamed: bool) -> None:
    async with endpoint(sampler, around=LosesFirstReply) as served:
        session = await served.begin()
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=session.key, max_retries=2) as client:
            retrying = OpenSession(session.id, session.key, client, session.http, session.controller)
            reply = await retrying.reply([user()], is_streamed=is_streamed)
        (row,) = await session.finish()
    assert reply["content"] == "a"
    assert len(sampler.prompts) == 1
    assert tuple(row["response_token_ids"]) == sampler.completions[0]


async def until(is_so: Any) -> None:
    """Let the loop and its sockets run until ``is_so()``."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - what the server sees of a socket sets no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_equal_requests_without_a_mark_are_separate_samples(sampler: HeldSampler, is_streamed: bool) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served, asyncio.TaskGroup() as group:
        session = await served.begin()
        asking = [group.create_task(session.post([user()], stream=is_streamed)) for _ in range(8)]
        await until(lambda: served.serving.sessions.statistics()["open_requests"] == 8)
        sampler.release.set()
        replies = [await task for task in asking]
        status = await session.status()
    assert len({reply.content for reply in replies}) == 8
    assert sampler.num_begun == status["num_turns"] == 8


@pytest.mark.parametrize("headers", [{RETRY_HEADER: "1"}, {"Idempotency-Key": "k"}, {"x-idempotency-key": "k"}])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_marked_resends_join_the_request_in_flight(
    sampler: HeldSampler, headers: dict[str, str], is_streamed: bool
) -> None:
    sampler.is_held = True
    first_headers = {} if RETRY_HEADER in headers else headers
    async with endpoint(sampler) as served, asyncio.TaskGroup() as group:
        session, other = await served.begin(), await served.begin()
        body = {**HELLO, "stream": is_streamed}
        first = group.create_task(session.http.post(CHAT, json=body, headers=first_headers))
        await sampler.asked.wait()
        asking = [group.create_task(session.http.post(CHAT, json=body, headers=headers)) for _ in range(2)]
        group.create_task(other.http.post(CHAT, json=body, headers=headers))
        await until(lambda: served.serving.sessions.statistics()["open_requests"] == 4)
        sampler.release.set()
        replies = [await task for task in (first, *asking)]
        status = await session.status()
    assert len({reply.content for reply in replies}) == 1
    assert sampler.num_begun == 2
    assert status["num_turns"] == 1


async def test_an_idempotency_key_names_one_request_and_its_reply(sampler: HeldSampler) -> None:
    async with endpoint(sampler) as served:
        session = await served.begin(limits={"max_turns": 3})

        async def ask(text: str, key: str) -> httpx.Response:
            body = {"messages": [user(text)]}
            return await session.http.post(CHAT, json=body, headers={"Idempotency-Key": key})

        broken = await session.http.post(CHAT, json={"messages": []}, headers={"Idempotency-Key": "1"})
        first, second, third = await ask("x", "1"), await ask("x", "2"), await ask("y", "3")
        again = [await ask("x", "1"), await ask("x", "2"), await ask("y", "3")]
        refused = await ask("y", "1")
    assert broken.status_code == 400
    assert [content(reply) for reply in (first, second, third)] == ["a", "b", "c"]
    assert [reply.content for reply in again] == [first.content, second.content, third.content]
    assert (refused.status_code, error_of(refused)["code"]) == (400, "idempotency_error")
    assert len(sampler.prompts) == 3


async def test_each_resend_of_equal_requests_joins_another_one(sampler: HeldSampler) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served, asyncio.TaskGroup() as group:
        session = await served.begin()
        figures = served.serving.sessions.statistics
        asking = [group.create_task(session.post([user()])) for _ in range(3)]
        await until(lambda: figures()["open_requests"] == 3)
        asking += [group.create_task(session.post([user()], retry=1)) for _ in range(3)]
        await until(lambda: figures()["open_requests"] == 6)
        sampler.release.set()
        replies = [content(await task) for task in asking]
    assert sorted(replies[:3]) == sorted(replies[3:]) == ["a", "b", "c"]


async def test_the_resend_of_an_abandoned_request_joins_no_equal_request(sampler: HeldSampler) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served:
        session = await served.begin()
        figures = served.serving.sessions.statistics
        leaving, staying = (asyncio.ensure_future(session.post([user()])) for _ in range(2))
        await until(lambda: sampler.num_begun == 2)
        await give_up(leaving)
        await sampler.cancelled.wait()
        resent = asyncio.ensure_future(session.post([user()], retry=1))
        await until(lambda: figures()["open_requests"] == 2 and sampler.num_begun == 3)
        sampler.release.set()
        assert content(await staying) != content(await resent)
        assert (await session.status())["num_turns"] == 2


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_abandoned_request_is_cancelled_in_the_engine_and_not_recorded(
    sampler: HeldSampler, is_streamed: bool
) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served:
        session = await served.begin()
        leaving = asyncio.ensure_future(session.post([user()], stream=is_streamed))
        await sampler.asked.wait()
        await give_up(leaving)
        await sampler.cancelled.wait()
        sampler.is_held = False
        again = await session.post([user()], stream=is_streamed, retry=1)
        rows = await session.finish()
    assert again.status_code == 200
    assert (sampler.num_begun, sampler.num_cancelled, len(rows)) == (2, 1, 1)


async def test_a_request_that_was_given_up_costs_no_later_one_its_replay(sampler: HeldSampler) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served:
        session = await served.begin()
        leaving = asyncio.ensure_future(session.post([user()]))
        await sampler.asked.wait()
        await give_up(leaving)
        await sampler.cancelled.wait()
        sampler.is_held = False
        again = await session.post([user()])
        replay = await session.post([user()], retry=1)
        assert (await session.status())["num_turns"] == 1
    assert replay.content == again.content


async def give_up(request: "asyncio.Future[Any]") -> None:
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request


async def test_an_abandoned_request_goes_on_for_a_resend_that_joined_it(sampler: HeldSampler) -> None:
    sampler.is_held = True
    async with endpoint(sampler) as served:
        session = await served.begin()
        figures = served.serving.sessions.statistics
        leaving = asyncio.ensure_future(session.post([user()]))
        await sampler.asked.wait()
        staying = asyncio.ensure_future(session.post([user()], retry=1))
        await until(lambda: figures()["open_requests"] == 2)
        await give_up(leaving)
        await until(lambda: figures()["open_requests"] == 1)
        sampler.release.set()
        assert content(await staying) == "a"
        assert (await session.status())["num_turns"] == 1
    assert (sampler.num_begun, sampler.num_cancelled) == (1, 0)


async def test_requests_beyond_a_limit_wait_in_line_and_are_answered(sampler: HeldSampler) -> None:
    sampler.is_held = True
    limited = endpoint(
        sampler,
        server=ServerConfig(max_concurrent_requests=3),
        session_settings=SessionSettings(limits=SessionLimits(max_concurrent_requests=2)),
    )
    async with limited as served, asyncio.TaskGroup() as group:
        one, two = await served.begin(), await served.begin()
        asking = [group.create_task(s.post([user(str(i))])) for s in (one, two) for i in range(4)]
        await until(lambda: served.serving.sessions.statistics()["open_requests"] == 8 and sampler.num_begun >= 3)
        assert sampler.num_begun == 3
        sampler.release.set()
        replies = [await task for task in asking]
    assert sorted(content(reply) for reply in replies) == list("abcdefgh")


async def test_a_held_stream_of_a_session_is_kept_alive_by_comments(
    sampler: HeldSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_INTERVAL_S", 0.01)
    sampler.is_held = True
    async with endpoint(sampler) as served:
        session = await served.begin()
        lines = []
        async with session.http.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keepalive") == 3:
                    sampler.release.set()
        status = await session.status()
    assert lines[0] == ": keepalive" and lines[1] == ""
    assert events_of("\n".join(lines))[-1] is None
    assert status["num_turns"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", HELLO),
    ],
)
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RequestRefusedError("the JSON schema cannot be followed"), 400, "invalid_value"),
        (NoEngineError("no engine is left"), 503, "no_engine"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status_even_in_a_stream_and_leaves_no_turn(
    sampler: HeldSampler, failure: Exception, status: int, code: str, path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    sampler.failure = failure
    body = {**body, "stream": is_streamed}
    async with endpoint(sampler) as served:
        session = await served.begin()
        failed = await session.http.post(path, json=body)
        sampler.failure = None
        retried = await session.http.post(path, json=body, headers={RETRY_HEADER: "1"})
        rows = await session.finish()
    assert (failed.status_code, failed.json()["error"]["code"]) == (status, code)
    assert retried.status_code == 200
    assert len(rows) == 1


async def ask(app: ASGIApp, method: str, path: str, key: str, body: Any = None) -> Any:
    """One request without sockets or a client library: thousands of sessions in seconds. Events come back as None."""
    messages = [
        {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    await app({"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}, receive, send)
    assert sent[0]["status"] < 300
    text = b"".join(message["body"] for message in sent[1:])
    return json.loads(text) if text.startswith(b"{") else None


async def live(app: ASGIApp, ends: str, message: str) -> None:
    """One session from its first request to its end, or to where it is left."""
    made = await ask(app, "POST", "/sessions", CONTROLLER_KEY, {})
    await ask(app, "POST", CHAT, made["api_key"], {"messages": [user(message)], "stream": ends == "delete"})
    if ends in ("finish", "finish and delete"):
        finished = await ask(app, "POST", f"/sessions/{made['id']}/finish", CONTROLLER_KEY, {"reward": 1.0})
        assert len(finished["trajectories"]) == 1
    if ends in ("delete", "finish and delete"):
        await ask(app, "DELETE", f"/sessions/{made['id']}", CONTROLLER_KEY)


@pytest.mark.slow
async def test_memory_stays_flat_over_a_thousand_sessions() -> None:
    """However they end: finished and deleted, only deleted, only finished, or left to expire."""
    now = [0.0]
    sampler = HeldSampler()
    app = create_app(
        sampler, RENDERER, api_keys=[], controller_keys=[CONTROLLER_KEY], parser=PARSER, clock=lambda: now[0]
    )
    app.state.serving.sessions._max_finished = 50  # all that is kept is there after 250 sessions
    ends = ("finish and delete", "delete", "finish", "expire")
    num_alive = []
    for index in range(1_000):
        await live(app, ends[index % 4], "x" * (index % 50))
        now[0] += 4.0
        if index % 100 == 99:
            sweep(app.state.serving)
        if index % 250 == 249:
            for log in (sampler.prompts, sampler.completions, sampler.sampled, sampler.labels):
                log.clear()
            num_alive.append(num_objects())
    assert app.state.serving.sessions.statistics()["created_total"] == 1_000
    assert num_alive[-1] - num_alive[0] < 500, num_alive


def sweep(serving: Serving) -> None:
    for session in serving.sessions.sweep():
        serving.end_session(session)


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
