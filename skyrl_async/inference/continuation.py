"""One generation from as many engine calls as it takes: after a weight update it continues in token space.

    request ──> call ──abort──> prompt + tokens so far, rest of the budget ──> call ──> ... ──> the end

This runs beside an engine, in the engine's process, so that a publish does not send every request in flight to its caller and back. It
also runs in the client, which continues in another engine when one dies. A paused engine holds its requests, so pauses are unknown here.
"""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager

from skyrl_async.errors import EngineDeadError, InferenceError
from skyrl_async.inference.generation_state import GenerationState, without_abort
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.rollout.sampler import NOTHING_SAMPLED, OpenGeneration
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason

EngineCall = Callable[[EngineRequest], AsyncGenerator[EngineOutput, None]]
"""Runs one engine call. Its last block has a finish reason; ``abort`` means that the generation is to continue."""


def _always() -> bool:
    return True


async def call_until_end(
    request: EngineRequest, state: GenerationState, call: EngineCall, may_continue: Callable[[], bool] = _always
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the blocks of call after call until the generation has ended, and add them to ``state``, which may have ended before.

    An abort is yielded, as the end, only if the request is not resumable or ``may_continue`` says no.
    """
    for number in itertools.count():
        if state.has_ended:
            return
        if state.num_remaining(request) < 1:
            end = EngineOutput(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.LENGTH)
            state.add(end)
            yield end
            return
        rest = state.remaining_request(request, f"{request.request_id}.{number}" if number else request.request_id)
        state.begin_call(rest.request_id)
        is_continued = True
        async with aclosing(call(rest)) as blocks:
            async for block in blocks:
                state.add(block)
                if block.finish_reason is FinishReason.ABORT:
                    is_continued = request.sampling.is_resumable and may_continue()
                yield without_abort(block) if is_continued else block
        if not is_continued:
            return


def belongs_to(call_id: str, request_ids: Collection[str]) -> bool:
    """Whether an engine call is one of these requests, or continues one of them."""
    parts = call_id.split(".")
    return any(".".join(parts[:end]) in request_ids for end in range(1, len(parts) + 1))


async def stream_once(engine: InferenceEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    """The blocks of one call. Raises ``InferenceError`` if the engine ends it without a finish reason."""
    reason = None
    blocks: AsyncIterator[EngineOutput] = engine.stream(request)
    try:
        async for block in blocks:
            reason = block.finish_reason
            yield block
    finally:
        if isinstance(blocks, AsyncGenerator):
            await blocks.aclose()
    if reason is None:
        raise InferenceError(f"{engine.name} ended request {request.request_id} without a finish reason")


async def generate_once(engine: InferenceEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    """One call's tokens as one block. Raises ``InferenceError`` like ``stream_once``."""
    output = await engine.generate(request)
    yield output
    if output.finish_reason is None:
        raise InferenceError(f"{engine.name} ended request {request.request_id} without a finish reason")


def stream_to_end(
    engine: InferenceEngine, request: EngineRequest, state: GenerationState, may_continue: Callable[[], bool] = _always
) -> AsyncGenerator[EngineOutput, None]:
    """``engine.stream``, continued across aborts; blocks are added to ``state``."""
    return call_until_end(request, state, lambda rest: stream_once(engine, rest), may_continue)


async def generate_to_end(
    engine: InferenceEngine, request: EngineRequest, state: GenerationState, may_continue: Callable[[], bool] = _always
) -> EngineOutput:
    """``engine.generate``, continued across aborts; tokens are added to ``state``."""
    blocks = call_until_end(request, state, lambda rest: generate_once(engine, rest), may_continue)
    async with aclosing(blocks):
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


class OpenGenerations:
    """The running generations of a client that a checkpoint reads."""

    def __init__(self) -> None:
        self._states: set[GenerationState] = set()

    @contextmanager
    def tracking(self, generation: OpenGeneration | None, state: GenerationState) -> Iterator[EngineOutput]:
        """Let ``generation`` read ``state`` while it grows; yields the tokens that it begins with."""
        if generation is None:
            yield NOTHING_SAMPLED
            return
        generation.follow(state.partial_output)
        self._states.add(state)
        try:
            yield generation.begin
        finally:
            self._states.discard(state)

    async def collect(
        self, engines: Sequence[InferenceEngine], on_death: Callable[[InferenceEngine, EngineDeadError], None]
    ) -> None:
        """Fetch from every engine what it has sampled and not handed over. The tokens of an engine that dies meanwhile are lost."""

        async def fetch(engine: InferenceEngine) -> None:
            try:
                await fetch_partial_outputs(engine, tuple(self._states))
            except EngineDeadError as error:
                on_death(engine, error)

        await run_together({f"collect-{engine.name}": fetch(engine) for engine in engines})
