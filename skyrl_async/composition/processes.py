"""The processes of a run: engines, policy workers, workers for log-probs, endpoint.

Does not know what they are used for.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_async.composition.data import PolicyFiles
from skyrl_async.composition.logprobs import (
    LogprobParts,
    critic_path,
    critic_settings,
    forward_settings,
    reference_path,
    teacher_settings,
    training_settings,
)
from skyrl_async.composition.ray_cluster import ReservedDevices, engine_resources, worker_resources
from skyrl_async.composition.run_directory import write_private
from skyrl_async.composition.time_sharing import lease_of
from skyrl_async.config.rules.algorithm import local_teachers, whole_vocabulary_settings
from skyrl_async.config.rules.devices import engine_device, training_device
from skyrl_async.config.rules.placement import devices_are_shared, stage_sizes
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.config.schema.fields import Device, from_section
from skyrl_async.config.schema.run import Config, WeightTransfer
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionSettings
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engine_life import EngineLife
from skyrl_async.inference.fleet import Fleet, FrontEndPool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.runtime.heartbeat import Heartbeat
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.tasks import run_together
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.logprob_workers import ForwardWorkers, LogprobWorkers
from skyrl_async.training.workers.recovering import RecoveringPolicy, TrainedWorkers

if TYPE_CHECKING:
    from skyrl_async.endpoint.server.process import EndpointSettings
    from skyrl_async.training.workers.policy_workers import PolicyWorkers


def is_supervised(config: Config) -> bool:
    """Whether engines are processes, which can die and be started anew."""
    return config.engine.backend is EngineBackend.vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Addresses and keys of the endpoint."""

    urls: tuple[str, ...]
    """URLs of its front ends, without ``/v1``."""
    api_key: str
    controller_key: str
    front_ends: Sequence[FrontEndPool]

    @property
    def base_url(self) -> str:
        """URL for clients outside of sessions."""
        return f"{self.urls[0]}/v1"


