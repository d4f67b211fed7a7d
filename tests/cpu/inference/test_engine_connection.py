"""Requests to an engine over a socket: real sockets, an engine of a few lines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import EngineDeadError, InferenceError, PromptTooLongError
from skyrl_async.inference.engines.connection import EngineAddress, EngineConnection, _Messages, listen
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, SamplingParams
from tests.patience import PATIENCE_S


def request(name: str, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=max_tokens))


def tokens(number: int, finish_reason: FinishReason | None = None) -> EngineOutput:
    versions = VersionSpans.constant(7, 1)
    return EngineOutput(token_ids=(number,), logprobs=(-0.5,), versions=versions, finish_reason=finish_reason)


class CountingEngine:
    """Samples 0, 1, 2, ...; what it does with some requests is in their names."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.ended = asyncio.Event()

    async def generate(self, asked: EngineRequest) -> EngineOutput:
        if asked.request_id == "too long":
            raise PromptTooLongError(9, 8)
        if asked.request_id == "strange":
            raise type("LocalError", (Exception,), {})("of no module")
        if asked.request_id == "held":
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        return tokens(0, FinishReason.STOP)

    async def stream(self, asked: EngineRequest) -> AsyncIterator[EngineOutput]:
        try:
            for number in range(asked.sampling.max_tokens):
                is_last = asked.request_id == "whole" and number == asked.sampling.max_tokens - 1
                yield tokens(number, FinishReason.LENGTH if is_last else None)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[CountingEngine, EngineConnection, EngineAddress]]:
    engine = CountingEngine()
    server, address = await listen("127.0.0.1", engine)
    connection = await EngineConnection.connect("engine-0", address)
    async with asyncio.timeout(PATIENCE_S):
        yield engine, connection, address
    connection.transport.abort()
    server.close()
    await asyncio.sleep(0)


async def collect(connection: EngineConnection, asked: EngineRequest, *, streams: bool) -> list[EngineOutput]:
    return [block async for block in connection.call(asked, streams=streams)]


@pytest.mark.parametrize("name", ["whole", "without a finish reason"])
async def test_calls_beside_each_other_get_their_own_tokens(name: str) -> None:
    async with connected() as (_, connection, _), asyncio.TaskGroup() as group:
        streams = [group.create_task(collect(connection, request(name, n), streams=True)) for n in (2, 40)]
        output = group.create_task(collect(connection, request("one"), streams=False))
    assert [[block.token_ids.tolist() for block in stream.result()] for stream in streams] == [
        [[i] for i in range(num_tokens)] for num_tokens in (2, 40)
    ]
    assert output.result() == [tokens(0, FinishReason.STOP)]


async def test_errors_cross_as_themselves_and_what_cannot_cross_is_an_inference_error() -> None:
    async with connected() as (_, connection, _):
        with pytest.raises(PromptTooLongError) as too_long:
            await collect(connection, request("too long"), streams=False)
        assert too_long.value.num_prompt_tokens == 9
        with pytest.raises(InferenceError, match="LocalError: of no module"):
            await collect(connection, request("strange"), streams=False)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_that_leaves_ends_its_request_and_no_other(streams: bool) -> None:
    async with connected() as (engine, connection, _):
        if streams:
            async with aclosing(connection.call(request("left", 10**9), streams=True)) as blocks:
                await anext(blocks)
        else:
            call = asyncio.ensure_future(collect(connection, request("held"), streams=False))
            await engine.held.wait()
            call.cancel()
        await engine.ended.wait()
        assert await collect(connection, request("one"), streams=False)


async def test_a_lost_connection_ends_the_calls_of_both_sides() -> None:
    async with connected() as (engine, connection, _):
        call = asyncio.ensure_future(collect(connection, request("held"), streams=False))
        await engine.held.wait()
        connection.transport.abort()
        for lost in (call, collect(connection, request("one"), streams=False)):
            with pytest.raises(EngineDeadError, match="engine engine-0 is gone: its connection ended"):
                await lost
        await engine.ended.wait()


async def test_nothing_of_a_stranger_is_read() -> None:
    async with connected() as (_, _, address):
        stranger = await EngineConnection.connect(
            "x", EngineAddress(host=address.host, port=address.port, key=b"k" * 32)
        )
        with pytest.raises(EngineDeadError):
            await collect(stranger, request("one"), streams=False)
    with pytest.raises(EngineDeadError, match="engine x is gone: it takes no connection"):
        await EngineConnection.connect("x", EngineAddress(host="127.0.0.1", port=1, key=b""))


@given(messages=st.lists(st.tuples(st.integers(), st.binary(max_size=300)), max_size=5), size=st.integers(1, 400))
def test_messages_arrive_whole_however_they_are_cut(messages: list[tuple[int, bytes]], size: int) -> None:
    sent, arrived = bytearray(), []

    class Wire:
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            sent.extend(data)

    class Side(_Messages):
        def received(self, *message: object) -> None:  # type: ignore[override]
            arrived.append(message)

    side = Side()
    side.transport = Wire()  # type: ignore[assignment]
    for message in messages:
        side.send(*message)
    for begin in range(0, len(sent), size):
        side.data_received(bytes(sent[begin : begin + size]))
    assert arrived == messages
