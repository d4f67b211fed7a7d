"""Engines that can be killed and frozen, for tests of failures and the tutorial on them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from skyrl_async.inference.protocol import CutOff, InferenceEngine, pause_then_load
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, WeightUpdate

T = TypeVar("T")


class FaultyEngine:
    """An engine as if in its own process, which SIGKILL can kill and SIGSTOP can freeze.

    A frozen engine neither answers nor fails until it is closed. Calls in flight at its death raise ``EngineDeadError``.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.name, self.max_model_len = engine.name, engine.max_model_len
        self._cut_off = CutOff()
        self._moving = asyncio.Event()
        self._moving.set()

    @property
    def is_dead(self) -> bool:
        """Whether it was killed or closed."""
        return self._cut_off.reason is not None

    @property
    def is_frozen(self) -> bool:
        """Whether it was frozen."""
        return not self._moving.is_set()

    def freeze(self) -> None:
        """Answer no call from now on."""
        self._moving.clear()

    def kill(self) -> None:
        """Raise ``EngineDeadError`` in every call from now on, and in those in flight."""
        self._cut_off.cut(f"{self.name} was killed")

    async def close(self) -> None:
        """End the engine, also a frozen one."""
        self.kill()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Stream the engine's blocks."""
        async with aclosing(self._engine.stream(request)) as blocks:
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
        with self._cut_off.block():
            await self._moving.wait()
            answer = await call()
            await self._moving.wait()
        self._cut_off.check()
        return answer
