"""What the trainer needs of a generator: all samples of a prompt, as training rows. How it samples is its own business."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import NoEngineError
from skyrl_async.rollout.sample_state import SampleStates
from skyrl_async.rollout.sampler import record_tokens
from skyrl_async.runtime.progress import GroupProgress
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Prompt, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What a generator is asked for: all samples of one prompt."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    """Per generation call; a multi-turn generator may stop earlier to respect its token budget."""
    seed: int = 0
    """Distinct per admission; used by engines that honour seeds."""
    priority: int = 0
    """Passed on to the engine: older admissions are smaller."""
    is_evaluation: bool = False
    sample_indices: tuple[int, ...] | None = None
    """The samples asked for; None: all of them. The others were finished by an earlier try."""
    progress: GroupProgress = field(default_factory=GroupProgress, repr=False, compare=False)
    """Where a generator may say what its samples do."""
    saved: SampleStates = field(default_factory=SampleStates, repr=False, compare=False)
    """Where its samples stand: what a generator goes on from, and what it leaves for the next try and for checkpoints."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples asked for, in [0, num_samples)."""
        return tuple(range(self.num_samples)) if self.sample_indices is None else self.sample_indices


Generate = TypeVar("Generate", bound=Callable[..., Any])
_MARK = "_keeps_samples"


class Generator(Protocol):
    """Plays prompts in environments; any harness that can be made to return ``Trajectory`` rows is one.

    A generator may let checkpoints keep what it has sampled, through ``request.saved``:

    - *snapshot*: ``follow(index, where)`` registers a function that a checkpoint calls for a ``SampleState``, on the event loop: it
      must not wait, and what it returns must not change later. ``finish(index, rows)`` says that a sample is finished.
    - *restore*: ``finish_as_saved(index)`` returns the rows of a sample that was finished in the checkpoint that is resumed, to be
      returned as they are; ``take(index)`` the ``SampleState`` of one that was not, with the generator's own JSON to go on from.
      ``discard(index)`` says that it cannot.

    ``play_members`` sees to what is finished. A generator that does nothing of this begins its groups anew in a resumed run,
    which is counted.
    """

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return the trajectories of ``request.indices``, in order or numbered. Cancellation must release what it holds.

        Whatever it raises becomes a failed rollout: tried again, then counted, its prompt kept.
        """
        ...


def keeps_samples(generate: Generate) -> Generate:
    """Marks a ``generate`` of which single samples can be lost.

    It leaves finished ones with ``request.saved.finish``, exactly as it would have returned them, and plays only
    ``request.indices``: when it fails or is cancelled, the next try asks for the others alone. Without the mark, as in a
    generator that rewards what another one returns, nothing that was kept counts and whole groups are tried again.
    """
    setattr(generate, _MARK, True)
    return generate


def does_keep_samples(generator: Generator) -> bool:
    """Whether the generator's ``generate`` is marked."""
    return hasattr(generator.generate, _MARK)


T = TypeVar("T")


async def play_members(
    request: GroupRequest,
    name: str,
    play: Callable[[int], Awaitable[T]],
    rows_of: Callable[[T], Sequence[Trajectory] | None],
    of_rows: Callable[[tuple[Trajectory, ...]], T],
) -> tuple[T, ...]:
    """Play the samples asked for at once, and return what they became, in order.

    When some fail, the others are played to their end, and the first failure is raised as it is; ``NoEngineError`` is raised at
    once and cancels the others.

    Args:
        request: says which samples, and keeps those that finish.
        name: of the tasks.
        play: sample index -> what it became.
        rows_of: what it became -> its training rows; None where it has to be played again.
        of_rows: training rows -> what it became: of a sample that had finished in the run that is resumed, and is not played.
    """
    played: dict[int, T] = {}
    failures: dict[int, Exception] = {}

    async def play_one(index: int) -> None:
        if (rows := request.saved.finish_as_saved(index)) is not None:
            played[index] = of_rows(rows)
            record_tokens(sum(row.num_sampled_tokens for row in rows))
            return
        try:
            with request.progress.playing(index):
                played[index] = await play(index)
        except NoEngineError:
            raise
        except Exception as error:  # a sample may fail in any way: raised once the others are done
            failures[index] = error
            request.saved.forget([index])
        else:
            finished = rows_of(played[index])
            if finished is not None:
                request.saved.finish(index, finished)

    await run_together({f"{name}-{request.prompt.uid}-{index}": play_one(index) for index in request.indices})
    for failure in failures.values():
        if len(failures) > 1:
            failure.add_note(
                f"{len(failures)} of {len(request.indices)} samples failed: {', '.join(map(str, failures))}"
            )
        raise failure
    return tuple(played[index] for index in request.indices)
