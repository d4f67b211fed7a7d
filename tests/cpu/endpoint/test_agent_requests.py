"""Requests of agents that are programs, as they were recorded, shortened: what they ask beside what a client library does."""

import json
from typing import Any

import httpx

from tests.cpu.scripted_sampler import RENDERER, RUN_KEY, ScriptedSampler, refusal, scripted_endpoint, training_session

HEADERS = {"Authorization": f"Bearer {RUN_KEY}"}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text(words: str, kind: str = "input_text") -> list[dict[str, str]]:
    return [{"type": kind, "text": words}]


PARAMETERS = {"type": "object", "properties": {"message": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn_agent", "strict": False, "parameters": PARAMETERS}
CODEX = {
    "model": "policy",
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a212bf",
    "client_metadata": {"thread_id": "01a212bf"},
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": PARAMETERS},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [SPAWN]},
        {"type": "web_search", "external_web_access": False},
    ],
}


async def test_codex_calls_a_function_in_a_namespace_and_goes_on_in_the_same_row() -> None:
    sampler = ScriptedSampler((("Two.\n", call_of("multi_agent_v1.spawn_agent", message="count")), ("Done.",)))
    conversation: list[Any] = [
        {"type": "message", "role": "developer", "content": text("You are Codex.")},
        {"type": "message", "role": "user", "content": text("Write it.")},
    ]
    async with (
        scripted_endpoint(sampler) as url,
        training_session(url) as (key, rows),
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client,
    ):
        items = items_of(await client.post("/v1/responses", json={**CODEX, "input": conversation}))
        (call,) = [item for item in items if item["type"] == "function_call"]
        assert (call["name"], call["namespace"]) == ("spawn_agent", "multi_agent_v1")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"agent_id":"1"}'}
        await client.post("/v1/responses", json={**CODEX, "input": [*conversation, *items, result]})
    assert "multi_agent_v1.spawn_agent" in RENDERER.decode(sampler.prompts[0])
    assert [(row["num_turns"], row["weight"]) for row in rows] == [(2, 1.0)]
    assert sum(rows[0]["loss_mask"]) == sum(map(len, sampler.completions))


def items_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The items of a streamed response as Codex sends them back."""
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line[:6] == "data: "]
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


async def test_a_namespace_that_holds_no_list_of_tools_is_refused_by_its_place() -> None:
    tools = [{"type": "namespace", "name": "n", "tools": 3}]
    refused = await refusal("/v1/responses", {"input": "hello", "tools": tools})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.0.tools")


async def test_codex_is_told_to_post_when_it_tries_a_websocket() -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    async with (
        scripted_endpoint(ScriptedSampler()) as url,
        httpx.AsyncClient(base_url=url, headers=HEADERS) as client,
    ):
        tried = await client.get("/v1/responses", headers=upgrade)
        plain = await client.get("/v1/responses")
    assert (tried.status_code, tried.json()["error"]["code"]) == (426, "websocket_not_served")
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")


def cached(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


FETCH = {"name": "WebFetch", "description": "Of a page.", "input_schema": PARAMETERS, "defer_loading": True}
CLAUDE = {
    "model": "policy",
    "max_tokens": 32000,
    "stream": True,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "{}"},
    "system": [cached("You are a Claude agent.")],
    "tools": [{"name": "ToolSearch", "description": "Finds tools.", "input_schema": PARAMETERS}],
}


async def test_a_tool_that_claude_code_loads_later_stands_in_the_result_that_names_it_and_leaves_one_row() -> None:
    sampler = ScriptedSampler((("I search.\n", call_of("ToolSearch", message="fetch")), ("Done.",)))
    conversation: list[Any] = [
        {"role": "user", "content": [cached("<system-reminder>\n</system-reminder>"), cached("Write it.")]},
        {"role": "system", "content": [cached("# Environment")]},
    ]
    async with (
        scripted_endpoint(sampler) as url,
        training_session(url) as (key, rows),
        httpx.AsyncClient(base_url=url, headers={"x-api-key": key, "anthropic-beta": "effort-2025-11-24"}) as client,
    ):
        first = await client.post("/v1/messages?beta=true", json={**CLAUDE, "messages": conversation, "stream": False})
        (call,) = [block for block in first.json()["content"] if block["type"] == "tool_use"]
        found = {"type": "tool_result", "tool_use_id": call["id"], "content": [reference("WebFetch"), reference("X")]}
        conversation += [
            {"role": "assistant", "content": first.json()["content"]},
            {"role": "user", "content": [found]},
        ]
        with_fetch = {**CLAUDE, "tools": [*CLAUDE["tools"], FETCH], "messages": conversation}  # type: ignore[misc]
        assert (await client.post("/v1/messages?beta=true", json=with_fetch)).status_code == 200
        counted = {"model": "policy", "messages": conversation, "tools": [FETCH], "system": CLAUDE["system"]}
        assert (await client.post("/v1/messages/count_tokens?beta=true", json=counted)).json()["input_tokens"] > 0
    before, after = (RENDERER.decode(prompt) for prompt in sampler.prompts)
    assert "WebFetch" not in before
    assert '{"name": "WebFetch", "description": "Of a page.", "parameters"' in after.removeprefix(before)
    assert [(row["num_turns"], row["weight"]) for row in rows] == [(2, 1.0)]


def reference(name: str) -> dict[str, str]:
    return {"type": "tool_reference", "tool_name": name}


async def test_a_refused_key_is_not_to_be_tried_again() -> None:
    async with scripted_endpoint(ScriptedSampler()) as url, httpx.AsyncClient(base_url=url) as client:
        answered = await client.post("/v1/messages", headers={"x-api-key": "sk-none"}, json={})
    assert (answered.status_code, answered.headers["x-should-retry"]) == (401, "false")


async def test_a_stream_may_be_read_by_clients_that_split_lines_as_python_does() -> None:
    said = "a\x85b\u2028c\u2029d"
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with (
        scripted_endpoint(ScriptedSampler(((said,),))) as url,
        httpx.AsyncClient(base_url=url, headers=HEADERS) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == said
