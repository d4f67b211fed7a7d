"""Calls of an engine over a socket: real sockets, an engine of a few lines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import EngineDeadError, InferenceError, PromptTooLongError
from skyrl_async.inference.engines import ray as ray_engine
from skyrl_async.inference.engines.connection import EngineAddress, EngineConnection, _Messages, listen
from skyrl_async.inference.engines.ray import RayEngine
from skyrl_async.inference.engines.ray_actor import StartedEngine
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, PauseMode, SamplingParams, WeightUpdate
from tests.patience import PATIENCE_S


def request(name: str, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=max_tokens))


def tokens(number: int, finish_reason: FinishReason | None = None) -> EngineOutput:
    versions = VersionSpans.constant(7, 1)
    return EngineOutput(token_ids=(number,), logprobs=(-0.5,), versions=versions, finish_reason=finish_reason)


class OfTwoArguments(Exception):
    """Can be pickled, and not made again of what was."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}, {text}")


class CountingEngine:
    """Samples 0, 1, 2, ...; what it does with some requests is in their names."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.ended = asyncio.Event()
        self.done = list[str]()

    async def do(self, name: str) -> str:
        self.done.append(name)
        if name == "too long":
            raise PromptTooLongError(9, 8)
        if name == "held":
            await self.held.wait()
        await asyncio.sleep(0)
        self.done.append(f"end of {name}")
        return name

    async def control(self, method: str, args: tuple[object, ...]) -> None:
        self.done.append(method)
        if method == "pause":
            await asyncio.Event().wait()
        if method == "load_weights":
            await asyncio.sleep(0.2)

    async def generate(self, asked: EngineRequest) -> EngineOutput:
        if asked.request_id == "too long":
            raise PromptTooLongError(9, 8)
        if asked.request_id == "strange":
            raise type("LocalError", (Exception,), {})("of no module")
        if asked.request_id == "of two arguments":
            raise OfTwoArguments(7, "lost on the way")
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
    connection = await EngineConnection.connect("engine-0", address, PATIENCE_S)
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


async def test_our_errors_cross_as_themselves_and_those_of_other_packages_are_inference_errors() -> None:
    async with connected() as (_, connection, _):
        with pytest.raises(PromptTooLongError) as too_long:
            await collect(connection, request("too long"), streams=False)
        assert too_long.value.num_prompt_tokens == 9
        for name, expected in (("strange", "LocalError: of no module"), ("of two arguments", "7, lost on the way")):
            with pytest.raises(InferenceError, match=expected) as failed:
                await collect(connection, request(name), streams=False)
            assert not isinstance(failed.value, EngineDeadError)
        assert await collect(connection, request("one"), streams=False)


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
            "x", EngineAddress(host=address.host, port=address.port, key=b"k" * 32), PATIENCE_S
        )
        with pytest.raises(EngineDeadError):
            await collect(stranger, request("one"), streams=False)
    with pytest.raises(EngineDeadError, match="engine x is gone: it takes no connection"):
        await EngineConnection.connect("x", EngineAddress(host="127.0.0.1", port=1, key=b""), PATIENCE_S)


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


async def test_methods_begin_in_the_order_of_their_calls_and_go_on_without_their_caller() -> None:
    async with connected() as (engine, connection, _):
        left = connection.ask("do", "first")
        answers = [connection.ask("do", name) for name in ("second", "third")]
        left.cancel()
        assert await asyncio.gather(*answers) == ["second", "third"]
        assert engine.done == [*("first", "second", "third"), *("end of first", "end of second", "end of third")]
        with pytest.raises(PromptTooLongError):
            await connection.ask("do", "too long")


async def test_a_lost_connection_is_an_engine_death_for_methods_that_go_on_and_for_later_ones() -> None:
    async with connected() as (engine, connection, address):
        open_call = connection.ask("do", "held")
        answer = connection.ask("do", "answered")
        assert await answer == "answered"
        connection.transport.abort()
        for lost in (open_call, connection.ask("do", "late")):
            with pytest.raises(EngineDeadError, match="engine engine-0 is gone"):
                await lost
        engine.held.set()
        other = await EngineConnection.connect("engine-0", address, PATIENCE_S)
        await other.ask("do", "other")
        assert "end of held" in engine.done and "late" not in engine.done
        other.transport.abort()


@asynccontextmanager
async def calling(
    monkeypatch: pytest.MonkeyPatch, *, call_timeout_s: float
) -> AsyncIterator[tuple[CountingEngine, RayEngine]]:
    """An engine, and what calls it without a grace."""
    monkeypatch.setattr(ray_engine, "_GRACE_S", 0.0)
    async with connected() as (engine, _, address):
        started = StartedEngine(
            max_model_len=1,
            node_id="",
            address=address,
            call_timeout_s=call_timeout_s,
            checksum_timeout_s=PATIENCE_S,
        )
        called = RayEngine("engine-0", None, started)
        yield engine, called
        assert called._connection is not None
        called._connection.transport.abort()


async def test_calls_keep_their_order_while_they_connect_and_one_without_an_answer_in_time_is_an_engine_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with calling(monkeypatch, call_timeout_s=PATIENCE_S) as (engine, called):
        await asyncio.gather(called.resume(), called.checksum(), called.version())
        assert engine.done == ["resume", "checksum", "version"]
        called._started = replace(called._started, call_timeout_s=0.01)
        with pytest.raises(EngineDeadError, match=r"engine engine-0: no answer to pause within 0.01 s"):
            await called.pause(PauseMode.KEEP)


async def test_an_engine_that_compares_the_bytes_it_loads_has_the_time_of_a_checksum_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with calling(monkeypatch, call_timeout_s=0.1) as (engine, called):
        await called.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0, is_compared=True))
        assert engine.done == ["load_weights"]
