"""How many groups are in flight where engines run out of cache."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skyrl_async.inference.cache_limit import CacheLimit
from skyrl_async.inference.protocol import EngineLoad
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings


class Observed:
    """A limit with the engines and the groups that it is shown."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.limit = CacheLimit(most, least)
        self.num_preemptions = Counter[str]()
        self.step = 0

    def observe(
        self,
        in_flight: int,
        *,
        preempted: int = 0,
        waiting: int = 0,
        cache_use: float = 0.5,
        steps: int = 0,
        engine: str = "engine-0",
    ) -> bool:
        self.num_preemptions[engine] += preempted
        self.step += steps
        load = EngineLoad(num_preemptions=self.num_preemptions[engine])
        of_all = EngineLoad(num_waiting=waiting, cache_use=cache_use)
        return self.limit.observe(engine, load, of_all, in_flight=in_flight, step=self.step)


def test_preemptions_take_a_quarter_of_the_groups_in_flight_at_once_and_no_more_until_these_have_drained() -> None:
    observed = Observed(100)
    assert observed.observe(80, preempted=5) and observed.limit.limit == 60
    assert not observed.observe(79, preempted=5) and observed.limit.limit == 60
    assert not observed.observe(60, preempted=1), "this one is of the limit before, too"
    assert observed.observe(60, preempted=1) and observed.limit.limit == 45


def test_a_limit_grows_by_two_percent_a_step_while_it_holds_groups_back_and_nothing_waits() -> None:
    observed = Observed(400)
    observed.observe(400, preempted=1)
    assert observed.limit.limit == 300
    observed.observe(300)
    observed.observe(300, steps=1)
    assert observed.limit.limit == 300, "something was preempted in this step"
    observed.observe(300, steps=1)
    assert observed.limit.limit == 306
    observed.observe(306, waiting=2)
    observed.observe(306, steps=1)
    assert observed.limit.limit == 306, "requests waited in engines"
    observed.observe(306, cache_use=0.95)
    observed.observe(306, steps=1)
    assert observed.limit.limit == 306, "the caches were full"
    observed.observe(200, steps=1)
    assert observed.limit.limit == 306, "it held nothing back"
    for _ in range(30):
        observed.observe(observed.limit.limit, steps=1)
    assert observed.limit.limit == 400


def test_a_small_limit_grows_by_a_group() -> None:
    observed = Observed(8)
    observed.observe(4, preempted=1)
    assert observed.limit.limit == 3
    observed.observe(3, steps=1)
    observed.observe(3, steps=1)
    assert observed.limit.limit == 4


def test_engines_that_begin_anew_say_nothing_of_the_room_until_they_preempt() -> None:
    observed = Observed(100)
    assert observed.observe(80, preempted=50)
    observed.num_preemptions.clear()
    assert not any(observed.observe(60, engine=engine) for engine in ("engine-0", "engine-1"))
    assert observed.limit.limit == 60
    assert observed.observe(60, preempted=1)


class LimitMachine(RuleBasedStateMachine):
    """Any observations: the limit stays in its bounds, is cut only by preemptions and grows only with steps."""

    def __init__(self) -> None:
        super().__init__()
        self.observed = Observed(20, least=3)

    @rule(in_flight=st.integers(0, 20), preempted=st.integers(0, 2), waiting=st.integers(0, 1), steps=st.integers(0, 2))
    def observe(self, in_flight: int, preempted: int, waiting: int, steps: int) -> None:
        before = self.observed.limit.limit
        is_cut = self.observed.observe(in_flight, preempted=preempted, waiting=waiting, steps=steps)
        after = self.observed.limit.limit
        assert after <= before or (steps and not is_cut and not preempted and not waiting)
        assert after >= before or (is_cut and preempted)

    @invariant()
    def is_in_bounds(self) -> None:
        assert 3 <= self.observed.limit.limit <= 20


TestLimitMachine = LimitMachine.TestCase
TestLimitMachine.settings = settings(stateful_step_count=40)


@given(room=st.integers(5, 60), most=st.integers(60, 100))
def test_the_limit_stays_close_to_the_room_of_engines_that_preempt_above_it(room: int, most: int) -> None:
    observed = Observed(most)
    limits = []
    for _ in range(400):
        in_flight = observed.limit.limit
        observed.observe(in_flight, preempted=max(0, in_flight - room), steps=1)
        limits.append(in_flight)
    assert max(limits[100:]) <= room + max(1, 0.02 * room)
    assert sum(limits[100:]) / 300 >= 0.75 * room


def test_a_run_whose_engines_preempt_has_fewer_groups_in_flight_until_steps_have_passed_without() -> None:
    settings = SimulationSettings(
        mini_batch_size=4, max_staleness_steps=3, num_workers=16, num_steps=60, seconds_per_token=1e-4
    )

    async def main() -> tuple[list[int], int]:
        simulation = Simulation(settings)
        pool, staleness, most_running = simulation.client.pool, simulation.staleness, list[int]()

        async def beat() -> None:
            num_preemptions = 0
            while True:
                await asyncio.sleep(1.0)
                most_running.append(staleness.num_running)
                num_preemptions += len(most_running) == 20
                pool.report_load("engine-0", EngineLoad(num_preemptions=num_preemptions))

        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(beat())
            await simulation.run()
            beating.cancel()
        return most_running, simulation.trainer.totals.trained_groups

    most_running, num_trained = run_in_virtual_time(main())
    assert num_trained == 60 * 4
    before, after = most_running[19], most_running[20:]
    assert min(after[5:40]) <= 0.75 * before < max(after[-100:])
