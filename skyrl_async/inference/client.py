"""One sampling interface over many engines, exact across weight updates and engine failures.

    generate / stream ──> pool ──> engine ──────death (or abort)─────┐
          ^                  ^                                         │
          │                  └── prompt + tokens so far, rest of budget┘
          └── tokens with log-probs and versions; text decoded once

Every token of a completion carries its behavior log-prob and the policy version it was sampled under. Requests that cannot be continued
exactly (grammars, penalties) are never split: they begin anew in another engine if theirs dies.

Groups, staleness and training are unknown here. The client does not pause engines: a paused engine holds its requests, so several clients
(the trainer's, the endpoint's) can share engines without coordination.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import TokenIds, fields_of
from skyrl_async.errors import EngineDeadError, InferenceError, PromptTooLongError
from skyrl_async.inference.generation import (
    ABORTED,
    BUDGET_USED,
    GenerationState,
    continued,
    fetch_partial_outputs,
    generate_once,
    head_of,
)
from skyrl_async.inference.placement import PlacementSettings
from skyrl_async.inference.pool import EnginePool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.text import CompletionText, Tokenizer
from skyrl_async.rollout.sampler import NOTHING_SAMPLED, OpenGeneration, record_cut_off, record_tokens
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.progress import report_engine
from skyrl_async.runtime.tasks import Turns, run_together
from skyrl_async.types import (
    Completion,
    CompletionDelta,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Message,
    SamplingParams,
)

logger = logging.getLogger(__name__)

_client_ids = itertools.count()
CARRIED_BLOCK_TOKENS = 1024
"""Most tokens of a generation that an engine's death costs, if nobody reads it in blocks."""


