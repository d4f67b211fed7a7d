"""Engines in processes of their own: a Ray actor around each vLLM engine, and the object that makes it an ``InferenceEngine`` again.

    RayEngine (any process) ──EngineConnection──> EngineActor (its process) ──> VLLMEngine ──> core

Ray starts and kills actors, nothing else. A ``RayEngine`` can be pickled. Requests that a weight update aborts continue inside the actor:
only those that cannot be continued come back with ``abort``. A lost connection is an ``EngineDeadError``; our own errors cross as they are.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, SchedulingStrategyT

from skyrl_async.errors import EngineDeadError, EngineStartError
from skyrl_async.inference.engine_life import EngineLife
from skyrl_async.inference.engines.connection import EngineConnection
from skyrl_async.inference.engines.ray_actor import EngineActor, StartedEngine
from skyrl_async.inference.protocol import EngineLoad, InferenceEngine
from skyrl_async.inference.vllm.boot import VLLMEngineConfig
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, WeightUpdate

logger = logging.getLogger(__name__)

_NUM_LOG_LINES_SHOWN = 20
_GRACE_S = 5.0
"""How much longer the caller waits, so that an engine misses its own deadline first and says why."""


class RayEngine:
    """An ``InferenceEngine`` in a Ray actor; made by ``start_ray_engines``."""

    def __init__(self, name: str, actor: ActorHandle, started: StartedEngine) -> None:
        self.name = name
        """Name from the config."""
        self.max_model_len = started.max_model_len
        """Longest prompt plus answer in tokens."""
        self.node_id = started.node_id
        """Ray's name of the machine that it runs on."""
        self._actor = actor
        self._started = started
        self._connecting = asyncio.Lock()
        self._connection: EngineConnection | None = None
        self._busy_until = 0.0
        """Deadline of the latest ordered call, on the loop's clock; 0 once it has answered."""

    def __reduce__(self) -> tuple[type, tuple[str, ActorHandle, StartedEngine]]:
        """A copy has a connection of its own."""
        return RayEngine, (self.name, self._actor, self._started)

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """``InferenceEngine.generate``."""
        async with contextlib.aclosing(self._call(request, streams=False)) as outputs:
            return await anext(outputs)

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """``InferenceEngine.stream``."""
        return self._call(request, streams=True)

    async def _call(self, request: EngineRequest, *, streams: bool) -> AsyncGenerator[EngineOutput, None]:
        connection = await self._connected()
        async with contextlib.aclosing(connection.call(request, streams=streams)) as blocks:
            async for block in blocks:
                yield block

    async def _connected(self) -> EngineConnection:
        async with self._connecting:  # always, so that calls are sent in their order
            if self._connection is None:
                self._connection = await EngineConnection.connect(
                    self.name, self._started.address, self._started.call_timeout_s
                )
        return self._connection

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """``InferenceEngine.partial_outputs``."""
        return await self._ask("partial_outputs", tuple(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """``InferenceEngine.pause``."""
        await self._control_in_order("pause", mode)

    async def resume(self) -> None:
        """``InferenceEngine.resume``."""
        await self._control_in_order("resume")

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """``VLLMEngine.connect_transfer``."""
        await self._control("connect_transfer", init_info)

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        """``VLLMEngine.receive_weights``, without a deadline."""
        await self._control("receive_weights", update, tuple(keep), has_deadline=False)

    async def stage_weights(self, update: WeightUpdate) -> None:
        """``InferenceEngine.stage_weights``."""
        await self._control("stage_weights", update)

    async def load_weights(self, update: WeightUpdate) -> None:
        """``InferenceEngine.load_weights``."""
        # For checking an adapter's layers, or comparing all bytes with those sent, and for loading.
        deadlines_s = self._started.checksum_timeout_s + self._started.call_timeout_s
        await self._control_in_order("load_weights", update, timeout_s=deadlines_s)

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """``InferenceEngine.switch_weights``."""
        deadlines_s = 3 * self._started.call_timeout_s  # for checking an adapter's layers, pausing and loading
        return await self._control_in_order("switch_weights", update, mode, timeout_s=deadlines_s)

    async def version(self) -> int:
        """``InferenceEngine.version``."""
        return await self._control("version")

    async def checksum(self) -> str:
        """``InferenceEngine.checksum``."""
        return await self._control_in_order("checksum", timeout_s=self._started.checksum_timeout_s)

    async def ping(self) -> EngineLoad:
        """``InferenceEngine.ping``."""
        load: EngineLoad = await self._control("ping", has_deadline=False)
        return load

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """``InferenceEngine.evict``. Evicting all takes as long as requests do, and has no deadline."""
        ids = None if request_ids is None else tuple(request_ids)
        await self._ask("evict", ids, has_deadline=ids is not None)

    async def statistics(self) -> dict[str, int]:
        """``VLLMEngine.statistics``."""
        return await self._control("statistics")

    async def close(self) -> None:
        """``InferenceEngine.close``. The actor and all its processes are killed."""
        if self._connection is not None:
            self._connection.transport.abort()
        ray.kill(self._actor)

    async def _control_in_order(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call what ``VLLMEngine`` does one after the other, in the order of the calls, also of those whose caller was cancelled.

        The deadline begins after that of the calls before, unless they have answered.
        """
        now = asyncio.get_running_loop().time()
        allowed_s = max(self._busy_until - now, 0.0) + (timeout_s or self._started.call_timeout_s)
        self._busy_until = busy_until = now + allowed_s
        is_abandoned = False
        try:
            return await self._ask("control", method, args, timeout_s=allowed_s)
        except asyncio.CancelledError:
            is_abandoned = True
            raise
        finally:
            if not is_abandoned and self._busy_until == busy_until:
                self._busy_until = 0.0

    async def _control(self, method: str, *args: Any, has_deadline: bool = True) -> Any:
        return await self._ask("control", method, args, has_deadline=has_deadline)

    async def _ask(self, what: str, *args: Any, timeout_s: float | None = None, has_deadline: bool = True) -> Any:
        waited_s = (timeout_s or self._started.call_timeout_s) + _GRACE_S
        connection = await self._connected()
        answer = connection.ask(what, *args)
        try:
            async with asyncio.timeout(waited_s if has_deadline else None) as deadline:
                return await answer
        except TimeoutError as error:
            if not deadline.expired():
                raise
            method = args[0] if what == "control" else what
            raise EngineDeadError(f"engine {self.name}: no answer to {method} within {waited_s:g} s") from error


def is_on_this_machine(engine: InferenceEngine) -> bool:
    """Whether the engine can map files in this machine's shared memory."""
    return not isinstance(engine, RayEngine) or engine.node_id == _this_node()


def _this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


async def start_ray_engines(
    configs: Sequence[VLLMEngineConfig],
    *,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    scheduling_strategies: Sequence[SchedulingStrategyT] | None = None,
    must_be_here: bool = False,
    start_timeout_s: float = 300.0,
    log_dir: Path,
    lives: Mapping[str, EngineLife] = MappingProxyType({}),
    boot_lock: asyncio.Lock | None = None,
) -> list[RayEngine]:
    """Start one engine per config, all at the same time. Where several may share a GPU they start one after another, since each measures
    the memory left there. Ray must be initialised.

    Args:
        num_cpus: CPU slots that Ray reserves per engine.
        num_gpus: GPUs per engine.
        scheduling_strategies: where Ray puts each engine; None leaves that to Ray.
        must_be_here: they map what is published on this machine. Without strategies Ray is asked to put them here, and one that is
            elsewhere is refused before it boots.
        start_timeout_s: longest boot of one engine, in seconds.
        log_dir: each engine writes ``<name>.log`` there; made if missing.
        lives: by name. An engine killed while it boots takes one of its restarts, and boots again under its name.
        boot_lock: of all calls whose engines may share a GPU; None: this call is the only one.

    Raises ``EngineStartError`` with the engine's last log lines if one does not come up; then none is left.
    """
    _require_resources(configs, {"CPU": num_cpus, "GPU": num_gpus})
    log_paths = _log_paths(configs, log_dir)
    are_apart = scheduling_strategies is not None or not 0 < num_gpus <= 0.5
    booting = contextlib.nullcontext() if are_apart else boot_lock or asyncio.Lock()
    # Ray puts an actor that asks for no resources anywhere, unless it must be on a node.
    here = NodeAffinitySchedulingStrategy(_this_node(), soft=num_cpus + num_gpus > 0) if must_be_here else None
    strategies = scheduling_strategies or [here] * len(configs)
    boots = {}
    with contextlib.ExitStack() as on_failure:
        for config, log_path, strategy in zip(configs, log_paths, strategies, strict=True):
            make_actor = partial(_make_actor, config, log_path, num_cpus, num_gpus, strategy, on_failure)
            life = lives.get(config.name)
            boots[config.name] = _boot(make_actor, config.name, log_path, start_timeout_s, booting, life, must_be_here)
        engines = list(await run_together(boots))
        on_failure.pop_all()
    return engines


def _log_paths(configs: Sequence[VLLMEngineConfig], log_dir: Path) -> list[Path]:
    log_dir.mkdir(parents=True, exist_ok=True)
    return [log_dir.absolute() / f"{config.name}.log" for config in configs]


def _require_resources(configs: Sequence[VLLMEngineConfig], needed_per_engine: dict[str, float]) -> None:
    """Raise ``EngineStartError`` for a resource that the cluster lacks: Ray would wait for it for ever."""
    available = ray.cluster_resources()
    for resource, num_per_engine in needed_per_engine.items():
        num_needed = num_per_engine * len(configs)
        if num_needed > available.get(resource, 0.0):
            raise EngineStartError(
                f"{len(configs)} engines need {num_needed:g} {resource}s, the Ray cluster has "
                f"{available.get(resource, 0.0):g}; lower engine.num_engines or "
                f"placement.num_{resource.lower()}s_per_engine"
            )


def _make_actor(
    config: VLLMEngineConfig,
    log_path: Path,
    num_cpus: float,
    num_gpus: float,
    strategy: SchedulingStrategyT,
    on_failure: contextlib.ExitStack,
) -> ActorHandle:
    environment = {"VLLM_LOGGING_LEVEL": "INFO"}
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    actor_class = ray.remote(EngineActor).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        scheduling_strategy=strategy,
        max_restarts=0,
        runtime_env={"env_vars": environment},
    )
    actor = actor_class.remote(config, str(log_path))
    on_failure.callback(ray.kill, actor)
    return actor


async def _boot(
    make_actor: Callable[[], ActorHandle],
    name: str,
    log_path: Path,
    timeout_s: float,
    boot_lock: contextlib.AbstractAsyncContextManager[None],
    life: EngineLife | None,
    must_be_here: bool,
) -> RayEngine:
    """Start one engine, under ``boot_lock``; again if it is killed meanwhile and its ``life`` has restarts left."""
    while True:
        actor = make_actor()
        try:
            async with boot_lock, asyncio.timeout(timeout_s):
                if must_be_here and await actor.node_id.remote() != _this_node():
                    raise EngineStartError(
                        "weight_sync.transfer must be auto, gloo or nccl where engines run on other machines than the trainer, got shm: "
                        f"{name} could not map what is published here"
                    )
                return RayEngine(name, actor, await actor.start.remote())
        except TimeoutError:
            reason = f"engine {name} was not up within {timeout_s:g} s (engine.start_timeout_s)"
            raise EngineStartError(f"{reason}\n{_log_tail(log_path)}") from None
        except RayError as error:
            reason = str(error.cause if isinstance(error, RayTaskError) else f"engine {name} did not come up: {error}")
            if life is None or not _was_killed(error):
                raise EngineStartError(f"{reason}\n{_log_tail(log_path)}") from error
        ray.kill(actor)  # its process may live, and hold what Ray has reserved for it
        life.die()
        if (wait_s := life.restart()) is None:
            raise EngineStartError(
                f"{reason}; engine.max_restarts={life.num_restarts} are used up\n{_log_tail(log_path)}"
            )
        logger.warning("%s; it is started again", reason)
        await asyncio.sleep(wait_s)


def _was_killed(error: RayError) -> bool:
    """Whether a process of the engine was ended from outside, so that another may come up."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineDeadError)
    return isinstance(error, RayActorError) and not error.actor_init_failed


def _log_tail(log_path: Path) -> str:
    if not log_path.exists():
        return f"It has written no log ({log_path}): Ray has not started its process."
    lines = log_path.read_text(errors="replace").splitlines()
    return "\n".join([f"Its last log lines ({log_path}):", *lines[-_NUM_LOG_LINES_SHOWN:]])
