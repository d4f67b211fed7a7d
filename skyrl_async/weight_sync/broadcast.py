"""How a version reaches engines other than by its file: broadcast to engines that cannot map it, or shared on devices.

    deliver ──> a group (the one before, where its members are the same) ──┬── rank 0 sends ───┬──> every engine holds the file
                       └ formed anew after any failure                     └── engines receive ┘ └ some died: again, with the others
                                                                               beside generation └ nobody died: PublishError

Neither pauses or loads anything: an engine that has received an update still samples with the weights it had.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
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
"""Called with an update; yields the update to load, valid while the block lasts."""
_GRACE_S = 5.0
"""How much later than the group's timeout a receiver's own failure may arrive."""
OnDeath = Callable[[InferenceEngine, EngineDeadError], Awaitable[None]]
"""Called with an engine that died, and the reason."""


@runtime_checkable
class ReceivingEngine(InferenceEngine, Protocol):
    """An ``InferenceEngine`` that can take part in a broadcast. Either method may raise ``EngineDeadError``."""

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """Prepare to receive in a group, without waiting for its other members."""

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        """Receive the update's file, and drop every file received before that is not in ``keep``.

        Raises ``PublishError`` if the broadcast breaks off.
        """


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What one attempt came to. Without deaths and without a failure every receiver holds the file."""

    was_used: bool
    """Whether the group is an older one, which may have broken since, such as by a restart of rank 0."""
    deaths: dict[str, EngineDeadError] = field(default_factory=dict)
    failures: list[SkyRLAsyncError] = field(default_factory=list)
    """Failures other than deaths, in the order in which they came."""


@dataclass(kw_only=True, eq=False)
class WeightBroadcast:
    """Sends a file from the policy's rank 0 to every engine that cannot map it, at once."""

    policy: SendingPolicy
    """Its rank 0 sends."""
    backend: str
    """``gloo`` or ``nccl``."""
    must_receive: Callable[[InferenceEngine], bool]
    """Whether an engine cannot map the file."""
    bucket_bytes: int
    """Most bytes sent at a time."""
    timeout_s: float
    """Longest wait for a member, when the group forms and in each bucket."""
    _members: tuple[ReceivingEngine, ...] = field(default=(), init=False)
    """Engines of the open group, by rank; empty if no group is usable."""
    _held: WeakKeyDictionary[InferenceEngine, set[str]] = field(default_factory=WeakKeyDictionary, init=False)
    """Engine -> paths of the files it has received and kept. Not by name: another engine may get that."""

    async def deliver(
        self,
        engines: list[InferenceEngine],
        update: WeightUpdate,
        on_death: OnDeath,
        *,
        keep: WeightUpdate | None = None,
    ) -> None:
        """Send ``update`` to each of ``engines`` that must receive it, again to the others if one dies.

        Dead engines are removed from the list and passed to ``on_death``. Of the files received before, engines keep only ``keep``.
        Raises ``PublishError`` if the broadcast breaks off in a new group although no engine died.
        """
        kept = set() if keep is None else {keep.path}
        while receivers := tuple(
            engine
            for engine in engines
            if isinstance(engine, ReceivingEngine) and self.must_receive(engine)
            if update.path not in self._held.get(engine, ())
        ):
            outcome = await self._broadcast(receivers, update, kept)
            for engine in [engine for engine in receivers if engine.name in outcome.deaths]:
                engines.remove(engine)
                await on_death(engine, outcome.deaths[engine.name])
            if outcome.failures and not outcome.deaths and not outcome.was_used:
                raise PublishError(
                    f"version {update.version} did not get to every engine: {outcome.failures[0]} (in each bucket a member is waited for, "
                    f"for weight_sync.transfer_timeout_s={self.timeout_s:g})"
                ) from outcome.failures[0]

    async def _broadcast(
        self, receivers: tuple[ReceivingEngine, ...], update: WeightUpdate, kept: Collection[str]
    ) -> _Outcome:
        outcome, self._members = _Outcome(was_used=receivers == self._members), ()
        if not outcome.was_used:
            await self._open_group(receivers, outcome)
        if outcome.deaths:
            return outcome
        async with task_group() as tasks:
            receiving = {
                tasks.create_task(self._receive(engine, update, kept, outcome), name=f"receive-{engine.name}"): engine
                for engine in receivers
            }
            try:
                await self.policy.broadcast_weights(Path(update.path), self.bucket_bytes)
            except WeightsTransferError as error:
                outcome.failures.append(error)
            wait_s = self.timeout_s + _GRACE_S
            _, silent = await asyncio.wait(receiving, timeout=wait_s)
            for task in silent:
                task.cancel()
                name = receiving[task].name
                reason = f"{name} has not received version {update.version} {wait_s:g} s after it was sent"
                outcome.deaths[name] = EngineDeadError(reason)
        if not outcome.deaths and not outcome.failures:
            self._members = receivers
        return outcome

    async def _open_group(self, receivers: Sequence[ReceivingEngine], outcome: _Outcome) -> None:
        """Tell every engine where the group forms."""
        place = await self.policy.open_transfer(len(receivers), self.backend, self.timeout_s)

        async def connect(rank: int, engine: ReceivingEngine) -> None:
            try:
                await engine.connect_transfer(asdict(place) | {"rank": rank})
            except EngineDeadError as error:
                outcome.deaths[engine.name] = error

        await run_together(
            {f"connect-{engine.name}": connect(rank, engine) for rank, engine in enumerate(receivers, 1)}
        )

    async def _receive(
        self, engine: ReceivingEngine, update: WeightUpdate, kept: Collection[str], outcome: _Outcome
    ) -> None:
        before = self._held.pop(engine, set())
        try:
            await engine.receive_weights(update, kept)
            self._held[engine] = {update.path} | before & set(kept)
        except EngineDeadError as error:
            outcome.deaths[engine.name] = error
        except PublishError as error:
            self._held[engine] = before & set(kept)
            outcome.failures.append(error)


from_files_alone: ShareWeights = nullcontext
"""Shares nothing: engines load the file."""


def from_devices(policy: SendingPolicy) -> ShareWeights:
    """Let engines load from the policy workers' copies on devices that both use, for one load. Other engines load the file."""

    @asynccontextmanager
    async def share(update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        try:
            shared = await policy.share_weights(update.version)
            yield replace(update, shared=shared)
        finally:
            await policy.unshare_weights()

    return share
