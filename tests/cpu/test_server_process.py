"""The endpoint in a Ray actor: real Ray, real uvicorn, the real client and openai; only the engine is scripted."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from ray.exceptions import RayActorError

from skyrl_async.errors import ConfigError
from skyrl_async.inference.server.process import EndpointSettings, endpoint_process
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason
from tests.cpu.tiny_chat import END, TOKENIZER, spelled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

ANSWER = (*spelled("hé"), END)


class OneAnswerEngine:
    """Says the same to everything, under version 3, and is aborted once after the first token."""

    name = "engine-0"

    async def generate(self, request: EngineRequest) -> EngineOutput:
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


@pytest.fixture
def engine() -> Any:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield OneAnswerEngine()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def settings(directory: Path, **changes: Any) -> EndpointSettings:
    TOKENIZER.save_pretrained(directory)
    return EndpointSettings(
        **{
            "policy_path": str(directory),
            "trust_remote_code": False,
            "max_model_len": 100,
            "host": "127.0.0.1",
            "port": 0,
            "api_keys": ("k",),
            "model_name": "policy",
            "max_body_bytes": 10_000,
            "keep_alive_timeout_s": 75,
            **changes,
        }
    )


async def ask(url: str) -> ChatCompletion:
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        return await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hello"}], extra_body={"return_token_ids": True}
        )


async def test_an_actor_serves_over_its_own_client_and_is_gone_afterwards(tmp_path: Path, engine: Any) -> None:
    async with endpoint_process(settings(tmp_path), [engine]) as (host, port, actor):
        reply = await ask(f"http://{host}:{port}/v1")
    choice = reply.choices[0]
    assert choice.message.content == "hé"
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == ANSWER
    assert choice.model_extra["num_aborts"] == 1
    assert choice.model_extra["policy_versions"] == [{"version": 3, "start": 0, "end": 4}]
    with pytest.raises(RayActorError):
        await actor.wait.remote()


async def test_a_port_in_use_reaches_the_driver_as_one_clear_error(tmp_path: Path, engine: Any) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=rf"^server.port {port} is in use on 127.0.0.1; choose another"):
        async with endpoint_process(settings(tmp_path, port=port), [engine]):
            raise AssertionError
    taken.close()
    await taken.wait_closed()


async def test_stopping_ends_the_wait(tmp_path: Path, engine: Any) -> None:
    async with endpoint_process(settings(tmp_path), [engine]) as (_, _, actor):
        await actor.stop.remote()
        await actor.wait.remote()
