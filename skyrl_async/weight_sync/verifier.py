"""Verifies that engines hold the trained weights: by version and checksum, and by the log-probs of a probe (contract 6).

It remembers the last checksum that engines agreed on, and compares an engine that joins later with it. The probe sees what a checksum
cannot: on CPU a tied output layer can stay stale behind equal checksums, and the log-probs of the next tokens are then off by whole nats.
Engines compare the bytes that they load themselves. Nothing is loaded, paused or resumed here.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from skyrl_async.columns import TokenIds, column
from skyrl_async.errors import DeadlineError, EngineDeadError, NoEngineError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.training.protocol import Policy
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.engine_time_sharing import HoldEngines
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater

logger = logging.getLogger(__name__)

_NUM_TOKENS = 24
_TIMEOUT_S = 600.0
"""Seconds for one engine's answer: a full engine begins a request when others end."""

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class WeightVerifier:
    """Compares engines with each other, with earlier checksums and with the policy."""

    client: InferenceEngineClient
    policy: Policy
    updater: EngineWeightUpdater
    """Drops engines that die meanwhile."""
    trace: Trace
    """Gets a span per probe."""
    probe_prompt_token_ids: Sequence[int] | TokenIds
    """Prompt of the probe; empty: there is none."""
    max_logprob_gap: float
    """Nats per token past which the probe fails."""
    hold_engines: HoldEngines = nullcontext
    """In its block engines have the devices that they share."""
    _verified: tuple[int, str] | None = field(default=None, init=False)
    """(version, checksum) that engines last agreed on."""

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """Compare checksums after the first publish, and run the log-prob probe.

        Returns ``async/engine_logprob_gap`` in nats. Raises ``PublishError`` if an engine does not hold the trained weights.
        """
        if is_first:
            await self.verify_checksums(version)
        if not len(self.probe_prompt_token_ids):
            return {}
        gap = await self._retried_on_next_engine(lambda: self._probe(version))
        if not gap <= self.max_logprob_gap:
            raise PublishError(
                f"the engines' log-probs differ from the trainer's by up to {gap:.3g} nats at version {version}, more than "
                f"trainer.max_engine_logprob_gap={self.max_logprob_gap:g}: the engines do not hold the weights that are trained"
            )
        return {"async/engine_logprob_gap": gap}

    async def verify_checksums(self, version: int) -> str:
        """The checksum that all engines agree on. Raises ``PublishError`` if versions or checksums differ."""
        return await self._retried_on_next_engine(lambda: self._agreed_checksum(version))

    async def _retried_on_next_engine(self, verify: Callable[[], Awaitable[T]]) -> T:
        """Retry with the next engine if the last one dies meanwhile and another is expected."""
        while True:
            try:
                return await verify()
            except NoEngineError:
                if not self.client.pool.is_expecting:
                    raise
                await self.client.pool.wait_for_engine()

    async def _probe(self, version: int) -> float:
        """Let every engine sample 24 tokens after the prompt and return the largest ``|log pi_engine - log pi_trainer|``.

        A prompt that leaves less room is cut at its beginning. The gap is NaN if any log-prob is. No weight update may be under way.
        Engines that share devices with the policy sample under one lease, and the policy computes under its own.

        Raises ``PublishError`` if an engine stamps its tokens with another version, ``NoEngineError`` if none answers.
        """
        room = self.client.max_model_len
        prompt = column(self.probe_prompt_token_ids, np.int32)[-max(1, room - _NUM_TOKENS) :]
        with self.trace.span("probe", track="publish", version=version):
            async with self.hold_engines():
                outputs = await self._sampled(prompt, min(_NUM_TOKENS, room - len(prompt)), version)
            if not outputs:
                raise NoEngineError("no inference engine survived the probe; see the run's log for the first failure")
            gaps = []
            for output in outputs:
                trained = await self.policy.logprobs(np.concatenate([prompt, output.token_ids]))
                gaps.append(np.abs(output.logprobs - np.array(trained[-len(output.token_ids) :])))
        return float(np.concatenate(gaps).max())

    async def _sampled(self, prompt: TokenIds, budget: int, version: int) -> list[EngineOutput]:
        """One output per engine that survives the probe."""
        outputs = []
        for engine in self.client.engines:
            request = EngineRequest(
                request_id=f"probe-{uuid.uuid4().hex}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=budget, ignore_eos=True, seed=0),
            )
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    output = await engine.generate(request)
            except (EngineDeadError, TimeoutError) as error:
                silent = DeadlineError(f"it has not answered the probe of version {version} in {_TIMEOUT_S:g} s")
                self.client.drop_engine(engine, silent if isinstance(error, TimeoutError) else error)
                continue
            if output.finish_reason is FinishReason.ABORT and not len(output.token_ids):  # it was removed meanwhile
                continue
            if output.versions.distinct != {version}:
                raise PublishError(
                    f"{engine.name} stamps tokens with {sorted(output.versions.distinct)}, expected version {version}"
                )
            outputs.append(output)
        return outputs

    async def _agreed_checksum(self, version: int) -> str:
        engines = list(self.client.engines)
        checksums = await self.updater.everywhere("checksum", lambda engine: engine.checksum(), engines)
        versions = await self.updater.everywhere("version", lambda engine: engine.version(), engines)
        if not versions:
            raise NoEngineError("no inference engine survived 'version'; see the run's log for the first failure")
        agreed = {checksums[name] for name in versions}
        if set(versions.values()) != {version} or len(agreed) != 1:
            raise PublishError(
                f"expected version {version} and equal weights in every engine, got {versions} and {checksums}"
            )
        self._verified = version, agreed.pop()
        return self._verified[1]

    async def verify_engine(self, engine: InferenceEngine, update: WeightUpdate) -> None:
        """Compare an engine that has loaded the served version, and takes no requests yet, with that version's known checksum.

        The engine has compared the bytes it loaded with the bytes sent; this compares the resulting weights. Raises ``PublishError``.
        """
        version = update.version
        found, checksum = await engine.version(), await engine.checksum()
        expected = await self._checksum_of(version)
        if found != version or expected not in (None, checksum):
            raise PublishError(
                f"{engine.name} came up with version {found} and checksum {checksum}, expected version {version} and {expected}"
            )
        if expected is None:
            logger.info(
                "%s has loaded version %d %s; no other engine's checksum is there to compare its own with",
                engine.name,
                version,
                "unseen" if update.crc32 is None else f"as it was sent (checksum {update.crc32:08x})",
            )
        self._verified = version, checksum

    async def _checksum_of(self, version: int) -> str | None:
        """The checksum verified for the version, else that of any engine; None if there is no engine."""
        if self._verified is not None and self._verified[0] == version:
            return self._verified[1]
        for engine in self.client.engines:
            try:
                return await engine.checksum()
            except EngineDeadError as error:
                await self.updater.remove_dead(engine, error)
        return None
