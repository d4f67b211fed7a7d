"""The engine interface: tokens in, tokens with log-probs and versions out. Implemented over vLLM, over Ray, by the deterministic engine and
by the simulator. Retries, text, chat and other engines are unknown to an engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import astuple, dataclass
from typing import Protocol

from skyrl_async.errors import EngineDeadError
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, WeightUpdate


@dataclass(frozen=True, slots=True)
class Iterations:
    """Iterations of an engine's scheduler, added up. In each of them, all requests that run get their next token."""

    num: int = 0
    seconds: float = 0.0
    num_requests: int = 0
    """That ran in each."""
    num_prefills: int = 0
    """Requests among these of whose prompt, or answer up to an abort, a part was computed."""
    num_prefill_tokens: int = 0
    """Tokens of those."""

    def __add__(self, other: "Iterations") -> "Iterations":
        return Iterations(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Iterations") -> "Iterations":
        return Iterations(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine answers to a heartbeat. Counts are those since it booted; an engine that does not count leaves them out."""

    num_waiting: int = 0
    """Requests that wait for room in the engine, now."""
    cache_use: float = 0.0
    """Fraction of its cache of keys and values that running requests hold, now."""
    num_prompt_tokens: int = 0
    """Tokens of prompts that were looked up in the cache of prefixes."""
    num_cached_tokens: int = 0
    """Those that were found."""
    num_preemptions: int = 0
    """Running requests that lost their place in the cache to others, and computed their keys and values again. Those that a weight update
    makes compute them again are not counted."""
    decode: Iterations = Iterations()
    """Iterations without a prefill."""
    prefill: Iterations = Iterations()
    """Those with one."""


class InferenceEngine(Protocol):
    """One replica of the policy, serving one policy version at a time.

    Any method may raise ``EngineDeadError``; after that the engine is not used again.
    """

    @property
    def name(self) -> str:
        """Short unique name for logs and metrics, such as ``engine-0``."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Sample until the end, or until a pause in abort mode. That returns all tokens so far with ``finish_reason`` ``abort``, unless the
        engine continues the request by itself and counts that in ``num_aborts``. While the engine is paused a new request waits inside
        it. Cancelling the call ends the request.

        Raises ``RequestRefusedError`` for a request that the engine cannot serve.
        """

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Like ``generate``, in blocks of new tokens as they are sampled; only the last block has a ``finish_reason``."""

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """All tokens so far of those requests that are in the engine, by id; with a finish reason if there are no more. The requests are
        not changed. One that is ending may be missing."""

    async def pause(self, mode: PauseMode) -> None:
        """Return once no further token is sampled under the current version, and any cancelled load has ended. Idempotent.

        While the engine holds a request that is not ``sampling.is_resumable``, it freezes requests in every mode.
        """

    async def resume(self) -> None:
        """Sample again, after all pauses called before, also cancelled ones. Idempotent."""

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Prepare as much of loading the update as possible while tokens are sampled, which takes as much memory as the weights. An update
        staged before is dropped. An engine may do nothing.

        Raises ``PublishError`` if it cannot; the update can be loaded all the same.
        """

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by ``update``, drop every cached key and value, and serve ``update.version``.

        Only called between ``pause`` and ``resume``. Raises ``PublishError``, with the old weights unchanged, if the update cannot be the
        policy's (unknown names, other shapes, missing files), or its bytes are to be compared and differ from those sent. Any later failure
        is ``EngineDeadError``.
        """

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """``pause``, then ``load_weights``, without a round trip in between; returns the seconds until it had paused.

        It may refuse an update before it pauses.
        """

    async def version(self) -> int:
        """The policy version being served."""

    async def checksum(self) -> str:
        """Digest of the weights; equal weights give equal digests on engines of the same kind."""

    async def ping(self) -> EngineLoad:
        """How the engine is used, if it can sample. A wedged engine never returns: the caller sets the deadline."""

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """End running requests that can continue elsewhere, with ``finish_reason`` ``abort`` and all tokens so far.

        Args:
            request_ids: the requests to end, also while the engine is paused. None: all; then this returns when the others have run to
                their end, and nothing may be sent to the engine meanwhile.
        """

    async def close(self) -> None:
        """Release everything, also with requests in flight. Idempotent."""


async def pause_then_load(engine: InferenceEngine, update: WeightUpdate, mode: PauseMode) -> float:
    """``InferenceEngine.switch_weights`` for an engine in this process, where calls cost no round trip."""
    clock = asyncio.get_running_loop().time
    asked = clock()
    await engine.pause(mode)
    acknowledge_seconds = clock() - asked
    await engine.load_weights(update)
    return acknowledge_seconds


class CutOff:
    """Ends what is awaited in an engine as soon as the engine is dead, even if nothing answers any more."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the engine is dead; None while it is not."""
        self._open: dict[_CutOffBlock, None] = {}

    def cut(self, reason: str) -> None:
        """End every open block. Idempotent: the first reason stays."""
        if self.reason is None:
            self.reason = reason
            for block in self._open:
                asyncio.get_running_loop().call_soon(block.end)

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the engine is dead."""
        if self.reason is not None:
            raise EngineDeadError(self.reason)

    def block(self) -> "_CutOffBlock":
        """What the block awaits ends when ``cut`` is called. Raises ``EngineDeadError`` then, and if it was called before."""
        return _CutOffBlock(self)


class _CutOffBlock:
    """As ``asyncio.timeout``, at half the cost: each block of a stream passes through one."""

    def __init__(self, cut_off: CutOff) -> None:
        self._cut_off = cut_off
        self._is_cut = False

    def __enter__(self) -> None:
        self._cut_off.check()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancelled_before = self._task.cancelling()
        self._cut_off._open[self] = None

    def end(self) -> None:
        """Cancel what the block awaits, if it is still open."""
        if self in self._cut_off._open and self._task is not None:
            self._is_cut = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: object) -> None:
        del self._cut_off._open[self]
        if self._is_cut and self._task is not None:
            is_cancelled = self._task.uncancel() > self._num_cancelled_before
            if not is_cancelled and isinstance(failure, asyncio.CancelledError):
                over = TimeoutError()
                over.__cause__ = failure  # as a timeout's: ``first_failure`` tells it from the cancellation of a task
                raise EngineDeadError(self._cut_off.reason) from over
