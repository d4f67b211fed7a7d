"""Turns of the event loop."""

import asyncio

from skyrl_async.runtime.tasks import Turns


async def test_in_a_turn_of_the_event_loop_few_tasks_go_on_and_all_do_in_the_order_in_which_they_asked() -> None:
    turns, gone_on = Turns(3), list[int]()

    async def go_on(number: int) -> None:
        await turns.next()
        gone_on.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(go_on(number))
        while len(gone_on) < 20:
            before = len(gone_on)
            await asyncio.sleep(0)
            assert len(gone_on) - before <= 3
    assert gone_on == list(range(20))
