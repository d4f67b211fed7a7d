"""The ``engine`` section: what samples."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl_async.config.schema.fields import Device, doc, require


class PauseModeName(Enum):
    abort = "abort"
    keep = "keep"


class EngineBackend(Enum):
    vllm = "vllm"
    deterministic = "deterministic"


@dataclass
class EngineConfig:
    backend: EngineBackend = doc(
        EngineBackend.vllm,
        "vllm, or deterministic: one request at a time through transformers, slow, bit-reproducible.",
    )
    num_engines: int = doc(1, "Replicas of the policy.")
    tensor_parallel_size: int = doc(1, "Devices per engine.")
    device: Device = doc(Device.auto, "auto takes cuda where there is one.")
    max_model_len: int | None = doc(None, "Longest prompt plus answer in tokens; null takes the model's own.")
    max_num_seqs: int = doc(
        256, "Requests running at once in an engine. Default: vLLM's for most GPUs; SkyRL takes 1024."
    )
    gpu_memory_utilization: float = doc(0.85, "Share of a GPU's memory an engine takes.")
    cpu_kv_cache_gb: int = doc(1, "KV cache on CPU, GiB.")
    enforce_eager: bool | None = doc(None, "Skip compilation and CUDA graphs; null: on CPUs only.")
    enable_prefix_caching: bool = doc(True, "Share prompt prefixes; dropped at each weight update.")
    oldest_request_weight: float | None = doc(
        None,
        "Several engines get requests of equal weight instead of equal number. The oldest weigh this much, the newest 1, so that requests "
        "which training waits for share an engine with few others. 1 treats all alike; null: 1.5 (trainer.max_staleness_steps + 1) with "
        "trainer.staleness_policy=wait, otherwise 2.",
    )
    start_timeout_s: float = doc(
        600.0,
        "An engine that is not up by then stops the run, with its last log lines. Compilation and CUDA graphs take minutes.",
    )
    call_timeout_s: float = doc(
        60.0, "Deadline of a control call (pause, load, resume, checksum); an engine that misses it counts as dead."
    )
    heartbeat_interval_s: float = doc(5.0, "Seconds between the heartbeats asked of an engine.")
    heartbeat_timeout_s: float = doc(
        60.0,
        "An engine that leaves a heartbeat unanswered for so long is killed; what it was sampling goes on in the others. "
        "At least heartbeat_interval_s, and longer than the engine's longest forward pass.",
    )
    max_restarts: int = doc(
        5,
        "Times that a dead engine is started anew in its place, failed attempts included; 0: never. "
        "The run ends, with a checkpoint, when no engine is left.",
    )
    restart_backoff_s: float = doc(
        1.0, "Wait before a dead engine is started anew; doubled, to a minute at most, at each death in a row."
    )
    no_engine_timeout_s: float = doc(
        900.0,
        "With no engine left, generation and training wait so long for one to come back; then the run ends, with a checkpoint.",
    )
    stream_interval: int = doc(10, "Tokens per streamed block.")
    pause_mode: PauseModeName = doc(
        PauseModeName.abort,
        "What a weight update does to requests in flight: abort (continued in token space) or keep (frozen, KV recomputed).",
    )
    extra_args: dict[str, Any] = doc(dict, "More vLLM engine arguments, as in AsyncEngineArgs.")

    def __post_init__(self) -> None:
        require(self.num_engines >= 1, "engine.num_engines", ">= 1", self.num_engines)
        require(self.tensor_parallel_size >= 1, "engine.tensor_parallel_size", ">= 1", self.tensor_parallel_size)
        require(self.max_num_seqs >= 1, "engine.max_num_seqs", ">= 1", self.max_num_seqs)
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            "engine.max_model_len",
            ">= 2 or null",
            self.max_model_len,
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            "engine.gpu_memory_utilization",
            "in (0, 1]",
            self.gpu_memory_utilization,
        )
        weight = self.oldest_request_weight
        require(weight is None or weight >= 1, "engine.oldest_request_weight", ">= 1 or null", weight)
        require(self.stream_interval >= 1, "engine.stream_interval", ">= 1", self.stream_interval)
        require(self.start_timeout_s > 0, "engine.start_timeout_s", "> 0", self.start_timeout_s)
        require(self.call_timeout_s > 0, "engine.call_timeout_s", "> 0", self.call_timeout_s)
        for key in ("heartbeat_interval_s", "no_engine_timeout_s"):
            require(getattr(self, key) > 0, f"engine.{key}", "> 0", getattr(self, key))
        for key in ("max_restarts", "restart_backoff_s"):
            require(getattr(self, key) >= 0, f"engine.{key}", ">= 0", getattr(self, key))
        require(
            self.heartbeat_timeout_s >= self.heartbeat_interval_s,
            "engine.heartbeat_timeout_s",
            f">= engine.heartbeat_interval_s ({self.heartbeat_interval_s:g})",
            self.heartbeat_timeout_s,
        )
