"""Which engine requests belong in: the state machine under Hypothesis, and moves across weight updates in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.composition.parts import placement
from skyrl_async.config.load import from_overrides
from skyrl_async.errors import ConfigError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.generation import belongs_to
from skyrl_async.inference.placement import SHARE_TOKENS, Placement, PlacementSettings
from skyrl_async.inference.prefix_index import BLOCK_TOKENS
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import EngineRequest, PauseMode, SamplingParams, WeightUpdate
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater

ENGINES = ("e0", "e1", "e2")


def call(number: int, priority: int, **sampling: float) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=9, **sampling),
        priority=priority,
    )


def client_of(engines: Sequence[ModelledEngine], oldest_weight: float) -> InferenceEngineClient:
    return InferenceEngineClient(
        engines,
        max_model_len=1000,
        placement=PlacementSettings(oldest_weight=oldest_weight, oldest_age=8),
    )


def updater_of(client: InferenceEngineClient) -> EngineWeightUpdater:
    return EngineWeightUpdater(
        client=client,
        pause_mode=PauseMode.KEEP,
        trace=Trace(None, lambda: 0.0),
        clock=asyncio.get_running_loop().time,
    )


def are_together(engines: list[str]) -> bool:
    """Whether no engine occurs again after another one."""
    found = [engine for engine, _ in groupby(engines)]
    return len(found) == len(set(found))


@given(
    requests=st.lists(st.tuples(st.integers(0, 100), st.sampled_from(ENGINES)), min_size=1, max_size=60),
    weight=st.floats(1.0, 20.0),
)
def test_after_an_update_each_engine_has_neighbours_by_age_and_all_weigh_the_same(
    requests: list[tuple[int, str]], weight: float
) -> None:
    state = Placement(PlacementSettings(oldest_weight=weight, oldest_age=50))
    where = {}
    for number, (priority, engine) in enumerate(requests):
        state.start(f"g{number}", call(number, priority), engine)
        where[f"g{number}"] = engine
    leaving = state.rearrange(ENGINES)
    for engine, request_ids in leaving.items():
        for request_id in request_ids:
            generation = request_id.replace("r", "g")
            assert where[generation] == engine
            state.end(generation)
            number = int(generation[1:])
            target = state.choose(dict.fromkeys(ENGINES), generation, call(number, requests[number][0]))
            assert target != engine
            where[generation] = target
    by_age = sorted(where, key=lambda generation: requests[int(generation[1:])][0])
    assert are_together([where[generation] for generation in by_age])
    weights = {engine: 0.0 for engine in ENGINES}
    for generation, engine in where.items():
        weights[engine] += state.weight_of(requests[int(generation[1:])][0])
    for engine in ENGINES:
        assert state.load(engine) == pytest.approx(weights[engine])
    share = (sum(weights.values()) + len(requests)) / len(ENGINES)
    assert all(load <= share + weight + 1e-6 for load in weights.values()), "room is kept for new ones"


def test_requests_of_neighbouring_ages_stay_together_in_whichever_engine_they_are() -> None:
    state = Placement(PlacementSettings(oldest_weight=1.0, oldest_age=50))
    for number in range(12):
        state.start(f"g{number}", call(number, number), ENGINES[2 - number // 4])
    state.rearrange(ENGINES)  # makes room for as many as have come
    assert not state.rearrange(ENGINES)


@given(priorities=st.lists(st.integers(0, 300), min_size=2, max_size=30), weight=st.floats(1.0, 20.0))
def test_an_older_request_never_weighs_less(priorities: list[int], weight: float) -> None:
    state = Placement(PlacementSettings(oldest_weight=weight, oldest_age=50))
    for number, priority in enumerate(priorities):
        state.start(f"g{number}", call(number, priority), "e0")
    weights = [state.weight_of(priority) for priority in sorted(priorities)]
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == pytest.approx(1.0) and all(1 <= w <= weight + 1e-9 for w in weights)


def prompt_of(session: int, num_blocks: int) -> EngineRequest:
    """A call whose prompt begins as all shorter ones of its session."""
    tokens = np.arange(num_blocks * BLOCK_TOKENS, dtype=np.int32) * 10 + session
    return replace(call(0, 0), prompt_token_ids=tokens)


class RoutingMachine(RuleBasedStateMachine):
    """Requests, updates and engines that come and go in any order: the choice is as cheap as the emptiest engine without a cache, and as
    those that have most of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement()
        self.engines = dict.fromkeys(ENGINES)
        self.open: dict[str, tuple[str, tuple[int, int]]] = {}
        """Generation -> engine, and session and blocks of its prompt."""
        self.cached: dict[str, dict[int, int]] = {name: {} for name in ("e0", "e1", "e2", "e3")}
        """Engine -> session -> blocks of its longest prompt there."""
        self.num_started = 0

    @precondition(lambda self: self.engines)
    @rule(session=st.integers(0, 3), num_blocks=st.integers(0, 5))
    def start(self, session: int, num_blocks: int) -> None:
        num_cached = {name: min(num_blocks, self.cached[name].get(session, 0)) for name in self.engines}

        def price(name: str, num_cached: int) -> float:
            num_running = sum(engine == name for engine, _ in self.open.values())
            return (1 + num_running) * (SHARE_TOKENS + BLOCK_TOKENS * (num_blocks - num_cached))

        self.num_started += 1
        generation = f"g{self.num_started}"
        name = self.placement.choose(self.engines, generation, prompt_of(session, num_blocks))
        assert price(name, num_cached[name]) <= min(price(one, 0) for one in self.engines)
        most = max(num_cached.values())
        assert price(name, num_cached[name]) <= min(price(one, most) for one in num_cached if num_cached[one] == most)
        self.open[generation] = name, (session, num_blocks)
        self.cache(name, session, num_blocks)

    def cache(self, name: str, session: int, num_blocks: int) -> None:
        self.cached[name][session] = max(num_blocks, self.cached[name].get(session, 0))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.open)))
        self.placement.end(generation)
        del self.open[generation]

    @rule()
    def update_weights(self) -> None:
        """Only what running calls compute anew is cached then."""
        self.placement.weights_updated()
        self.cached = {name: {} for name in self.cached}
        for name, (session, num_blocks) in self.open.values():
            self.cache(name, session, num_blocks)

    @rule(name=st.sampled_from(["e0", "e1", "e2", "e3"]))
    def join_or_leave(self, name: str) -> None:
        """The last request of an engine that leaves ends; a namesake started anew knows nothing."""
        if name in self.engines:
            del self.engines[name]
            for generation in [one for one, (engine, _) in self.open.items() if engine == name]:
                self.placement.end(generation)
                del self.open[generation]
            self.placement.forget(name)
            self.cached[name] = {}
        else:
            self.engines[name] = None
        self.placement.engines_changed()

    @invariant()
    def loads_add_up(self) -> None:
        for name in self.engines:
            assert self.placement.load(name) == sum(engine == name for engine, _ in self.open.values())

    @precondition(lambda self: self.engines)
    @invariant()
    def the_emptiest_is_found(self) -> None:
        def size(name: str) -> tuple[float, int]:
            return self.placement.load(name), self.placement.caches.num_blocks(name)

        assert self.placement._emptiest(self.engines) == min(self.engines, key=size)


