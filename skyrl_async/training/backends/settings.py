"""What a rank is made with: plain values, so that any process can hold them.

The composition root fills it from the configuration; the training code never sees the configuration tree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_async.algorithms.settings import CorrectionSettings, LossConstants
from skyrl_async.errors import ConfigError
from skyrl_async.types import Adapter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Adapters that train in place of the weights; see ``training.lora``."""

    rank: int
    """>= 1."""
    alpha: float
    """> 0."""
    dropout: float = 0.0
    """In [0, 1); of the adapters' inputs, where gradients are taken."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Ends of the names of linear layers, or ``all-linear`` alone."""
    exclude_modules: tuple[str, ...] = ()
    init_method: str = "kaiming"
    """``kaiming`` or ``gaussian``: how A is drawn."""
    is_published_alone: bool = False
    """Whether A and B are published, instead of the weights with the adapters merged into them."""
    seed: int = 0
    """Of A; the same on every rank."""

    @property
    def adapter(self) -> Adapter:
        """What others have to know of them."""
        return Adapter(rank=self.rank, alpha=self.alpha)

    @property
    def adapts_all_linear(self) -> bool:
        """Every linear layer but the output projection has one."""
        return self.target_modules == ("all-linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings:
    """What an engine is made with."""

    zero_stage: int
    """0 shards nothing; 1 the optimizer's state; 2 gradients too; 3 weights too."""
    offload_optimizer: bool = False
    """The optimizer's state and step are in the host's memory; stage 1 and above."""
    offload_param: bool = False
    """Weights are in the host's memory until they are used; stage 3."""
    user_config: Mapping[str, Any] | None = None
    """Further keys of DeepSpeed's own, none of them below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Everything a ``PolicyRank`` needs to know."""

    policy_path: str
    """Local Hugging Face directory (config, safetensors, tokenizer)."""
    trust_remote_code: bool = False
    """Passed to transformers."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    serve_dtype: str = "float32"
    """``float32`` or ``bfloat16``: of exported and published weights; training keeps float32 master weights."""
    shares_weights: bool = False
    """Keep what is published on each rank's device too, for engines that run there."""
    mixed_precision: bool = False
    """bfloat16 forward and backward over float32 weights."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora: LoraSettings | None = None
    """None: the weights train."""
    cpu_offload: bool = False
    """Keep the policy's parameters, gradients and optimizer state in the host's memory, and step there."""
    deepspeed: DeepSpeedSettings | None = None
    """None: FSDP2 trains."""

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
    """Optimizer steps of the whole run; only a falling schedule needs it."""
    max_grad_norm: float = 1.0
    """Gradient clipping; 0 does not clip."""

    micro_batch_tokens: int = 4096
    """Most tokens, padding included, of one forward on one rank."""
    use_sample_packing: bool = True
    """Lay the rows of a micro-batch end to end instead of padding them to the longest."""
    logprobs_chunk_size: int = 1024
    """Sampled tokens whose logits exist at once, >= 1."""
    temperature: float = 1.0
    """The engine samples from ``softmax(logits / temperature)``, so the policy's log-probs are taken there too; > 0."""

    trains: bool = True
    """False: no optimizer and no gradients; only log-probs are asked for, of weights that ``load_weights`` replaces."""
    has_reference: bool = False
    """Hold a frozen reference model beside the policy."""
    reference_path: str | None = None
    """Local Hugging Face directory of the reference; None: the policy as it is before the first step, which with adapters is the policy
    without them and no second model."""

    policy_loss: str = "ppo_clip"
    """Name known to ``registries.POLICY_LOSSES``, or ``package.module:function``."""
    loss_constants: LossConstants = field(default_factory=LossConstants)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    """Off-policy corrections of the policy loss."""
    kl_estimator: str | None = None
    """Name known to ``algorithms.kl.get_kl_estimator``; None: the loss has no divergence from the reference in it."""
    kl_coef: float = 0.0
    """Of that divergence in the loss, >= 0; 0 only measures it."""
    entropy_coef: float = 0.0
    """Of the entropy that the loss rewards, >= 0; 0 only measures it."""
    bad_step_dir: str | None = None
    """Where the rows of a step are written whose loss or gradient is not finite; None: they are not."""
    seed: int = 0
    """Of each rank's random state (plus the rank), before a checkpoint replaces it."""
    is_deterministic: bool = False
    """On CUDA, take kernels that give the same bits each time."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"generator.sampling.temperature must be > 0 while training, got {self.temperature}: "
                "greedy samples carry no log-probs to train against"
            )
        if self.lr_schedule != "constant" and self.num_steps is None:
            raise ConfigError(
                f"trainer.num_steps must be set when training.lr_schedule={self.lr_schedule}, got None: "
                "the schedule falls to 0 at that step"
            )

    @property
    def published_adapter(self) -> Adapter | None:
        """What is published of adapters alone; None: all weights are."""
        return self.lora.adapter if self.lora is not None and self.lora.is_published_alone else None

    @property
    def micro_batch_overhead_tokens(self) -> int:
        """Fixed cost of a forward and backward in tokens: about 4 ms at 50 us per token measured on a CPU core with
        the tiny policy; on a GPU launches dominate until a micro-batch is full.
        """
        return 80 if self.device == "cpu" else 4096

    @property
    def torch_serve_dtype(self) -> "torch.dtype":
        """``serve_dtype`` as torch's."""
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.serve_dtype]
