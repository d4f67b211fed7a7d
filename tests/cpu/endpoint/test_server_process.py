"""The endpoint in a Ray actor: real Ray, real uvicorn, the real client and openai; only the engine is scripted."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion
from ray.exceptions import RayActorError

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.server.front_ends import FrontEnd, endpoint_processes
from skyrl_async.endpoint.server.process import EndpointServer, EndpointSettings
from skyrl_async.errors import ConfigError, InferenceError
from skyrl_async.generators.agent.sessions import SessionPool
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.retrier import RolloutRetrier
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, Prompt, SamplingParams
from skyrl_gym_http import SkyRLGymHTTPGenerator
from tests.cpu.generators.test_gym_http_generator import Chat
from tests.cpu.tiny_chat import END, TOKENIZER, spelled
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ray_session")]

ANSWER = (*spelled("hé"), END)
HELLO: Any = [{"role": "user", "content": "hello"}]


class OneAnswerEngine:
    """Says the same to everything, under version 3, and is aborted once after the first token."""

    def __init__(self, name: str = "engine-0") -> None:
        self.name = name
        self.num_calls = 0

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.num_calls += 1
        rest = ANSWER[request.num_sampled_tokens :]
        is_aborted = request.num_sampled_tokens == 0
        ids = rest[:1] if is_aborted else rest
        return EngineOutput(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(3,) * len(ids),
            finish_reason=FinishReason.ABORT if is_aborted else FinishReason.STOP,
        )

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        yield await self.generate(request)


class DeadlyEngine(OneAnswerEngine):
    """Kills the first processes that look at it, as many as there are ``deaths``; not the one that made it."""

    def __init__(self, directory: Path, deaths: int) -> None:
        self.num_calls = 0
        self.directory, self.deaths, self.maker = directory, deaths, os.getpid()

    @property
    def name(self) -> str:  # type: ignore[override]
        marks = list(self.directory.glob("death-*"))
        if os.getpid() != self.maker and len(marks) < self.deaths:
            (self.directory / f"death-{len(marks)}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "engine-0"


@pytest.fixture
def engine() -> Any:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield OneAnswerEngine()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def settings(directory: Path, engine_wait_s: float = 0.0, **server: Any) -> EndpointSettings:
    TOKENIZER.save_pretrained(directory)
    return EndpointSettings(
        server=ServerConfig(shutdown_timeout_s=server.pop("shutdown_timeout_s", 1), **server),
        policy_path=str(directory),
        trust_remote_code=False,
        max_model_len=100,
        api_keys=("k",),
        controller_keys=("c",),
        engine_wait_s=engine_wait_s,
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two front ends that tests share, and the outages of their processes."""

    front_ends: tuple[FrontEnd, ...]
    deadlines: Deadlines

    async def follow(self, engines: Sequence[Any]) -> tuple[FrontEnd, ...]:
        for front_end in self.front_ends:
            await front_end.follow(engines)
        return self.front_ends


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    deadlines = Deadlines()
    shared = settings(
        tmp_path_factory.mktemp("policy"),
        engine_wait_s=60.0,
        num_front_ends=2,
        heartbeat_interval_s=0.2,
        heartbeat_timeout_s=3.0,
    )
    async with endpoint_processes(shared, [], outages=deadlines.outages) as front_ends:
        yield Pair(front_ends=front_ends, deadlines=deadlines)


async def until_dead(actor: Any) -> None:
    """It may answer some calls more after it was killed."""
    while True:
        await actor.ping.remote()


async def ask(url: str, api_key: str = "k") -> ChatCompletion:
    async with openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        return await client.chat.completions.create(
            model="policy", messages=HELLO, extra_body={"return_token_ids": True}
        )


