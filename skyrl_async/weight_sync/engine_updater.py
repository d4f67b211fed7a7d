"""Moves engines from one update to the next: pause, load, resume, all or nothing.

    (stage, beside generation) ──> pause, load ──every engine──> (requests move) ──> resume
                       └ a refusal, an error, a cancellation: engines that have loaded go back to the update before

Afterwards all engines serve the same version. An engine that dies is closed, since its version is unknown, and so is one that keeps a
cancellation waiting. Where updates come from, and engines that join meanwhile, are unknown here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from skyrl_async.errors import EngineDeadError, NoEngineError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.shutdown import GRACE_S
from skyrl_async.runtime.tasks import is_being_cancelled, run_together
from skyrl_async.types import PauseMode, WeightUpdate

logger = logging.getLogger(__name__)

_MAX_EVICTED_AT_ONCE = 256
"""Requests, of all engines together, whose last tokens come at once: the event loop does nothing else meanwhile."""

EngineCall = Callable[[InferenceEngine], Coroutine[Any, Any, Any]]
Engines = list[InferenceEngine]
"""Those that take part; engines that die are removed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdateTimes:
    """Seconds of one update."""

    acknowledge: float
    """Until the first engine has finished its current step and has paused."""
    load: float
    """From then until every engine has loaded; each loads as soon as it has paused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineWeightUpdater:
    """Pauses, updates and resumes engines."""

    client: InferenceEngineClient
    """Drops engines that die, and knows whether another one may come."""
    pause_mode: PauseMode
    """What happens to requests in flight."""
    trace: Trace
    """Gets a span for the load."""
    clock: Callable[[], float]
    """Seconds."""

    async def stage(self, engines: Engines, update: WeightUpdate) -> None:
        """Let ``engines`` prepare for ``update`` beside generation. An engine that cannot prepare loads it all the same.

        Raises ``NoEngineError`` if all die and none is expected.
        """

        async def stage(engine: InferenceEngine) -> None:
            try:
                await engine.stage_weights(update)
            except PublishError as error:
                logger.warning("%s; its pause will be longer", error)

        with self.trace.span("stage", track="publish", version=update.version):
            await self.everywhere("stage", stage, engines)

    @asynccontextmanager
    async def loaded(
        self, engines: Engines, update: WeightUpdate, before: WeightUpdate | None, serving_version: int | None
    ) -> AsyncIterator[EngineUpdateTimes]:
        """Make ``engines`` serve ``update``; engines that die are removed from the list.

        The block runs, without waiting for anything, once all have loaded and before any resumes. From then on they serve ``update``,
        whatever happens.

        Args:
            engines: all of the run's.
            update: what they are to serve.
            before: what they serve now, to roll back to; None: its files are gone, and engines that have loaded ``update`` are closed
                in a roll-back.
            serving_version: the version they serve now; None before the first update.

        Raises ``PublishError`` if an engine refuses. After that, or after another error or a cancellation before the block, all of them
        serve ``serving_version`` again. Raises ``NoEngineError`` if all die and none is expected.
        """
        asked = self.clock()
        try:
            with self.trace.span("load", track="publish", version=update.version) as shown:
                acknowledge = await self._load(engines, update, before, serving_version)
                shown["acknowledge_s"] = acknowledge
            yield EngineUpdateTimes(acknowledge=acknowledge, load=self.clock() - asked - acknowledge)
            await self._rearrange(engines)
        finally:
            await self.resume(engines)
        self._require(engines, "resume")

    async def everywhere(self, what: str, call: EngineCall, engines: Engines) -> dict[str, Any]:
        """Call all engines at once and return the answers by name. Engines that die are closed and removed from ``engines``.

        Raises ``NoEngineError`` if no engine survives and none is expected.
        """
        answers = await self._on_each(what, call, engines)
        self._require(engines, what)
        return answers

    async def pause(self, engines: Engines) -> None:
        """Pause all engines; on return each has acknowledged. Engines that die are removed from the list."""
        await self._on_each("pause", lambda engine: engine.pause(self.pause_mode), engines)

    async def resume(self, engines: Engines) -> None:
        """Resume all engines, a second time if a cancellation interrupts the first: others than this run may use them."""
        was_cancelled = is_being_cancelled()
        try:
            await self._on_each("resume", lambda engine: engine.resume(), engines)
        except asyncio.CancelledError:
            if not was_cancelled:
                await self._on_each("resume", lambda engine: engine.resume(), engines)
            raise

    async def remove_dead(self, engine: InferenceEngine, error: EngineDeadError) -> None:
        """Drop a dead engine, and close it so that it serves no other client either."""
        self.client.drop_engine(engine, error)
        await engine.close()

    async def _load(
        self, engines: Engines, update: WeightUpdate, before: WeightUpdate | None, serving_version: int | None
    ) -> float:
        """Each engine pauses and loads at its own pace. Returns the seconds until the first has paused.

        If there is nothing to roll back to, all pause before any loads: until then a cancellation costs no engine.
        """
        asked = self.clock()
        refusals: dict[str, PublishError] = {}
        broken: set[str] = set()
        paused_at: list[float] = []

        async def pause(engine: InferenceEngine) -> None:
            await engine.pause(self.pause_mode)
            paused_at.append(self.clock())

        async def load(engine: InferenceEngine) -> None:
            began = self.clock()
            try:
                with self.trace.span("load", track=f"engines/{engine.name}", version=update.version) as shown:
                    shown["acknowledge_s"] = await engine.switch_weights(update, self.pause_mode)
                    paused_at.append(began + shown["acknowledge_s"])
            except PublishError as error:
                refusals[engine.name] = error
            except EngineDeadError:
                raise
            except Exception:
                broken.add(engine.name)
                raise

        try:
            if before is None and serving_version is not None:
                await self.everywhere("pause", pause, engines)
            await self.everywhere("load", load, engines)
            if refusals:
                name, error = next(iter(refusals.items()))
                raise PublishError(
                    f"{name} refused version {update.version} ({error}); {what_serves(serving_version)}"
                ) from error
        except BaseException:
            if serving_version is not None:
                await self._roll_back(engines, before, serving_version, broken)
            raise
        return min(paused_at, default=asked) - asked

    async def _rearrange(self, engines: Engines) -> None:
        """Move requests to the engines where they belong: their keys and values are computed anew in any case. An engine that dies
        stays in the list."""
        leaving = self.client.pool.rearrange()
        at_once = max(1, _MAX_EVICTED_AT_ONCE // max(1, len(engines)))

        async def evict(engine: InferenceEngine) -> None:
            request_ids = leaving[engine.name]
            for begin in range(0, len(request_ids), at_once):
                await engine.evict(request_ids[begin : begin + at_once])

        await self._on_each("evict", evict, [engine for engine in engines if engine.name in leaving])

    async def _roll_back(
        self, engines: Engines, before: WeightUpdate | None, version: int, broken: Collection[str]
    ) -> None:
        """Load ``before`` again in every engine that may hold another version than ``version``; one that cannot is closed."""

        async def load(engine: InferenceEngine) -> None:
            await engine.pause(self.pause_mode)  # it waits for a load that continued when its caller was cancelled
            if engine.name not in broken and await engine.version() == version:
                return
            if before is None:
                raise EngineDeadError(
                    f"{engine.name} was closed: the weights it should go back to are not kept (weight_sync.double_buffer=false)"
                )
            try:
                await engine.load_weights(before)
            except Exception as error:
                raise EngineDeadError(f"{engine.name} was closed: it cannot go back to {before.version}") from error

        await self._on_each("roll back", load, engines)

    async def _on_each(self, what: str, call: EngineCall, engines: Engines) -> dict[str, Any]:
        """Call all engines at once; dead ones are removed from ``engines``. While being cancelled, wait no longer than a grace period."""
        answers: dict[str, Any] = {}
        timeout_s = GRACE_S if is_being_cancelled() else None

        async def one(engine: InferenceEngine) -> None:
            try:
                answers[engine.name] = await _answer(engine, what, call, timeout_s)
            except EngineDeadError as error:
                engines.remove(engine)
                await self.remove_dead(engine, error)

        await run_together({f"{what}-{engine.name}": one(engine) for engine in tuple(engines)})
        return answers

    def _require(self, engines: Collection[InferenceEngine], what: str) -> None:
        if not engines and not self.client.pool.is_expecting:
            reason = f"no inference engine survived '{what}'; see the run's log for the first failure"
            raise NoEngineError(self.client.pool.unavailable_reason or reason)


async def _answer(engine: InferenceEngine, what: str, call: EngineCall, timeout_s: float | None) -> Any:
    """The engine's answer. Raises ``EngineDeadError`` if it does not come in time."""
    if timeout_s is None:
        return await call(engine)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await call(engine)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EngineDeadError(f"{engine.name} kept the end of a publish waiting: no answer to '{what}'") from error


def what_serves(version: int | None) -> str:
    """What engines serve after a failed publish, as text for its error."""
    return "the run cannot begin" if version is None else f"every engine still serves version {version}"
