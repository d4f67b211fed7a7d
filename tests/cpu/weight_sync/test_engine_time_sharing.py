"""Engines on devices that others compute on: one at a time, nobody starves, and no schedule stands still (virtual time)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.device_leases import DeviceGroup, groups_by_member
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Completion, Group, SamplingParams
from skyrl_async.weight_sync.engine_time_sharing import EngineTimeSharing

SHARED = SimulationSettings(
    mean_tokens=100.0,
    num_steps=5,
    mini_batch_size=2,
    num_engines=2,
    seconds_per_token=1e-3,
    step_seconds=0.5,
    gather_seconds=0.2,
    send_seconds=0.4,
    stage_seconds=0.1,
    load_seconds=0.3,
    shared_by=(("policy", "generate"),),
)


def watched(simulation: Simulation) -> None:
    """Have the run fail where something computes beside the engines, or engines run in somebody else's turn."""
    policy, group = simulation.policy, simulation.device_groups.get("generate")

    def alone(member: str, call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def checked(*arguments: object) -> object:
            result = None
            for is_over in (False, True):
                if group is not None and simulation.device_groups.get(member) is group:
                    assert group.statistics().holder == member
                    assert all(engine._shared.is_paused for engine in simulation.client.engines)
                result = result if is_over else await call(*arguments)
            return result

        return checked

    for name in ("forward_backward", "step", "gather_weights"):
        setattr(policy, name, alone("policy", getattr(policy, name)))
    for engine in simulation.engines:
        resume = engine.resume

        async def resumed(resume: Callable[[], Awaitable[None]] = resume) -> None:
            assert group is None or group.statistics().holder == "generate"
            await resume()

        engine.resume = resumed


def logprob_stages(policy: ModelledPolicy) -> dict[str, Callable[[Group], Awaitable[Group]]]:
    async def work(group: Group) -> Group:
        await asyncio.sleep(0.05)
        return group

    return {"ref_logp": work, "logp": work}


def run(job: SimulationSettings, **parts: object) -> Simulation:
    async def main() -> Simulation:
        simulation = Simulation(job, **parts)
        watched(simulation)
        async with asyncio.timeout(3600):
            await simulation.run()
        left = [group.statistics() for group in simulation.device_groups.values()]
        assert all((turns.holder, turns.waiting) == (None, ()) for turns in left), "a turn was not given back"
        return simulation

    return run_in_virtual_time(main())


placements = st.sampled_from(
    [
        ("policy", "generate"),
        ("generate", "ref"),
        ("logp", "generate"),
        ("policy", "ref", "logp", "generate"),
        ("policy", "ref", "logp"),
        (),
    ]
)


@pytest.mark.slow
@given(
    placement=placements,
    staleness_policy=st.sampled_from(["wait", "window", "mask", "resample", "allow"]),
    bound=st.integers(0, 3),
    every=st.integers(1, 4),
    sigma=st.sampled_from([0.0, 0.8, 2.0]),
    min_slice_s=st.sampled_from([0.0, 0.3, 5.0]),
    streamed=st.booleans(),
    deterministic=st.booleans(),
    limits=st.booleans(),
    validates=st.booleans(),
    seed=st.integers(0, 5),
)
@example(("policy", "generate"), "wait", 1, 1, 2.0, 0.0, True, False, False, True, 0)
@example(("policy", "ref", "logp", "generate"), "wait", 0, 1, 2.0, 5.0, True, True, True, True, 0)
def test_whatever_shares_devices_and_however_staleness_is_bound_every_step_is_trained(
    placement: tuple[str, ...],
    staleness_policy: str,
    bound: int,
    every: int,
    sigma: float,
    min_slice_s: float,
    streamed: bool,
    deterministic: bool,
    limits: bool,
    validates: bool,
    seed: int,
) -> None:
    """Training waits for the oldest group while its engines stand still: that would be for ever."""
    job = replace(
        SHARED,
        shared_by=(placement,),
        staleness_policy="wait" if deterministic else staleness_policy,
        max_staleness_steps=bound,
        publish_every_steps=min(every, bound + 1),
        sigma=sigma,
        min_generation_slice_s=min_slice_s,
        stream_mini_batch=streamed,
        deterministic=deterministic,
        count_buffered_as_in_flight=limits,
        eval_interval_steps=2 if validates else 0,
        num_eval_prompts=2 if validates else 0,
        seed=seed,
    )
    simulation = run(job, prepare_with=logprob_stages)
    assert simulation.trainer.served_version == simulation.trainer.trained_version == job.num_steps
    assert [len(step) for step in simulation.policy.steps] == [job.mini_batch_size] * job.num_steps + [0]
    if job.staleness_policy == "wait":
        assert simulation.trainer.totals.staleness_max <= bound


@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_one_step_off_on_shared_devices_is_the_sum_of_both(sigma: float) -> None:
    job = replace(SHARED, is_one_step_off=True, max_staleness_steps=1, stream_mini_batch=False, sigma=sigma)
    shared, separate = run(job), run(replace(job, shared_by=()))
    assert shared.policy.steps == separate.policy.steps, "the same groups, sampled under the same versions"
    assert shared.trainer.totals.training_seconds > separate.trainer.totals.training_seconds


def test_synchronous_training_is_the_same_wherever_it_is_placed_and_validation_is_generation() -> None:
    job = replace(SHARED, max_staleness_steps=0, eval_interval_steps=1, num_eval_prompts=2)
    steps = [run(replace(job, shared_by=shared)).policy.steps for shared in [(), (("policy", "generate"),)]]
    assert steps[0] == steps[1]


def test_engines_that_die_under_any_lease_cost_no_group() -> None:
    async def main() -> None:
        simulation = Simulation(SHARED)
        watched(simulation)
        pause, num_pauses = simulation.engines[0].pause, 0

        async def dying(mode: object) -> None:
            nonlocal num_pauses
            num_pauses += 1
            if num_pauses == 4:
                simulation.engines[0].kill()
            await pause(mode)

        simulation.engines[0].pause = dying
        await simulation.run()
        assert simulation.client.engines == (simulation.engines[1],)
        assert simulation.trainer.trained_version == SHARED.num_steps

    run_in_virtual_time(main())


class Letters:
    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return ""


class Setting:
    """One engine that makes 100 tokens a second, and a group that it shares with ``ref``."""

    def __init__(self, min_slice_s: float) -> None:
        clock = asyncio.get_running_loop().time
        self.engine = ModelledEngine("engine-0", num_tokens_of=lambda prompt, seed: 990, half_speed_requests=1e9)
        self.client = InferenceEngineClient([self.engine], tokenizer=Letters(), max_model_len=10_000)
        self.group: DeviceGroup = groups_by_member([["ref", "generate"]])["ref"]
        self.turns = EngineTimeSharing(
            self.client,
            self.group,
            min_slice_s=min_slice_s,
            is_busy=lambda: self.client.pool.is_busy,
            trace=Trace(None, clock),
            clock=clock,
        )

    async def completion(self) -> Completion:
        return await self.client.generate_tokens((1,), SamplingParams(max_tokens=1000))

    async def compute(self, seconds: float) -> None:
        async with self.group.lease("ref"):
            await asyncio.sleep(seconds)


def test_generation_gets_its_shortest_turn_between_any_two_of_others_and_loses_no_token() -> None:
    async def main() -> None:
        setting = Setting(min_slice_s=2.0)

        async def always() -> None:
            while True:
                await setting.compute(3.0)

        async with setting.turns.running():
            other = asyncio.ensure_future(always())
            started = asyncio.get_running_loop().time()
            completion = await setting.completion()
            took = asyncio.get_running_loop().time() - started
            other.cancel()
        assert len(completion.token_ids) == 990 and completion.num_aborts == 0
        assert took == pytest.approx(9.9 + 3.0 * 4, abs=0.1), (
            "9.9 s of sampling in 5 turns, 4 turns of others between them"
        )
        held = setting.group.statistics()
        assert held.num_leases["generate"] <= took / 2.0 + 1

    run_in_virtual_time(main())


def test_a_removed_engine_samples_only_on_its_devices_until_it_is_empty() -> None:
    class Draining(ModelledEngine):
        async def evict(self, request_ids: Collection[str] | None = None) -> None:
            """What it has cannot be continued elsewhere."""

    async def main() -> None:
        setting = Setting(min_slice_s=2.0)
        leaving = Draining("engine-1", num_tokens_of=lambda prompt, seed: 990, half_speed_requests=1e9)
        await setting.client.add_engine(leaving)
        async with setting.turns.running(), asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(setting.completion())
            await asyncio.sleep(1.0)
            removed = tasks.create_task(setting.client.remove_engine("engine-1"))
            for _ in range(2):
                async with setting.group.lease("ref"):
                    assert leaving._shared.is_paused and not removed.done()
                    await asyncio.sleep(3.0)
            await removed
            assert leaving.num_sampled_tokens == 990
            assert asyncio.get_running_loop().time() == pytest.approx(9.9 + 2 * 3.0, abs=0.1)

    run_in_virtual_time(main())


def test_idle_engines_release_their_devices_at_once() -> None:
    async def main() -> None:
        setting, loop = Setting(min_slice_s=1000.0), asyncio.get_running_loop()
        async with setting.turns.running():
            await setting.compute(1.0)
            await setting.compute(1.0)
            assert loop.time() == 2.0
            sampling = asyncio.ensure_future(setting.completion())
            await asyncio.sleep(1.0)
            await setting.compute(1.0)
            assert sampling.done() and loop.time() >= 1000.0
        await sampling

    run_in_virtual_time(main())


def test_deadlines_of_rollouts_stand_still_while_others_compute() -> None:
    async def main() -> None:
        setting = Setting(min_slice_s=0.0)
        async with setting.turns.running():
            async with setting.client.pool.deadlines.within(2.0):
                await asyncio.sleep(0.5)
                await setting.compute(100.0)
            with pytest.raises(TimeoutError):
                async with setting.client.pool.deadlines.within(2.0):
                    await asyncio.sleep(3.0)

    run_in_virtual_time(main())


def test_whoever_holds_engines_keeps_their_turn_and_whoever_comes_later_waits_for_the_next() -> None:
    async def main() -> None:
        setting, loop = Setting(min_slice_s=0.0), asyncio.get_running_loop()
        async with setting.turns.running(), asyncio.TaskGroup() as tasks:
            async with setting.turns.holding():
                tasks.create_task(setting.compute(5.0))
                await asyncio.sleep(3.0)
                assert setting.group.statistics().holder == "generate"
            await asyncio.sleep(0.1)
            assert setting.group.statistics().holder == "ref" and setting.engine._shared.is_paused
            async with setting.turns.holding():
                assert loop.time() == 8.0 and not setting.engine._shared.is_paused

    run_in_virtual_time(main())


def test_an_error_under_a_lease_ends_the_run_with_that_error() -> None:
    async def main() -> None:
        setting = Setting(min_slice_s=0.0)

        async def broken(mode: object) -> None:
            raise ZeroDivisionError("a bug")

        setting.engine.pause = broken
        with pytest.raises(ZeroDivisionError, match="a bug"):
            async with setting.turns.running():
                await setting.compute(1.0)

    run_in_virtual_time(main())


def test_engines_that_are_all_gone_block_no_lease() -> None:
    async def main() -> None:
        setting = Setting(min_slice_s=1.0)
        async with setting.turns.running():
            setting.engine.kill()
            setting.client.drop_engine(setting.engine, EngineDeadError("killed"))
            async with asyncio.timeout(10.0):
                await setting.compute(1.0)
                await setting.compute(1.0)

    run_in_virtual_time(main())


def test_without_a_group_nothing_is_waited_for() -> None:
    simulation = run(replace(SHARED, shared_by=()))
    assert simulation.engine_time_sharing is None and not simulation.device_groups
    assert all("timing/wait_for_devices" not in values for _, values in simulation.logged)
