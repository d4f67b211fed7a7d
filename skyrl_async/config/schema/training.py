"""The ``training`` section: what computes gradients."""

from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.deepspeed import DeepSpeedConfig
from skyrl_async.config.schema.fields import Device, doc, require


class TrainingBackendName(Enum):
    fsdp = "fsdp"
    deepspeed = "deepspeed"


class LrSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class TrainingConfig:
    backend: TrainingBackendName = doc(
        TrainingBackendName.fsdp,
        "fsdp is FSDP2, deepspeed is ZeRO. Checkpoints of either load in the other, on any number of ranks.",
    )
    deepspeed: DeepSpeedConfig = doc(DeepSpeedConfig, "Settings of backend=deepspeed.")
    num_workers: int = doc(1, "Ranks.")
    num_ref_workers: int = doc(
        0,
        "Ranks of the reference alone; 0: it lives on the policy workers, which compute its log-probs between their other calls.",
    )
    num_logp_workers: int = doc(
        0,
        "Ranks that recompute log-probs under the newest published weights, for decoupled_ppo; 0: the policy workers do, under the "
        "weights they hold.",
    )
    device: Device = doc(Device.auto, "auto takes cuda where there is one.")
    lr: float = doc(1e-6, "Peak learning rate of AdamW. Default: SkyRL's and verl's.")
    adam_beta1: float = doc(0.9, "Decay of AdamW's first moment.")
    adam_beta2: float = doc(0.999, "Decay of AdamW's second moment. Default: SkyRL's and verl's.")
    weight_decay: float = doc(0.01, "Decoupled weight decay of AdamW. Default: SkyRL's and verl's.")
    lr_schedule: LrSchedule = doc(
        LrSchedule.constant,
        "After warm-up: constant (SkyRL's and verl's default), or down to 0 over the run's steps, linear or cosine.",
    )
    num_warmup_steps: int = doc(0, "Steps of linear warm-up; verl's DAPO scripts take 10.")
    max_grad_norm: float = doc(1.0, "Gradient clipping; 0 does not clip.")
    micro_batch_tokens: int = doc(
        16384,
        "Most tokens, padding included, of one forward on one rank; a longer single sequence goes alone. Default: verl's "
        "ppo_max_token_len_per_gpu.",
    )
    use_sample_packing: bool = doc(
        True,
        "Lay the sequences of a micro-batch end to end, each attending to itself alone, instead of padding them to the longest. A model "
        "that cannot keep them apart is refused.",
    )
    logprobs_chunk_size: int = doc(
        1024,
        "Sampled tokens whose logits exist at once: a micro-batch with more of them computes its logits chunk by chunk, and again in the "
        "backward pass, so that memory does not grow with its length times the vocabulary.",
    )
    mixed_precision: bool = doc(True, "bfloat16 forward and backward over float32 weights.")
    activation_checkpointing: bool = doc(
        True, "Recompute activations in the backward pass: less memory, about a third more computation."
    )
    cpu_offload: bool = doc(
        False,
        "Keep parameters, gradients and the optimizer in the host's memory and step there; a layer is on the GPU while it is computed. For "
        "backend=fsdp; ZeRO's own are training.deepspeed.offload_optimizer and offload_param.",
    )
    step_timeout_s: float = doc(
        1800.0,
        "Deadline of one call to the workers, and of their start; past it they are replaced (see trainer.max_restarts).",
    )
    heartbeat_interval_s: float = doc(5.0, "Seconds between the heartbeats asked of a policy worker while it works.")
    heartbeat_timeout_s: float = doc(
        60.0,
        "Policy workers of which one leaves a heartbeat unanswered for so long (its process is stopped, its machine is gone) are replaced, "
        "see trainer.max_restarts. A thread beside the work answers. At least heartbeat_interval_s.",
    )

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "training.num_workers", ">= 1", self.num_workers)
        for key in ("num_ref_workers", "num_logp_workers"):
            require(getattr(self, key) >= 0, f"training.{key}", ">= 0", getattr(self, key))
        require(self.lr > 0, "training.lr", "> 0", self.lr)
        for key in ("micro_batch_tokens", "logprobs_chunk_size"):
            require(getattr(self, key) >= 1, f"training.{key}", ">= 1", getattr(self, key))
        require(self.max_grad_norm >= 0, "training.max_grad_norm", ">= 0", self.max_grad_norm)
        require(self.step_timeout_s > 0, "training.step_timeout_s", "> 0", self.step_timeout_s)
        interval_s = self.heartbeat_interval_s
        require(interval_s > 0, "training.heartbeat_interval_s", "> 0", interval_s)
        require(
            self.heartbeat_timeout_s >= interval_s,
            "training.heartbeat_timeout_s",
            f">= training.heartbeat_interval_s ({interval_s:g})",
            self.heartbeat_timeout_s,
        )
        require(self.num_warmup_steps >= 0, "training.num_warmup_steps", ">= 0", self.num_warmup_steps)