class InferenceEngineClient:
    """Routes generations to engines and continues them after a weight update or an engine's failure.

    Args:
        engines: the replicas, all serving the same policy.
        max_model_len: longest prompt plus answer in tokens, the same in every engine.
        tokenizer: decodes completions; None: they have no text, and stop strings are refused.
        renderer: turns messages into token ids; None: requests must give token ids.
        name: prefix of request ids, unique among the clients of these engines.
        carries_tokens: let engines send long generations in blocks, so that an engine's death costs one block. Otherwise it costs the
            tokens since the last weight update.
        engine_wait_s: longest wait of a request when no engine is left; None: as long as one may come back.
        placement: weights of old requests; None loads engines alike and moves no request.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        renderer: ChatRenderer | None = None,
        name: str = "trainer",
        carries_tokens: bool = False,
        engine_wait_s: float | None = 0.0,
        placement: PlacementSettings | None = None,
    ) -> None:
        self.pool = EnginePool(engines, wait_s=engine_wait_s, placement=placement)
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.max_model_len = max_model_len
        """Longest prompt plus answer, in tokens."""
        self._carries_tokens = carries_tokens
        self._name = f"{name}-{next(_client_ids)}"
        self._request_numbers = itertools.count()
        self._tracked: dict[GenerationState, str] = {}
        """The running generations that a checkpoint reads -> their ids."""
        self._turns = Turns()
        self._counts = {"requests": 0, "tokens": 0, "abandoned_tokens": 0, "aborts": 0, "engine_failures": 0}

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """The engines known to be alive."""
        return self.pool.engines

    @property
    def policy_version(self) -> int:
        """The newest that was published to the engines, or that tokens came from."""
        return self.pool.policy_version

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines that stand still while there is no engine."""
        return self.pool.deadlines

    @property
    def num_abandoned_tokens(self) -> int:
        """Tokens of cancelled and failed generations; tokens still in an engine count only if ``collect_open_tokens`` found them."""
        return self._counts["abandoned_tokens"]

    async def add_engine(self, engine: InferenceEngine) -> None:
        """Send requests to one more engine, once it has loaded the version the others serve; see ``EnginePool.add``."""
        await self.pool.add(engine)
        logger.info("%s takes requests", engine.name)

    async def remove_engine(self, name: str, *, timeout_s: float = 60.0) -> InferenceEngine:
        """Remove an engine and return it, to be closed; its requests continue elsewhere with their tokens. See ``EnginePool.remove``."""
        engine = await self.pool.remove(name, timeout_s=timeout_s)
        logger.info("%s was taken out", name)
        return engine

    def drop_engine(self, engine: InferenceEngine, reason: BaseException) -> None:
        """Send nothing more to a dead or wedged engine; its requests continue elsewhere."""
        if engine in self.pool.engines:
            logger.warning("%s is dead, its requests continue elsewhere: %s", engine.name, reason)
            self._counts["engine_failures"] += 1
            self.pool.drop(engine, str(reason))

    async def generate(
        self,
        *,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int] | TokenIds | None = None,
        messages: Sequence[Message] | None = None,
    ) -> Completion:
        """Sample one completion of token ids or of chat messages (exactly one of the two).

        Raises ``PromptTooLongError``, ``NoEngineError``, and ``ValueError`` for neither or both inputs.
        """
        if (prompt_token_ids is None) == (messages is None):
            raise ValueError("give either prompt_token_ids or messages, not both and not neither")
        if prompt_token_ids is None:
            if self._renderer is None:
                raise InferenceError(
                    "this client was made without a chat renderer: give prompt_token_ids instead of messages"
                )
            prompt_token_ids = self._renderer.render(list(messages or ()))
        return await self.generate_tokens(prompt_token_ids, sampling)

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        """Sample one completion; see ``rollout.sampler.Sampler``. Its prompt says to which engine it goes, whatever its session."""
        request = self._request(prompt_token_ids, sampling, priority)
        is_long, is_resumable = request.sampling.max_tokens > CARRIED_BLOCK_TOKENS, sampling.is_resumable
        streams = bool(sampling.stop) or (self._carries_tokens and is_resumable and is_long)
        num_restarts, asked_at = 0, time.time()
        engines, engine_seconds = dict[str, None](), 0.0
        while True:
            state = GenerationState(has_logprobs=sampling.reports_logprobs)
            state.engines, state.engine_seconds = engines, engine_seconds
            text = CompletionText(self._tokenizer, sampling)
            begin = NOTHING_SAMPLED
            if generation is not None and is_resumable:
                begin, generation.partial_output = generation.begin, state.partial_output
                self._tracked[state] = request.request_id
            try:
                async for _ in self._blocks(request, state, text, begin, streams=streams):
                    pass
            finally:
                self._tracked.pop(state, None)
            if state.has_ended:
                break
            num_restarts += 1  # its engine died, and it is not resumable
            engine_seconds = state.engine_seconds
        return Completion(
            prompt_token_ids=request.prompt_token_ids,
            text=text.finish()[0],
            engines=tuple(state.engines),
            engine_seconds=state.engine_seconds,
            asked_at=asked_at,
            **state.fields() | {"num_aborts": state.num_aborts + num_restarts},
        )

    async def collect_open_tokens(self) -> None:
        """Fetch the engines' tokens of the generations that a checkpoint reads. An engine that dies meanwhile is dropped."""
        states_in: dict[str | None, list[GenerationState]] = {}
        for state, generation_id in self._tracked.items():
            states_in.setdefault(self.pool.engine_of(generation_id), []).append(state)

        async def fetch(engine: InferenceEngine) -> None:
            await self._turns.next()  # engines may answer all at once
            try:
                await fetch_partial_outputs(engine, states_in.get(engine.name, ()))
            except EngineDeadError as error:
                self.drop_engine(engine, error)

        await run_together({f"collect-{engine.name}": fetch(engine) for engine in self.engines})

    async def stream_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Sample one completion in blocks; see ``rollout.sampler.Sampler``."""
        if not sampling.is_resumable:
            whole = await self.generate_tokens(prompt_token_ids, sampling, priority=priority)
            in_one_block = fields_of(whole)
            del in_one_block["prompt_token_ids"]
            yield CompletionDelta(**in_one_block)
            return
        asked_at, state = time.time(), GenerationState(has_logprobs=sampling.reports_logprobs)
        text = CompletionText(self._tokenizer, sampling)
        request = replace(self._request(prompt_token_ids, sampling, priority), stream_interval=None)
        async with aclosing(self._blocks(request, state, text, NOTHING_SAMPLED, streams=True)) as blocks:
            async for block in blocks:
                is_last = block.finish_reason is not None
                if not len(block.token_ids) and not is_last:
                    continue  # an engine died, or was paused before its first token
                of_all: dict[str, Any] = {"num_cached_tokens": state.num_cached_tokens or 0, "num_aborts": 0}
                if is_last:
                    of_all |= {
                        "num_aborts": state.num_aborts,
                        "engines": tuple(state.engines),
                        "engine_seconds": state.engine_seconds,
                        "asked_at": asked_at,
                    }
                new_text = text.finish()[1] if is_last else text.take()
                yield CompletionDelta(text=new_text, **fields_of(block) | of_all)

    def statistics(self) -> dict[str, float]:
        """Requests, tokens (delivered, and abandoned), aborts and engine failures so far, and the load now."""
        counts = {f"{name}_total": float(count) for name, count in self._counts.items()}
        return counts | self.pool.statistics() | {"policy_version": float(self.policy_version)}

    def _request(
        self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams, priority: int
    ) -> EngineRequest:
        """The engine request of one generation. Raises ``PromptTooLongError``."""
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {sampling.max_tokens}")
        budget = min(sampling.max_tokens, self.max_model_len - len(prompt_token_ids))
        if budget < 1:
            raise PromptTooLongError(len(prompt_token_ids), self.max_model_len)
        self._counts["requests"] += 1
        stream_interval = None if sampling.stop else CARRIED_BLOCK_TOKENS
        if sampling.stop or budget < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=budget, min_tokens=min(sampling.min_tokens, budget), stop=())
        return EngineRequest(
            request_id=f"{self._name}-{next(self._request_numbers)}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            priority=priority,
            stream_interval=stream_interval,
        )

    async def _blocks(
        self,
        request: EngineRequest,
        state: GenerationState,
        text: CompletionText,
        begin: EngineOutput,
        *,
        streams: bool,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the tokens of one generation, first those it begins with, from whichever engines are alive; count them, and add them to
        ``text``. A stop string ends the block in which it ends, and ``state``."""
        try:
            state.add(begin)
            await self._turns.next()
            if len(begin.token_ids):
                yield _until_stop_string(begin, state, text)
            while (rest := state.next_call(request)) is not None:
                async with aclosing(self._call(rest, state, request.request_id, streams=streams)) as blocks:
                    async for block in blocks:
                        state.add(block)
                        # Many may come at once. An aborted call is still in its slot, so that the placement knows it.
                        await self._turns.next()
                        is_abort = block.finish_reason is FinishReason.ABORT
                        if is_abort and not request.sampling.is_resumable:
                            yield block
                            return
                        yield _until_stop_string(continued(block) if is_abort else block, state, text)
                        if state.has_stop_string:
                            return
            if not state.has_ended:
                state.add(BUDGET_USED)
                yield BUDGET_USED
        finally:
            self._counts["aborts"] += state.num_aborts
            if state.has_ended:
                self._counts["tokens"] += state.num_tokens
                record_tokens(state.num_tokens)
            else:
                num_tokens = len(state.partial_output().token_ids)
                self._counts["abandoned_tokens"] += num_tokens
                record_cut_off(num_tokens)

    async def _call(
        self,
        request: EngineRequest,
        state: GenerationState,
        generation_id: str,
        *,
        streams: bool,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield what one engine samples of a generation; its death becomes an abort, even if it does not react any more."""
        before, clock = state.engine_seconds, asyncio.get_running_loop().time
        asked = clock()
        await self.pool.wait_for_engine()
        began, num_tokens = clock(), 0
        slot = self.pool.begin_call(generation_id, request)
        report_engine(slot.engine.name)
        state.engines[slot.engine.name] = None
        try:
            blocks = slot.engine.stream(request) if streams else generate_once(slot.engine, request)
            async with aclosing(blocks):
                while True:
                    with slot.cut_off.block():
                        block = await anext(blocks, None)
                    if block is None:
                        return
                    state.engine_seconds = before + clock() - asked
                    num_tokens += len(block.token_ids)
                    self.pool.note_sampled(max(block.versions.distinct, default=0))
                    yield block
        except EngineDeadError as error:
            state.engine_seconds = before + clock() - asked
            self.drop_engine(slot.engine, error)
        finally:
            self.pool.end_call(slot, generation_id, num_tokens, clock() - began)
        await self._turns.next()
        yield ABORTED


def _until_stop_string(block: EngineOutput, state: GenerationState, text: CompletionText) -> EngineOutput:
    """Add a block, the last one of ``state``, to ``text``; the part of it before the end of a stop string, which ends ``state`` there."""
    # A last end-of-sequence or stop token is text only on demand.
    is_stopped = block.finish_reason is FinishReason.STOP and not text.includes_stop
    num_kept = text.push(block.token_ids[:-1] if is_stopped else block.token_ids)
    if num_kept is None:
        return block
    num_before = state.num_tokens - len(block.token_ids)
    state.truncate(num_kept)
    return head_of(block, max(0, num_kept - num_before))
