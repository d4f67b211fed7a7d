"""Plays the samples of a group side by side, so that each can fail alone.

Flows in: a request, and a way to play one sample. Flows out: what each became; in ``request.saved``, the rows of those that
finished, for the next try and for checkpoints. Does not know how a sample is played.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from skyrl_async.errors import NoEngineError
from skyrl_async.rollout.request import GroupRequest
from skyrl_async.rollout.token_usage import record_tokens
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Trajectory

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
