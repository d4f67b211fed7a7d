"""The ``policy`` section: which model is trained, and how the tiny one is made."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_async.config.schema.fields import DType, bounded, require


@dataclass
class WarmStartConfig:
    enabled: bool = False
    """Teach the tiny policy the task's format by supervised learning first (cached under cache_dir)."""
    target_accuracy: float = bounded(0.95, ge=0, le=1)
    """Greedy accuracy on clean worked answers at which the first phase ends."""
    min_tokens: int = bounded(60_000, ge=0)
    """Least tokens of the first phase: at its first success a policy still slips."""
    max_tokens: int = bounded(400_000, ge=0)
    """Most tokens of the first phase."""
    mixture_tokens: int = bounded(40_000, ge=0)
    """Tokens of the second phase: terse guesses mixed with worked answers, so that reinforcement has something to learn."""
    batch_tokens: int = bounded(320, ge=1)
    """Tokens of an optimizer step of both phases; more for conversations of hundreds of tokens, a few of which should fit."""
    terse_share: float = bounded(0.7, ge=0, le=1)
    """Share of terse guesses in the second phase."""
    slip_rate: float = bounded(0.0, ge=0, le=1)
    """Wrong digits in the second phase's worked answers; for built-in tasks only."""
    files: list[str] = field(default_factory=list)
    """Conversations to imitate, for tasks that are not built in: files as of task.train_files, whose rows have messages, and guess=true
    where they are hasty answers for the second phase. The tiny policy's tokenizer is made for them.
    """


LoraInit = StrEnum("LoraInit", ["kaiming", "gaussian"])
LoraPublish = StrEnum("LoraPublish", ["merged", "adapter"])


ALL_LINEAR = "all-linear"
LARGEST_SERVED_RANK = 512
"""Largest rank of an adapter that vLLM serves."""


@dataclass
class LoraConfig:
    rank: int = bounded(0, ge=0)
    """Rank of the adapters that train in place of the weights, which stay as they are; 0 trains the weights."""
    alpha: float = bounded(16.0, gt=0, lt=math.inf)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = bounded(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs in training, in [0, 1); log-probs of stages and engines are without it."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names, or their ends, of the linear layers that get an adapter, such as [q_proj,v_proj]; [all-linear] is all of them but the output
    projection, which never gets one. Experts whose matrices are stacked in one parameter are none of them.
    """
    exclude_modules: list[str] = field(default_factory=list)
    """Names, or their ends, of layers that get none though they are among these."""
    init_method: LoraInit = LoraInit.kaiming
    """How A is drawn, uniformly or normally; B begins as 0, so that training begins with the weights as they are."""

    publish: LoraPublish = LoraPublish.merged
    """What engines get of each version. merged: all weights, the adapters merged into them. adapter: the adapters alone, which vLLM
    computes beside the weights it booted with: a small transfer and a short pause, for some speed at every token.
    """

    @property
    def is_on(self) -> bool:
        """Whether adapters train in place of the weights."""
        return self.rank > 0

    @property
    def named_targets(self) -> tuple[str, ...]:
        """``target_modules``; empty for all linear layers."""
        return tuple(name for name in self.target_modules if name != ALL_LINEAR)

    @property
    def served_rank(self) -> int:
        """Rank of the adapters that engines compute beside their weights; 0: they get whole weights."""
        return self.rank if self.publish is LoraPublish.adapter else 0

    def __post_init__(self) -> None:
        names = self.target_modules
        are_fine = names == [ALL_LINEAR] or (bool(names) and ALL_LINEAR not in names)
        require(are_fine, "policy.lora.target_modules", "[all-linear], or names of layers without it", names)
        if self.publish is LoraPublish.adapter:
            expected = f"in [1, {LARGEST_SERVED_RANK}] with policy.lora.publish=adapter"
            require(0 < self.rank <= LARGEST_SERVED_RANK, "policy.lora.rank", expected, self.rank)


@dataclass
class PolicyConfig:
    path: str | None = None
    """Local Hugging Face directory (config, safetensors, tokenizer). Null builds the tiny policy for the built-in task."""
    dtype: DType = DType.bfloat16
    """Type of the weights that engines serve; training keeps float32 master weights."""
    trust_remote_code: bool = False
    """Passed to transformers and vLLM."""
    hidden_size: int = bounded(128, ge=1)
    """Width of the tiny policy."""
    num_layers: int = bounded(2, ge=1)
    """Layers of the tiny policy."""
    num_heads: int = bounded(4, ge=1)
    """Attention heads of the tiny policy; half as many key-value heads."""
    intermediate_size: int = bounded(512, ge=1)
    """Width of the tiny policy's MLPs."""
    tie_word_embeddings: bool = False
    """Share the tiny policy's input and output embeddings."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """What the tiny policy learns before reinforcement."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of low rank that train in place of the weights."""
