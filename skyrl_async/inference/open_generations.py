"""The generations of a client that a checkpoint can read while they go on.

Flows in: generations as they begin, and engines to ask. Flows out: the tokens of each so far, also those that an engine has not
handed over yet. Does not know who takes checkpoints, nor when.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.continuation import hold_partial_outputs
from skyrl_async.inference.generation_state import GenerationState
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.rollout.sampler import NOTHING_SAMPLED, OpenGeneration
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import EngineOutput


class FollowedGenerations:
    """Those in flight that somebody follows."""

    def __init__(self) -> None:
        self._joined: set[GenerationState] = set()

    @contextmanager
    def following(self, generation: OpenGeneration | None, joined: GenerationState) -> Iterator[EngineOutput]:
        """Let ``generation`` read ``joined`` while it grows; gives what it begins with."""
        if generation is None:
            yield NOTHING_SAMPLED
            return
        generation.follow(joined.partial_output)
        self._joined.add(joined)
        try:
            yield generation.begin
        finally:
            self._joined.discard(joined)

    async def collect(
        self, engines: Sequence[InferenceEngine], on_death: Callable[[InferenceEngine, EngineDeadError], None]
    ) -> None:
        """Have the generations know what is in the engines now; what an engine that dies meanwhile has sampled is lost."""

        async def ask(engine: InferenceEngine) -> None:
            try:
                await hold_partial_outputs(engine, tuple(self._joined))
            except EngineDeadError as error:
                on_death(engine, error)

        await run_together({f"collect-{engine.name}": ask(engine) for engine in engines})
