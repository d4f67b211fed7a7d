"""Publishes a policy version to every engine: gather, send and load. Only loading pauses engines. All or nothing.

    policy ──gather──> staging ──send──> buckets ──load: (stage) pause, load──> every engine acknowledged ──> resume
       training waits     └ training goes on    └ an engine that joins later ──checksum──> load ──checksum──> takes requests

Every engine acknowledges its pause; nothing sleeps instead (contract 5). Requests, groups and the trainer are unknown here. Versions come
one after another: ``trainer.step_gate`` says when the policy may change, and none is gathered before the one before is sent.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from skyrl_async.columns import TokenIds
from skyrl_async.errors import ConfigError, EngineDeadError, PublishError, WeightsLostError, WeightsWriteError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.daemon_threads import NumberedDirectories
from skyrl_async.training.protocol import Policy
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.broadcast import ShareWeights, WeightBroadcast, from_files_alone
from skyrl_async.weight_sync.engine_time_sharing import HoldEngines
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater, what_serves
from skyrl_async.weight_sync.verifier import WeightVerifier

logger = logging.getLogger(__name__)

T = TypeVar("T")

Follower = Callable[[WeightUpdate], Awaitable[None]]
"""Loads a version that engines serve."""

_RETRY_PAUSE_S = 1.0
"""Seconds before another try, for what is full or refuses."""
_QUICK_CHECKSUM_BYTES = 16 << 20
"""Size of weights whose checksum is computed after every publish: 2 MB take 5 to 15 ms of a core, 60 MB 160."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTimes:
    """Seconds of one publish."""

    version: int
    """Policy version that engines now serve."""
    gather: float
    """Copying the weights to staging memory: overlaps generation, not training."""
    send: float
    """Moving them to where engines load them: overlaps generation and training."""
    stage: float
    """Engines preparing to load, beside generation."""
    acknowledge: float
    """From the pause request until the first engine has finished its current step, whose tokens count."""
    pause: float
    """From then until the last engine has resumed: the longest time for which an engine may have sampled nothing."""
    load: float
    """The part of the pause until the last engine has loaded."""
    num_bytes: int
    """Size of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far the engines lag behind the trainer."""

    steps: int = 0
    """Optimizer steps completed and not yet served."""
    seconds: float = 0.0
    """Time since the first of those steps was completed; 0 if there is none."""


