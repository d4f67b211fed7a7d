"""What the trainer needs of a generator: all samples of a prompt, as training rows. How it samples is its own business."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from skyrl_async.rollout.request import GroupRequest
from skyrl_async.types import Trajectory

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

    ``members.play_members`` sees to what is finished. A generator that does nothing of this begins its groups anew in a resumed run,
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
