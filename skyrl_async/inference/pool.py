"""The engines that a client uses, while they come and go, and the calls that are open in each.

    add ──admission──> slot ──calls──> drop (dead: calls are cut off) · remove (drained: calls come back with their tokens)

Each call gets an engine's slot, as soon as there is an engine. The pool does not know what is generated, nor how weights reach an engine:
the publisher of weights sets ``admission``, and the fleet that restarts engines sets ``listener``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from typing import Any, Protocol

from skyrl_async.errors import EngineDeadError, InferenceError, NoEngineError, StateError
from skyrl_async.inference.placement import Placement, PlacementSettings
from skyrl_async.inference.protocol import CutOff, EngineLoad, InferenceEngine
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.tasks import Changes
from skyrl_async.types import EngineRequest

Admission = Callable[[InferenceEngine], AbstractAsyncContextManager[None]]
"""Makes an engine serve the version the others serve. It takes requests from the block's end on; no publish comes in between."""

_NO_ENGINE = "no engine"
_NONE_LEFT = "no inference engine is left: every one has died; see the run's log for the first failure"


class EngineListener(Protocol):
    """Is told when engines join and leave a pool."""

    def engine_joined(self, engine: InferenceEngine) -> None:
        """The engine takes requests from now on."""

    async def engine_leaving(self, name: str) -> None:
        """The engine takes no more requests; those that it has are evicted once this returns."""

    def engine_died(self, name: str, reason: str) -> None:
        """The engine takes no more requests; those that it had continue elsewhere."""


