"""The ``policy`` section: which model is trained, and how the tiny one is made."""

from dataclasses import dataclass

from skyrl_async.config.schema.choices import DType
from skyrl_async.config.schema.fields import doc, require
from skyrl_async.config.schema.lora import LoraConfig


@dataclass
class WarmStartConfig:
    enabled: bool = doc(
        False, "Teach the tiny policy the task's format by supervised learning first (cached under cache_dir)."
    )
    target_accuracy: float = doc(0.95, "Greedy accuracy on clean worked answers at which the first phase ends.")
    min_tokens: int = doc(60_000, "Least tokens of the first phase: at its first success a policy still slips.")
    max_tokens: int = doc(400_000, "Most tokens of the first phase.")
    mixture_tokens: int = doc(
        40_000,
        "Tokens of the second phase: terse guesses mixed with worked answers, so that reinforcement has something to learn.",
    )
    terse_share: float = doc(0.7, "Share of terse guesses in the second phase.")
    slip_rate: float = doc(0.0, "Wrong digits in the second phase's worked answers; of built-in tasks.")
    files: list[str] = doc(
        list,
        "Conversations to imitate, for tasks that are not built in: files as of task.train_files, whose rows have messages, and "
        "guess=true where they are hasty answers for the second phase. The tiny policy's tokenizer is made for them.",
    )

    def __post_init__(self) -> None:
        require(0 <= self.terse_share <= 1, "policy.warm_start.terse_share", "in [0, 1]", self.terse_share)
        require(0 <= self.slip_rate <= 1, "policy.warm_start.slip_rate", "in [0, 1]", self.slip_rate)


@dataclass
class PolicyConfig:
    path: str | None = doc(
        None,
        "Local Hugging Face directory (config, safetensors, tokenizer). Null builds the tiny policy for the built-in task.",
    )
    dtype: DType = doc(DType.bfloat16, "Of the weights the engines serve; training keeps float32 master weights.")
    trust_remote_code: bool = doc(False, "Passed to transformers and vLLM.")
    hidden_size: int = doc(128, "Of the tiny policy.")
    num_layers: int = doc(2, "Of the tiny policy.")
    num_heads: int = doc(4, "Of the tiny policy; half as many key-value heads.")
    intermediate_size: int = doc(512, "Of the tiny policy.")
    tie_word_embeddings: bool = doc(False, "Of the tiny policy.")
    warm_start: WarmStartConfig = doc(WarmStartConfig, "What the tiny policy learns before reinforcement.")
    lora: LoraConfig = doc(LoraConfig, "Adapters of low rank that train in place of the weights.")
