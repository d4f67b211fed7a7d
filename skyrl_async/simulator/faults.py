"""Engines that can be killed and frozen, for tests of failures and the tutorial on them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.generation import stream_once
from skyrl_async.inference.protocol import InferenceEngine, pause_then_load
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, WeightUpdate

T = TypeVar("T")


class FaultyEngine:
    """An engine as if in its own process, which SIGKILL can kill and SIGSTOP can freeze.

    A frozen engine neither answers nor fails until it is closed. Calls in flight at its death raise ``EngineDeadError``.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.name, self.max_model_len = engine.name, engine.max_model_len
        self.is_dead = False
        """Whether it was killed or closed."""
        self._moving = asyncio.Event()
        self._moving.set()
        self._open: dict[asyncio.Timeout, None] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether it was frozen."""
        return not self._moving.is_set()

    def freeze(self) -> None:
        """Answer no call from now on."""
        self._moving.clear()

    def kill(self) -> None:
        """Raise ``EngineDeadError`` in every call from now on, and in those in flight."""
        if not self.is_dead:
            self.is_dead = True
            now = asyncio.get_running_loop().time()
            for deadline in self._open:
                deadline.reschedule(now)

    async def close(self) -> None:
        """End the engine, also a frozen one."""
        self.kill()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Stream the engine's blocks."""
        async with aclosing(stream_once(self._engine, request)) as blocks:
            while (block := await self._answer(lambda: anext(blocks, None))) is not None:
                yield block

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """Pause, load and resume."""
        return await pause_then_load(self, update, mode)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Any other method of the engine, which a frozen engine does not answer."""
        method = getattr(self._engine, name)

        async def answer(*arguments: Any, **named: Any) -> Any:
            return await self._answer(lambda: method(*arguments, **named))

        return answer

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Answer a call; not while frozen, and not after death."""
        self._raise_if_dead()
        try:
            async with asyncio.timeout(None) as deadline:
                self._open[deadline] = None
                try:
                    await self._moving.wait()
                    answer = await call()
                    await self._moving.wait()
                finally:
                    self._open.pop(deadline, None)
        except TimeoutError:
            self._raise_if_dead()
            raise
        self._raise_if_dead()
        return answer

    def _raise_if_dead(self) -> None:
        if self.is_dead:
            raise EngineDeadError(f"{self.name} was killed")
