"""Brings a published file to engines that cannot map it, by a broadcast from the policy's rank 0 to all of them at once.

    deliver ──> a group (the one before, where its members are the same) ──┬── rank 0 sends ───┬──> every engine holds the file
                       └ formed anew after any failure                     └── engines receive ┘ └ some died: again, with the others
                                                                               beside generation └ nobody died: PublishError

Flows in: engines, and an update whose file rank 0 can read. Flows out: engines that hold it, and those that died. Pauses nothing and
loads nothing: an engine that holds an update goes on with the weights it has.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from skyrl_async.errors import EngineDeadError, PublishError, SkyRLAsyncError, WeightsTransferError
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.runtime.tasks import run_together, task_group
from skyrl_async.training.protocol import SendingPolicy
from skyrl_async.types import WeightUpdate

ShareWeights = Callable[[WeightUpdate], AbstractAsyncContextManager[WeightUpdate]]
"""Takes an update; in its block the one that comes out can be loaded."""
_GRACE_S = 5.0
"""A receiver that fails by itself does so within the group's timeout; its answer comes a moment later."""
Lose = Callable[[InferenceEngine, EngineDeadError], Awaitable[None]]
"""Takes an engine that died, and why."""


@runtime_checkable
class ReceivingEngine(InferenceEngine, Protocol):
    """An ``InferenceEngine`` that can take part in a broadcast. Either method may raise ``EngineDeadError``."""

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """Be ready to receive in a group; returns without waiting for its other members."""
        ...

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        """Receive the update's file, and let go of what was received before but for the files in ``keep``.

        Raises ``PublishError`` where the broadcast broke off.
        """
        ...


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """Of one attempt; no death and no failure mean that every receiver holds the file."""

    was_open: bool
    """The group had been used before: what broke may have been broken since, such as by a rank 0 that was replaced."""
    deaths: dict[str, EngineDeadError] = field(default_factory=dict)
    failure: SkyRLAsyncError | None = None
    """The first that was no death."""

    def note(self, failure: SkyRLAsyncError) -> None:
        self.failure = self.failure or failure


class WeightBroadcast:
    """See the module.

    Args:
        policy: its rank 0 sends.
        backend: ``gloo`` or ``nccl``.
        must_receive: of an engine, whether it cannot map the file by itself.
        bucket_bytes: most bytes that are sent at a time.
        timeout_s: longest wait for a member, at the meeting and in each bucket.
    """

    def __init__(
        self,
        policy: SendingPolicy,
        *,
        backend: str,
        must_receive: Callable[[InferenceEngine], bool],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._policy = policy
        self._backend = backend
        self._must_receive = must_receive
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._members: tuple[ReceivingEngine, ...] = ()
        """Engines of the open group, by rank; none where it is of no use any more."""
        self._held: WeakKeyDictionary[InferenceEngine, set[str]] = WeakKeyDictionary()
        """Paths of the files that an engine has received and kept. By the engine itself: its name may go to another one."""

    async def deliver(
        self, engines: list[InferenceEngine], update: WeightUpdate, lose: Lose, *, keep: WeightUpdate | None = None
    ) -> None:
        """Have every one of ``engines`` hold ``update`` that must receive it; those that die over it leave the list, and ``lose`` is told.

        Of what they received before they hold ``keep`` alone from then on. Raises ``PublishError`` where the broadcast broke off in a new
        group although no engine died.
        """
        path, kept = _path_of(update), {_path_of(keep)} if keep is not None else set()
        while receivers := [
            engine
            for engine in engines
            if isinstance(engine, ReceivingEngine) and self._must_receive(engine)
            if path not in self._held.get(engine, ())
        ]:
            outcome = await self._broadcast(receivers, update, kept)
            for engine in [engine for engine in receivers if engine.name in outcome.deaths]:
                engines.remove(engine)
                await lose(engine, outcome.deaths[engine.name])
            if outcome.failure is not None and not outcome.deaths and not outcome.was_open:
                raise PublishError(
                    f"version {update.version} did not get to every engine: {outcome.failure} (in each bucket a member is waited for, for "
                    f"weight_sync.transfer_timeout_s={self._timeout_s:g})"
                ) from outcome.failure

    async def _broadcast(
        self, receivers: Sequence[ReceivingEngine], update: WeightUpdate, kept: Collection[str]
    ) -> _Outcome:
        members = tuple(receivers)
        outcome, self._members = _Outcome(was_open=members == self._members), ()
        if not outcome.was_open:
            await self._open_group(receivers, outcome)
        if outcome.deaths:
            return outcome
        async with task_group() as tasks:
            receiving = {
                tasks.create_task(self._receive(engine, update, kept, outcome), name=f"receive-{engine.name}"): engine
                for engine in receivers
            }
            await self._send(update, outcome)
            patience_s = self._timeout_s + _GRACE_S
            _, silent = await asyncio.wait(receiving, timeout=patience_s)
            for task in silent:
                task.cancel()
                name = receiving[task].name
                reason = f"{name} has not received version {update.version} {patience_s:g} s after it was sent"
                outcome.deaths[name] = EngineDeadError(reason)
        if not outcome.deaths and outcome.failure is None:
            self._members = members
        return outcome

    async def _open_group(self, receivers: Sequence[ReceivingEngine], outcome: _Outcome) -> None:
        """Tell everybody where to meet."""
        place = await self._policy.open_transfer(len(receivers), self._backend, self._timeout_s)

        async def connect(rank: int, engine: ReceivingEngine) -> None:
            try:
                await engine.connect_transfer(asdict(place) | {"rank": rank})
            except EngineDeadError as error:
                outcome.deaths[engine.name] = error

        await run_together(
            {f"connect-{engine.name}": connect(rank, engine) for rank, engine in enumerate(receivers, 1)}
        )

    async def _send(self, update: WeightUpdate, outcome: _Outcome) -> None:
        try:
            await self._policy.broadcast_weights(Path(_path_of(update)), self._bucket_bytes)
        except WeightsTransferError as error:
            outcome.note(error)

    async def _receive(
        self, engine: ReceivingEngine, update: WeightUpdate, kept: Collection[str], outcome: _Outcome
    ) -> None:
        before = self._held.pop(engine, set())
        try:
            await engine.receive_weights(update, kept)
            self._held[engine] = {_path_of(update)} | before & set(kept)
        except EngineDeadError as error:
            outcome.deaths[engine.name] = error
        except PublishError as error:
            self._held[engine] = before & set(kept)
            outcome.note(error)


def _path_of(update: WeightUpdate) -> str:
    (chunk,) = update.chunks
    return str(chunk["path"])


@asynccontextmanager
async def files_alone(update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
    """Nothing is shared."""
    yield update


def sharing(policy: SendingPolicy) -> ShareWeights:
    """Engines that find none of the handles to be of their device load the file."""

    @asynccontextmanager
    async def share(update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        try:
            shared = await policy.share_weights(update.version)
            (chunk,) = update.chunks
            yield replace(update, chunks=(chunk | {"shared": shared},)) if shared else update
        finally:
            await policy.unshare_weights()

    return share
