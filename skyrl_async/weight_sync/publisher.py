"""Publishes a policy version to every engine: gather, send and load. Only loading pauses engines. All or nothing.

    policy ──gather──> staging ──send──> buckets ──load: (stage) pause, load──> every engine acknowledged ──> resume
       training waits     └ training goes on    └ an engine that joins later ──checksum──> load ──checksum──> takes requests

Every engine acknowledges its pause; nothing sleeps instead (contract 5). Requests, groups and the trainer are unknown here.
"""

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from skyrl_async.errors import EngineDeadError, PublishError, WeightsLostError, WeightsWriteError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.changes import Changes
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.training.protocol import Policy
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.broadcast import ShareWeights, WeightBroadcast, from_files_alone
from skyrl_async.weight_sync.engine_time_sharing import HoldEngines
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater, delete_update_files, files_of, what_serves
from skyrl_async.weight_sync.lag import Lag, LagMonitor
from skyrl_async.weight_sync.verifier import WeightVerifier
from skyrl_async.weight_sync.version_slots import SentUpdate, VersionSlots, require_shm_capacity

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


class WeightPublisher:
    """Moves every engine from one policy version to the next.

    ``publish`` does all of it. A trainer that continues meanwhile awaits ``gather``, and runs ``send`` and then ``load`` in a task beside
    its next step.

    Args:
        client: knows which engines are alive.
        policy: holds the weights.
        directory: where buckets are written, in shared memory; made if missing, emptied by ``close``.
        bucket_bytes: most bytes that are sent at a time.
        load_bucket_bytes: most bytes that an engine loads at a time, see ``weight_sync.load_bucket_mb``.
        double_buffer: keep the served version while the next one is sent and loaded, and prepare the next one in the engines' memory.
        pause_mode: what happens to requests in flight.
        trace: gets one span per phase.
        probe_prompt_token_ids: prompt after which the engines' log-probs are compared with the trainer's; empty: never.
        max_logprob_gap: nats per token past which that comparison fails.
        verify_checksums: ask engines for their checksums after every publish instead of only the first; engines that join later are
            compared with them. None: only if the weights are so small that it takes next to no time.
        max_retries: how often a failed sending or loading is tried again before it is an error.
        hold_engines: in its block engines have the devices that they share.
        broadcast: sends versions to engines that cannot map their files; None: all can.
        share: lets engines load from the policy workers' devices; the default uses files only.
        followers: also load each version after the engines serve it, such as workers that recompute log-probs.
        clock: seconds, for the times reported.
    """

    def __init__(
        self,
        *,
        client: InferenceEngineClient,
        policy: Policy,
        directory: Path,
        bucket_bytes: int,
        load_bucket_bytes: int = 512 << 20,
        double_buffer: bool = True,
        pause_mode: PauseMode,
        trace: Trace,
        probe_prompt_token_ids: Sequence[int] = (),
        max_logprob_gap: float = 0.0,
        verify_checksums: bool | None = False,
        max_retries: int = 0,
        hold_engines: HoldEngines = nullcontext,
        broadcast: WeightBroadcast | None = None,
        share: ShareWeights = from_files_alone,
        followers: Sequence[Follower] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._policy = policy
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._load_bucket_bytes = load_bucket_bytes
        self._double_buffer = double_buffer
        self._pause_mode = pause_mode
        self._trace = trace
        self._verify_checksums = verify_checksums
        self._max_retries = max_retries
        self._hold_engines = hold_engines
        self._broadcast = broadcast
        self._share = share
        self._followers = followers
        self._clock = clock
        self._slots = VersionSlots()
        self._slots_changes = Changes()
        self._gathered: tuple[int, float] | None = None
        """(version, seconds) of the weights in the policy's staging memory."""
        self._staging_lock = asyncio.Lock()
        self._is_capacity_checked = False
        self._send_numbers = itertools.count()
        self._threads = DaemonThreads("weight-files")
        self._deletions: dict[asyncio.Future[None], Callable[[], None]] = {}
        """Deletions running in threads: the kernel frees memory only about as fast as it is written."""
        self._updater = EngineWeightUpdater(client, pause_mode=pause_mode, trace=trace, clock=clock)
        self._verifier = WeightVerifier(
            client=client,
            policy=policy,
            updater=self._updater,
            trace=trace,
            probe_prompt_token_ids=probe_prompt_token_ids,
            max_logprob_gap=max_logprob_gap,
            hold_engines=hold_engines,
        )
        self._engines_change = asyncio.Lock()
        self.lag = LagMonitor()
        """Lags by the versions published, or by every step if ``trained`` is called for each."""
        client.pool.admission = self.admission

    @property
    def serving(self) -> WeightUpdate | None:
        """The update that every engine serves; its files stay until the next publish has succeeded. None before the first."""
        return self._slots.serving

    @property
    def keeps_served_version(self) -> bool:
        """Whether an engine that joins while a version is sent can load the one before: only with a double buffer."""
        return self._double_buffer

    async def publish(self, version: int) -> PublishTimes:
        """Make every engine serve ``version``; on return all, and at least one, have acknowledged it. Raises what the phases raise."""
        await self.gather(version)
        await self.send(version)
        times = await self.load()
        if times is None or times.version != version:
            raise PublishError(
                f"version {version} was not published: {what_serves(self._slots.serving_version)}, and a publish has to be the only "
                "one that is under way"
            )
        return times

    def trained(self, version: int) -> None:
        """The policy holds ``version`` from now on, published or not; ``lag_values`` are measured by it."""
        self.lag.trained(version, self._clock())

    async def gather(self, version: int) -> None:
        """Copy the policy's weights to its staging memory; on return they may change. Waits for a running ``send``.

        Raises ``ConfigError`` at the first call if shared memory has no room for the weights.
        """
        async with self._staging_lock:
            started = self._clock()
            self.trained(version)
            with self._trace.span("gather", track="publish", version=version):
                num_bytes = await self._policy.gather_weights(version)
            if not self._is_capacity_checked:
                require_shm_capacity(self._directory, num_bytes, double_buffer=self._double_buffer)
                self._is_capacity_checked = True
            self._gathered = version, self._clock() - started

    async def send(self, version: int) -> bool:
        """Send the gathered version, which ``load`` then loads. Versions are sent one after another, beside training and generation.

        Without a double buffer this first waits until the version before is loaded, and deletes its buckets. Returns False if policy
        workers died with the copy after a further step, or another version was gathered since; then a newer one follows.
        Raises ``PublishError`` if there is no room, after the retries. After any failure none of its buckets is left.
        """
        async with self._staging_lock:
            if self._gathered is None or self._gathered[0] != version:
                return False
            if not self._double_buffer:
                await self._slots_changes.until(lambda: self._slots.is_idle)
                async with self._engines_change:
                    self._delete(self._slots.release_served())
            started = self._clock()
            try:
                with self._trace.span("send", track="publish", version=version):
                    update = await self._retried(lambda _: self._send(version))
            except WeightsLostError as error:
                logger.warning("version %d is not published: %s", version, error)
                return False
            send_seconds = self._clock() - started
            gather_seconds = self._gathered[1]
            self._delete(
                self._slots.add(SentUpdate(update=update, gather_seconds=gather_seconds, send_seconds=send_seconds))
            )
            return True

    async def load(self) -> PublishTimes | None:
        """Make every engine serve the newest version sent; on return all, and at least one, have acknowledged it.

        Returns None if engines serve it already. Older versions sent meanwhile are never loaded. An engine that dies is closed; if none is
        left, this waits for one that may come back.
        Raises ``PublishError`` if an engine refuses, after the retries: every engine still serves the version before. Raises
        ``NoEngineError`` if no engine is left and none is expected, and what a follower raises.
        """
        times = await self._retried(self._load_newest)
        if times is None:
            return None
        await self._client.pool.wait_for_engine()
        if self._is_checksum_due(times.num_bytes):
            await self._verifier.verify_checksums_of_any(times.version)
        for follower in self._followers:
            assert self._slots.serving is not None, "it was loaded"
            await follower(self._slots.serving)
        return times

    def _is_checksum_due(self, num_bytes: int) -> bool:
        return num_bytes <= _QUICK_CHECKSUM_BYTES if self._verify_checksums is None else self._verify_checksums

    @asynccontextmanager
    async def admission(self, engine: InferenceEngine) -> AsyncIterator[None]:
        """Let an engine load and verify the served version; in the block it may begin to serve. See ``pool.Admission``.

        Before the first publish there is nothing to load. Without a double buffer this waits for the version being sent. Engines that share
        devices load while they hold them. After ``PublishError`` or ``EngineDeadError`` the engine must not serve.
        """
        while True:
            await self._slots_changes.until(lambda: not self._slots.lacks_served_files)
            async with self._engines_change:
                if self._slots.lacks_served_files:
                    continue
                async with self._hold_engines():
                    await self._update_joining(engine)
                    yield
                return

    async def _update_joining(self, engine: InferenceEngine) -> None:
        if (serving := self._slots.serving) is None:
            return
        if self._broadcast is not None:
            await self._broadcast.deliver([engine], serving, _raise)
        await engine.pause(self._pause_mode)
        await engine.load_weights(replace(serving, is_compared=True))
        await self._verifier.verify_engine(engine, serving)
        await engine.resume()
        self.lag.joined(engine.name, serving.version)

    def lags(self) -> dict[str, Lag]:
        """Each engine's lag behind the trainer now, by name."""
        self._forget_engines_that_left()
        return self.lag.lags(self._clock())

    def lag_values(self) -> dict[str, float]:
        """The largest lag of an engine behind the trainer since the last call, as metrics."""
        self._forget_engines_that_left()
        return self.lag.values(self._clock())

    def _forget_engines_that_left(self) -> None:
        for name in self.lag.lags(self._clock()).keys() - {engine.name for engine in self._client.engines}:
            self.lag.left(name)

    async def _retried(self, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Try up to ``max_retries`` times more; the attempt is told whether it is the last."""
        for num_remaining in range(self._max_retries, 0, -1):
            try:
                return await attempt(False)
            except PublishError as error:
                logger.warning("%s; %d more tries", error, num_remaining)
            await asyncio.sleep(_RETRY_PAUSE_S)
        return await attempt(True)

    async def _load_newest(self, is_last_try: bool) -> PublishTimes | None:
        async with self._engines_change:
            sent = self._slots.start_loading()
            if sent is None:
                return None
            try:
                async with self._hold_engines():
                    return await self._update_engines(sent)
            except PublishError:
                if not is_last_try:
                    self._delete(self._slots.requeue())
                raise
            finally:
                self._delete(self._slots.abort_loading())
                self._slots_changes.notify()

    async def _update_engines(self, sent: SentUpdate) -> PublishTimes:
        engines, update = list(self._client.engines), sent.update
        broadcast_seconds = await self._deliver(engines, update)
        staged = self._clock()
        if self._double_buffer:
            await self._updater.stage(engines, update)
        replaced: WeightUpdate | None = None

        def note_loaded() -> None:
            nonlocal replaced
            replaced = self._slots.finish_loading()
            self._client.policy_version = sent.version

        try:
            async with self._share(update) as shared:
                begun = self._clock()
                with self._trace.span("switch", track="publish", version=sent.version):
                    times = await self._updater(
                        engines, shared, self._slots.serving, self._slots.serving_version, on_loaded=note_loaded
                    )
                resumed = self._clock()
            paused = begun + times.acknowledge
            self._trace.past_span("pause", "publish/pause", paused, resumed, version=sent.version)
        finally:
            self._delete(replaced)  # not in the pause
        self.lag.serves([engine.name for engine in engines], sent.version, resumed)
        return PublishTimes(
            version=sent.version,
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
        if self._broadcast is None:
            return 0.0
        started = self._clock()
        with self._trace.span("broadcast", track="publish", version=update.version):
            await self._broadcast.deliver(engines, update, self._updater.remove_dead, keep=self._slots.serving)
        return self._clock() - started

    async def _send(self, version: int) -> WeightUpdate:
        """Write the buckets once old ones are deleted.

        Raises ``PublishError`` if there is no room. After any failure none is left.
        """
        await self._deleted()
        directory = self._directory / f"{version:06d}-{next(self._send_numbers)}"
        try:
            update = await self._policy.send_weights(version, directory, self._bucket_bytes)
        except BaseException as error:
            self._begin_deletion(partial(shutil.rmtree, directory, ignore_errors=True))
            if isinstance(error, WeightsWriteError | OSError):
                raise PublishError(
                    f"version {version} cannot be sent ({error}); {what_serves(self._slots.serving_version)}"
                ) from error
            raise
        limit = {"load_bucket_bytes": self._load_bucket_bytes}
        return replace(update, chunks=tuple(chunk | limit if "path" in chunk else chunk for chunk in update.chunks))

    def _delete(self, update: WeightUpdate | None) -> None:
        """Begin to delete the files of an update. Cancellations do not stop it, and ``close`` finishes it."""
        if update is not None and files_of(update):
            self._begin_deletion(partial(delete_update_files, update))

    def _begin_deletion(self, delete: Callable[[], None]) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._threads, delete)
        self._deletions[future] = delete

    async def _deleted(self) -> None:
        """Wait until running deletions have freed their memory."""
        if self._deletions:
            done, _ = await asyncio.wait(self._deletions)
            for deletion in done:
                self._deletions.pop(deletion, None)
                deletion.result()

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """See ``WeightVerifier.check``."""
        return await self._verifier.check(version, is_first=is_first)

    async def verify_checksums(self, version: int) -> str:
        """See ``WeightVerifier.verify_checksums``."""
        return await self._verifier.verify_checksums(version)

    def close(self) -> None:
        """Delete all buckets now, also those that a thread has begun to delete. Idempotent."""
        for update in self._slots.clear():
            delete_update_files(update)
        for delete in self._deletions.values():
            delete()


async def _raise(engine: InferenceEngine, death: EngineDeadError) -> None:
    raise death
