"""The engines of a run, and the fleet that starts others in the place of dead ones.

Knows neither the policy workers nor the endpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skyrl_async.composition.ray_cluster import ReservedDevices, engine_resources
from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.run import Config, Device, EngineBackend
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engine_life import EngineLife
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.front_end_notifier import FrontEndPool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.vllm.boot import VLLMEngineConfig


def is_supervised(config: Config) -> bool:
    """Whether engines are processes, which can die and be started anew."""
    return config.engine.backend is EngineBackend.vllm


class Engines:
    """Starts a run's engines, and the fleet that replaces dead ones.

    Args:
        config: checked.
        policy_dir: the policy that engines boot from.
        run_dir: their logs go there.
        reserved: devices that are reserved for them; None: Ray puts them where it likes.
    """

    def __init__(self, config: Config, policy_dir: Path, run_dir: Path, reserved: ReservedDevices | None) -> None:
        self._config = config
        self._policy_dir = policy_dir
        self._run_dir = run_dir
        self._bundles = reserved
        self._lives = {f"engine-{i}": EngineLife(config.engine) for i in range(config.engine.num_engines)}
        """A restart while an engine boots counts as one while it serves."""

    async def start(self) -> Sequence[InferenceEngine]:
        """Boot the engines that the run begins with."""
        config = self._config
        if not is_supervised(config):
            from skyrl_async.inference.engines.deterministic import DeterministicEngine

            rank, longest = config.policy.lora.served_rank, config.engine.max_model_len
            return [DeterministicEngine("engine-0", self._policy_dir, adapter_rank=rank, max_model_len=longest)]
        return await self._start_vllm(list(self._lives), self._lives)

    def fleet(
        self, client: InferenceEngineClient, *, front_ends: Sequence[FrontEndPool], say: Callable[[str], None]
    ) -> Fleet:
        """Make what keeps the client's engines alive; new ones load the version that is served."""

        async def start(name: str) -> InferenceEngine:
            return (await self._start_vllm([name], {}))[0]

        return Fleet(
            client,
            start=start,
            config=self._config.engine,
            say=say,
            front_ends=front_ends,
            lives=self._lives,
        )

    async def _start_vllm(self, names: Sequence[str], lives: Mapping[str, EngineLife]) -> Sequence[InferenceEngine]:
        from skyrl_async.inference.engines.ray import start_ray_engines

        config, engine = self._config, self._config.engine
        resources = engine_resources(config, self._bundles, names)
        device = engine_device(engine)
        configs = [
            VLLMEngineConfig(
                name=name,
                policy_dir=str(self._policy_dir),
                dtype=config.policy.dtype.name,
                device=device.name,
                tensor_parallel_size=engine.tensor_parallel_size,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.max_num_seqs,
                gpu_memory_utilization=engine.gpu_memory_utilization,
                cpu_kv_cache_gb=engine.cpu_kv_cache_gb,
                enforce_eager=device is Device.cpu if engine.enforce_eager is None else engine.enforce_eager,
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
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            scheduling_strategies=resources.strategies,
            start_timeout_s=engine.start_timeout_s,
            log_dir=self._run_dir / "logs",
            lives=lives,
        )
