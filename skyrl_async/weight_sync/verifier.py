"""Proves that engines hold what is trained: by version and checksum, and by the log-probs of a probe (contract 6).

Flows in: engines that serve a version, or are about to. Flows out: nothing, or ``PublishError``. Remembers the last checksum that engines
agreed on, so that one which comes up later can be held against it. Does not load, pause or resume, and leaves the comparison of the bytes
that are loaded to the engines.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

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
"""A full engine begins a request when others end."""

T = TypeVar("T")


class WeightVerifier:
    """See the module; for the arguments see ``WeightPublisher``."""

    def __init__(
        self,
        *,
        client: InferenceEngineClient,
        policy: Policy,
        updater: EngineWeightUpdater,
        trace: Trace,
        probe_prompt_token_ids: Sequence[int],
        max_logprob_gap: float,
        hold_engines: HoldEngines,
    ) -> None:
        self._client = client
        self._policy = policy
        self._updater = updater
        self._trace = trace
        self._probe_prompt_token_ids = tuple(probe_prompt_token_ids)
        self._max_logprob_gap = max_logprob_gap
        self._hold_engines = hold_engines
        self._attested: tuple[int, str] | None = None
        """(version, the checksum that engines agreed on)."""

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
            await self.verify_checksums(version)
        if not self._probe_prompt_token_ids:
            return {}
        with self._trace.span("probe", track="publish", version=version):
            gap = await engine_logprob_gap(
                self._client, self._policy, self._probe_prompt_token_ids, version, hold_engines=self._hold_engines
            )
        check_gap(gap, self._max_logprob_gap, version)
        return {"async/engine_logprob_gap": gap}

    async def verify_checksums(self, version: int) -> str:
        """The checksum all engines agree on. Raises ``PublishError`` when versions or checksums differ."""
        engines = list(self._client.engines)
        checksums = await self._updater.everywhere("checksum", lambda engine: engine.checksum(), engines)
        versions = await self._updater.everywhere("version", lambda engine: engine.version(), engines)
        if not versions:
            raise NoEngineError("no inference engine survived 'version'; see the run's log for the first failure")
        agreed = {checksums[name] for name in versions}
        if set(versions.values()) != {version} or len(agreed) != 1:
            raise PublishError(
                f"expected version {version} and equal weights in every engine, got {versions} and {checksums}"
            )
        self._attested = version, agreed.pop()
        return self._attested[1]

    async def attest_when_expecting(self, version: int) -> str:
        """The same, of the next engine where the last one dies meanwhile and another is expected."""
        return await self._while_expecting(lambda: self.verify_checksums(version))

    async def of_one(self, engine: InferenceEngine, update: WeightUpdate) -> None:
        """Hold an engine that has loaded what is served, and takes no requests yet, against what is known of that version's weights.

        What it loaded were the bytes that were sent: it has compared them. Here it is what came of them. Raises ``PublishError``.
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
        self._attested = version, checksum

    async def _checksum_of(self, version: int) -> str | None:
        """What was attested for the version, or else any engine's that serves it; None when there is none."""
        if self._attested is not None and self._attested[0] == version:
            return self._attested[1]
        for engine in self._client.engines:
            try:
                return await engine.checksum()
            except EngineDeadError as error:
                await self._updater.remove_dead(engine, error)
        return None


async def engine_logprob_gap(
    client: InferenceEngineClient,
    policy: Policy,
    prompt_token_ids: Sequence[int],
    version: int,
    *,
    hold_engines: HoldEngines = nullcontext,
) -> float:
    """Let every engine sample 24 tokens after the prompt and return the largest ``|log pi_engine - log pi_trainer|``.

    A prompt that leaves less room is cut at its beginning. NaN where one of them is. Raises ``PublishError`` when an engine
    stamps its tokens with another version, and ``NoEngineError`` when none answers. A weight update must not be under way. Where engines
    share devices with the policy, they sample in one turn of theirs, and it computes in its own.
    """
    prompt = tuple(prompt_token_ids)[-max(1, client.max_model_len - _NUM_TOKENS) :]
    budget = min(_NUM_TOKENS, client.max_model_len - len(prompt))
    async with hold_engines():
        outputs = await _sampled(client, prompt, budget, version)
    if not outputs:
        raise NoEngineError("no inference engine survived the probe; see the run's log for the first failure")
    gaps: list[float] = []
    for output in outputs:
        trained = (await policy.logprobs([*prompt, *output.token_ids]))[-len(output.token_ids) :]
        gaps += [abs(a - b) for a, b in zip(output.logprobs, trained, strict=True)]
    return max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)


async def _sampled(
    client: InferenceEngineClient, prompt: tuple[int, ...], budget: int, version: int
) -> list[EngineOutput]:
    """What each engine that survives it says after the prompt."""
    outputs = []
    for engine in client.engines:
        request = EngineRequest(
            request_id=f"probe-{uuid.uuid4().hex}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=budget, ignore_eos=True, seed=0),
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output = await engine.generate(request)
        except EngineDeadError as error:
            client.drop_engine(engine, error)
            continue
        except TimeoutError:
            client.drop_engine(
                engine, DeadlineError(f"it has not answered the probe of version {version} in {_TIMEOUT_S:g} s")
            )
            continue
        if output.finish_reason is FinishReason.ABORT and not output.token_ids:  # it was taken out of service meanwhile
            continue
        if set(output.versions) != {version}:
            raise PublishError(
                f"{engine.name} stamps tokens with {sorted(set(output.versions))}, expected version {version}"
            )
        outputs.append(output)
    return outputs


def check_gap(gap: float, limit: float, version: int) -> None:
    """Raise ``PublishError`` when the gap is above the limit."""
    if not gap <= limit:
        raise PublishError(
            f"the engines' log-probs differ from the trainer's by up to {gap:.3g} nats at version {version}, more than "
            f"trainer.max_engine_logprob_gap={limit:g}: the engines do not hold the weights that are trained"
        )
