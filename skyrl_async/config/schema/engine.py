"""The ``engine`` section: what samples."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from skyrl_async.config.schema.fields import Device, bounded, check_heartbeat, require

PauseModeName = StrEnum("PauseModeName", ["abort", "keep"])
Autoscale = StrEnum("Autoscale", ["none", "plan"])
EngineBackend = StrEnum("EngineBackend", ["vllm", "deterministic"])


@dataclass
class EngineConfig:
    backend: EngineBackend = EngineBackend.vllm
    """vllm, or deterministic: one request at a time through transformers, slow, bit-reproducible."""
    num_engines: int = bounded(1, ge=1)
    """Replicas of the policy."""
    tensor_parallel_size: int = bounded(1, ge=1)
    """Devices per engine."""
    device: Device = Device.auto
    """auto takes cuda where there is one."""
    max_model_len: int | None = bounded(None, ge=2)
    """Longest prompt plus answer in tokens; null takes the model's own."""
    max_num_seqs: int = bounded(256, ge=1)
    """Requests running at once in an engine. Default: vLLM's for most GPUs; SkyRL takes 1024."""
    gpu_memory_utilization: float = bounded(0.85, gt=0, le=1)
    """Share of a GPU's memory an engine takes."""
    cpu_kv_cache_gb: int = bounded(1, ge=1)
    """KV cache on CPU, GiB; engines of small models take only what they can use."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs; null: on CPUs only."""
    enable_prefix_caching: bool = True
    """Share prompt prefixes; dropped at each weight update."""
    oldest_request_weight: float | None = bounded(None, ge=1)
    """Several engines get requests of equal weight instead of equal number, but for those whose prompt one has cached. The oldest weigh
    this much, the newest 1, so that requests which training waits for share an engine with few others. 1 treats all alike; null: 1.5
    (trainer.max_staleness_steps + 1) with trainer.staleness_policy=wait or window, otherwise 2.
    """
    start_timeout_s: float = bounded(600.0, gt=0)
    """An engine that is not up by then stops the run, with its last log lines. Compilation and CUDA graphs take minutes."""
    call_timeout_s: float = bounded(60.0, gt=0)
    """Deadline of a control call (pause, load, resume, checksum, heartbeat); an engine that misses it counts as dead. Longer than the
    engine's longest forward pass, which a pause waits for.
    """
    heartbeat_interval_s: float = bounded(5.0, gt=0)
    """Seconds between the heartbeats asked of an engine."""
    heartbeat_timeout_s: float = 60.0
    """An engine that leaves a heartbeat unanswered for so long is killed; what it was sampling goes on in the others. At least
    heartbeat_interval_s, and longer than the engine's longest forward pass.
    """
    max_restarts: int = bounded(5, ge=0)
    """Times that a dead engine is started anew in its place, failed attempts included; 0: never. The run ends, with a checkpoint, when no
    engine is left.
    """
    restart_backoff_s: float = bounded(1.0, ge=0)
    """Wait before a dead engine is started anew; doubled, to a minute at most, at each death in a row."""
    no_engine_timeout_s: float = bounded(900.0, gt=0)
    """With no engine left, generation and training wait so long for one to come back; then the run ends, with a checkpoint."""
    autoscale: Autoscale = Autoscale.none
    """plan: every autoscale_interval_s the run is planned (skyrl_async.plan) from its newest steps with one engine more and one fewer. One
    is added for a gain of a tenth that is surer than the plan's error, and removed where that loses at most a fiftieth, if two plans in a
    row say so; to add one again that was added and removed, twice as many each time.
    """
    min_engines: int | None = bounded(None, ge=1)
    """Fewest engines that autoscale leaves; null: 1."""
    max_engines: int | None = bounded(None, ge=1)
    """Most engines that autoscale starts; null: ``num_engines``."""
    autoscale_interval_s: float = bounded(300.0, gt=0)
    """Seconds between two plans."""
    stream_interval: int = bounded(10, ge=1)
    """Tokens per streamed block."""
    pause_mode: PauseModeName = PauseModeName.abort
    """What a weight update does to requests in flight: abort (continued in token space) or keep (frozen, KV recomputed)."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments, as in AsyncEngineArgs; not those that the run sets, such as seed, dtype or logprobs_mode."""

    def __post_init__(self) -> None:
        check_heartbeat("engine", self.heartbeat_interval_s, self.heartbeat_timeout_s)
        least, most = self.min_engines or 1, self.max_engines or self.num_engines
        require(
            least <= self.num_engines <= most,
            "engine.num_engines",
            f"from min_engines to max_engines ({least} to {most})",
            self.num_engines,
        )
        if self.autoscale is not Autoscale.none:
            require(
                self.backend is EngineBackend.vllm,
                "engine.backend",
                "vllm with engine.autoscale=plan",
                self.backend.name,
            )
