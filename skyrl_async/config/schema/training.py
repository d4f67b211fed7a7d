"""The ``training`` section: what computes gradients."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_async.config.schema.fields import Device, bounded, check_heartbeat, require

TrainingBackendName = StrEnum("TrainingBackendName", ["fsdp", "deepspeed"])
LrSchedule = StrEnum("LrSchedule", ["constant", "linear", "cosine"])


@dataclass
class DeepSpeedConfig:
    zero_stage: int = bounded(2, ge=0, le=3)
    """What ZeRO shards over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and step, in the host's memory; zero_stage >= 1, on cuda."""
    offload_param: bool = False
    """Keep weights in the host's memory until they are used; zero_stage 3, on cuda."""
    config: str | None = None
    """JSON in DeepSpeed's format with further settings, such as bucket sizes. Batch sizes, accumulation, optimizer, schedule, clipping and
    precision are ours: a file that sets them to other values is refused.
    """

    def __post_init__(self) -> None:
        for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
            is_fine = self.zero_stage >= least or not getattr(self, key)
            require(is_fine, "training.deepspeed.zero_stage", f">= {least} with {key}=true", self.zero_stage)


@dataclass
class TrainingConfig:
    backend: TrainingBackendName = TrainingBackendName.fsdp
    """fsdp is FSDP2, deepspeed is ZeRO. Checkpoints of either load in the other, on any number of ranks."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """Settings of backend=deepspeed."""
    num_workers: int = bounded(1, ge=1)
    """Ranks."""
    num_ref_workers: int = bounded(0, ge=0)
    """Ranks of the reference alone; 0: it lives on the policy workers, which compute its log-probs between their other calls."""
    num_logp_workers: int = bounded(0, ge=0)
    """Ranks that recompute log-probs under the newest published weights, for what asks for them, such as decoupled_ppo; 0: the policy
    workers do, under the weights they hold.
    """
    num_teacher_workers: int = bounded(1, ge=1)
    """Ranks of each local teacher of trainer.algorithm.distillation."""
    num_critic_workers: int = bounded(1, ge=1)
    """Ranks of the critic of advantage_estimator=gae and turn_gae, and of what says needs_values; other estimators have none."""
    device: Device = Device.auto
    """auto takes cuda where there is one."""
    lr: float = bounded(1e-6, gt=0, lt=math.inf)
    """Peak learning rate of AdamW. Default: SkyRL's and verl's."""
    adam_beta1: float = bounded(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = bounded(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment. Default: SkyRL's and verl's."""
    weight_decay: float = bounded(0.01, ge=0, lt=math.inf)
    """Decoupled weight decay of AdamW. Default: SkyRL's and verl's."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """After warm-up: constant (SkyRL's and verl's default), or down to 0 over the run's steps, linear or cosine."""
    num_warmup_steps: int = bounded(0, ge=0)
    """Steps of linear warm-up; verl's DAPO scripts take 10."""
    max_grad_norm: float = bounded(1.0, ge=0)
    """Gradient clipping; 0 does not clip."""
    micro_batch_tokens: int = bounded(16384, ge=1)
    """Most tokens, padding included, of one forward on one rank; a longer single sequence goes alone. Default: verl's
    ppo_max_token_len_per_gpu.
    """
    use_sample_packing: bool = True
    """Lay the sequences of a micro-batch end to end, each attending to itself alone, instead of padding them to the longest. A model that
    cannot keep them apart is refused.
    """
    logprobs_chunk_size: int = bounded(1024, ge=1)
    """Sampled tokens whose logits exist at once: a micro-batch with more of them computes its logits chunk by chunk, and again in the
    backward pass, so that memory does not grow with its length times the vocabulary.
    """
    mixed_precision: bool = True
    """bfloat16 forward and backward over float32 weights."""
    activation_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    cpu_offload: bool = False
    """Keep parameters, gradients and the optimizer in the host's memory and step there; a layer is on the GPU while it is computed. For
    backend=fsdp; ZeRO's own are training.deepspeed.offload_optimizer and offload_param.
    """
    step_timeout_s: float = bounded(1800.0, gt=0, lt=math.inf)
    """Deadline of one call to the workers, and of their start; past it they are replaced (see trainer.max_restarts)."""
    heartbeat_interval_s: float = bounded(5.0, gt=0)
    """Seconds between the heartbeats asked of a policy worker while it works."""
    heartbeat_timeout_s: float = 60.0
    """Policy workers of which one leaves a heartbeat unanswered for so long (its process is stopped, its machine is gone) are replaced, see
    trainer.max_restarts. A thread beside the work answers. At least heartbeat_interval_s.
    """

    def __post_init__(self) -> None:
        check_heartbeat("training", self.heartbeat_interval_s, self.heartbeat_timeout_s)
