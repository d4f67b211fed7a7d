"""Compares what engines say of tokens with what the trainer says of the same: sees what a checksum cannot (contract 6).

Flows in: engines and the policy, both at the same version. Flows out: the largest difference in nats. On CPU a tied output
layer can stay stale behind equal checksums; the log-probs of the next tokens then are off by whole nats.
"""

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import nullcontext

from skyrl_async.errors import DeadlineError, EngineDeadError, NoEngineError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.training.protocol import Policy
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, SamplingParams
from skyrl_async.weight_sync.engine_time_sharing import HoldEngines

_NUM_TOKENS = 24
_TIMEOUT_S = 600.0
"""A full engine begins a request when others end."""


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