async def test_an_actor_serves_finishes_what_is_open_when_it_stops_and_is_gone_afterwards(
    tmp_path: Path, engine: Any
) -> None:
    async with endpoint_processes(settings(tmp_path, shutdown_timeout_s=PATIENCE_S), [engine]) as (front_end,):
        reply = await ask(f"{front_end.url}/v1")
        async with openai.AsyncOpenAI(base_url=f"{front_end.url}/v1", api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
            first = await anext(stream)
            await front_end.actor.stop.remote()
            rest = [chunk async for chunk in stream]
        await front_end.actor.wait.remote()
    choice = reply.choices[0]
    assert choice.message.content == "hé"
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == ANSWER
    assert choice.model_extra["num_aborts"] == 1
    assert choice.model_extra["policy_versions"] == [{"version": 3, "start": 0, "end": 4}]
    assert first.choices[0].delta.role == "assistant"
    assert rest[-1].choices[0].finish_reason == "stop"
    with pytest.raises(RayActorError):
        await until_dead(front_end.actor)
    with pytest.raises(InferenceError, match=f"the front end on port {front_end.port} is gone"):
        await front_end.follow([engine])


async def test_a_port_in_use_reaches_the_driver_as_one_clear_error(tmp_path: Path, engine: Any) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=rf"^server.port {port} is in use on 127.0.0.1; choose another"):
        async with endpoint_processes(settings(tmp_path, port=port), [engine]):
            raise AssertionError
    taken.close()
    await taken.wait_closed()


async def test_any_front_end_serves_every_session_and_hands_it_to_the_one_that_holds_it(
    pair: Pair, engine: Any
) -> None:
    first, second = await pair.follow([engine])
    async with httpx.AsyncClient(headers={"Authorization": "Bearer c"}) as controller:
        assert first.port != second.port
        made = (await controller.post(f"{second.url}/sessions")).json()
        assert made["base_url"] == f"{second.url}/v1"
        for front_end in (first, second, first):
            assert (await ask(f"{front_end.url}/v1", made["api_key"])).choices[0].message.content == "hé"
        async with openai.AsyncOpenAI(base_url=f"{first.url}/v1", api_key=made["api_key"]) as client:
            stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hé"
            with pytest.raises(openai.BadRequestError, match="messages"):
                await client.chat.completions.create(model="policy", messages=[])
        finished = await controller.post(f"{second.url}/sessions/{made['id']}/finish", json={"reward": 1.0})
        rows = finished.json()["trajectories"]
        assert [row["weight"] for row in rows] == [0.25] * 4
        assert {tuple(row["response_token_ids"]) for row in rows} == {ANSWER}
        with pytest.raises(openai.AuthenticationError, match="is finished"):
            await ask(f"{first.url}/v1", made["api_key"])
        assert (await controller.get(f"{first.url}/sessions/{made['id']}")).status_code == 404


