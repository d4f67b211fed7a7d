"""Harnesses on real engines: two vLLM engines in Ray actors, the endpoint's processes, real SDKs, a storm of weight updates.

The policy has random weights so large that its text wanders over the whole vocabulary; tool calls are forced where needed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.server.front_ends import FrontEnd, endpoint_processes
from skyrl_async.endpoint.server.process import EndpointSettings
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.generators.agent.sessions import SessionPool
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.ray import RayEngine, start_ray_engines
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.tasks.tiny_policy import PolicySizes, make_tiny_model, save_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.tasks.trail import LOOK_TOOL
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import ENVIRONMENT_VERSION, PauseMode, SamplingParams, Trajectory
from skyrl_async.weight_sync.publisher import WeightPublisher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("ray_session"),
]

RUN_KEY, CONTROLLER_KEY = "run-key", "controller-key"
NUM_TURNS = 10
QUESTION = {"role": "user", "content": "Follow 3 to 0."}
SAMPLING = SamplingParams(max_tokens=32)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": [str(digit) for digit in range(10)]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
COMPACT_JSON = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
"""A random policy would spend its whole budget on white space."""
SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 10, "maximum": 99},
            "minItems": 8,
            "maxItems": 8,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Engines, the endpoint before them, and what publishes to them."""

    engines: list[RayEngine]
    renderer: ChatRenderer
    front_ends: tuple[FrontEnd, ...]
    publisher: WeightPublisher

    @property
    def url(self) -> str:
        return self.front_ends[0].url

    @contextlib.asynccontextmanager
    async def storm(self) -> AsyncIterator[asyncio.Condition]:
        """Publish one version after the other while the block runs; yields what tells of each."""
        published = asyncio.Condition()

        async def publish() -> None:
            while True:
                await self.publisher.publish(next(_versions))
                async with published:
                    published.notify_all()

        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(publish(), name="storm")
            yield published
            publishing.cancel()


_versions = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> AsyncIterator[System]:
    root = tmp_path_factory.mktemp("system")
    tokenizer = train_tokenizer(["Follow 3 to 0.", "#### 7"] * 4, tools=[LOOK_TOOL])
    model = make_tiny_model(PolicySizes(intermediate_size=128), tokenizer, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(10.0)
    policy_dir = root / "policy"
    policy_dir.mkdir()
    save_policy(model, tokenizer, policy_dir)
    renderer = ChatRenderer(tokenizer)
    configs = [
        VLLMEngineConfig(name=f"engine-{i}", policy_dir=str(policy_dir), extra_args=COMPACT_JSON) for i in range(2)
    ]
    async with contextlib.AsyncExitStack() as stack:
        engines = await start_ray_engines(configs, log_dir=root / "logs")
        for engine in engines:
            stack.push_async_callback(engine.close)
        settings = EndpointSettings(
            server=ServerConfig(num_front_ends=2),
            policy_path=str(policy_dir),
            trust_remote_code=False,
            max_model_len=engines[0].max_model_len,
            api_keys=(RUN_KEY,),
            controller_keys=(CONTROLLER_KEY,),
            sessions=SessionSettings(trains_constrained=True),
        )
        front_ends = await stack.enter_async_context(endpoint_processes(settings, engines))
        client = InferenceEngineClient(
            engines, tokenizer=tokenizer, max_model_len=engines[0].max_model_len, renderer=renderer
        )
        publisher = WeightPublisher(
            client=client,
            policy=InProcessPolicy(TrainingSettings(policy_path=str(policy_dir))),
            directory=root / "buckets",
            bucket_bytes=1 << 20,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, lambda: 0.0),
        )
        yield System(engines=engines, renderer=renderer, front_ends=front_ends, publisher=publisher)
        publisher.close()


async def converse(client: AsyncOpenAI, *, is_streamed: bool, published: asyncio.Condition | None = None) -> list[Any]:
    """Ten turns, every other one a forced call of a tool; the choices with their exact ids.

    With ``published``, three of them come after one more version: engines may answer faster than versions are made.
    """
    messages: list[Any] = [QUESTION]
    turns = []
    for i in range(NUM_TURNS):
        if published is not None and i % 3 == 2:
            async with published:
                await published.wait()
        asked: dict[str, Any] = {
            "model": "policy",
            "messages": messages,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}} if i % 2 == 0 else "auto",
            "extra_body": {"return_token_ids": True},
        }
        turn = await _streamed(client, asked) if is_streamed and i % 2 else await _whole(client, asked)
        turns.append(turn)
        messages.append(turn["message"])
        calls = turn["message"].get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": str(i)} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": f"Go on, {i}."})
    return turns