TestRoutingMachine = RoutingMachine.TestCase
TestRoutingMachine.settings = settings(stateful_step_count=50)


def test_without_settings_requests_count_alike_and_none_moves() -> None:
    state = Placement()
    for number in range(6):
        state.start(f"g{number}", call(number, number * 100), "e0")
    assert state.load("e0") == 6.0 and not state.rearrange(ENGINES)
    state.end("g0")
    assert state.load("e0") == 5.0


def test_engines_that_are_empty_again_weigh_the_same() -> None:
    state = Placement(PlacementSettings(oldest_weight=7.0, oldest_age=60))
    for number in range(30):
        state.start(f"g{number}", call(number, number, presence_penalty=1.0), ENGINES[number % 3])
    state.rearrange(ENGINES)
    for number in range(30):
        state.end(f"g{number}")
    assert [state.load(engine) for engine in ENGINES] == [0.0, 0.0, 0.0]


def test_an_engine_that_joins_a_single_one_gets_requests_however_many_came_before_it() -> None:
    state = Placement(PlacementSettings(oldest_weight=7.0, oldest_age=60))
    for number in range(1000):  # 20 run at a time, and come between two updates
        state.start(f"g{number}", call(number, number), "e0")
        if number >= 20:
            state.end(f"g{number - 20}")
        if number % 20 == 19:
            state.rearrange(["e0"])
    for number in range(1000, 1020):
        state.start(f"g{number}", call(number, number), "e1")
    leaving = state.rearrange(["e0", "e1"])
    num_left = {engine: 20 - len(leaving.get(engine, ())) for engine in ("e0", "e1")}
    assert num_left["e1"] + len(leaving.get("e0", ())) > 10
    assert num_left["e0"] + len(leaving.get("e1", ())) > 10