@dataclass(eq=False)
class Processes:
    """Starts the processes of a run, one kind after another; all end with ``stack``."""

    config: Config
    """Checked."""
    files: PolicyFiles
    """Directories of the policy."""
    initial: Path
    """The policy that training begins with; its weights may be trained later."""
    run_dir: Path
    """Gets logs, the endpoint's address, rows of bad steps, and what the workers recover from."""
    stack: contextlib.AsyncExitStack
    """Ends them."""
    reserved: ReservedDevices | None
    """Devices that are reserved for them; None: Ray puts them where it likes."""

    def __post_init__(self) -> None:
        self._served = self.initial
        self._lives = {f"engine-{i}": EngineLife(self.config.engine) for i in range(self.config.engine.num_engines)}
        """A restart while an engine boots counts as one while it serves."""
        self._boot_lock = asyncio.Lock()

    async def engines_and_policy(self, num_steps: int) -> tuple[Sequence[InferenceEngine], RecoveringPolicy]:
        """Boot the engines while the policy is warmed up and its workers load it; ``num_steps`` are those of the whole run.

        On GPUs that they share, the workers load it after the engines have booted: vLLM measures how much GPU memory is left for keys and
        values, and takes what the workers allocate meanwhile for its own.
        """
        self._served = await self.files.served()
        are_up = asyncio.Event()
        if not _share_gpus(self.config):
            are_up.set()

        async def trained() -> Path:
            path = await self.files.trained()
            await are_up.wait()
            return path

        async def start_engines() -> Sequence[InferenceEngine]:
            started = await self._start_engines()
            are_up.set()
            for engine in started:
                self.stack.push_async_callback(engine.close)
            return started

        async with asyncio.TaskGroup() as tasks:
            booting = tasks.create_task(start_engines(), name="engines")
            loading = tasks.create_task(self._start_policy(trained, num_steps), name="policy")
        return booting.result(), loading.result()

    async def fleet(
        self, client: InferenceEngineClient, endpoint: "Endpoint | None", say: Callable[[str], None], trace: Trace
    ) -> Fleet | None:
        """Keep the client's engines alive, until ``stack`` ends; new ones load the version served. None where they are no processes."""
        if not is_supervised(self.config):
            return None

        async def start(name: str) -> InferenceEngine:
            return (await self._start_vllm([name], {}))[0]

        config, lives, front_ends = self.config.engine, self._lives, endpoint.front_ends if endpoint else ()
        fleet = Fleet(client, start=start, config=config, say=say, front_ends=front_ends, lives=lives, trace=trace)
        await self.stack.enter_async_context(fleet.supervising())
        return fleet

    async def logprob_workers(self, device_groups: Mapping[str, DeviceGroup]) -> LogprobParts:
        """Start what ``training.num_ref_workers`` and ``training.num_logp_workers`` ask for, side by side.

        They lease devices that they share, by ``device_groups``.
        """
        config = self.config

        async def started(stage: str, path: str | None) -> LogprobWorkers | None:
            if stage not in stage_sizes(config):
                return None

            async def start() -> ForwardWorkers:
                return await self._start_workers(
                    stage,
                    forward_settings(config, path or str(self.initial)),
                    policy_path=None if path else self.files.trained,
                    worker_name=f"{stage}-worker",
                    loads_published=stage == "logp",
                )

            lease = lease_of(stage, device_groups)
            workers = LogprobWorkers(start, max_restarts=config.trainer.max_restarts, device_lease=lease)
            self.stack.push_async_callback((await workers.started()).close)
            return workers

        async with asyncio.TaskGroup() as tasks:
            ref = tasks.create_task(started("ref", reference_path(config)), name="ref workers")
            old = tasks.create_task(started("logp", None), name="logp workers")
        return LogprobParts(ref=ref.result(), old=old.result())

    async def local_teachers(self) -> dict[str, LogprobWorkers]:
        """Start the workers of each teacher that is a directory, side by side. They hold its weights until ``stack`` ends."""
        config, num_each = self.config, self.config.training.num_teacher_workers

        async def started(place: int, name: str, path: str) -> LogprobWorkers:
            async def start() -> ForwardWorkers:
                return await self._start_workers(
                    "teacher",
                    teacher_settings(config, path),
                    actors=range(place * num_each, (place + 1) * num_each),
                    worker_name=f"teacher-{name}-worker",
                )

            workers = LogprobWorkers(start, max_restarts=config.trainer.max_restarts)
            self.stack.push_async_callback((await workers.started()).close)
            return workers

        teachers = local_teachers(config)
        starting = {name: started(place, name, path) for place, (name, path) in enumerate(teachers.items())}
        return dict(zip(teachers, await run_together(starting), strict=True))

    @contextlib.asynccontextmanager
    async def endpoint(
        self, client: InferenceEngineClient, shutdown: ShutdownRequest | None
    ) -> AsyncIterator[Endpoint]:
        """Run the endpoint's processes; their address and keys are in ``endpoint.json`` meanwhile, readable by its owner only.

        They sample from the client's engines. Where rollouts need the endpoint, the client's outages learn of a process that is gone. One
        that stays gone fails the run through ``shutdown``, or raises here where that is None.
        """
        from skyrl_async.endpoint.server.front_ends import endpoint_processes

        config = self.config
        api_key = config.server.api_key or f"sk-{secrets.token_urlsafe(24)}"
        controller_key = f"ck-{secrets.token_urlsafe(24)}"
        processes = endpoint_processes(
            _endpoint_settings(config, self.initial, client.max_model_len, api_key, controller_key),
            client.engines,
            outages=client.deadlines.outages if config.generator.needs_endpoint else None,
            on_failure=shutdown.fail if shutdown is not None else None,
        )
        async with processes as front_ends:
            urls = tuple(front_end.url for front_end in front_ends)
            endpoint = Endpoint(urls=urls, api_key=api_key, controller_key=controller_key, front_ends=front_ends)
            content = {
                "base_url": endpoint.base_url,
                "api_key": api_key,
                "model": config.server.model_name,
                "front_ends": urls,
                "controller_key": controller_key,
            }
            path = self.run_dir / "endpoint.json"
            write_private(path, json.dumps(content))
            try:
                yield endpoint
            finally:
                path.unlink(missing_ok=True)

    async def _start_engines(self) -> Sequence[InferenceEngine]:
        """Boot the engines that the run begins with."""
        config = self.config
        if is_supervised(config):
            return await self._start_vllm(list(self._lives), self._lives)
        from skyrl_async.inference.engines.deterministic import DeterministicEngine

        rank, longest = config.policy.lora.served_rank, config.engine.max_model_len
        return [DeterministicEngine("engine-0", self._served, adapter_rank=rank, max_model_len=longest)]

    async def _start_vllm(self, names: Sequence[str], lives: Mapping[str, EngineLife]) -> Sequence[InferenceEngine]:
        from skyrl_async.inference.engines.ray import start_ray_engines

        config, engine = self.config, self.config.engine
        resources = engine_resources(config, self.reserved, names)
        configs = [vllm_config(config, name, self._served) for name in names]
        return await start_ray_engines(
            configs,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            scheduling_strategies=resources.strategies,
            must_be_here=config.weight_sync.transfer is WeightTransfer.shm,
            start_timeout_s=engine.start_timeout_s,
            log_dir=self.run_dir / "logs",
            lives=lives,
            boot_lock=self._boot_lock,
        )

    async def _start_policy(self, trained: Callable[[], Awaitable[Path]], num_steps: int) -> RecoveringPolicy:
        """Start policy workers that are replaced when they die."""
        return await self._start_trained(
            "policy", training_settings(self.config, self.initial, num_steps), policy_path=trained, publishes=True
        )

    async def critic(self, num_steps: int) -> RecoveringPolicy | None:
        """Start the critic's workers, which are replaced when they die; None where nothing needs values."""
        if "critic" not in stage_sizes(self.config):
            return None
        path = critic_path(self.config)
        settings = critic_settings(self.config, path or self.initial, num_steps)
        return await self._start_trained("critic", settings, policy_path=None if path else self.files.trained)

    async def _start_trained(self, stage: str, settings: TrainingSettings, **arguments: Any) -> RecoveringPolicy:
        config, run_dir = self.config, self.run_dir
        settings = replace(settings, bad_step_dir=str(run_dir / "bad_step" / ("" if stage == "policy" else stage)))

        async def start() -> TrainedWorkers:
            return await self._start_workers(stage, settings, worker_name=f"{stage}-worker", **arguments)

        workers = RecoveringPolicy(
            start,
            max_restarts=config.trainer.max_restarts,
            directory=run_dir / ("recovery" if stage == "policy" else f"recovery_{stage}"),
            max_journal_bytes=config.trainer.restart_journal_mb << 20,
            kind=f"{stage} workers",
        )
        self.stack.push_async_callback((await workers.started()).close)
        return workers

    async def _start_workers(
        self, stage: str, settings: TrainingSettings, *, actors: Sequence[int] | None = None, **arguments: Any
    ) -> "PolicyWorkers":
        """Start the workers of a stage with the timeouts of ``training.*``; for the ``arguments`` see ``PolicyWorkers.start``.

        ``actors``: which of the stage's actors they are; None: all.
        """
        from skyrl_async.training.workers.policy_workers import PolicyWorkers

        training, resources = self.config.training, worker_resources(self.config, self.reserved, stage)
        actors = actors or range(stage_sizes(self.config)[stage].num_actors)
        strategies = resources.strategies
        return await PolicyWorkers.start(
            settings,
            num_workers=len(actors),
            num_cpus_per_worker=resources.num_cpus,
            num_gpus_per_worker=resources.num_gpus,
            scheduling_strategies=None if strategies is None else [strategies[actor] for actor in actors],
            call_timeout_s=training.step_timeout_s,
            heartbeat=Heartbeat(interval_s=training.heartbeat_interval_s, timeout_s=training.heartbeat_timeout_s),
            **arguments,
        )


