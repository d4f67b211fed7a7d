"""Publishes a policy version to every engine: gather and send while they generate, load inside a pause, all or nothing.

    policy ──gather, send──> buckets ──pause──> load ──every engine acknowledged──> resume

Flows in: a version and the policy that holds it. Flows out: engines that serve it, and how long each phase took. Does not know
requests, groups or the trainer. Pausing is an acknowledgement of each engine, never a sleep (contract 5).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_async.concurrency import run_together
from skyrl_async.errors import EngineDeadError, NoEngineError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.training.protocol import Policy
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.probe import check_gap, engine_logprob_gap

logger = logging.getLogger(__name__)


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
        self._clock = clock
        self._serving: WeightUpdate | None = None

    async def publish(self, version: int) -> PublishTimes:
        """Make every engine serve ``version``; on return all have acknowledged it.

        An engine that dies meanwhile is dropped. Raises ``PublishError`` when the update cannot be loaded: the version before
        goes on being served everywhere. Raises ``NoEngineError`` when no engine is left.
        """
        started = self._clock()
        with self._trace.span("send", track="publish", version=version):
            update = await self._policy.export_weights(version, self._directory, self._bucket_bytes)
        sent = self._clock()
        with self._trace.span("pause", track="publish", version=version):
            try:
                await self._everywhere("pause", lambda engine: engine.pause(self._pause_mode))
                loading = self._clock()
                with self._trace.span("load", track="publish", version=version):
                    await self._load(update)
                loaded = self._clock()
            finally:
                await self._resume()
        self._require_engines("resume")
        resumed = self._clock()
        self._client.policy_version = version
        self._discard(self._serving)
        self._serving = update
        if self._verify_checksums:
            await self.attest(version)
        return PublishTimes(
            send=sent - started, pause=resumed - sent, load=loaded - loading, num_bytes=update.num_bytes
        )

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """Prove that engines hold what is trained: checksums after the first publish, and the log-prob probe.

        Returns ``async/engine_logprob_gap`` in nats. Raises ``PublishError`` when they do not.
        """
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
        checksums = await self._everywhere("checksum", lambda engine: engine.checksum())
        versions = await self._everywhere("version", lambda engine: engine.version())
        if set(versions.values()) != {version} or len(set(checksums.values())) != 1:
            raise PublishError(
                f"expected version {version} and equal weights in every engine, got {versions} and {checksums}"
            )
        return next(iter(checksums.values()))

    def close(self) -> None:
        """Delete the buckets. Idempotent."""
        self._discard(self._serving)
        self._serving = None

    async def _resume(self) -> None:
        """Resume every engine, again where a cancellation cut that short: engines may serve others than this run."""
        try:
            await self._on_each("resume", lambda engine: engine.resume())
        except asyncio.CancelledError:
            await self._on_each("resume", lambda engine: engine.resume())
            raise

    async def _load(self, update: WeightUpdate) -> None:
        refusals: dict[str, PublishError] = {}

        async def load(engine: InferenceEngine) -> None:
            try:
                await engine.load_weights(update)
            except PublishError as error:
                refusals[engine.name] = error

        await self._everywhere("load", load)
        if not refusals:
            return
        if self._serving is not None:
            await self._roll_back(self._serving, but=set(refusals))
        self._discard(update)
        name, error = next(iter(refusals.items()))
        serving = (
            f"every engine still serves version {self._serving.version}" if self._serving else "the run cannot begin"
        )
        raise PublishError(f"{name} refused version {update.version} ({error}); {serving}") from error

    async def _roll_back(self, before: WeightUpdate, but: set[str]) -> None:
        """Load ``before`` again wherever the new version got in; an engine that cannot go back is closed."""

        async def load(engine: InferenceEngine) -> None:
            try:
                await engine.load_weights(before)
            except PublishError as error:
                await engine.close()
                raise EngineDeadError(f"{engine.name} was closed: it cannot go back to {before.version}") from error

        await self._everywhere("roll back", load, but=but)

    async def _everywhere(
        self, what: str, call: Callable[[InferenceEngine], Coroutine[Any, Any, Any]], but: Collection[str] = ()
    ) -> dict[str, Any]:
        """Like ``_on_each``, but raises ``NoEngineError`` when no engine survives."""
        answers = await self._on_each(what, call, but)
        self._require_engines(what)
        return answers

    async def _on_each(
        self, what: str, call: Callable[[InferenceEngine], Coroutine[Any, Any, Any]], but: Collection[str] = ()
    ) -> dict[str, Any]:
        """Call every live engine at once; one that dies is dropped."""
        answers: dict[str, Any] = {}

        async def one(engine: InferenceEngine) -> None:
            try:
                answers[engine.name] = await call(engine)
            except EngineDeadError as error:
                self._client.drop_engine(engine.name, error)

        called = [engine for engine in self._client.engines if engine.name not in but]
        await run_together({f"{what}-{engine.name}": one(engine) for engine in called})
        return answers

    def _require_engines(self, what: str) -> None:
        if not self._client.engines:
            raise NoEngineError(f"no inference engine survived '{what}'; see the run's log for the first failure")

    def _discard(self, update: WeightUpdate | None) -> None:
        for chunk in update.chunks if update is not None else ():
            if "path" in chunk:
                Path(chunk["path"]).unlink(missing_ok=True)
