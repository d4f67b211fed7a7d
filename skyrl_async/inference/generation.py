"""One generation from as many engine calls as it takes: after a weight update it continues in token space.

    request ──> call ──abort──> prompt + tokens so far, rest of the budget ──> call ──> ... ──> the end

``GenerationState`` has the tokens so far, with log-probs and versions, and why it ended. This runs beside an engine, in the engine's
process, so that a publish does not send every request in flight to its caller and back. It also runs in the client, which continues in
another engine when one dies. A paused engine holds its requests, so pauses are unknown here.
"""

import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from skyrl_async.columns import NO_LOGPROBS, TokenIds, VersionSpans, fields_of
from skyrl_async.errors import InferenceError, PromptTooLongError, RequestRefusedError
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason

EngineCall = Callable[[EngineRequest], AsyncGenerator[EngineOutput, None]]
"""Runs one engine call. Its last block has a finish reason; ``abort`` means that the generation is to continue."""

_COLUMNS = ("token_ids", "logprobs", "versions", "top_logprobs")
"""Fields of ``EngineOutput`` with one entry per token, or none at all."""

_NOTHING = EngineOutput(finish_reason=None)
BUDGET_USED = EngineOutput(finish_reason=FinishReason.LENGTH)
ABORTED = EngineOutput(finish_reason=FinishReason.ABORT)
_MAX_BLOCKS = 256
"""Blocks kept apart: a block of one token takes a hundred times the memory of its token."""


def check_prompt(engine: str, token_ids: TokenIds, *, max_model_len: int, vocabulary_size: int) -> None:
    """Raise ``PromptTooLongError``, or ``RequestRefusedError`` for a token id that the policy has no weights for: vLLM's core would end."""
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(len(token_ids), max_model_len)
    unknown = token_ids[(token_ids < 0) | (token_ids >= vocabulary_size)]
    if unknown.size:
        raise RequestRefusedError(
            f"engine {engine} cannot serve a prompt with token id {unknown[0]}: the policy has 0 to {vocabulary_size - 1}"
        )