class LagMonitor:
    """Computes the lag from what the publisher reports. No I/O and no clock: callers say when things happened."""

    def __init__(self) -> None:
        self._trained_at: dict[int, float] = {}
        """Versions that are not served yet."""
        self._served: int | None = None
        self._largest = Lag()
        """Largest since the last call of ``values``."""

    def trained(self, version: int, now: float) -> None:
        """The trainer holds ``version`` from ``now`` on. Later calls for the same version change nothing."""
        self._trained_at.setdefault(version, now)

    def serves(self, version: int, now: float) -> None:
        """Every engine serves ``version`` from ``now`` on."""
        self._record(now)
        self._served = version
        self._trained_at = {trained: at for trained, at in self._trained_at.items() if trained > version}

    def lag(self, now: float) -> Lag:
        """The lag now; none before the first version is served."""
        missing = {} if self._served is None else {v: at for v, at in self._trained_at.items() if v > self._served}
        if self._served is None or not missing:
            return Lag()
        return Lag(steps=max(missing) - self._served, seconds=now - min(missing.values()))

    def values(self, now: float) -> dict[str, float]:
        """The largest lag since the last call, as metrics."""
        self._record(now)
        largest, self._largest = self._largest, self.lag(now)
        return {"weight_sync/lag_steps_max": float(largest.steps), "timing/weight_sync_lag_max": largest.seconds}

    def _record(self, now: float) -> None:
        lag, largest = self.lag(now), self._largest
        self._largest = Lag(steps=max(lag.steps, largest.steps), seconds=max(lag.seconds, largest.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentVersion:
    """A version whose files are complete."""

    update: WeightUpdate
    directory: Path
    gather_seconds: float
    send_seconds: float


@dataclass(kw_only=True, eq=False)
class WeightPublisher:
    """Moves every engine from one policy version to the next.

    ``publish`` does all of it. A trainer that continues meanwhile awaits ``gather``, and runs ``send`` and then ``load`` in a task beside
    its next step.
    """

    client: InferenceEngineClient
    """Knows which engines are alive."""
    policy: Policy
    """Holds the weights."""
    directory: Path
    """Where buckets are written, in shared memory; made if missing, emptied by ``close``."""
    bucket_bytes: int
    """Most bytes that are sent at a time."""
    load_bucket_bytes: int = 512 << 20
    """Most bytes that an engine loads at a time, see ``weight_sync.load_bucket_mb``."""
    double_buffer: bool = True
    """Keep the served version, for engines that join, while the next one is sent and loaded, and prepare that one in engines' memory."""
    pause_mode: PauseMode
    """What happens to requests in flight."""
    trace: Trace
    """Gets one span per phase."""
    probe_prompt_token_ids: Sequence[int] | TokenIds = ()
    """Prompt after which the engines' log-probs are compared with the trainer's; empty: never."""
    max_logprob_gap: float = 0.0
    """Nats per token past which that comparison fails."""
    verifies_checksums: bool | None = False
    """Ask engines for their checksums after every publish instead of only the first; engines that join later are compared with them. None:
    only if the weights are so small that it takes next to no time."""
    max_retries: int = 0
    """How often a failed sending or loading is tried again before it is an error."""
    hold_engines: HoldEngines = nullcontext
    """In its block engines have the devices that they share."""
    broadcast: WeightBroadcast | None = None
    """Sends versions to engines that cannot map their files; None: all can."""
    share: ShareWeights = from_files_alone
    """Lets engines load from the policy workers' devices; the default uses files only."""
    followers: Sequence[Follower] = ()
    """Also load each version after the engines serve it, such as workers that recompute log-probs."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for the times reported."""

    _is_capacity_checked: bool = field(default=False, init=False)
    _gather_seconds: float = field(default=0.0, init=False)
    _sent: _SentVersion | None = field(default=None, init=False)
    """Waits to be loaded, or is being loaded."""
    _served: _SentVersion | None = field(default=None, init=False)
    """What engines serve, while its files are there."""
    _served_version: int | None = field(default=None, init=False)
    _engines_change: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)
    """Held while the version of an engine changes; notified when another one is served."""
    _lag: LagMonitor = field(default_factory=LagMonitor, init=False)

    def __post_init__(self) -> None:
        self._files = NumberedDirectories(self.directory, "weight-files")
        self._updater = EngineWeightUpdater(
            client=self.client, pause_mode=self.pause_mode, trace=self.trace, clock=self.clock
        )
        self.verifier = WeightVerifier(
            client=self.client,
            policy=self.policy,
            updater=self._updater,
            trace=self.trace,
            probe_prompt_token_ids=self.probe_prompt_token_ids,
            max_logprob_gap=self.max_logprob_gap,
            hold_engines=self.hold_engines,
        )
        """Compares engines with each other and with the policy."""
        self.client.pool.admission = self.admission

    @property
    def serving(self) -> WeightUpdate | None:
        """The update that every engine serves, while its files are there; without a double buffer only until the next one is sent."""
        return None if self._served is None else self._served.update

    async def publish(self, version: int) -> PublishTimes:
        """Make every engine serve ``version``; on return all, and at least one, have acknowledged it. Raises what the phases raise."""
        await self.gather(version)
        times = await self.load() if await self.send(version) else None
        if times is None:
            raise PublishError(f"version {version} was not published: {what_serves(self._served_version)}")
        return times

    def trained(self, version: int) -> None:
        """The policy holds ``version`` from now on, published or not; ``lag_values`` are measured by it."""
        self._lag.trained(version, self.clock())

    async def gather(self, version: int) -> None:
        """Copy the policy's weights to its staging memory; on return they may change. The version before must be sent.

        Raises ``ConfigError`` at the first call if shared memory has no room for the weights.
        """
        started = self.clock()
        self.trained(version)
        with self.trace.span("gather", track="publish", version=version):
            num_bytes = await self.policy.gather_weights(version)
        if not self._is_capacity_checked:
            require_shm_capacity(self.directory, num_bytes, double_buffer=self.double_buffer)
            self._is_capacity_checked = True
        self._gather_seconds = self.clock() - started

    async def send(self, version: int) -> bool:
        """Send the gathered version, which ``load`` then loads. The version before must be loaded; if it is not, it is deleted.

        Without a double buffer this first deletes the buckets of the version served. Returns False if policy workers died with the copy
        after a further step; then a newer one follows. Raises ``PublishError`` if there is no room, after the retries. After any failure
        none of its buckets is left.
        """
        self._drop_sent()
        if not self.double_buffer:
            async with self._engines_change:
                replaced, self._served = self._served, None
            self._delete(replaced)
        started, gather_seconds = self.clock(), self._gather_seconds
        try:
            with self.trace.span("send", track="publish", version=version):
                update, directory = await self._retried(lambda: self._write(version))
        except WeightsLostError as error:
            logger.warning("version %d is not published: %s", version, error)
            return False
        send_seconds = self.clock() - started
        self._sent = _SentVersion(
            update=update, directory=directory, gather_seconds=gather_seconds, send_seconds=send_seconds
        )
        return True

    async def load(self) -> PublishTimes | None:
        """Make every engine serve the version sent; on return all, and at least one, have acknowledged it.

        Returns None if there is none. An engine that dies is closed; if none is left, this waits for one that may come back.
        Raises ``PublishError`` if an engine refuses, after the retries: every engine still serves the version before. Raises
        ``NoEngineError`` if no engine is left and none is expected, and what a follower raises.
        """
        if (sent := self._sent) is None:
            return None
        try:
            times = await self._retried(lambda: self._load(sent))
        finally:
            self._drop_sent()
        await self.client.pool.wait_for_engine()
        if self._is_checksum_due(times.num_bytes):
            await self.verifier.verify_checksums(times.version)
        for follower in self.followers:
            await follower(sent.update)
        return times

    def _is_checksum_due(self, num_bytes: int) -> bool:
        return num_bytes <= _QUICK_CHECKSUM_BYTES if self.verifies_checksums is None else self.verifies_checksums

    @asynccontextmanager
    async def admission(self, engine: InferenceEngine) -> AsyncIterator[None]:
        """Let an engine load and verify the served version; in the block it may begin to serve. See ``pool.Admission``.

        Before the first publish there is nothing to load. Without a double buffer this waits for the version being sent. Engines that share
        devices load while they hold them. After ``PublishError`` or ``EngineDeadError`` the engine must not serve.
        """
        async with self._engines_change:
            await self._engines_change.wait_for(lambda: self._served_version is None or self._served is not None)
            async with self.hold_engines():
                await self._update_joining(engine)
                yield

    async def _update_joining(self, engine: InferenceEngine) -> None:
        if (serving := self.serving) is None:
            return
        if self.broadcast is not None:
            await self.broadcast.deliver([engine], serving, _raise)
        await engine.pause(self.pause_mode)
        await engine.load_weights(replace(serving, is_compared=True))
        await self.verifier.verify_engine(engine, serving)
        await engine.resume()

    def lags(self) -> dict[str, Lag]:
        """Each engine's lag behind the trainer now, by name. All of them serve the same version."""
        return {engine.name: self._lag.lag(self.clock()) for engine in self.client.engines}

    def lag_values(self) -> dict[str, float]:
        """The engines' largest lag behind the trainer since the last call, as metrics."""
        return self._lag.values(self.clock())

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try up to ``max_retries`` times more."""
        for num_remaining in range(self.max_retries, 0, -1):
            try:
                return await attempt()
            except PublishError as error:
                logger.warning("%s; %d more tries", error, num_remaining)
            await asyncio.sleep(_RETRY_PAUSE_S)
        return await attempt()

    async def _load(self, sent: _SentVersion) -> PublishTimes:
        async with self._engines_change:
            try:
                async with self.hold_engines():
                    return await self._update_engines(sent)
            finally:
                self._engines_change.notify_all()

    async def _update_engines(self, sent: _SentVersion) -> PublishTimes:
        engines, update = list(self.client.engines), sent.update
        broadcast_seconds = await self._deliver(engines, update)
        staged = self.clock()
        if self.double_buffer:
            await self._updater.stage(engines, update)
        replaced: _SentVersion | None = None
        try:
            async with self.share(update) as shared:
                begun = self.clock()
                with self.trace.span("switch", track="publish", version=update.version):
                    async with self._updater.loaded(engines, shared, self.serving, self._served_version) as times:
                        replaced, self._served, self._sent = self._served, sent, None
                        self._served_version = self.client.pool.policy_version = update.version
                resumed = self.clock()
            paused = begun + times.acknowledge
            self.trace.past_span("pause", "publish/pause", paused, resumed, version=update.version)
        finally:
            self._delete(replaced)  # not in the pause
        self._lag.serves(update.version, resumed)
        return PublishTimes(
            version=update.version,
            gather=sent.gather_seconds,
            send=sent.send_seconds + broadcast_seconds,
            stage=begun - staged,
            acknowledge=times.acknowledge,
            pause=resumed - paused,
            load=times.load,
            num_bytes=update.num_bytes,
        )

    async def _deliver(self, engines: list[InferenceEngine], update: WeightUpdate) -> float:
        """Broadcast the update to engines that cannot map it; dead ones are removed from the list. Returns the seconds it took."""
        if self.broadcast is None:
            return 0.0
        started = self.clock()
        with self.trace.span("broadcast", track="publish", version=update.version):
            await self.broadcast.deliver(engines, update, self._updater.remove_dead, keep=self.serving)
        return self.clock() - started

    async def _write(self, version: int) -> tuple[WeightUpdate, Path]:
        """Write the buckets to a directory, once old ones are deleted.

        Raises ``PublishError`` if there is no room. After any failure none is left.
        """
        await self._files.deleted()
        directory = self._files.new(f"{version:06d}")
        try:
            update = await self.policy.send_weights(version, directory, self.bucket_bytes)
        except BaseException as error:
            self._files.delete(directory)
            if isinstance(error, WeightsWriteError | OSError):
                raise PublishError(
                    f"version {version} cannot be sent ({error}); {what_serves(self._served_version)}"
                ) from error
            raise
        return replace(update, load_bucket_bytes=self.load_bucket_bytes), directory

    def _drop_sent(self) -> None:
        """Delete the version that was sent and not loaded, if there is one."""
        dropped, self._sent = self._sent, None
        self._delete(dropped)

    def _delete(self, version: _SentVersion | None) -> None:
        if version is not None:
            self._files.delete(version.directory)

    def close(self) -> None:
        """Delete all buckets now, also those that a thread has begun to delete. Idempotent."""
        self._files.close()


def require_shm_capacity(directory: Path, num_bytes: int, *, double_buffer: bool) -> None:
    """Raise ``ConfigError``, with the sizes and what to set, unless the versions held fit into the file system of ``directory``.

    With a double buffer these are two: the version served, which an engine that joins or rolls back loads, and the next one. A run sends no
    version before the one before it is loaded.

    Args:
        directory: where versions are written; it may not exist yet.
        num_bytes: size of one version.
        double_buffer: whether two are held.
    """
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    status = os.statvfs(place)
    num_free = status.f_bavail * status.f_frsize
    num_versions = 1 + double_buffer
    if num_versions * num_bytes <= num_free:
        return
    needed, free, one = (f"{size / 2**20:,.0f} MiB" for size in (num_versions * num_bytes, num_free, num_bytes))
    found = f"{needed} are needed in {place}, {free} are free"
    advice = "make room there (a container's --shm-size), or publish smaller weights (policy.dtype=bfloat16)"
    if double_buffer:
        raise ConfigError(
            f"weight_sync.double_buffer must be false, got true: {num_versions} versions of the weights do not fit ({found}); "
            f"with false {one} do, or {advice}"
        )
    raise ConfigError(
        f"the weights do not fit into shared memory, even with weight_sync.double_buffer=false: {found}; {advice}"
    )


async def _raise(engine: InferenceEngine, death: EngineDeadError) -> None:
    raise death