async def test_front_ends_follow_the_engines_that_they_are_told_of_and_hold_what_has_none(
    pair: Pair, engine: Any
) -> None:
    front_end, _ = await pair.follow([])
    async with (
        openai.AsyncOpenAI(base_url=f"{front_end.url}/v1", api_key="k", max_retries=0) as client,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(ask(f"{front_end.url}/v1"))
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        await front_end.follow([OneAnswerEngine("engine-1")])
        assert (await waiting).choices[0].message.content == "hé"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hé"
        await front_end.follow([])
        waiting = tasks.create_task(ask(f"{front_end.url}/v1"))
        await front_end.follow([engine])
        assert (await waiting).choices[0].message.content == "hé"


async def test_without_engines_for_too_long_a_request_gets_503_and_when_to_come_back(
    tmp_path: Path, engine: Any
) -> None:
    server = EndpointServer(settings(tmp_path, engine_wait_s=0.2), [])
    host, port = await server.start()
    url = f"http://{host}:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="no inference engine has been there for 0.2 s") as failure:
            await client.chat.completions.create(model="policy", messages=HELLO)
        assert (failure.value.status_code, failure.value.code, failure.value.type) == (503, "no_engine", "server_error")
        assert failure.value.response.headers["retry-after"] == "10"
        await server.follow([engine])
        assert (await ask(url)).choices[0].message.content == "hé"
    await server.stop()


async def test_a_front_end_that_is_killed_or_frozen_is_replaced_on_its_port(pair: Pair, engine: Any) -> None:
    first, second = await pair.follow([engine])
    async with httpx.AsyncClient(headers={"Authorization": "Bearer c"}) as controller:
        for struck, other, sign in ((first, second, signal.SIGKILL), (second, first, signal.SIGSTOP)):
            made = (await controller.post(f"{struck.url}/sessions")).json()
            replaced = struck.actor
            os.kill(await replaced.__ray_call__.remote(lambda self: os.getpid()), sign)
            while struck.actor is replaced:  # noqa: ASYNC110 - what is tested is that nobody is told
                await asyncio.sleep(0.05)
            async with openai.AsyncOpenAI(base_url=f"{struck.url}/v1", api_key="k", max_retries=20) as client:
                reply = await client.chat.completions.create(model="policy", messages=HELLO)
            assert reply.choices[0].message.content == "hé"
            for front_end in (struck, other):
                with pytest.raises(openai.AuthenticationError):
                    await ask(f"{front_end.url}/v1", made["api_key"])
            again = (await controller.post(f"{struck.url}/sessions")).json()
            assert (await ask(f"{other.url}/v1", again["api_key"])).choices[0].message.content == "hé"


@pytest.mark.usefixtures("engine")
async def test_a_front_end_that_is_killed_while_it_comes_up_at_first_is_replaced(tmp_path: Path) -> None:
    async with endpoint_processes(settings(tmp_path, max_restarts=2), [DeadlyEngine(tmp_path, 2)]) as (front_end,):
        assert (await ask(f"{front_end.url}/v1")).choices[0].message.content == "hé"


async def test_a_rollout_over_http_outlives_its_front_end_and_costs_no_retry(pair: Pair, engine: Any) -> None:
    outages = pair.deadlines.outages
    num_over = outages.num_over
    front_end, _ = await pair.follow([])
    generator = SkyRLGymHTTPGenerator(
        f"{front_end.url}/v1",
        "k",
        "policy",
        lambda name, extras: Chat(1),
        outages=outages,
        outage_timeout_s=PATIENCE_S,
    )
    retrier = RolloutRetrier(
        generator, GeneratorConfig(max_retries=0, rollout_timeout_s=PATIENCE_S, retry_backoff_s=0), pair.deadlines
    )
    prompt = Prompt(uid="p", messages=tuple(HELLO), env_class="chat")
    request = GroupRequest(prompt=prompt, num_samples=2, sampling=SamplingParams(max_tokens=9))
    async with asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(retrier.generate(request))
        os.kill(await front_end.actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        while outages.num_over == num_over:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.05)
        await front_end.follow([engine])
    await generator.close()
    assert [tuple(row.response_token_ids) for row in playing.result()] == [ANSWER] * 2


async def test_a_front_end_may_be_told_of_engines_before_it_serves(tmp_path: Path, engine: Any) -> None:
    server = EndpointServer(settings(tmp_path), [])
    await server.follow([engine])
    host, port = await server.start()
    assert (await ask(f"http://{host}:{port}/v1")).choices[0].message.content == "hé"
    await server.stop()


async def test_a_front_end_that_takes_anothers_place_forwards_from_its_first_request_on(
    tmp_path: Path, engine: Any
) -> None:
    owner = EndpointServer(settings(tmp_path), [engine], 0)
    host, port = await owner.start()
    root = f"http://{host}:{port}"
    successor = EndpointServer(settings(tmp_path), [engine], 1, (root, "http://127.0.0.1:1"))
    host, port = await successor.start()
    async with SessionPool([root], "c") as pool, pool.session() as session:
        assert (await ask(f"http://{host}:{port}/v1", session.api_key)).choices[0].message.content == "hé"
    for server in (successor, owner):
        await server.stop()


async def test_sessions_of_several_front_ends_share_idle_engines_and_make_room_when_they_end(tmp_path: Path) -> None:
    engines: list[Any] = [OneAnswerEngine(f"engine-{i}") for i in range(4)]
    servers = [EndpointServer(settings(tmp_path), engines, front_end) for front_end in range(4)]
    roots = [f"http://{host}:{port}" for host, port in [await server.start() for server in servers]]
    async with SessionPool(roots, "c") as pool:
        for _ in range(8):
            async with pool.session() as session:
                await ask(session.base_url, session.api_key)
        assert [engine.num_calls for engine in engines] == [4] * 4, "two calls make an answer"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                session = await stack.enter_async_context(pool.session())
                await ask(session.base_url, session.api_key)
    assert [engine.num_calls for engine in engines] == [8] * 4
    for server in servers:
        await server.stop()
