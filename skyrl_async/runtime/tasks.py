"""Running several coroutines together, with the first failure raised as itself.

Flows in: named coroutines. Flows out: their results in order. Knows nothing of what they do.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(coroutines: Mapping[str, Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Run the coroutines in one task group, as tasks of these names, and return their results in order.

    The first failure cancels the others and is raised bare: callers tell errors apart by class, which a group hides.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
    except BaseExceptionGroup as failures:
        root = first_failure(failures)
        raise root from root.__cause__
    return tuple(task.result() for task in tasks)


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the group failed of: its first exception that is no group and was not raised while its task was being cancelled.

    A task group lists its body's own error last, behind whatever its tasks made of their cancellation.
    """
    leaves = list(_leaves(failures))
    return next((leaf for leaf in leaves if not _comes_of_cancellation(leaf)), leaves[0])


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        for inner in failure.exceptions:
            yield from _leaves(inner)
    else:
        yield failure


def _comes_of_cancellation(failure: BaseException) -> bool:
    """Whether it was raised while a cancellation was under way that was not a timeout's."""
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        if isinstance(error, asyncio.CancelledError):
            return True
        is_timeout = isinstance(error, TimeoutError) and isinstance(error.__cause__, asyncio.CancelledError)
        if is_timeout or isinstance(
            error, BaseExceptionGroup
        ):  # raised again out of a group that was looked into before
            return False
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