def test_a_request_that_cannot_be_continued_stays() -> None:
    state = Placement(PlacementSettings(oldest_weight=4.0, oldest_age=10))
    for number in range(6):
        state.start(f"g{number}", call(number, number, presence_penalty=1.0), "e2")
    assert not state.rearrange(ENGINES)


@pytest.mark.parametrize("mode", PauseMode)
def test_a_generation_that_is_moved_keeps_its_tokens_and_their_versions(mode: PauseMode) -> None:
    async def main() -> None:
        engines = [
            ModelledEngine(name, num_tokens_of=lambda prompt, seed: 200, half_speed_requests=1e9) for name in ENGINES
        ]
        client = client_of(engines, oldest_weight=8.0)

        async def update() -> None:
            await asyncio.sleep(1.0)
            for engine in engines:
                await engine.pause(mode)
                await engine.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0))
            leaving = client.pool.rearrange()
            for engine in engines:
                await engine.evict(leaving.get(engine.name, ()))
                await engine.resume()
            await asyncio.sleep(0.1)
            running = client.pool._placement._running.values()
            oldest_first = sorted(running, key=lambda one: one.call.priority)
            assert len(running) == 24
            assert are_together([one.engine for one in oldest_first])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(update())
            calls = [
                tasks.create_task(client.generate_tokens((i,), SamplingParams(max_tokens=500), priority=i // 3))
                for i in range(24)
            ]
        for done in calls:
            completion = done.result()
            assert completion.token_ids.tolist() == [i % 100 for i in range(200)]
            assert tuple(completion.versions) == (0,) * 100 + (1,) * 100
        assert client.num_abandoned_tokens == 0

    run_in_virtual_time(main())


LONG_TAILED = SimulationSettings(
    mini_batch_size=16,
    group_size=4,
    num_engines=4,
    half_speed_requests=16.0,
    mean_tokens=100.0,
    sigma=0.8,
    seconds_per_token=1e-4,
    max_staleness_steps=3,
    num_steps=24,
    pause_mode=PauseMode.KEEP,
    block_tokens=1 << 20,
)


def simulate(settings: SimulationSettings) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(settings)
        await simulation.trainer.run()
        return simulation

    return run_in_virtual_time(main())


@pytest.mark.slow
def test_a_run_that_waits_for_its_oldest_groups_is_faster_when_they_have_engines_with_few_others() -> None:
    weighed = simulate(LONG_TAILED)
    alike = simulate(replace(LONG_TAILED, oldest_weight=1.0))
    assert weighed.trainer.totals.training_seconds < alike.trainer.totals.training_seconds
    assert weighed.trainer.totals.trained_tokens == alike.trainer.totals.trained_tokens
    assert weighed.trainer.totals.wasted_tokens == weighed.trainer.totals.groups_over_bound == 0


@pytest.mark.slow
def test_where_nothing_waits_for_the_oldest_fewer_of_their_tokens_are_too_old() -> None:
    settings = replace(LONG_TAILED, seconds_per_token=3e-4)
    of_policy = {
        (policy, weight): simulate(replace(settings, staleness_policy=policy, oldest_weight=weight)).trainer.totals
        for policy in ("mask", "allow")
        for weight in (None, 1.0)
    }
    masked, alike = of_policy["mask", None], of_policy["mask", 1.0]
    assert masked.masked_tokens < alike.masked_tokens
    assert masked.trained_tokens / masked.training_seconds > alike.trained_tokens / alike.training_seconds
    assert of_policy["allow", None].groups_over_bound < of_policy["allow", 1.0].groups_over_bound


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 20), kill_at=st.floats(0.5, 30.0), mode=st.sampled_from(PauseMode))
def test_moves_and_an_engine_that_dies_lose_no_group(seed: int, kill_at: float, mode: PauseMode) -> None:
    async def main() -> Simulation:
        settings = replace(LONG_TAILED, seed=seed, num_steps=8, pause_mode=mode, load_seconds=0.1)
        simulation = Simulation(settings)

        async def kill() -> None:
            await asyncio.sleep(kill_at)
            simulation.engines[0].kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.trainer.totals.trained_groups == 8 * LONG_TAILED.mini_batch_size
    assert simulation.client.statistics()["running_requests"] == 0
    assert all(simulation.client.pool._placement.load(f"engine-{i}") == pytest.approx(0) for i in range(4))


