"""What the client needs of an engine. Implemented over vLLM, over Ray, by the deterministic engine and by the simulator.

An engine does not know retries, text, chat or other engines: tokens in, tokens with provenance out.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Protocol

from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, WeightUpdate


class InferenceEngine(Protocol):
    """One replica of the policy, serving one policy version at a time.

    Any method may raise ``EngineDeadError``; after that the engine is not used again.
    """

    @property
    def name(self) -> str:
        """Short unique name for logs and metrics, such as ``engine-0``."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Sample until the end, or until a pause in abort mode: then ``finish_reason`` is ``abort`` and all tokens so far
        are returned, unless the engine goes on with them by itself and says so in ``num_aborts``. While the engine is paused
        a new request waits inside it. Cancelling the call ends the request.

        Raises ``RequestRefusedError`` for a request that it cannot serve.
        """
        ...

    def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Like ``generate``, in blocks of new tokens as they are sampled; only the last block has a ``finish_reason``."""
        ...

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """What is sampled so far of those of the requests that are in the engine, by id, from their first token on; with a finish
        reason where that is all. Nothing is taken from them; one that is ending may be missing."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return once no further token is sampled under the current version, and a load that was cancelled has come to its end.
        Idempotent.

        An engine that serves requests which are not ``sampling.is_resumable`` freezes while it holds one, whatever the mode.
        """
        ...

    async def resume(self) -> None:
        """Sample again, after every pause called before, also a cancelled one. Idempotent."""
        ...

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Prepare for ``load_weights`` of the update what can be prepared while tokens are sampled, which takes as much memory as the
        weights; what was staged before is dropped. Nothing has to be done.

        Raises ``PublishError`` when that is not possible: the update is to be loaded all the same.
        """
        ...

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by ``update``, drop every cached key and value, and serve ``update.version``.

        Only called between ``pause`` and ``resume``. Raises ``PublishError``, with the old weights untouched, when the
        update cannot be the policy's (unknown names, other shapes, missing files), or is to be compared and is not what was sent; any
        later failure is ``EngineDeadError``.
        """
        ...

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """``pause``, then ``load_weights``, without a round trip in between; returns the seconds until it had paused.

        What ``load_weights`` refuses may be refused before the pause. See ``pause_then_load``.
        """
        ...

    async def version(self) -> int:
        """The policy version being served."""
        ...

    async def checksum(self) -> str:
        """Digest of the weights held; equal weights give equal digests on engines of the same kind."""
        ...

    async def ping(self) -> None:
        """Return when the engine is able to sample. A wedged one does not: the caller sets the deadline."""
        ...

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """End requests in flight that can go on elsewhere: their ``finish_reason`` is ``abort``, with all tokens so far.

        Args:
            request_ids: these, where they have not ended; also while the engine is paused. None: all of them; then it returns when
                the others have run to their ends, and nothing is sent to the engine meanwhile.
        """
        ...

    async def close(self) -> None:
        """Release everything, whatever is in flight. Idempotent."""
        ...


async def pause_then_load(engine: InferenceEngine, update: WeightUpdate, mode: PauseMode) -> float:
    """``InferenceEngine.switch_weights`` of an engine to which a call is no round trip."""
    clock = asyncio.get_running_loop().time
    asked = clock()
    await engine.pause(mode)
    acknowledge_seconds = clock() - asked
    await engine.load_weights(update)
    return acknowledge_seconds
