"""When the next optimizer step may begin: the gate by itself, in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.trainer.step_gate import StepGate


async def begins(waiting: Coroutine[Any, Any, None]) -> bool:
    """Whether it needs no further event."""
    try:
        async with asyncio.timeout(1):
            await waiting
    except TimeoutError:
        return False
    return True


def test_weights_stay_until_the_copy_of_the_step_before_is_sent() -> None:
    async def main() -> None:
        gate = StepGate()
        assert gate.may_step and await begins(gate.until_may_step())
        gate.copied(1)
        assert not gate.may_step and not await begins(gate.until_may_step())
        gate.sent(1)
        assert await begins(gate.until_may_step())

    run_in_virtual_time(main())


def test_an_old_version_that_is_through_does_not_release_the_copy_of_a_later_one() -> None:
    async def main() -> None:
        gate = StepGate()
        gate.handed_on()
        gate.copied(2)
        gate.through(1)
        assert not await begins(gate.until_may_step())

    run_in_virtual_time(main())


def test_gradients_wait_for_all_but_two_steps_and_for_every_step_before_a_checkpoint() -> None:
    async def main() -> None:
        gate = StepGate()
        for version in (1, 2):
            gate.handed_on()
            assert await begins(gate.until_may_begin(all_are_through=False)), version
        gate.handed_on()
        assert not await begins(gate.until_may_begin(all_are_through=False))
        gate.through(1)
        assert await begins(gate.until_may_begin(all_are_through=False))
        assert not await begins(gate.until_may_begin(all_are_through=True))
        gate.through(2)
        gate.through(3)
        assert await begins(gate.until_may_begin(all_are_through=True))

    run_in_virtual_time(main())


def test_closing_waits_for_the_optimizer_step_in_progress_and_lets_none_follow() -> None:
    async def main() -> None:
        gate, order = StepGate(), []

        async def step(seconds: float) -> None:
            async with gate.stepping():
                await asyncio.sleep(seconds)
                order.append("stepped")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(step(5))
            await asyncio.sleep(1)
            await gate.close()
            order.append("closed")
        assert order == ["stepped", "closed"] and not await begins(step(0))

    run_in_virtual_time(main())