class GenerationState:
    """One generation's tokens so far.

    Args:
        has_logprobs: whether every token must have a log-prob; if not, log-probs are dropped.
    """

    def __init__(self, *, has_logprobs: bool = True) -> None:
        self._has_logprobs = has_logprobs
        self._blocks: list[EngineOutput] = []
        self.num_tokens = 0
        """Tokens of the blocks added."""
        self.finish_reason: FinishReason | None = None
        """``stop`` or ``length`` once the generation has ended."""
        self.num_aborts = 0
        self.engines: dict[str, None] = {}
        """Engines that were called, in order of their first call, as the client notes them."""
        self.engine_seconds = 0.0
        """Seconds of its engine calls, and of waiting for an engine, likewise."""
        self.num_cached_tokens: int | None = None
        """Cached tokens of the first call's prompt: later prompts contain tokens of the answer. None before the first token."""
        self.call_id: str | None = None
        """Request id of the open engine call."""
        self._num_calls = 0
        self._is_call_open = False
        self._num_before_call = self._num_aborts_before_call = 0
        self._engine_output: EngineOutput | None = None
        """All tokens, as the engine of the open call has told."""
        self.has_stop_string = False
        """Whether a stop string has ended the generation."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to be sampled."""
        return self.finish_reason is not None

    @property
    def _num_aborts_so_far(self) -> int:
        """Without the one that an output before the end has as its reason."""
        return self.num_aborts if self.has_ended else max(0, self.num_aborts - 1)

    def add(self, output: EngineOutput) -> None:
        """Append a block. Raises ``InferenceError`` if a token lacks its log-prob or version."""
        if not self._has_logprobs:
            output = replace(output, logprobs=NO_LOGPROBS)
        num_tokens, num_logprobs, num_versions = len(output.token_ids), len(output.logprobs), len(output.versions)
        if num_tokens != num_versions or num_logprobs != (num_tokens if self._has_logprobs else 0):
            raise InferenceError(
                f"an engine returned {num_tokens} tokens with {num_logprobs} log-probs and {num_versions} versions; "
                "every token needs one of each"
            )
        if num_tokens:
            if self.num_cached_tokens is None:
                self.num_cached_tokens = output.num_cached_tokens
            self._blocks.append(output)
            if len(self._blocks) > _MAX_BLOCKS:
                self._blocks = [joined(self._blocks)]
            self.num_tokens += num_tokens
        self.num_aborts += output.num_aborts
        if output.finish_reason is None:
            return
        self._is_call_open = False
        if output.finish_reason is FinishReason.ABORT:
            self.num_aborts += 1
        else:
            self.finish_reason = output.finish_reason

    def next_call(self, request: EngineRequest) -> EngineRequest | None:
        """Begin the engine call that samples the rest of ``request``; None when there is nothing left to sample.

        Raises ``InferenceError`` if the engine ended the call before without a finish reason.
        """
        if self._is_call_open:
            engine = next(reversed(self.engines), "an engine")
            raise InferenceError(f"{engine} ended request {self.call_id} without a finish reason")
        if self.has_ended or self.num_tokens >= request.sampling.max_tokens:
            return None
        self.call_id = f"{request.request_id}.{self._num_calls}" if self._num_calls else request.request_id
        self._num_calls += 1
        self._is_call_open = True
        self._num_before_call, self._num_aborts_before_call = self.num_tokens, self.num_aborts
        self._engine_output = None
        return self._remaining_request(request, self.call_id)

    def set_engine_output(self, outputs: Mapping[str, EngineOutput]) -> None:
        """Remember the open call's tokens that its engine has not handed over yet. ``outputs``: request id -> all tokens of that call.

        They are joined here, because ``partial_output`` is called for thousands of generations in one step of the event loop.
        """
        output = outputs.get(self.call_id or "")
        if output is None:
            return
        if not self._has_logprobs:
            output = replace(output, logprobs=NO_LOGPROBS)
        num_aborts = self._num_aborts_before_call + output.num_aborts
        if self._num_before_call:
            output = joined([head_of(self.output(), self._num_before_call), output])
        self._engine_output = replace(output, num_aborts=num_aborts, num_cached_tokens=self.num_cached_tokens or 0)

    def partial_output(self) -> EngineOutput:
        """All tokens known, including those that the engine has not handed over; the finish reason is set once an engine ended it.

        It is None where a stop string did: whoever continues from the tokens finds the string again.
        """
        found = self._engine_output
        if found is not None and len(found.token_ids) > self.num_tokens:
            return found
        reason = None if self.has_stop_string else self.finish_reason
        return EngineOutput(**self.fields() | {"finish_reason": reason, "num_aborts": self.num_aborts})

    def truncate(self, num_tokens: int) -> None:
        """Keep ``num_tokens``: a stop string has ended the generation there."""
        self._blocks = [head_of(self.output(), num_tokens)]
        self.num_tokens = num_tokens
        self.finish_reason = FinishReason.STOP
        self.has_stop_string = True

    def _remaining_request(self, request: EngineRequest, request_id: str) -> EngineRequest:
        """The request for the rest: the prompt of ``request`` plus the tokens so far, and the rest of its budget."""
        if not self.num_tokens:
            return request if request_id == request.request_id else replace(request, request_id=request_id)
        return replace(
            request,
            request_id=request_id,
            prompt_token_ids=np.concatenate([request.prompt_token_ids, self.output().token_ids]),
            sampling=replace(
                request.sampling,
                max_tokens=request.sampling.max_tokens - self.num_tokens,
                min_tokens=max(0, request.sampling.min_tokens - self.num_tokens),
            ),
            num_sampled_tokens=request.num_sampled_tokens + self.num_tokens,
        )

    def output(self) -> EngineOutput:
        """All tokens as one engine call's output. Before the end its reason is ``abort``, which ``num_aborts`` then leaves out."""
        return EngineOutput(**self.fields())

    def fields(self) -> dict[str, Any]:
        """The fields of ``output``."""
        if len(self._blocks) > 1:
            self._blocks = [joined(self._blocks)]
        return fields_of(self._blocks[0] if self._blocks else _NOTHING) | {
            "finish_reason": self.finish_reason or FinishReason.ABORT,
            "num_aborts": self._num_aborts_so_far,
            "num_cached_tokens": self.num_cached_tokens or 0,
        }


