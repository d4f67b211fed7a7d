"""Whatever the order of asking, sampling, failing, disconnecting and closing, a turn is committed exactly once."""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.requests.shared_request import Emit, SharedRequest
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionOutcome, SessionSettings
from skyrl_async.errors import NoEngineError
from skyrl_async.types import Completion, CompletionDelta, FinishReason, SamplingParams
from tests.cpu.tiny_chat import END, RENDERER, TOKENIZER, spelled

MAX_CONCURRENT = 3
"""Generations at once; 2 of them in one session."""
NO_PARSER = AnswerParser.of(TOKENIZER, tool_call_parser=None, reasoning_parser=None)


@dataclass(eq=False)
class Generation:
    """One generation that the engine was asked for; its text is its name."""

    name: str
    asked_by: tuple[str, ...]
    """The session and the prompt."""
    outcome: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_running: bool = True


@dataclass
class HeldSampler:
    """Finishes each generation when told to."""

    max_model_len: int = 200
    generations: list[Generation] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def generation(self, prompt: Sequence[int], session_id: str | None) -> AsyncIterator[Generation]:
        asked_by = (str(session_id), RENDERER.decode(prompt))
        made = Generation(f"g{len(self.generations)}", asked_by)
        self.generations.append(made)
        try:
            await made.outcome
            yield made
        finally:
            made.is_running = False

    async def generate_tokens(
        self, prompt: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None, priority: int = 0
    ) -> Completion:
        async with self.generation(prompt, session_id) as made:
            ids = (*spelled(made.name), END)
            return Completion(
                prompt_token_ids=tuple(prompt),
                token_ids=ids,
                logprobs=(-1.0,) * len(ids),
                versions=(0,) * len(ids),
                text=made.name,
                finish_reason=FinishReason.STOP,
            )

    async def stream_tokens(
        self, prompt: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[CompletionDelta]:
        async with self.generation(prompt, session_id) as made:
            for text, end in ((made.name[:1], ()), (made.name[1:], (END,))):
                ids = (*spelled(text), *end)
                finish = FinishReason.STOP if end else None
                logprobs, versions = (-1.0,) * len(ids), (0,) * len(ids)
                yield CompletionDelta(
                    token_ids=ids, logprobs=logprobs, versions=versions, text=text, finish_reason=finish
                )
                await asyncio.sleep(0)


class Client:
    """One request over ASGI, by a client that may read slowly and leave at any time."""

    def __init__(
        self, app: Any, key: str, body: dict[str, Any], *, marked: Mapping[str, str] = {}, is_slow: bool = False
    ) -> None:
        self.is_stream = bool(body.get("stream"))
        self.status: int | None = None
        self.received = b""
        self.has_left = asyncio.Event()
        self.reads = asyncio.Event()
        if not is_slow:
            self.reads.set()
        self._unsent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **marked}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._unsent:
            return self._unsent.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if message["body"]:
            await self.reads.wait()
            if not self.has_left.is_set():  # as uvicorn, which writes no more and says nothing
                self.received += message["body"]

    def leave(self) -> None:
        """As in uvicorn, waiting for messages ends before waiting to write."""
        self.has_left.set()
        self.reads.set()

    @property
    def reply(self) -> str | None:
        """The text that it has in full, of a success."""
        if self.status != 200 or not self.received:
            return None
        if not self.is_stream:
            return str(json.loads(self.received)["choices"][0]["message"]["content"])
        events = self.received.decode().strip().split("\n\n")
        if events[-1] != "data: [DONE]":
            return None
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


