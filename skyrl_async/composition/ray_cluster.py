"""The Ray of a run, and what it reserves: one placement group with the bundles of every device group.

    placement.ray_address ──> a Ray of the run's own, or one it joins ──> left when the run ends
    device plan ──> placement group (all of it or nothing) ──> resources of engines and policy workers
                                                           └──> removed when the run ends

Knows no actor.
"""

import asyncio
import atexit
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skyrl_async.composition.closing import ClosingStack, descendants, kill_descendants
from skyrl_async.config.rules.device_plan import DevicePlan, Unit
from skyrl_async.config.rules.placement import (
    device_plan,
    device_unit,
    gpus_per_engine,
    gpus_per_worker,
    num_cpu_slots,
    num_training_workers,
    stage_sizes,
)
from skyrl_async.config.schema.run import Config, PlacementConfig
from skyrl_async.errors import ConfigError, DeadlineError, EngineStartError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 60.0
"""Ray takes milliseconds where devices are free. A cluster that starts machines takes minutes: fail with a message instead."""
_MAX_STARTS = 2


async def start_ray(config: PlacementConfig, stack: ClosingStack) -> None:
    """Start a Ray of the run's own, or join one; it is left with ``stack``.

    Raises:
        ConfigError: the one to join is not there.
        DeadlineError: its own did not come up.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    stack.callback_in_thread("Ray", end_ray)
    try:
        _init_ray(config)
    except SystemExit:
        # Ray's own handler of SIGTERM, while Ray was starting: let the run's handler have the signal.
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        raise
    finally:
        # Ray puts a handler of its own in place, which aborts this process and its clean-up with it.
        signal.signal(signal.SIGTERM, on_sigterm)


def end_ray() -> None:
    """End Ray. Blocks for ever where Ray's processes hang; they end with this process, so its exit must not wait for them again."""
    import ray

    atexit.unregister(ray.shutdown)
    ray.shutdown()


def _init_ray(config: PlacementConfig) -> None:
    import ray

    if config.ray_address != "local":
        try:
            ray.init(address=config.ray_address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"placement.ray_address={config.ray_address} cannot be joined: {error}") from error
        return
    for num_starts in range(1, _MAX_STARTS + 1):
        before = descendants()
        try:
            _start_local_ray(num_cpu_slots(config))
            return
        # Ray raises a bare Exception when its processes take longer than its 30 seconds.
        except Exception as error:
            kill_descendants(but=before)
            if num_starts == _MAX_STARTS:
                raise DeadlineError(
                    f"Ray did not start, in {_MAX_STARTS} attempts: {error} A machine that is very busy is one reason; "
                    "placement.ray_address joins a Ray that runs already"
                ) from error
            logger.warning("Ray did not start (%s); it is started once more", error)


def _start_local_ray(num_cpus: int | None) -> None:
    import ray

    # Silences a notice that a local Ray is protected by a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=512 << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorResources:
    """What Ray reserves for each actor of a stage, and where."""

    num_cpus: float
    """CPU slots."""
    num_gpus: float
    strategies: "tuple[PlacementGroupSchedulingStrategy, ...] | None" = None
    """One per actor; None: Ray puts them where it likes."""