async def _whole(client: AsyncOpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    reply = await client.chat.completions.create(**asked)
    choice = reply.choices[0]
    assert reply.model_extra is not None and choice.model_extra is not None
    return {
        "message": choice.message.model_dump(exclude_none=True),
        "prompt": reply.model_extra["prompt_token_ids"],
        "ids": choice.model_extra["token_ids"],
        "finish": choice.finish_reason,
    }


async def _streamed(client: AsyncOpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    turn: dict[str, Any] = {"message": {"role": "assistant", "content": ""}, "prompt": [], "ids": [], "finish": None}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        turn["prompt"] += (chunk.model_extra or {}).get("prompt_token_ids") or []
        choice = chunk.choices[0]
        turn["ids"] += (choice.model_extra or {}).get("token_ids") or []
        turn["message"]["content"] += choice.delta.content or ""
        turn["finish"] = choice.finish_reason or turn["finish"]
    return turn


def assert_is_exactly(row: Trajectory, turns: list[Any]) -> None:
    """The row holds what was sampled, in place, and nothing that was sampled is anywhere tokenized again."""
    whole = [*row.prompt_token_ids, *row.response_token_ids]
    for turn, later in itertools.pairwise(turns):
        partial_output = turn["prompt"] + turn["ids"]
        assert later["prompt"][: len(partial_output)] == partial_output
    assert turns[-1]["prompt"] + turns[-1]["ids"] == whole
    sampled = [False] * len(whole)
    for turn in turns:
        start = len(turn["prompt"])
        assert whole[start : start + len(turn["ids"])] == turn["ids"]
        sampled[start : start + len(turn["ids"])] = [True] * len(turn["ids"])
    response = sampled[len(row.prompt_token_ids) :]
    for is_sampled, mask, logprob, version in zip(response, row.loss_mask, row.logprobs, row.versions, strict=True):
        assert is_sampled == (version != ENVIRONMENT_VERSION) and (is_sampled or mask == 0)
        assert not mask or logprob < 0
    assert any(row.loss_mask)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_ten_turns_with_tools_are_one_exact_row_under_a_storm_of_updates(
    system: System, is_streamed: bool
) -> None:
    urls = [front_end.url for front_end in system.front_ends]
    async with SessionPool(urls, CONTROLLER_KEY) as pool, pool.session(sampling=SAMPLING) as session:
        client = AsyncOpenAI(base_url=f"{system.url}/v1", api_key=session.api_key, max_retries=0)
        async with system.storm() as published:
            turns = await converse(client, is_streamed=is_streamed, published=published)
        await client.close()
        (row,) = await session.finish(1.0)
    assert [turn["finish"] == "tool_calls" for turn in turns[::2]] == [True] * (NUM_TURNS // 2)
    assert row.num_turns == NUM_TURNS and row.weight == 1.0
    assert_is_exactly(row, turns)
    assert len({v for v in row.versions if v != ENVIRONMENT_VERSION}) >= 2


async def test_sessions_of_equal_prompts_run_beside_each_other_and_stay_apart(system: System) -> None:
    async def play(pool: SessionPool) -> tuple[list[Any], tuple[Trajectory, ...]]:
        async with pool.session(sampling=SAMPLING) as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
            turns = await converse(client, is_streamed=False)
            await client.close()
            return turns, await session.finish(0.5)

    async with (
        SessionPool([front_end.url for front_end in system.front_ends], CONTROLLER_KEY) as pool,
        system.storm(),
        asyncio.TaskGroup() as group,
    ):
        played = [group.create_task(play(pool), name=f"session-{i}") for i in range(6)]
        await asyncio.wait(played)
    for turns, (row,) in (task.result() for task in played):
        assert_is_exactly(row, turns)
    assert len({tuple(row.response_token_ids) for _, (row,) in (task.result() for task in played)}) == 6


async def test_a_constrained_answer_obeys_its_schema_whatever_is_published(system: System) -> None:
    async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key=RUN_KEY, max_retries=0) as client:

        async def ask(i: int) -> str:
            reply = await client.chat.completions.create(
                model="policy",
                messages=[QUESTION, {"role": "user", "content": str(i)}],  # type: ignore[list-item,misc]
                max_tokens=200,
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            )
            return reply.choices[0].message.content or ""

        async with system.storm():
            answers = await asyncio.gather(*(ask(i) for i in range(6)))
    assert all(len(json.loads(answer)["numbers"]) == 8 for answer in answers)


async def test_every_surface_streams_to_the_end_under_a_storm(system: System) -> None:
    async with (
        AsyncOpenAI(base_url=f"{system.url}/v1", api_key=RUN_KEY, max_retries=0) as client,
        AsyncAnthropic(base_url=system.url, api_key=RUN_KEY, max_retries=0) as anthropic,
        system.storm(),
    ):
        async with client.responses.stream(model="policy", input="Follow 3 to 0.", max_output_tokens=150) as stream:
            events: list[Any] = [event async for event in stream]
        assert events[-1].type in ("response.completed", "response.incomplete")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = events[-1].response
        assert response.output_text == text and response.usage.output_tokens > 0
        async with anthropic.messages.stream(
            model="policy", max_tokens=150, messages=[{"role": "user", "content": "Follow 3 to 0."}]
        ) as said:
            pieces = [piece async for piece in said.text_stream]
            message = await said.get_final_message()
        assert message.content[0].text == "".join(pieces)  # type: ignore[union-attr]
        raw = await client.completions.create(model="policy", prompt="Follow", max_tokens=50, stream=True)
        chunks = [chunk async for chunk in raw]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


async def test_an_engine_killed_under_load_fails_no_request_and_no_stream(system: System) -> None:
    """Last: it leaves one engine."""
    body = {"max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key=RUN_KEY, max_retries=0) as client:

        async def ask(i: int, begun: asyncio.Event) -> list[int]:
            asked: Any = {"model": "policy", "messages": [QUESTION, {"role": "user", "content": str(i)}], **body}
            if i % 2:
                begun.set()
                return list((await _whole(client, asked))["ids"])
            ids: list[int] = []
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                ids += (chunk.choices[0].model_extra or {}).get("token_ids") or []
                if ids:
                    begun.set()
            return ids

        async def ask_all(kill: bool) -> list[list[int]]:
            begun = [asyncio.Event() for _ in range(16)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(i, begun[i]), name=f"ask-{i}") for i in range(16)]
                if kill:
                    await asyncio.gather(*(event.wait() for event in begun))
                    pid = (await system.engines[0].statistics())["core_process_id"]
                    os.kill(pid, signal.SIGKILL)
            return [task.result() for task in tasks]

        undisturbed = await ask_all(kill=False)
        killed = await ask_all(kill=True)
    assert [len(ids) for ids in killed] == [300] * 16
    assert killed == undisturbed