class RequestMachine(RuleBasedStateMachine):
    """Clients of two sessions, an engine under control, and the loop run a few iterations at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.sampler = HeldSampler()
        self.app = create_app(
            self.sampler,
            RENDERER,
            api_keys=["k"],
            parser=NO_PARSER,
            server=ServerConfig(max_concurrent_requests=MAX_CONCURRENT),
            session_settings=SessionSettings(limits=SessionLimits(max_concurrent_requests=2)),
        )
        self.serving = self.app.state.serving
        self.clients: list[Client] = []
        self.num_turns_when_closed: dict[str, int] = {}
        made = [self.serving.sessions.create() for _ in range(2)]
        self.sessions = [session for session, _ in made]
        self.keys = [key for _, key in made]
        self.owners: dict[Client, int] = {}

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def iterate(self, times: int) -> None:
        async def go() -> None:
            for _ in range(times):
                await asyncio.sleep(0)

        self.run(go())

    @rule(
        which=st.integers(0, 1),
        word=st.sampled_from("ab"),
        is_stream=st.booleans(),
        marked=st.sampled_from([{}, {}, {"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}]),
        is_slow=st.booleans(),
        then=st.integers(0, 6),
    )
    def ask(self, which: int, word: str, is_stream: bool, marked: dict[str, str], is_slow: bool, then: int) -> None:
        async def go() -> Client:
            body = {"messages": [{"role": "user", "content": word}], "stream": is_stream}
            return Client(self.app, self.keys[which], body, marked=marked, is_slow=is_slow)

        client = self.run(go())
        self.clients.append(client)
        self.owners[client] = which
        self.iterate(then)

    @precondition(lambda self: any(g.is_running for g in self.sampler.generations))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]), then=st.integers(0, 6))
    def end_generation(self, data: st.DataObject, fails: bool, then: int) -> None:
        running = [g for g in self.sampler.generations if g.is_running and not g.outcome.done()]
        if not running:
            return
        chosen = data.draw(st.sampled_from(running))
        if fails:
            chosen.outcome.set_exception(NoEngineError("no engine is left"))
        else:
            chosen.outcome.set_result(None)
        self.iterate(then)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), leaves=st.booleans(), then=st.integers(0, 6))
    def read_or_leave(self, data: st.DataObject, leaves: bool, then: int) -> None:
        client = data.draw(st.sampled_from(self.clients))
        client.leave() if leaves else client.reads.set()
        self.iterate(then)

    @rule(which=st.integers(0, 1), then=st.integers(0, 6))
    def close_session(self, which: int, then: int) -> None:
        session = self.sessions[which]
        if session.is_open:
            self.serving.end_session(session)
            self.serving.sessions.finish(session.id, SessionOutcome(reward=1.0))
            self.num_turns_when_closed[session.id] = session.num_turns
        self.iterate(then)

    @rule()
    def settle(self) -> None:
        self.iterate(60)
        self.check_settled()

    @invariant()
    def no_more_than_the_limit_is_sampled(self) -> None:
        running = [g for g in self.sampler.generations if g.is_running]
        assert len(running) <= MAX_CONCURRENT
        assert all(count <= 2 for count in Counter(g.asked_by[0] for g in running).values())

    def check_settled(self) -> None:
        """What holds when nothing can go on by itself."""
        open_clients = [client for client in self.clients if not client.task.done()]
        for client in self.clients:
            if client.task.done():
                client.task.result()
        assert self.serving.sessions.statistics()["open_requests"] <= len(open_clients)
        running = Counter(g.asked_by for g in self.sampler.generations if g.is_running)
        assert sum(running.values()) <= len(open_clients), "something is sampled without a client"
        for which, session in enumerate(self.sessions):
            replies = {c.reply for c, owner in self.owners.items() if owner == which} - {None}
            if session.is_open:
                texts = [turn.addition.text for turn in session.tree.turns]
                assert len(texts) == len(set(texts)), "a turn was committed twice"
                assert set(texts) == replies, "what a client has is a turn, and nothing else is"
            else:
                assert session.num_turns == self.num_turns_when_closed[session.id]
                assert not any(g.is_running for g in self.sampler.generations if g.asked_by[0] == session.id)

    def teardown(self) -> None:
        with self.runner:
            for client in self.clients:
                client.leave()
            self.iterate(60)
            self.check_settled()
            assert all(client.task.done() for client in self.clients)
            assert not any(generation.is_running for generation in self.sampler.generations)
            self._every_slot_is_free()

    def _every_slot_is_free(self) -> None:
        num_before = len(self.sampler.generations)

        async def go() -> list[Client]:
            keys = [self.serving.sessions.create()[1] for _ in range(MAX_CONCURRENT)]
            body = {"messages": [{"role": "user", "content": "c"}]}
            return [Client(self.app, key, body) for key in keys]

        last = self.run(go())
        self.iterate(30)
        assert len(self.sampler.generations) - num_before == MAX_CONCURRENT
        for client in last:
            client.leave()
        self.iterate(30)


TestRequests = pytest.mark.slow(RequestMachine.TestCase)
TestRequests.settings = settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("is_write_resumed", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_of_a_broken_connection_goes_to_the_next_equal_request(
    is_stream: bool, is_write_resumed: bool
) -> None:
    sampler = HeldSampler()
    app = create_app(sampler, RENDERER, api_keys=["k"], parser=NO_PARSER)
    session, key = app.state.serving.sessions.create()
    body = {"messages": [{"role": "user", "content": "a"}], "stream": is_stream}
    broken = Client(app, key, body, is_slow=True)
    await _settle()
    sampler.generations[0].outcome.set_result(None)
    await _settle()
    if is_write_resumed:  # at the same moment, and noticed first
        broken.reads.set()
    broken.leave()
    await _settle()
    assert broken.task.done() and broken.reply is None and session.num_turns == 0
    resent, further = Client(app, key, body), Client(app, key, body)
    await _settle()
    assert resent.reply == "g0"
    assert [turn.addition.text for turn in session.tree.turns] == ["g0"]
    assert further.reply is None and len(sampler.generations) == 2
    further.leave()
    await _settle()


async def _settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def _shared(log: list[str], produced: "asyncio.Future[str] | None" = None, **arguments: Any) -> SharedRequest:
    async def produce(emit: Emit) -> None:
        log.append("begun")
        emit({"n": 1})
        try:
            if produced:
                await produced
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        emit({"n": 2})

    return SharedRequest(produce, **arguments)


async def test_connections_share_one_run_and_a_late_one_gets_all_events() -> None:
    log: list[str] = []
    shared = _shared(log)
    with shared.connected():
        assert await shared.ended() == [{"n": 1}, {"n": 2}]
        with shared.connected():
            assert await shared.ended() == [{"n": 1}, {"n": 2}]
            assert await shared.events(0, 9) == [{"n": 1}, {"n": 2}]
            assert await shared.events(2, 9) == []
        shared.delivered()
    assert log == ["begun"]


async def test_the_last_connection_to_close_cancels_and_the_first_does_not() -> None:
    log: list[str] = []
    abandoned: list[SharedRequest] = []
    shared = _shared(log, asyncio.get_running_loop().create_future(), on_abandoned=abandoned.append)
    with shared.connected():
        with shared.connected():
            assert await shared.events(0, 9) == [{"n": 1}]
        assert not abandoned
    assert abandoned == [shared]
    await asyncio.sleep(0)
    assert log == ["begun", "cancelled"]


async def test_a_delivery_is_recorded_once() -> None:
    told: list[SharedRequest] = []
    shared = _shared([], on_delivered=told.append, on_abandoned=lambda _: pytest.fail("somebody has it"))
    with shared.connected():
        await shared.ended()
        shared.delivered()
        shared.delivered()
    assert told == [shared]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_cancelled_request_raises_the_reason_on_all_connections(is_begun: bool) -> None:
    log: list[str] = []
    shared = _shared(log, asyncio.get_running_loop().create_future())

    async def connect() -> None:
        with shared.connected():
            num_seen = 0
            while not shared.is_done:
                num_seen += len(await shared.events(num_seen, 1e6))
            assert shared.has_failed
            await shared.ended()

    connections = [asyncio.ensure_future(connect()) for _ in range(2)]
    if is_begun:
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
    shared.cancel(NoEngineError("over"))
    for connection in connections:
        with pytest.raises(NoEngineError, match="over"):
            await connection
    assert log == (["begun", "cancelled"] if is_begun else [])


async def test_a_connection_that_is_cancelled_with_its_request_stays_cancelled() -> None:
    shared = _shared([], asyncio.get_running_loop().create_future())

    async def connect() -> None:
        with shared.connected():
            await shared.ended()

    connection = asyncio.ensure_future(connect())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    shared.cancel(NoEngineError("over"))
    connection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection


async def test_a_replay_is_the_same_outcome_and_holds_nothing_that_made_it() -> None:
    shared = _shared([])
    with shared.connected():
        events = await shared.ended()
        again = SharedRequest(shared.replay())
    with again.connected():
        assert await again.ended() == events == [{"n": 1}, {"n": 2}]


async def test_a_failure_without_connections_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def produce(emit: Emit) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise NoEngineError("in the middle of leaving") from None
        raise AssertionError

    shared = SharedRequest(produce)
    with caplog.at_level(logging.INFO):
        with shared.connected():
            await shared.events(0, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "in the middle of leaving" in caplog.text
