"""What Ray reserves for the groups of a plan: a real Ray, real policy workers."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from skyrl_async.composition.closing import ClosingStack
from skyrl_async.composition.ray_cluster import (
    _indices_by_group,
    engine_resources,
    reserve_devices,
    worker_resources,
)
from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.device_plan import DevicePlan, StageSize, Unit, resolve
from skyrl_async.config.rules.placement import device_plan
from skyrl_async.config.schema.run import Config, PlacementConfig
from skyrl_async.errors import ConfigError, EngineStartError
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from tests.cpu.tiny_policies import trajectories
from tests.cpu.training.test_policy_workers import settings_with_policy


def config_of(*overrides: str) -> Config:
    """Of a run that joins a Ray."""
    return from_overrides("placement.ray_address=auto", "engine.device=cpu", "training.device=cpu", *overrides)


def plan_of(num_available: int, *overrides: str) -> DevicePlan:
    plan = device_plan(config_of(*overrides), num_available)
    assert plan is not None
    return plan


def test_without_groups_actors_reserve_what_their_own_keys_say_and_go_where_ray_likes() -> None:
    config = from_overrides("placement.num_cpus_per_engine=0.5", "placement.num_cpus_per_worker=2")
    engine, worker = engine_resources(config, None, ["engine-0"]), worker_resources(config, None, "policy")
    assert (engine.num_cpus, engine.strategies) == (0.5, None)
    assert (worker.num_cpus, worker.strategies) == (2.0, None)


def test_bundles_are_assigned_machine_by_machine_and_the_policy_gets_this_one() -> None:
    sizes = {
        "policy": StageSize(num_actors=4, num_key="training.num_workers"),
        "ref": StageSize(num_actors=2, num_key="n"),
        "generate": StageSize(num_actors=2, num_key="engine.num_engines", devices_per_actor=2, per_actor_key="tp"),
    }
    plan = resolve(
        PlacementConfig(groups=[["policy"], ["ref"], ["generate"]], devices=[4, 2, 4]),
        sizes=sizes,
        needed=sizes,
        unit=Unit.gpu,
        num_available=10,
    )
    nodes = ["b", "a", "b", "a", "a", "a", "b", "a"]
    assert _indices_by_group(plan, nodes, "a") == [[1, 3, 4, 5], [0, 2], [7, 6]]
    assert _indices_by_group(plan, nodes, "b") == [[0, 2, 1, 3], [4, 5], [6, 7]]

    placement = PlacementConfig(groups=[["ref"], ["policy"], ["generate"]], devices=[2, 4, 4])
    last = resolve(placement, sizes=sizes, needed=sizes, unit=Unit.gpu, num_available=10)
    assert _indices_by_group(last, nodes, "b") == [[4, 5], [0, 2, 1, 3], [6, 7]]


def test_what_loads_published_weights_gets_the_bundles_of_this_machine_that_the_policy_leaves() -> None:
    stages = ("ref", "logp", "policy")
    plan = resolve(
        PlacementConfig(groups=[[stage] for stage in stages], devices=[1, 1, 1]),
        sizes={stage: StageSize(num_actors=1, num_key="n") for stage in stages},
        needed=stages,
        unit=Unit.gpu,
        num_available=3,
    )
    assert _indices_by_group(plan, ["b", "a", "a"], "a") == [[0], [2], [1]]


@pytest.mark.slow
class TestOnRay:
    async def test_actors_get_their_parts_of_their_group_s_bundles_and_so_do_their_successors_until_the_run_ends(
        self, ray_session: None, tmp_path: Path
    ) -> None:
        # Inside of the test, Ray sends them whole: its workers do not import what this file does.
        def place(_: object) -> Any:
            names = ray._private.worker.global_worker.core_worker.resource_ids()
            return ray.get_runtime_context().get_assigned_resources(), sorted(names)

        @ray.remote
        class Engine:
            """Stands for one: where it is, not what it does, is looked at."""

        config = config_of(
            "placement.groups=[[ref],[policy,generate]]", "placement.devices=[1,2]", "engine.num_engines=2"
        )
        async with ClosingStack() as stack:
            bundles = await reserve_devices(config, stack)
            resources = worker_resources(config, bundles, "policy")
            workers = await PolicyWorkers.start(
                settings_with_policy(tmp_path / "policy"),
                num_workers=1,
                num_cpus_per_worker=resources.num_cpus,
                num_gpus_per_worker=resources.num_gpus,
                scheduling_strategies=resources.strategies,
            )
            stack.push_async_callback(workers.close)
            figures = await workers.forward_backward(trajectories(2, seed=1), [1.0, -1.0], 0)
            assert figures["num_tokens"] > 0
            resources = engine_resources(config, bundles, ["engine-0.3", "engine-1"])
            engines = [
                Engine.options(num_cpus=resources.num_cpus, scheduling_strategy=strategy).remote()
                for strategy in resources.strategies or ()
            ]
            actors = [ray.get_actor(workers.names[0]), *engines]
            places = [await actor.__ray_call__.remote(place) for actor in actors]
            assert [resources for resources, _ in places] == [{"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 0.5}]
            assert all(any(name.startswith("bundle_group_1_") for name in names) for _, names in places)
            ray.kill(engines[0])
            again = Engine.options(
                num_cpus=resources.num_cpus, scheduling_strategy=(resources.strategies or ())[0]
            ).remote()
            assert await again.__ray_call__.remote(place) == places[1]
            (reserved,) = {strategy.placement_group for strategy in resources.strategies or ()}
            assert placement_group_table(reserved)["state"] == "CREATED"
        assert stack.failures == []
        assert placement_group_table(reserved)["state"] == "REMOVED"

    async def test_a_cluster_without_enough_devices_is_refused_with_the_numbers(self, ray_session: None) -> None:
        groups = "placement.groups=[[policy],[ref],[generate]]"
        too_many = config_of(groups, "placement.devices=[4,1,1]")
        async with ClosingStack() as stack:
            with pytest.raises(ConfigError, match=r"sum to at most the 4 CPU slots of the cluster, got \[4,1,1\]"):
                await reserve_devices(too_many, stack)

    async def test_actors_that_reserve_more_than_the_cluster_has_between_them_are_refused(
        self, ray_session: None
    ) -> None:
        each = ["placement.num_cpus_per_engine=3", "placement.num_cpus_per_worker=1"]
        async with ClosingStack() as stack:
            assert await reserve_devices(config_of(*each), stack) is None
            expected = (
                r"reserves 5 CPUs \(1 engines x 3 \+ 2 workers of training x 1\) and the Ray cluster has 4; lower"
            )
            with pytest.raises(ConfigError, match=expected):
                await reserve_devices(config_of(*each, "training.num_workers=2"), stack)

    async def test_devices_that_others_hold_are_not_waited_for_for_ever(self, ray_session: None) -> None:
        config = config_of("placement.groups=[[policy,generate]]", "placement.devices=[3]")
        async with ClosingStack() as stack:
            await reserve_devices(config, stack)
            expected = (
                r"needs 3 CPU slots, 3 of them on one machine, .* within 0.2 s: 1 of the cluster's 4 are free; wait"
            )
            with pytest.raises(ConfigError, match=expected):
                await reserve_devices(config, stack, timeout_s=0.2)
        assert stack.failures == []

    async def test_an_engine_that_is_added_where_no_device_is_left_is_refused(self, ray_session: None) -> None:
        config = config_of("placement.groups=[[policy],[generate]]", "placement.devices=[1,2]", "engine.num_engines=2")
        async with ClosingStack() as stack:
            bundles = await reserve_devices(config, stack)
            assert len(engine_resources(config, bundles, ["engine-1", "engine-0.2"]).strategies or ()) == 2
            with pytest.raises(
                EngineStartError, match="has devices for 2 engines, none for engine-2: remove an engine"
            ):
                engine_resources(config, bundles, ["engine-1", "engine-2"])