@pytest.mark.slow
def test_the_weight_comes_from_the_configuration() -> None:
    several = placement(from_overrides("engine.num_engines=2", "trainer.max_staleness_steps=4"))
    assert several == PlacementSettings(oldest_weight=7.5, oldest_age=4 * 8)
    assert placement(from_overrides("trainer.max_staleness_steps=4")) == several, "one engine, and others may join it"
    assert placement(from_overrides("engine.num_engines=2", "trainer.max_staleness_steps=0")) is None
    assert placement(from_overrides("engine.num_engines=2", "engine.oldest_request_weight=1")) is None
    for policy in ("mask", "resample", "allow"):
        others = placement(from_overrides("engine.num_engines=2", f"trainer.staleness_policy={policy}"))
        assert others == PlacementSettings(oldest_weight=2.0, oldest_age=4 * 8)
    with pytest.raises(ConfigError, match="engine.oldest_request_weight must be >= 1 or null, got 0.5"):
        from_overrides("engine.oldest_request_weight=0.5")


def test_a_call_is_part_of_the_request_that_it_continues() -> None:
    assert belongs_to("trainer-0-5.2.1", {"trainer-0-5.2"}) and belongs_to("trainer-0-5", {"trainer-0-5"})
    assert not belongs_to("trainer-0-51", {"trainer-0-5"}) and not belongs_to("trainer-0-5", {"trainer-0-5.2"})


def test_an_engine_that_joins_gets_its_share_at_the_next_update_and_one_that_was_removed_gets_nothing() -> None:
    async def main() -> None:
        def engine(name: str) -> ModelledEngine:
            return ModelledEngine(name, num_tokens_of=lambda prompt, seed: 400, half_speed_requests=1e9)

        client = client_of([engine("e0"), engine("e1")], oldest_weight=1.0)
        updater = updater_of(client)

        async def publish(version: int) -> dict[str, int]:
            """How many requests each engine has afterwards."""
            update = WeightUpdate(version=version, path="", manifest={}, num_bytes=0)
            async with updater.loaded(list(client.engines), update, None, None):
                pass
            await asyncio.sleep(0.01)
            return dict(Counter(one.engine for one in client.pool._placement._running.values()))

        async def change() -> None:
            await asyncio.sleep(0.5)
            assert await publish(1) == {"e0": 24}, "room is kept for as many new ones"
            await asyncio.sleep(0.5)
            await client.add_engine(engine("e2"))
            assert await publish(2) == {"e0": 8, "e1": 8, "e2": 8}
            removed = await client.remove_engine("e0")
            assert isinstance(removed, ModelledEngine) and not removed._calls
            assert await publish(3) == {"e1": 12, "e2": 12}
            dead = next(one for one in client.engines if one.name == "e1")
            assert isinstance(dead, ModelledEngine)
            dead.kill()
            await asyncio.sleep(0)
            assert await publish(4) == {"e2": 24}

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(change())
            calls = [
                tasks.create_task(client.generate_tokens((i,), SamplingParams(max_tokens=500), priority=i))
                for i in range(24)
            ]
        assert all(call.result().token_ids.tolist() == [i % 100 for i in range(400)] for call in calls)
        assert client.pool._placement._weights == {"e2": pytest.approx(0)}

    run_in_virtual_time(main())


def test_requests_that_move_leave_their_engines_some_at_a_time() -> None:
    """The last tokens of thousands at once would stop the event loop."""
    num_leaving = list[int]()

    class Noting(ModelledEngine):
        async def evict(self, request_ids: Collection[str] | None = None) -> None:
            num_leaving.append(len(request_ids or ()))
            await super().evict(request_ids)

    async def main() -> None:
        engines = [Noting(name, num_tokens_of=lambda prompt, seed: 200, half_speed_requests=1e9) for name in ENGINES]
        client = client_of(engines, oldest_weight=8.0)
        updater = updater_of(client)
        async with asyncio.TaskGroup() as tasks:
            for i in range(900):
                tasks.create_task(client.generate_tokens((i,), SamplingParams(max_tokens=500), priority=i // 100))
            await asyncio.sleep(1.0)
            update = WeightUpdate(version=1, path="", manifest={}, num_bytes=0)
            async with updater.loaded(list(engines), update, None, None):
                pass
        assert sum(num_leaving) > 300 and max(num_leaving) <= 256 // len(engines)

    run_in_virtual_time(main())
