"""Running several coroutines together, with the first failure raised as itself.

Flows in: named coroutines. Flows out: their results in order. Knows nothing of what they do.
"""

import asyncio
from collections.abc import Coroutine, Mapping
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
        raise first_failure(failures) from None
    return tuple(task.result() for task in tasks)


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group that is no group itself."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