class OpenCalls:
    """The states of an engine's open calls, and which of them are to leave it."""

    def __init__(self) -> None:
        self._states: dict[str, GenerationState] = {}
        self._evicted: set[str] = set()

    @contextmanager
    def tracking(self, request: EngineRequest) -> Iterator[GenerationState]:
        """Yield the call's state, to which the caller adds what is sampled."""
        state = GenerationState(has_logprobs=request.sampling.reports_logprobs)
        self._states[request.request_id] = state
        try:
            yield state
        finally:
            self._states.pop(request.request_id, None)
            self._evicted.discard(request.request_id)

    def evict(self, request_ids: Collection[str] | None = None) -> set[str]:
        """Let those requests that are open leave the engine, or all, and return them."""
        leaving = set(self._states) if request_ids is None else set(self._states).intersection(request_ids)
        self._evicted |= leaving
        return leaving

    def is_evicted(self, request_id: str) -> bool:
        """Whether an open request is to leave the engine."""
        return request_id in self._evicted

    def find(self, request_ids: Collection[str]) -> dict[str, GenerationState]:
        """The states of those requests that are open, by id."""
        return {i: self._states[i] for i in request_ids if i in self._states}

    def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """The tokens so far of those requests that are open, by id."""
        return {request_id: state.partial_output() for request_id, state in self.find(request_ids).items()}


def head_of(output: EngineOutput, num_tokens: int) -> EngineOutput:
    """The first tokens of a block that a stop string ends."""
    head = {name: getattr(output, name)[:num_tokens] for name in _COLUMNS}
    return replace(output, **head, finish_reason=FinishReason.STOP)


def joined(blocks: Sequence[EngineOutput]) -> EngineOutput:
    """Consecutive blocks of a stream, at least one, as one."""
    return EngineOutput(
        token_ids=np.concatenate([block.token_ids for block in blocks]),
        logprobs=np.concatenate([block.logprobs for block in blocks]),
        versions=VersionSpans.joined(block.versions for block in blocks),
        top_logprobs=tuple(itertools.chain.from_iterable(block.top_logprobs for block in blocks)),
        finish_reason=blocks[-1].finish_reason,
        num_aborts=sum(block.num_aborts for block in blocks),
        num_cached_tokens=blocks[0].num_cached_tokens,
    )


async def call_until_end(
    request: EngineRequest, state: GenerationState, call: EngineCall, may_continue: Callable[[], bool] = lambda: True
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the blocks of call after call until the generation has ended, and add them to ``state``, which may have ended before.

    An abort is yielded, as the end, only if the request is not resumable or ``may_continue`` says no.
    """
    while (rest := state.next_call(request)) is not None:
        async with aclosing(call(rest)) as blocks:
            async for block in blocks:
                state.add(block)
                is_abort = block.finish_reason is FinishReason.ABORT
                if is_abort and not (request.sampling.is_resumable and may_continue()):
                    yield block
                    return
                yield continued(block) if is_abort else block
    if not state.has_ended:
        state.add(BUDGET_USED)
        yield BUDGET_USED


def continued(block: EngineOutput) -> EngineOutput:
    """The last block of an aborted call as a block before the end."""
    return replace(block, finish_reason=None, num_aborts=block.num_aborts + 1)


def belongs_to(call_id: str, request_ids: Collection[str]) -> bool:
    """Whether an engine call is one of these requests, or continues one of them."""
    parts = call_id.split(".")
    return any(".".join(parts[:end]) in request_ids for end in range(1, len(parts) + 1))


async def generate_once(engine: InferenceEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    """One call's tokens as one block."""
    yield await engine.generate(request)


async def generate_to_end(
    engine: InferenceEngine,
    request: EngineRequest,
    state: GenerationState,
    may_continue: Callable[[], bool] = lambda: True,
) -> EngineOutput:
    """``engine.generate``, continued across aborts; tokens are added to ``state``."""
    async with aclosing(call_until_end(request, state, partial(generate_once, engine), may_continue)) as blocks:
        async for _ in blocks:
            pass
    return state.output()


async def fetch_partial_outputs(engine: InferenceEngine, generations: Collection[GenerationState]) -> None:
    """Tell generations which tokens the engine has sampled and not handed over yet. Raises what the engine raises."""
    calls = [state.call_id for state in generations if state.call_id is not None]
    if not calls:
        return
    outputs = await engine.partial_outputs(calls)
    for state in generations:
        state.set_engine_output(outputs)
