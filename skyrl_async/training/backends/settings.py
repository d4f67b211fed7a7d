"""The settings of a rank, which cross processes. The composition root fills them from the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_async.algorithms.settings import CorrectionSettings, LossConstants
from skyrl_async.config.schema.policy import LoraConfig
from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.types import Adapter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The settings of a ``PolicyRank``."""

    policy_path: str
    """Local Hugging Face directory (config, safetensors, tokenizer)."""
    trust_remote_code: bool = False
    """Passed to transformers."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    serve_dtype: str = "float32"
    """Dtype of exported and published weights: ``float32`` or ``bfloat16``. Training keeps float32 weights."""
    shares_weights: bool = False
    """Also keep published weights on each rank's device, for engines that run there."""
    mixed_precision: bool = False
    """bfloat16 forward and backward over float32 weights."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora: LoraConfig | None = None
    """None: all weights train."""
    cpu_offload: bool = False
    """Keep the policy's parameters, gradients and optimizer state in the host's memory, and step there."""
    deepspeed: DeepSpeedConfig | None = None
    """None: FSDP2."""
    deepspeed_json: Mapping[str, Any] | None = None
    """Further keys of DeepSpeed's configuration, none that ``engine_config`` sets."""

    lr: float = 3e-4
    """Peak learning rate of AdamW, > 0."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine`` after warm-up; the last two fall to 0 at ``num_steps``."""
    num_warmup_steps: int = 0
    """Steps of linear warm-up, >= 0."""
    num_steps: int | None = None
    """Optimizer steps of the full run; only a falling schedule needs it."""
    max_grad_norm: float = 1.0
    """Norm at which gradients are clipped; 0: never."""

    micro_batch_tokens: int = 4096
    """Most tokens, padding included, of one forward on one rank."""
    use_sample_packing: bool = True
    """Lay the rows of a micro-batch end to end instead of padding them to the longest."""
    logprobs_chunk_size: int = 1024
    """Sampled tokens whose logits exist at once, >= 1."""
    temperature: float = 1.0
    """> 0. Engines sample from ``softmax(logits / temperature)``; the policy's log-probs are computed from the same."""
    returns_logprobs: bool = False
    """Whether ``forward_backward`` returns the log-probs of the trained tokens, for the record of samples."""

    trains: bool = True
    """False: no optimizer and no gradients. Such a rank computes log-probs, of weights that ``load_weights`` replaces."""
    has_reference: bool = False
    """Hold a frozen reference model beside the policy."""
    reference_path: str | None = None
    """Local Hugging Face directory of the reference. None: the initial policy; with adapters, the policy without them and no second
    model."""

    num_top_tokens: int = 0
    """Likeliest tokens that ``logprobs_of`` gives in the place of each sampled one, for ``teacher_coef`` elsewhere; 0: none."""

    is_critic: bool = False
    """The model has a value head in place of its output projection, and its values are trained towards returns."""
    value_clip: float | None = 0.2
    """> 0: how far a critic's value may move from what it was when its row was finished; None: as far as it likes."""

    policy_loss: str = "ppo_clip"
    """Name known to ``registries.POLICY_LOSSES``, or ``package.module:function``."""
    loss_constants: LossConstants = field(default_factory=LossConstants)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    """Off-policy corrections of the policy loss."""
    kl_estimator: str | None = None
    """Name known to ``algorithms.kl.KL_ESTIMATORS``; None: no divergence from the reference is computed."""
    kl_coef: float = 0.0
    """Weight of the divergence in the loss, >= 0; 0 only measures it."""
    entropy_coef: float = 0.0
    """Weight of the entropy that the loss rewards, >= 0; 0 only measures it."""
    teacher_coef: float = 0.0
    """Weight in the loss of the divergence over a teacher's likeliest tokens, >= 0; 0: rows need none."""
    teacher_divergence: str = "reverse_kl"
    """Name known to ``algorithms.divergences.DIVERGENCES``."""
    bad_step_dir: str | None = None
    """Directory for the rows of a step whose loss or gradient is not finite; None: they are not written."""
    seed: int = 0
    """Seed of each rank's random state, plus its rank, until a checkpoint replaces that state."""
    is_deterministic: bool = False
    """On CUDA, use kernels that give the same bits each time."""

    @property
    def published_adapter(self) -> Adapter | None:
        """The adapter that is published alone; None: all weights are published."""
        return self.adapter if self.lora is not None and self.lora.served_rank else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that trains; None: all weights train."""
        return Adapter(rank=self.lora.rank, alpha=self.lora.alpha) if self.lora is not None else None

    @property
    def micro_batch_overhead_tokens(self) -> int:
        """Fixed cost of a forward and backward, in tokens. On a CPU core, 4 ms at 50 us per token were measured with the tiny policy. On a
        GPU, kernel launches dominate until a micro-batch is full.
        """
        return 80 if self.device == "cpu" else 4096

    @property
    def torch_serve_dtype(self) -> "torch.dtype":
        """``serve_dtype`` as a torch dtype."""
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.serve_dtype]
