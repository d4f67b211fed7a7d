"""The tiny policy: a small Qwen3 with random weights, written as a Hugging Face directory for transformers and vLLM."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyrl_async.errors import ConfigError

MAX_POSITION_EMBEDDINGS = 1024
INITIALIZER_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """The architecture of a tiny policy."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    """Attention heads; even, and a divisor of ``hidden_size``. There are half as many key-value heads."""
    intermediate_size: int = 512
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy.{name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % 2:
            raise ConfigError(f"policy.num_heads must be even, got {self.num_heads}")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"policy.hidden_size must be a multiple of 2 * policy.num_heads ({2 * self.num_heads}), "
                f"got {self.hidden_size}"
            )


def make_tiny_model(sizes: PolicySizes, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a float32 Qwen3 with weights drawn from ``seed`` alone."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads // 2,
        head_dim=sizes.hidden_size // sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        tie_word_embeddings=sizes.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, INITIALIZER_STD, generator=generator)
    return model


def save_policy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write config, generation config, ``model.safetensors`` and tokenizer into ``directory``."""
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(directory)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)


@contextmanager
def created_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``directory`` if the block succeeds, and is deleted if it fails.

    A ``directory`` that another process has created meanwhile stays.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            os.rename(temporary, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_tiny_policy(directory: Path, sizes: PolicySizes, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write a tiny policy with random weights as ``directory``, whole or not at all."""
    with created_directory(directory) as temporary:
        save_policy(make_tiny_model(sizes, tokenizer, seed), tokenizer, temporary)
