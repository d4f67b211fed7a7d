"""A vLLM engine in a Ray actor's process: its requests, which callers can cancel, and every other call.

    RayEngine (any process) ──> EngineActor ──> VLLMEngine ──> core

Requests that a weight update aborts continue here.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from skyrl_async.errors import EngineDeadError, EngineStartError
from skyrl_async.inference.continuation import fetch_partial_outputs, generate_to_end, stream_to_end
from skyrl_async.inference.generation_state import GenerationState, OpenCalls
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.inference.vllm.engine import VLLMEngine
from skyrl_async.types import EngineOutput, EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """Values of an engine that has booted."""

    max_model_len: int
    node_id: str
    call_timeout_s: float
    """Deadline of a control call."""
    checksum_timeout_s: float
    """Deadline of a checksum."""


class EngineActor:
    """Owns one ``VLLMEngine``, and its requests' tasks, so that callers can cancel them."""

    def __init__(self, config: VLLMEngineConfig, log_path: str) -> None:
        _redirect_output(log_path)
        self._config = config
        self._engine: VLLMEngine
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._evicted: set[str] = set()
        self._calls = OpenCalls()
        self._finished: dict[tuple[str, int], asyncio.Event] = {}
        """(caller, number) -> set once that ordered call is over; only each caller's newest are kept."""

    async def start(self) -> StartedEngine:
        """Boot, and sample one token: vLLM boots with models that its kernels for the device then turn out not to support."""
        self._engine = await VLLMEngine.start(self._config)
        request = EngineRequest(request_id="boot", prompt_token_ids=(0,), sampling=SamplingParams(max_tokens=1))
        try:
            await self._engine.generate(request)
        except EngineDeadError as error:
            name = self._config.name
            raise EngineStartError(f"engine {name} did not come up: its first token ended it ({error})") from error
        return StartedEngine(
            max_model_len=self._engine.max_model_len,
            node_id=ray.get_runtime_context().get_node_id(),
            call_timeout_s=self._config.call_timeout_s,
            checksum_timeout_s=self._config.checksum_timeout_s,
        )

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """See ``InferenceEngine.generate``."""
        with self._registered(request) as state:
            return await generate_to_end(self._engine, request, state, self._unless_evicted(request))

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """See ``InferenceEngine.stream``."""
        with self._registered(request) as state:
            blocks = stream_to_end(self._engine, request, state, self._unless_evicted(request))
            async with contextlib.aclosing(blocks):
                async for block in blocks:
                    yield block

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """See ``InferenceEngine.partial_outputs``; with the tokens of all the engine's calls for a request."""
        await fetch_partial_outputs(self._engine, self._calls.find(request_ids).values())
        return self._calls.partial_outputs(request_ids)

    async def cancel(self, request_id: str) -> None:
        """End a request whose caller is gone."""
        if task := self._requests.get(request_id):
            task.cancel()

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """See ``InferenceEngine.evict``. Requests also leave between two of the engine's calls."""
        leaving = self._requests.keys() if request_ids is None else self._requests.keys() & set(request_ids)
        self._evicted |= leaving
        await self._engine.evict(None if request_ids is None else leaving)

    async def control(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call any other method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def control_in_order(self, method: str, args: tuple[Any, ...], caller: str, number: int) -> Any:
        """``control``, after the caller's calls with smaller numbers (counted from 0) are over: Ray starts an actor's calls in any
        order."""
        over = self._finished.setdefault((caller, number), asyncio.Event())
        if number:
            await self._finished.setdefault((caller, number - 1), asyncio.Event()).wait()
            del self._finished[caller, number - 1]
        try:
            return await self.control(method, args)
        finally:
            over.set()

    def _unless_evicted(self, request: EngineRequest) -> Callable[[], bool]:
        """A function: whether the request may continue in this engine after an abort."""
        return lambda: request.request_id not in self._evicted

    @contextlib.contextmanager
    def _registered(self, request: EngineRequest) -> Iterator[GenerationState]:
        task = asyncio.current_task()
        assert task is not None
        self._requests[request.request_id] = task
        try:
            with self._calls.tracking(request) as state:
                yield state
        finally:
            del self._requests[request.request_id]
            self._evicted.discard(request.request_id)


def _redirect_output(log_path: str) -> None:
    """Send the output of this process and its children to a file."""
    with open(log_path, "ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
