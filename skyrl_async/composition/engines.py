"""The engines of a run, and what keeps them alive.

Flows in: the configuration and the directory of the policy that engines boot from. Flows out: engines, and a fleet that starts others in
the place of dead ones. Knows neither the policy workers nor the endpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from skyrl_async.composition.ray_cluster import Bundles, engine_resources
from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.run import Config, EngineBackend
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engine_life import EngineLife, LifeSettings
from skyrl_async.inference.fleet import Fleet, FleetSettings
from skyrl_async.inference.front_end_notifier import FrontEndPool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.vllm.boot import VLLMEngineConfig


async def start_engines(
    config: Config, policy_dir: Path, run_dir: Path, bundles: Bundles | None, lives: dict[str, EngineLife]
) -> Sequence[InferenceEngine]:
    """Boot the engines of a run, which begin the ``lives`` that the fleet goes on with."""
    if config.engine.backend is EngineBackend.deterministic:
        from skyrl_async.inference.engines.deterministic import DeterministicEngine

        rank, longest = config.policy.lora.served_rank, config.engine.max_model_len
        return [DeterministicEngine("engine-0", policy_dir, adapter_rank=rank, max_model_len=longest)]
    lives |= {f"engine-{i}": EngineLife(_life(config)) for i in range(config.engine.num_engines)}
    return await _start_vllm_engines(config, policy_dir, run_dir, list(lives), bundles, lives)


async def _start_vllm_engines(
    config: Config,
    policy_dir: Path,
    run_dir: Path,
    names: Sequence[str],
    bundles: Bundles | None,
    lives: Mapping[str, EngineLife] = MappingProxyType({}),
) -> Sequence[InferenceEngine]:
    from skyrl_async.inference.engines.ray import start_ray_engines

    engine, seats = config.engine, engine_resources(config, bundles, names)
    configs = [
        VLLMEngineConfig(
            name=name,
            policy_dir=str(policy_dir),
            dtype=config.policy.dtype.name,
            device=engine_device(engine).name,
            tensor_parallel_size=engine.tensor_parallel_size,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            cpu_kv_cache_gb=engine.cpu_kv_cache_gb,
            enforce_eager=engine.enforce_eager,
            enable_prefix_caching=engine.enable_prefix_caching,
            stream_interval=engine.stream_interval,
            trust_remote_code=config.policy.trust_remote_code,
            call_timeout_s=engine.call_timeout_s,
            extra_args=engine.extra_args,
            adapter_rank=config.policy.lora.served_rank,
            adapter_targets=config.policy.lora.named_targets,
            seed=config.trainer.seed,
        )
        for name in names
    ]
    return await start_ray_engines(
        configs,
        num_cpus=seats.num_cpus,
        num_gpus=seats.num_gpus,
        scheduling_strategies=seats.strategies,
        start_timeout_s=engine.start_timeout_s,
        log_dir=run_dir / "logs",
        lives=lives,
    )


def _life(config: Config) -> LifeSettings:
    engine = config.engine
    return LifeSettings(
        heartbeat_interval_s=engine.heartbeat_interval_s,
        heartbeat_timeout_s=engine.heartbeat_timeout_s,
        max_restarts=engine.max_restarts,
        restart_backoff_s=engine.restart_backoff_s,
    )


def is_supervised(config: Config) -> bool:
    """Whether engines are processes, which can die and be started anew."""
    return config.engine.backend is EngineBackend.vllm


def make_fleet(
    config: Config,
    client: InferenceEngineClient,
    policy_dir: Path,
    run_dir: Path,
    *,
    front_ends: Sequence[FrontEndPool],
    say: Callable[[str], None],
    bundles: Bundles | None = None,
    lives: dict[str, EngineLife] | None = None,
) -> Fleet:
    """What keeps the client's engines alive; new ones boot from ``policy_dir`` and load what is served."""

    async def start(name: str) -> InferenceEngine:
        return (await _start_vllm_engines(config, policy_dir, run_dir, [name], bundles))[0]

    return Fleet(
        client,
        start=start,
        settings=FleetSettings(
            life=_life(config),
            no_engine_timeout_s=config.engine.no_engine_timeout_s,
        ),
        say=say,
        front_ends=front_ends,
        lives=lives,
    )
