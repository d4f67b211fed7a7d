"""The agents of examples/own_agent, as programs and in process, against an endpoint whose policy is scripted."""

import ast
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from examples.own_agent import in_process
from examples.own_agent.tool_agent import MAX_TURNS, look
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.generators.agent.command import CommandHarness
from skyrl_async.generators.agent.harness import AgentTask, FunctionHarness, Harness, shown_extras
from skyrl_async.tasks import trail
from skyrl_async.tasks.registry import get_task, make_environment
from skyrl_async.types import Prompt, SamplingParams

FOLDER = Path(__file__).parents[3] / "examples" / "own_agent"
API_KEY = "sk-session"

Reply = dict[str, Any]
Policy = Callable[[dict[str, Any]], Reply]
"""The assistant's message for a request's body."""


@asynccontextmanager
async def endpoint(policy: Policy) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The address of an endpoint, and the bodies it was asked."""
    app, bodies = FastAPI(), list[dict[str, Any]]()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        assert request.headers["authorization"] == f"Bearer {API_KEY}"
        bodies.append(await request.json())
        message = {"role": "assistant", **policy(bodies[-1])}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}

    async with start_server(app) as (host, port):
        yield f"http://{host}:{port}/v1", bodies


def task_of(prompt: Prompt, base_url: str, working_dir: Path) -> AgentTask:
    return AgentTask(
        uid=prompt.uid,
        messages=prompt.messages,
        extras=shown_extras(prompt.extras),
        base_url=base_url,
        api_key=API_KEY,
        model="policy",
        max_model_len=1000,
        working_dir=working_dir,
        sample_index=0,
        is_evaluation=False,
        sampling=SamplingParams(max_tokens=8),
    )


def prompt_of(name: str) -> Prompt:
    (prompt,), _ = get_task(name).make_prompts(1, 0, seed=0)
    return prompt


def reward(prompt: Prompt, answer: str) -> float:
    return float(make_environment(prompt.env_class, prompt.extras).step(answer)["reward"])


def program(name: str) -> CommandHarness:
    return CommandHarness(f"{sys.executable} {FOLDER / name}")


async def play(harness: Harness, prompt: Prompt, policy: Policy, working_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """What the agent answered (the program: printed), and what it asked."""
    async with endpoint(policy) as (base_url, bodies):
        result = await harness.run(task_of(prompt, base_url, working_dir))
    printed = working_dir / ".skyrl" / "stdout.log"
    return (printed.read_text() if printed.exists() else str(result.output)).strip(), bodies


def follow_signs(body: dict[str, Any]) -> Reply:
    """A policy that works: it looks at each sign, and names the last but one digit."""
    *before, last = body["messages"]
    at = last["content"] if last["role"] == "tool" else last["content"].split()[1]
    if at == "0":
        asked = json.loads(before[-1]["tool_calls"][0]["function"]["arguments"])
        return {"content": f"#### {asked['at']}"}
    return call_of(f'{{"at": {at}}}')


def call_of(arguments: str) -> Reply:
    function = {"name": "look", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


@pytest.mark.slow
@pytest.mark.parametrize("harness", [program("agent.py"), FunctionHarness(in_process.answer)])
async def test_the_agent_asks_the_prompt_once_and_gives_the_answer(harness: Harness, tmp_path: Path) -> None:
    prompt = prompt_of("lagged_fibonacci")
    text = get_task("lagged_fibonacci").conversation(prompt, random.Random(0))[-1]["content"]
    answer, bodies = await play(harness, prompt, lambda body: {"content": text}, tmp_path)
    assert answer == text and reward(prompt, answer) == 1.0
    assert bodies == [{"model": "policy", "messages": list(prompt.messages)}]


@pytest.mark.slow
@pytest.mark.parametrize("harness", [program("tool_agent.py"), FunctionHarness(in_process.answer_with_tools)])
async def test_the_agent_with_a_tool_answers_every_call_until_the_policy_answers(
    harness: Harness, tmp_path: Path
) -> None:
    prompt = prompt_of("trail")
    answer, bodies = await play(harness, prompt, follow_signs, tmp_path)
    assert reward(prompt, answer) == 1.0
    assert len(bodies) == len(prompt.extras["signs"]) + 1
    assert [body["tools"] for body in bodies] == [[trail.LOOK_TOOL]] * len(bodies)
    results = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "tool"]
    assert results == [str(to) for to in prompt.extras["signs"].values()]


@pytest.mark.slow
@pytest.mark.parametrize("harness", [program("tool_agent.py"), FunctionHarness(in_process.answer_with_tools)])
async def test_a_policy_that_never_stops_calling_is_left_after_some_turns(harness: Harness, tmp_path: Path) -> None:
    answer, bodies = await play(harness, prompt_of("trail"), lambda body: call_of('{"where": 1}'), tmp_path)
    assert answer == "None"
    assert len(bodies) == MAX_TURNS
    assert bodies[-1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_0", "content": "?"}


@pytest.mark.parametrize("at", range(10))
def test_the_tool_is_the_one_that_the_warm_start_shows(at: int) -> None:
    signs = prompt_of("trail").extras["signs"]
    assert look(signs, json.dumps({"at": at})) == trail.look(signs, at)


@pytest.mark.parametrize("arguments", ["", "3", "[3]", "null", '"at"', "{", '{"at": [1]}', '{"to": 3}'])
def test_a_call_that_makes_no_sense_gets_an_answer_all_the_same(arguments: str) -> None:
    assert look({"3": 0}, arguments) == "?"


@pytest.mark.parametrize("name", ["agent.py", "tool_agent.py"])
def test_the_programs_need_no_package_but_openai(name: str) -> None:
    nodes = list(ast.walk(ast.parse((FOLDER / name).read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} - sys.stdlib_module_names == {"openai"}
