"""Whatever is sent to any route, the answer is a reply or a refusal in OpenAI's form, and never a failure of the server."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.server.app import create_app
from tests.cpu.malformed_bodies import BODIES, bodies
from tests.cpu.scripted_sampler import CONTROLLER_KEY, RENDERER, TOKENIZER, ScriptedSampler

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SCRIPTS = (("<think>\nhm\n</think>\n\n", "words ", CALL), ("a",), ('[{"name": "f", ', '"parameters": {}}]'))
APP = create_app(
    ScriptedSampler(scripts=SCRIPTS, max_model_len=5000),
    RENDERER,
    api_keys=[],
    controller_keys=[CONTROLLER_KEY],
    parser=AnswerParser.of(TOKENIZER, tool_call_parser="hermes", reasoning_parser="qwen3"),
)
SESSIONS = APP.state.serving.sessions


def client(key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://endpoint", headers=headers)


def parsed(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_error(body: Any) -> None:
    assert set(body) in ({"error"}, {"error", "type"})
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error", body
    assert body["error"]["message"]


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        for line in response.text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]" and (event := parsed(line[6:])).get("error"):
                check_error(event)
    elif response.content:
        body = parsed(response.text)
        if response.is_error:
            check_error(body)


async def ask(path: str, body: bytes, is_captured: bool) -> None:
    session, key = SESSIONS.create()
    async with client(CONTROLLER_KEY) as controller, client(key if is_captured else CONTROLLER_KEY) as asking:
        check(await asking.post(path.format(id=session.id), content=body))
        if is_captured:
            check(await asking.post(path, content=body))
        check(await controller.get(f"/sessions/{session.id}"))
        check(await controller.post(f"/sessions/{session.id}/finish", json={"reward": 1}))
        check(await controller.delete(f"/sessions/{session.id}"))


def test_bodies_are_made_for_every_route_that_takes_one() -> None:
    (mount,) = APP.routes
    assert {route.path for route in mount.routes if "POST" in route.methods} == set(BODIES)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("path", list(BODIES))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_no_body_makes_the_server_fail(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    is_captured = path.startswith("/v1/") and data.draw(st.booleans())
    asyncio.run(ask(path, body, is_captured))
