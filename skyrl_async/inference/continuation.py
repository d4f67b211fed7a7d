"""One generation from as many engine calls as it takes: what a weight update cuts off goes on in token space.

    request ──> segment ──abort──> prompt + tokens so far, rest of the budget ──> segment ──> ... ──> the end

Flows in: a request, and a way to run one segment of it. Flows out: its tokens, without the aborts. It runs beside an engine, in
the engine's process, so that a publish does not send every request in flight to its caller and back; and in the client, which
also goes from a dead engine to another. It knows neither routing nor pauses: a paused engine holds what it is sent.
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

Segment = Callable[[EngineRequest], AsyncGenerator[EngineOutput, None]]
"""Runs one engine call; the last block has a finish reason, ``abort`` where the generation is to go on."""


def _always() -> bool:
    return True


async def continued(
    request: EngineRequest, state: GenerationState, segment: Segment, may_continue: Callable[[], bool] = _always
) -> AsyncGenerator[EngineOutput, None]:
    """Yield what ``segment`` yields, call after call, until the generation has ended; ``state`` follows, and may have ended before.

    An abort comes out only of a request that is not resumable, or may not go on here, and is then the end.
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
        async with aclosing(segment(rest)) as blocks:
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
    """One call's blocks. Raises ``InferenceError`` when the engine ends it without a reason."""
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
    """Like ``engine.stream``, across aborts; ``state`` follows."""
    return continued(request, state, lambda rest: stream_once(engine, rest), may_continue)


async def generate_to_end(
    engine: InferenceEngine, request: EngineRequest, state: GenerationState, may_continue: Callable[[], bool] = _always
) -> EngineOutput:
    """Like ``engine.generate``, across aborts; ``state`` follows."""
    blocks = continued(request, state, lambda rest: generate_once(engine, rest), may_continue)
    async with aclosing(blocks):
        async for _ in blocks:
            pass
    return state.output()


def new_state(request: EngineRequest) -> GenerationState:
    """Where the segments of ``request`` are state."""
    return GenerationState(has_logprobs=request.sampling.reports_logprobs)


async def fetch_partial_outputs(engine: InferenceEngine, generations: Collection[GenerationState]) -> None:
    """Have generations know what the engine has sampled of them and not handed over yet. Raises what the engine raises."""
    calls = [state.call_id for state in generations if state.call_id is not None]
    if not calls:
        return
    held = await engine.partial_outputs(calls)
    for state in generations:
        state.set_engine_output(held)


class OpenGenerations:
    """Those in flight that somebody follows."""

    def __init__(self) -> None:
        self._states: set[GenerationState] = set()

    @contextmanager
    def tracking(self, generation: OpenGeneration | None, state: GenerationState) -> Iterator[EngineOutput]:
        """Let ``generation`` read ``state`` while it grows; gives what it begins with."""
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
        """Have the generations know what is in the engines now; what an engine that dies meanwhile has sampled is lost."""

        async def ask(engine: InferenceEngine) -> None:
            try:
                await fetch_partial_outputs(engine, tuple(self._states))
            except EngineDeadError as error:
                on_death(engine, error)

        await run_together({f"collect-{engine.name}": ask(engine) for engine in engines})