class ReservedDevices:
    """The reserved devices of a plan; made by ``reserve_devices``."""

    def __init__(self, plan: DevicePlan, group: "PlacementGroup", nodes: Sequence[str], here: str) -> None:
        self.plan = plan
        self._group = group
        self._indices = _indices_by_group(plan, nodes, here)

    def resources(self, stage: str) -> ActorResources:
        """What Ray reserves for each actor of a stage."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self.plan.group_of(stage)
        indices = self._indices[self.plan.groups.index(group)]
        strategies = tuple(
            PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=indices[group.bundle_of_actor(stage, actor)],
            )
            for actor in range(group.sizes[stage].num_actors)
        )
        reserved = group.reservation(stage)
        is_gpu = self.plan.unit is Unit.gpu
        return ActorResources(
            num_cpus=0.0 if is_gpu else reserved, num_gpus=reserved if is_gpu else 0.0, strategies=strategies
        )


async def reserve_devices(
    config: Config, stack: ClosingStack, *, timeout_s: float = RESERVE_TIMEOUT_S
) -> ReservedDevices | None:
    """Reserve what ``placement.groups`` says until ``stack`` ends, and then end what still runs there; None without groups.

    Raises ``ConfigError`` when the cluster has too little for all actors, or has not got the groups' devices free within ``timeout_s``.
    """
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    if config.placement.groups is None:
        _require_resources(config, ray.cluster_resources())
        return None
    plan = device_plan(config, int(ray.cluster_resources().get(device_unit(config).value, 0.0)))
    assert plan is not None
    bundles = [{plan.unit.value: float(size)} for size in _bundle_sizes(plan)]
    group = placement_group(bundles, strategy="PACK")
    stack.callback_in_thread("the placement group", lambda: remove_placement_group(group))
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        free = ray.available_resources().get(plan.unit.value, 0.0)
        raise ConfigError(_not_free(plan, free, timeout_s)) from None
    for line in plan.table().splitlines():
        logger.info("%s", line)
    node_of = placement_group_table(group)["bundles_to_node_id"]
    here = ray.get_runtime_context().get_node_id()
    return ReservedDevices(plan, group, [node_of[index] for index in range(len(bundles))], here)


def _require_resources(config: Config, available: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` where all actors together reserve more than there is: Ray would wait for it for ever."""
    placement, num_workers = config.placement, num_training_workers(config)
    num_engines = stage_sizes(config)["generate"].num_actors if "generate" in stage_sizes(config) else 0
    reserved = {
        Unit.cpu_slot: (placement.num_cpus_per_engine, placement.num_cpus_per_worker),
        Unit.gpu: (gpus_per_engine(config), gpus_per_worker(config)),
    }
    for unit, (per_engine, per_worker) in reserved.items():
        needed, there = num_engines * per_engine + num_workers * per_worker, available.get(unit.value, 0.0)
        if needed > there:
            keys = f"placement.num_{unit.value.lower()}s_per_engine or num_{unit.value.lower()}s_per_worker"
            raise ConfigError(
                f"this run reserves {needed:g} {unit.value}s ({num_engines} engines x {per_engine:g} + {num_workers} workers of training x "
                f"{per_worker:g}) and the Ray cluster has {there:g}; lower {keys}, or their number"
            )


def engine_resources(config: Config, reserved: ReservedDevices | None, names: Sequence[str]) -> ActorResources:
    """Resources of the engines of these names: ``engine-2`` has the third bundle, and so has its successor ``engine-2.1``.

    Raises ``EngineStartError`` when there are fewer bundles.
    """
    if reserved is not None:
        resources = reserved.resources("generate")
        assert resources.strategies is not None
        places = [int(name.partition(".")[0].removeprefix("engine-")) for name in names]
        if max(places) >= len(resources.strategies):
            raise EngineStartError(
                f"placement.groups has devices for {len(resources.strategies)} engines, none for {names[places.index(max(places))]}: "
                "remove an engine first"
            )
        return replace(resources, strategies=tuple(resources.strategies[place] for place in places))
    return ActorResources(num_cpus=config.placement.num_cpus_per_engine, num_gpus=gpus_per_engine(config))


def worker_resources(config: Config, reserved: ReservedDevices | None, stage: str) -> ActorResources:
    """What Ray reserves for each worker of ``policy``, ``ref``, ``logp`` or ``critic``."""
    if reserved is not None:
        return reserved.resources(stage)
    return ActorResources(num_cpus=config.placement.num_cpus_per_worker, num_gpus=gpus_per_worker(config))


def _bundle_sizes(plan: DevicePlan) -> list[int]:
    """Devices per bundle, group after group."""
    return [group.bundle_size for group in plan.groups for _ in range(group.num_bundles)]


def _indices_by_group(plan: DevicePlan, nodes: Sequence[str], here: str) -> list[list[int]]:
    """Which of the placement group's bundles belong to each group of the plan.

    Bundles of a size are alike: they are dealt out machine by machine, so that a group lies on as few machines as possible. This machine's
    bundles come first. The policy's group chooses first: its rank 0 publishes weights in the shared memory of the trainer's machine.
    The group of ``logp`` follows: its ranks load them from there.

    Args:
        nodes: where each bundle is.
        here: the node that this process is on.
    """
    sizes = _bundle_sizes(plan)
    order = sorted(range(len(sizes)), key=lambda index: (nodes[index] != here, nodes[index], index))
    free = {size: [index for index in order if sizes[index] == size] for size in set(sizes)}
    indices: dict[int, list[int]] = {}
    needs_this = [("policy" not in group.sizes, "logp" not in group.sizes) for group in plan.groups]
    for place in sorted(range(len(plan.groups)), key=lambda place: needs_this[place]):
        group = plan.groups[place]
        indices[place] = [free[group.bundle_size].pop(0) for _ in range(group.num_bundles)]
    return [indices[place] for place in range(len(plan.groups))]


def _not_free(plan: DevicePlan, free: float, timeout_s: float) -> str:
    needed = sum(group.num_devices for group in plan.groups)
    largest = max(_bundle_sizes(plan))
    return (
        f"placement.groups needs {plan.unit.count(needed)}, {largest} of them on one machine, and Ray has not come by them within "
        f"{timeout_s:g} s: {free:g} of the cluster's {plan.num_available} are free; wait for other jobs to end, or give groups less"
    )