def vllm_config(config: Config, name: str, policy_dir: Path) -> VLLMEngineConfig:
    """Return settings of the engine ``name``, which boots with the weights in ``policy_dir``."""
    device, engine = engine_device(config.engine), config.engine
    return from_section(
        VLLMEngineConfig,
        engine,
        name=name,
        policy_dir=str(policy_dir),
        dtype=config.policy.dtype.name,
        device=device.name,
        enforce_eager=device is Device.cpu if engine.enforce_eager is None else engine.enforce_eager,
        trust_remote_code=config.policy.trust_remote_code,
        adapter_rank=config.policy.lora.served_rank,
        adapter_targets=config.policy.lora.named_targets,
        seed=config.trainer.seed,
    )


def _share_gpus(config: Config) -> bool:
    devices = {engine_device(config.engine), training_device(config.training)}
    return devices == {Device.cuda} and devices_are_shared(config)


def _endpoint_settings(
    config: Config, policy_dir: Path, max_model_len: int, api_key: str, controller_key: str
) -> "EndpointSettings":
    from skyrl_async.endpoint.server.process import EndpointSettings

    server = config.server
    return EndpointSettings(
        server=server,
        policy_path=str(policy_dir),
        trust_remote_code=config.policy.trust_remote_code,
        max_model_len=max_model_len,
        api_keys=(api_key,),
        controller_keys=(controller_key,),
        engine_wait_s=server.engine_wait_s if is_supervised(config) else 0.0,
        sessions=SessionSettings(
            limits=SessionLimits(
                max_turns=server.session_max_turns,
                max_tokens=server.session_max_tokens,
                idle_timeout_s=server.session_idle_timeout_s,
                lifetime_s=server.session_lifetime_s,
                max_concurrent_requests=server.max_concurrent_requests_per_session,
            ),
            branches=server.branch_policy,
            trains_constrained=not whole_vocabulary_settings(config),
            trains_side_requests=server.train_side_requests,
            reasoning_policy=server.reasoning_policy,
        ),
    )
