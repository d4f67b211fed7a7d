"""All keys of a run: the small sections, and all sections put together.

``config.load`` builds checked objects of these dataclasses. What several keys of one class mean together is checked in its
``__post_init__``, which omegaconf runs when it builds the object; rules across classes are in ``config.rules``.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.fields import bounded
from skyrl_async.config.schema.generator import GeneratorConfig, SamplingConfig
from skyrl_async.config.schema.policy import PolicyConfig
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.config.schema.task import TaskConfig
from skyrl_async.config.schema.trainer import TrainerConfig
from skyrl_async.config.schema.training import TrainingConfig

SECRETS = ("server.api_key", "trainer.algorithm.distillation.api_key")
"""Keys whose values are shown nowhere."""

WeightTransfer = StrEnum("WeightTransfer", ["auto", "shm", "gloo", "nccl", "ipc"])


@dataclass
class WeightSyncConfig:
    transfer: WeightTransfer = WeightTransfer.auto
    """How a version that rank 0 of the policy has written to shared memory reaches the engines. shm: they map it, on the same machine.
    gloo, nccl: rank 0 broadcasts it to all of them, from host to host memory or between CUDA devices. auto: shm for engines on the machine
    of the trainer, a broadcast to the others, over NCCL where it can be. ipc: as auto, and engines on a GPU that policy workers use too
    load it from there (CUDA IPC); each worker keeps a set of the weights on its GPU until then.
    """
    transfer_timeout_s: float = bounded(60.0, gt=0, lt=math.inf)
    """Longest that a broadcast waits for one of its members, at their meeting and in each bucket; then it has failed, and is made anew
    without engines that are gone.
    """
    send_bucket_mb: int = bounded(512, ge=1)
    """Most that is sent at a time in a publish, MiB; a larger tensor is sent in several pieces."""
    load_bucket_mb: int = bounded(512, ge=1)
    """Most of a publish that an engine hands to its model, or keeps mapped, at a time, MiB; a larger tensor goes alone."""
    double_buffer: bool = True
    """Keep the version served until the next one is loaded everywhere, and let engines on CPUs prepare that in memory of their own, so that
    the pause is a swap: up to two versions are in shared memory, and an engine holds its weights twice for a while. false: the version
    served is deleted before the next one is sent, once what is to end under it has ended; longer pauses, and engines that come up wait for
    the version being sent.
    """
    verify_checksums: bool | None = None
    """Ask every engine for its checksum after each publish and stop when they differ (after the first publish it is always done). An engine
    that is started anew is held against it, beside the checksum of the file that it loads, which is always compared. Null: where the
    weights are at most 16 MiB and all of them are published.
    """

    max_retries: int = bounded(2, ge=0)
    """Times that a publish which failed (an engine refuses, shared memory is full) is tried again; then the run ends, with a checkpoint."""


@dataclass
class EvaluationConfig:
    num_prompts: int = bounded(1024, ge=0)
    """Held-out prompts used before and after training."""
    num_prompts_while_training: int = bounded(256, ge=0)
    """Held-out prompts used between; 0: no evaluation then."""
    n_samples_per_prompt: int = bounded(1, ge=1)
    """Answers per held-out prompt."""
    max_concurrent: int | None = bounded(None, ge=1)
    """Held-out prompts played at once, beside training's groups; null: as many as the engines run."""
    pin_version: bool = True
    """While training, play held-out prompts under one version: the next publish waits until they are through, and the trainer with it where
    it is faster. False publishes meanwhile: their tokens are then of several versions.
    """
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How held-out prompts are sampled."""


@dataclass
class PlacementConfig:
    ray_address: str = "local"
    """local starts a Ray of the run's own; auto or host:port joins one."""
    groups: list[list[str]] | None = None
    """Stages that share devices, such as [[policy,logp],[ref],[generate]]: policy (training, and what a publish gathers), logp (recomputed
    log-probs), ref (reference log-probs), teacher (theirs), critic (values, and their training), generate (engines). The stages of a group
    share its devices in time. Null: each actor reserves what num_*_per_engine and num_*_per_worker say.
    """
    ratios: list[float] | None = None
    """Each group's part of the cluster's devices (GPUs; CPU slots where nothing runs on GPUs), summing to 1; rounded to whole devices."""
    devices: list[int] | None = None
    """Devices of each group, in place of ratios."""
    num_cpu_slots: int | None = bounded(None, ge=1)
    """CPU slots of a Ray of the run's own; null: one per core. Slots are counted, not enforced: more of them than cores share these."""
    min_generation_slice_s: float = bounded(1.0, ge=0)
    """Least seconds that engines with requests keep devices which they share (placement.groups) once others wait: bounds how often devices
    change hands, and how long training waits.
    """
    num_cpus_per_engine: float = bounded(0.0, ge=0)
    """CPU slots Ray reserves per engine."""
    num_gpus_per_engine: float | None = bounded(None, ge=0)
    """GPUs per engine; null: engine.tensor_parallel_size on cuda, else 0."""
    num_cpus_per_worker: float = bounded(0.0, ge=0)
    """CPU slots Ray reserves per policy worker."""
    num_gpus_per_worker: float | None = bounded(None, ge=0)
    """GPUs per policy worker; null: 1 on cuda, else 0."""


@dataclass
class LoggingConfig:
    tensorboard: bool = True
    """Write TensorBoard events to the run directory."""
    wandb: bool = False
    """Log to Weights & Biases (extra skyrl-async[wandb])."""
    wandb_project: str = "skyrl_async"
    """Project of the W&B run."""
    console: bool = True
    """Live progress display (plain lines where standard output is no terminal)."""
    trace: bool = True
    """Write a Chrome/Perfetto trace of the stages to trace/ in the run directory, in parts that open alone."""
    trace_max_gb: float = bounded(1.0, ge=0.01, lt=math.inf)
    """Bound on the trace's size, GB. Of its older parts only the longest spans of each row stay, then the oldest parts are deleted."""
    level: str = "INFO"
    """Least level of what the log file and standard error show."""


@dataclass
class Config:
    task: TaskConfig = field(default_factory=TaskConfig)
    """What is learned."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """What learns."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What samples."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """What computes gradients."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """How prompts become trajectories."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The asynchronous loop."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Held-out prompts."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How weights reach the engines."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """The endpoint."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """What Ray reserves."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where figures go."""
    cache_dir: str = "~/.cache/skyrl_async"
    """Where warm-started policies are kept between runs."""

    @property
    def num_group_places(self) -> int:
        """Groups whose samples all engines together run at once, rounded up."""
        return -(-self.engine.num_engines * self.engine.max_num_seqs // self.generator.n_samples_per_prompt)

    @property
    def serves_endpoint(self) -> bool:
        """Whether this run opens the endpoint."""
        return self.generator.needs_endpoint if self.server.enabled is None else self.server.enabled