class EngineSlot:
    """One engine and the calls that one client has open in it."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.num_calls = 0
        self.changes = Changes()
        """Notified when ``num_calls`` changes."""
        self.cut_off = CutOff()
        """Ends what the calls await."""
        self.num_tokens = 0
        """Sampled in calls that have ended, of this client and of those that ``count_call`` knows."""
        self.call_seconds = 0.0
        """Seconds of these calls, added up."""
        self.load = self.load_before = EngineLoad()
        """What the engine said last, and before that."""


class EnginePool:
    """The engines of one client.

    Args:
        engines: the first engines.
        wait_s: longest wait of a request for an engine, in seconds; None: until one joins or ``give_up`` is called.
        placement: weights of old requests; None loads engines alike and moves no request.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        wait_s: float | None = 0.0,
        placement: PlacementSettings | None = None,
    ) -> None:
        self._slots = {engine.name: EngineSlot(engine) for engine in engines}
        """The engines that take requests, in order of preference between equals."""
        self._leaving: dict[str, EngineSlot] = {}
        """Removed engines with open calls."""
        self._placement = Placement(placement)
        self._wait_s = wait_s
        self._changes = Changes()
        self.unavailable_reason: str | None = None
        """Why nobody should wait for an engine; None while one may come."""
        self.policy_version = 0
        """The newest version that a call has got tokens of."""
        self.admission: Admission = _admit_at_once
        self.listener: EngineListener | None = None
        self.on_load: Callable[[str, EngineLoad, EngineLoad], None] = lambda engine, load, of_all: None
        """Called after each heartbeat with the engine's name, what it said, and the sum of what all said last; of ``cache_use`` it is the
        mean."""
        self.speeds: dict[str, float] = {}
        """Engine -> tokens sampled per second of a call, as ``measure_speeds`` found; those without an ended call are left out."""
        self.deadlines = Deadlines()
        """Stand still during an outage: no engine is left, and one is waited for."""

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """The engines that take requests."""
        return tuple(slot.engine for slot in self._slots.values())

    @property
    def sampling_engines(self) -> tuple[InferenceEngine, ...]:
        """The engines that take requests, and removed ones that still have calls."""
        return self.engines + tuple(slot.engine for slot in self._leaving.values())

    @property
    def is_expecting(self) -> bool:
        """Whether requests wait for an engine if there is none."""
        return self._wait_s != 0 and self.unavailable_reason is None

    @property
    def is_busy(self) -> bool:
        """Whether a call of this client's is open in an engine that takes requests."""
        return any(slot.num_calls for slot in self._slots.values())

    def begin_call(self, generation_id: str, request: EngineRequest) -> EngineSlot:
        """The slot for one call of a generation, right after ``wait_for_engine`` has returned; see ``Placement.choose``."""
        slot = self._slots[self._placement.choose(self._slots, generation_id, request)]
        slot.num_calls += 1
        return slot

    def note_sampled(self, version: int) -> None:
        """A call has got tokens, the newest sampled under ``version``. Engines change versions together."""
        if version > self.policy_version:
            self.policy_version = version
            self._placement.weights_updated()

    def end_call(self, slot: EngineSlot, generation_id: str, num_tokens: int, seconds: float) -> None:
        """The generation's call has ended, with so many tokens, after so many seconds."""
        slot.num_calls -= 1
        slot.num_tokens += num_tokens
        slot.call_seconds += seconds
        slot.changes.notify()
        self._placement.end(generation_id)
        self._forget(slot.engine.name)

    def engine_of(self, generation_id: str) -> str | None:
        """Name of the engine in which the generation has an open call; None while it has none."""
        return self._placement.engine_of(generation_id)

    def rearrange(self) -> Mapping[str, Sequence[str]]:
        """Engine -> its requests to evict, which then continue in another. Called at every weight update, while engines are paused;
        see ``Placement.rearrange``."""
        self._placement.weights_updated()
        return self._placement.rearrange(tuple(self._slots))

    async def wait_for_engine(self) -> None:
        """Return once there is an engine. Raises ``NoEngineError`` if none is expected, or none comes in time."""
        if self._slots:
            return
        try:
            async with asyncio.timeout(self._wait_s) as deadline:
                await self._changes.until(lambda: bool(self._slots) or not self.is_expecting)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise NoEngineError(f"no inference engine has been there for {self._wait_s:g} s; try again") from error
        if not self._slots:
            raise NoEngineError(self.unavailable_reason or _NONE_LEFT)

    def give_up(self, reason: str) -> None:
        """Fail every wait for an engine, now and until one is added."""
        self.unavailable_reason = reason
        self._notify()

    async def add(self, engine: InferenceEngine) -> None:
        """Send requests to one more engine, once it serves the version the others serve.

        Raises ``StateError`` for a name in use, and what ``admission`` raises.
        """
        async with self.admission(engine):
            self._add(engine)
        if self.listener is not None:
            self.listener.engine_joined(engine)

    async def remove(self, name: str, *, timeout_s: float) -> InferenceEngine:
        """Send no more requests to an engine, continue its requests elsewhere with their tokens, and return it.

        Requests that cannot be continued run to their end there; after ``timeout_s`` they begin anew in another engine.
        Raises ``InferenceError`` for an unknown name, and for the last engine if no other is expected.
        """
        if name not in self._slots:
            raise InferenceError(f"there is no engine {name!r} to remove; there are {', '.join(self._slots) or 'none'}")
        if len(self._slots) == 1 and not self.is_expecting:
            raise InferenceError(f"{name} is the only engine; add another one before it is removed")
        slot = self._take_out(name)
        try:
            async with asyncio.timeout(timeout_s):
                if self.listener is not None:
                    await self.listener.engine_leaving(name)
                await slot.engine.evict()
                await slot.changes.until(lambda: not slot.num_calls)
        except (TimeoutError, EngineDeadError):
            slot.cut_off.cut(f"{name} was removed before all of its requests had left it")
        return slot.engine

    def drop(self, engine: InferenceEngine, reason: str) -> None:
        """Send nothing more to a dead engine, and cut off its calls. Idempotent."""
        if engine not in self.engines:
            return
        self._take_out(engine.name).cut_off.cut(reason)
        if self.listener is not None:
            self.listener.engine_died(engine.name, reason)

    def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Use exactly these engines, which somebody else supervises. Open calls in other engines run to their end."""
        named = {engine.name: engine for engine in engines}
        for name in self._slots.keys() - named:
            self._take_out(name)
        for name, engine in named.items():
            if name not in self._slots and name not in self._leaving:
                self._add(engine)

    def statistics(self) -> dict[str, float]:
        """Engines, and requests running: in all, and on the emptiest and the fullest engine."""
        loads = [slot.num_calls for slot in self._slots.values()] or [0]
        return {
            "engines": float(len(self._slots)),
            "running_requests": float(sum(loads)),
            "min_running_requests": float(min(loads)),
            "max_running_requests": float(max(loads)),
        }

    def report_load(self, name: str, load: EngineLoad) -> None:
        """An engine has answered a heartbeat."""
        if (slot := self._slots.get(name)) is not None:
            slot.load_before, slot.load = slot.load, load
            self.on_load(name, load, _total([slot.load for slot in self._slots.values()]))

    def load_statistics(self) -> dict[str, float]:
        """Figures of the engines' caches, by metric name: over the time between the last two heartbeats, and for preemptions in all.

        The hit fraction is missing where no prompt came meanwhile, and iterations of a kind that there was not.
        """
        slots = self._slots.values()
        load, before = _total([slot.load for slot in slots]), _total([slot.load_before for slot in slots])
        found = {
            "engines/cache_use": load.cache_use,
            "engines/preemptions": float(load.num_preemptions),
            "engines/waiting_requests": float(load.num_waiting),
        }
        if num_prompt_tokens := load.num_prompt_tokens - before.num_prompt_tokens:
            found["engines/prefix_hit_frac"] = (load.num_cached_tokens - before.num_cached_tokens) / num_prompt_tokens
        for name, change in (("decode", load.decode - before.decode), ("prefill", load.prefill - before.prefill)):
            if change.num:
                found[f"engines/{name}_iteration_seconds"] = change.seconds / change.num
                found[f"engines/{name}_iteration_requests"] = change.num_requests / change.num
            if change.num_prefills:
                found["engines/prefill_iteration_prompts"] = change.num_prefills / change.num
                found["engines/prefill_iteration_tokens"] = change.num_prefill_tokens / change.num
        return found

    def count_call(self, name: str, num_tokens: int, seconds: float) -> None:
        """Count what another client of these engines has called, such as one in a process of the endpoint."""
        if (slot := self._slots.get(name)) is not None:
            slot.num_tokens += num_tokens
            slot.call_seconds += seconds

    def measure_speeds(self) -> None:
        """Set ``speeds`` to those since the last time."""
        self.speeds = {}
        for name, slot in self._slots.items():
            if slot.num_tokens and slot.call_seconds:
                self.speeds[name] = slot.num_tokens / slot.call_seconds
                slot.num_tokens, slot.call_seconds = 0, 0.0

    def _add(self, engine: InferenceEngine) -> None:
        name = engine.name
        if name in self._slots or name in self._leaving:
            raise StateError(f"the name {name} is taken, by an engine or by requests that have yet to leave it")
        self._slots[name] = EngineSlot(engine)
        self._placement.engines_changed()
        self.unavailable_reason = None
        self._notify()

    def _take_out(self, name: str) -> EngineSlot:
        """Send nothing more to an engine; its requests may end later."""
        slot = self._leaving[name] = self._slots.pop(name)
        self._placement.engines_changed()
        self._forget(name)
        self._notify()
        return slot

    def _notify(self) -> None:
        """Wake whoever waits for an engine, and begin or end an outage."""
        self._changes.notify()
        outages = self.deadlines.outages
        if self._slots:
            outages.end(_NO_ENGINE)
        elif self.is_expecting:
            outages.begin(_NO_ENGINE)
        else:
            outages.give_up(_NO_ENGINE, self.unavailable_reason or _NONE_LEFT)

    def _forget(self, name: str) -> None:
        """Forget a removed engine once its last call has ended."""
        if name in self._leaving and not self._leaving[name].num_calls:
            del self._leaving[name]
            self._placement.forget(name)


def _total(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The sum of each count, and the mean of ``cache_use``."""
    sums: dict[str, Any] = {
        each.name: sum((getattr(load, each.name) for load in loads), getattr(EngineLoad(), each.name))
        for each in fields(EngineLoad)
    }
    return EngineLoad(**sums | {"cache_use": sums["cache_use"] / max(1, len(loads))})


@asynccontextmanager
async def _admit_at_once(engine: InferenceEngine) -> AsyncIterator[None]:
    yield
