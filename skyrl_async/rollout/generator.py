"""The interface between the trainer and a generator, and a helper that runs a group's samples side by side.

A generator takes requests for all samples of a prompt, and returns training rows. How it samples is its own business.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import ENDS_RUN, GenerationError
from skyrl_async.rollout.group_state import SampleStates
from skyrl_async.rollout.sampler import record_tokens
from skyrl_async.runtime.progress import GroupProgress
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Prompt, SamplingParams, Trajectory

T = TypeVar("T")
Generate = TypeVar("Generate", bound=Callable[..., Any])
_MARK = "_keeps_samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A request for all samples of one prompt."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    """For each generation call; a multi-turn generator may stop earlier to respect its token budget."""
    seed: int = 0
    """Distinct per admission; used by engines that honour seeds."""
    priority: int = 0
    """Passed on to the engine: older admissions are smaller."""
    is_evaluation: bool = False
    sample_indices: tuple[int, ...] | None = None
    """Samples to generate; None: all. An earlier try finished the others."""
    progress: GroupProgress = field(default_factory=GroupProgress, repr=False, compare=False)
    """A generator may report the activity of its samples here."""
    sample_states: SampleStates = field(default_factory=SampleStates, repr=False, compare=False)
    """States of the samples: a generator continues from them, and updates them for the next try and for checkpoints."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples to generate, in [0, num_samples)."""
        return tuple(range(self.num_samples)) if self.sample_indices is None else self.sample_indices


class Generator(Protocol):
    """Generates the samples of prompts; any harness that can return ``Trajectory`` rows can be one.

    A generator may let checkpoints keep partial samples, through ``request.sample_states``:

    - *snapshot*: ``track(index, read)`` registers a function that a checkpoint calls for a ``SampleState``, on the event loop. It
      must not wait, and the state it returns must not change later. ``finish(index, rows)`` reports a finished sample, and
      ``fail(index, rows, why)`` what a failed one had sampled, for the record.
    - *restore*: ``restore_finished(index)`` returns the rows of a sample that was finished in the checkpoint, to be returned
      unchanged. ``restore(index)`` returns the ``SampleState`` of an unfinished one, with the generator's own JSON to continue from.
      ``discard(index)`` reports a state that cannot be continued.

    ``run_samples`` does this for finished samples. A generator without any of it restarts its groups in a resumed run; the run
    counts them.
    """

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return the trajectories of ``request.indices``, in order or with their ``sample_index``. Cancellation must release everything.

        Any exception fails the rollout: it is retried, then counted, and its prompt is kept.
        """


def keeps_samples(generate: Generate) -> Generate:
    """Mark a ``generate`` that can lose single samples.

    It passes finished samples to ``request.sample_states.finish``, exactly as it would return them, and generates only
    ``request.indices``. After a failure or a cancellation the next try then asks for the missing samples alone. Without the mark
    (a generator that rewards the rows of another one, say), kept samples are ignored and the whole group is retried.
    """
    setattr(generate, _MARK, True)
    return generate


def does_keep_samples(generator: Generator) -> bool:
    return hasattr(generator.generate, _MARK)


async def run_samples(
    request: GroupRequest,
    name: str,
    run: Callable[[int], Awaitable[T]],
    rows_of: Callable[[T], Sequence[Trajectory] | None],
    of_rows: Callable[[tuple[Trajectory, ...]], T],
) -> tuple[T, ...]:
    """Run the requested samples concurrently, and return their results in order.

    If some fail, the others run to their end, and the first failure is raised unchanged. The errors of ``ENDS_RUN`` are raised at once and
    cancel the others.

    Args:
        request: names the samples, and keeps finished ones.
        name: prefix of the tasks' names.
        run: sample index -> result.
        rows_of: result -> training rows; None if the sample has to be generated again.
        of_rows: training rows -> result, for a sample that a checkpoint holds as finished.
    """
    states = request.sample_states
    results: dict[int, T] = {}
    failures: dict[int, Exception] = {}

    async def run_one(index: int) -> None:
        if (rows := states.restore_finished(index)) is not None:
            results[index] = of_rows(rows)
            record_tokens(sum(row.num_sampled_tokens for row in rows))
            return
        try:
            with request.progress.playing(index):
                results[index] = await run(index)
        except ENDS_RUN:
            raise
        except SystemExit as error:  # else the process would end here, and say that all is well
            failures[index] = GenerationError(f"sample {index} of {request.prompt.uid} called sys.exit({error.code!r})")
            states.forget([index])
        except Exception as error:  # a sample may fail in any way: raised once the others are done
            failures[index] = error
            states.forget([index])
        else:
            if (finished := rows_of(results[index])) is not None:
                states.finish(index, finished)

    await run_together({f"{name}-{request.prompt.uid}-{index}": run_one(index) for index in request.indices})
    for failure in failures.values():
        if len(failures) > 1:
            failure.add_note(
                f"{len(failures)} of {len(request.indices)} samples failed: {', '.join(map(str, failures))}"
            )
        raise failure
    return tuple(results[index] for index in request.indices)
