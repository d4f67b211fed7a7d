"""A vLLM engine in a Ray actor's process. Ray starts it; every later call comes over a caller's connection.

    RayEngine (any process) ──EngineConnection──> EngineActor ──> VLLMEngine ──> core

Requests that a weight update aborts continue here.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray

from skyrl_async.errors import EngineDeadError, EngineStartError
from skyrl_async.inference.engines.connection import EngineAddress, listen
from skyrl_async.inference.generation import (
    OpenCalls,
    call_until_end,
    fetch_partial_outputs,
    generate_to_end,
)
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.inference.vllm.engine import VLLMEngine
from skyrl_async.types import EngineOutput, EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """Values of an engine that has booted."""

    max_model_len: int
    node_id: str
    address: EngineAddress
    """Where it takes calls."""
    call_timeout_s: float
    """Deadline of a control call."""
    checksum_timeout_s: float
    """Deadline of a checksum."""


class EngineActor:
    """Owns one ``VLLMEngine``."""

    def __init__(self, config: VLLMEngineConfig, log_path: str) -> None:
        with open(log_path, "ab", buffering=0) as log:  # of this process and its children
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        self._config = config
        self._engine: VLLMEngine
        self._server: asyncio.Server
        self._calls = OpenCalls()

    async def node_id(self) -> str:
        """Ray's name of the machine that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def start(self) -> StartedEngine:
        """Boot, and sample one token: vLLM boots with models that its kernels for the device then turn out not to support."""
        self._engine = await VLLMEngine.start(self._config)
        request = EngineRequest(request_id="boot", prompt_token_ids=(0,), sampling=SamplingParams(max_tokens=1))
        try:
            await self._engine.generate(request)
        except EngineDeadError as error:
            name = self._config.name
            raise EngineStartError(f"engine {name} did not come up: its first token ended it ({error})") from error
        self._server, address = await listen(ray.util.get_node_ip_address(), self)
        return StartedEngine(
            max_model_len=self._engine.max_model_len,
            node_id=await self.node_id(),
            address=address,
            call_timeout_s=self._config.call_timeout_s,
            checksum_timeout_s=self._config.checksum_timeout_s,
        )

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """``InferenceEngine.generate``."""
        with self._calls.tracking(request) as state:
            return await generate_to_end(self._engine, request, state, self._may_continue(request))

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """``InferenceEngine.stream``."""
        with self._calls.tracking(request) as state:
            blocks = call_until_end(request, state, self._engine.stream, self._may_continue(request))
            async with contextlib.aclosing(blocks):
                async for block in blocks:
                    yield block

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """``InferenceEngine.partial_outputs``, with the tokens of all the engine's calls for a request."""
        await fetch_partial_outputs(self._engine, self._calls.find(request_ids).values())
        return self._calls.partial_outputs(request_ids)

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """``InferenceEngine.evict``. Requests also leave between two of the engine's calls."""
        leaving = self._calls.evict(request_ids)
        await self._engine.evict(None if request_ids is None else leaving)

    async def control(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call any other method of the engine."""
        return await getattr(self._engine, method)(*args)

    def _may_continue(self, request: EngineRequest) -> Callable[[], bool]:
        return lambda: not self._calls.is_evicted(request.request_id)
