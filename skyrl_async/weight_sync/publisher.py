"""Publishes a policy version to every engine: gather and send while they generate, load inside a pause, all or nothing.

    policy ──gather, send──> buckets ──pause──> load ──every engine acknowledged──> resume
                                └──an engine that comes up later──> load ──checksum──> takes requests

Flows in: a version and the policy that holds it; engines that join. Flows out: engines that serve it, and how long each phase took.
Does not know requests, groups or the trainer. Pausing is an acknowledgement of each engine, never a sleep (contract 5).
"""

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from skyrl_async.errors import EngineDeadError, NoEngineError, PublishError, WeightsWriteError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.training.protocol import Policy
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.probe import check_gap, engine_logprob_gap
from skyrl_async.weight_sync.switch import EngineSwitch, discard, what_serves

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_PAUSE_S = 1.0
"""What is full or refuses may need a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTimes:
    """Seconds of one publish."""

    send: float
    """Gather and send: overlaps generation."""
    pause: float
    """From the first pause request to the last engine's resumption."""
    load: float
    """Part of the pause in which engines load."""
    num_bytes: int
    """Of the weights."""


class WeightPublisher:
    """Brings every engine from one policy version to the next.

    Args:
        client: knows which engines live.
        policy: holds the weights.
        directory: where buckets are written, in shared memory; made here, emptied by ``close``.
        bucket_bytes: size of a bucket.
        pause_mode: what happens to requests in flight.
        trace: one span per phase.
        probe_prompt_token_ids: prompt after which the engines' log-probs are compared with the trainer's; empty: never.
        max_logprob_gap: nats per token past which that comparison fails.
        verify_checksums: compare the engines' checksums after every publish, not after the first alone.
        max_retries: times that a publish which failed is tried again before it is an error.
        clock: seconds, for the times reported.
    """

    def __init__(
        self,
        *,
        client: InferenceEngineClient,
        policy: Policy,
        directory: Path,
        bucket_bytes: int,
        pause_mode: PauseMode,
        trace: Trace,
        probe_prompt_token_ids: Sequence[int] = (),
        max_logprob_gap: float = 0.0,
        verify_checksums: bool = False,
        max_retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._policy = policy
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._pause_mode = pause_mode
        self._trace = trace
        self._probe_prompt_token_ids = tuple(probe_prompt_token_ids)
        self._max_logprob_gap = max_logprob_gap
        self._verify_checksums = verify_checksums
        self._max_retries = max_retries
        self._clock = clock
        self._serving: WeightUpdate | None = None
        self._attested: tuple[int, str] | None = None
        """(version, the checksum that engines agreed on)."""
        self._send_numbers = itertools.count()
        self._switch = EngineSwitch(client, pause_mode=pause_mode, trace=trace, clock=clock)
        self._engines_change = asyncio.Lock()
        client.pool.admission = self.admission

    @property
    def serving(self) -> WeightUpdate | None:
        """What every engine serves; its files stay until the next publish has succeeded. None before the first."""
        return self._serving

    async def publish(self, version: int) -> PublishTimes:
        """Make every engine serve ``version``; on return all have acknowledged it, one at least.

        An engine that dies meanwhile is closed. Where none is left but one may come back, that one is waited for.
        Raises ``PublishError`` when the update cannot be sent or loaded, after the retries: the version before goes on being served
        everywhere. Raises ``NoEngineError`` when no engine is left and none is expected.
        """
        for num_left in range(self._max_retries, 0, -1):
            try:
                return await self._publish(version)
            except PublishError as error:
                logger.warning("publishing version %d failed, %d more tries: %s", version, num_left, error)
            await asyncio.sleep(_RETRY_PAUSE_S)
        return await self._publish(version)

    @asynccontextmanager
    async def admission(self, engine: InferenceEngine) -> AsyncIterator[None]:
        """Bring an engine to the version being served and prove it; in the block it may begin to serve. See ``pool.Admission``.

        Before the first publish there is nothing to load. Raises ``PublishError`` and ``EngineDeadError``: it must not serve.
        """
        async with self._engines_change:
            if self._serving is not None:
                await engine.pause(self._pause_mode)
                await engine.load_weights(self._serving)
                await self._prove(engine, self._serving.version)
                await engine.resume()
            yield

    async def _publish(self, version: int) -> PublishTimes:
        started = self._clock()
        with self._trace.span("send", track="publish", version=version):
            update = await self._send(version)
        sent = self._clock()
        async with self._engines_change:
            begun = self._clock()
            engines = list(self._client.engines)
            with self._trace.span("pause", track="publish", version=version):
                load_seconds = await self._switch(engines, update, self._serving)
            resumed = self._clock()
            discard(self._serving)
            self._serving = update
        await self._client.pool.wait_for_engine()
        self._client.policy_version = version
        if self._verify_checksums:
            await self._while_expecting(lambda: self.attest(version))
        return PublishTimes(send=sent - started, pause=resumed - begun, load=load_seconds, num_bytes=update.num_bytes)

    async def _send(self, version: int) -> WeightUpdate:
        """Write the buckets. Raises ``PublishError`` where there is no room for them; whatever fails, none is left."""
        directory = self._directory / f"{version:06d}-{next(self._send_numbers)}"
        try:
            return await self._policy.export_weights(version, directory, self._bucket_bytes)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, WeightsWriteError | OSError):
                raise PublishError(
                    f"version {version} cannot be sent ({error}); {what_serves(self._serving)}"
                ) from error
            raise

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """Prove that engines hold what is trained: checksums after the first publish, and the log-prob probe.

        Returns ``async/engine_logprob_gap`` in nats. Raises ``PublishError`` when they do not.
        """
        return await self._while_expecting(lambda: self._check(version, is_first=is_first))

    async def _while_expecting(self, prove: Callable[[], Awaitable[T]]) -> T:
        """Prove something of the engines, again with the next one where the last of them dies meanwhile."""
        while True:
            try:
                return await prove()
            except NoEngineError:
                if not self._client.pool.is_expecting:
                    raise
                await self._client.pool.wait_for_engine()

    async def _check(self, version: int, *, is_first: bool) -> dict[str, float]:
        if is_first:
            await self.attest(version)
        if not self._probe_prompt_token_ids:
            return {}
        with self._trace.span("probe", track="publish", version=version):
            gap = await engine_logprob_gap(self._client, self._policy, self._probe_prompt_token_ids, version)
        check_gap(gap, self._max_logprob_gap, version)
        return {"async/engine_logprob_gap": gap}

    async def attest(self, version: int) -> str:
        """The checksum all engines agree on. Raises ``PublishError`` when versions or checksums differ."""
        engines = list(self._client.engines)
        checksums = await self._switch.everywhere("checksum", lambda engine: engine.checksum(), engines)
        versions = await self._switch.everywhere("version", lambda engine: engine.version(), engines)
        if not versions:
            raise NoEngineError("no inference engine survived 'version'; see the run's log for the first failure")
        agreed = {checksums[name] for name in versions}
        if set(versions.values()) != {version} or len(agreed) != 1:
            raise PublishError(
                f"expected version {version} and equal weights in every engine, got {versions} and {checksums}"
            )
        self._attested = version, agreed.pop()
        return self._attested[1]

    def close(self) -> None:
        """Delete the buckets. Idempotent."""
        discard(self._serving)
        self._serving = None

    async def _prove(self, engine: InferenceEngine, version: int) -> None:
        """Hold an engine that is not yet serving against what is known of the version's weights. Raises ``PublishError``."""
        found, checksum = await engine.version(), await engine.checksum()
        expected = await self._checksum_of(version)
        if found != version or expected not in (None, checksum):
            raise PublishError(
                f"{engine.name} came up with version {found} and checksum {checksum}, expected version {version} and {expected}"
            )
        if expected is None:
            logger.info(
                "%s is the first to serve version %d: no checksum to compare its own with", engine.name, version
            )
        self._attested = version, checksum

    async def _checksum_of(self, version: int) -> str | None:
        """What was attested for the version, or else any engine's that serves it; None when there is none."""
        if self._attested is not None and self._attested[0] == version:
            return self._attested[1]
        for engine in self._client.engines:
            try:
                return await engine.checksum()
            except EngineDeadError as error:
                await self._switch.bury(engine, error)
        return None
