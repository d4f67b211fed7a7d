"""The tiny policy: a small Qwen3, written as a Hugging Face directory for transformers and vLLM, and kept in a cache.

A second run with the same values uses the first one's. The name of a directory in the cache contains a hash of all inputs, including the
source text of this package. A directory appears whole or not at all, so that runs may share a cache.
"""

import hashlib
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyrl_async.config.schema.policy import WarmStartConfig
from skyrl_async.tasks.registry import WarmStartTask, tools_of
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.tasks.warm_start import WarmStartProgress, warm_start

logger = logging.getLogger(__name__)

NUM_TOKENIZER_CONVERSATIONS = 200
MAX_POSITION_EMBEDDINGS = 1024
INITIALIZER_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """The architecture of a tiny policy."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    """Attention heads; even, and twice their number divides ``hidden_size``. There are half as many key-value heads."""
    intermediate_size: int = 512
    tie_word_embeddings: bool = False


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
    generation = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    generation.save_pretrained(directory)
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


def task_tokenizer(task: WarmStartTask) -> PreTrainedTokenizerFast:
    """Return the tokenizer of ``task``'s texts; it is always the same."""
    rng = random.Random(0)
    conversations = [task.conversation(task.draw_prompt(rng), rng) for _ in range(NUM_TOKENIZER_CONVERSATIONS)]
    texts = [message["content"] for conversation in conversations for message in conversation]
    return train_tokenizer(texts, tools_of(task.draw_prompt(rng)))


def prepare_initial_policy(cache_dir: Path, task: WarmStartTask, sizes: PolicySizes, *, seed: int) -> Path:
    """Return a directory with ``task``'s tokenizer and random weights. It takes a second if it is not in the cache.

    Architecture and tokenizer are those of ``prepare_tiny_policy``: engines can boot on it while the warm start runs.
    """
    directory = _directory(cache_dir, f"{task.name}-initial", {"sizes": asdict(sizes), "seed": seed})
    if not directory.is_dir():
        build_tiny_policy(directory, sizes, task_tokenizer(task), seed)
    return directory


def prepare_tiny_policy(
    cache_dir: Path,
    task: WarmStartTask,
    sizes: PolicySizes,
    plan: WarmStartConfig,
    *,
    held_out: frozenset[str],
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
) -> Path:
    """Return a directory with the warm-started policy, trained now if it is not in the cache.

    Args:
        cache_dir: shared by all runs; ``~`` is expanded.
        held_out: uids of prompts that must not be learned.
        seed: seed of the random weights and of the conversations.
        should_stop, on_progress: as in ``warm_start``. A stopped warm start leaves no files.
    """
    # The task's name contains a hash of what its files hold; where they lie does not matter.
    learned = asdict(replace(plan, enabled=True, files=[]))
    values = {"sizes": asdict(sizes), "plan": learned, "held_out": sorted(held_out), "seed": seed}
    directory = _directory(cache_dir, f"{task.name}-warm", values)
    if directory.is_dir():
        logger.info("the warm-started policy is in the cache: %s", directory)
        return directory
    started = time.monotonic()
    torch.set_num_threads(1)  # two OpenMP threads on cores that an engine shares are several times slower than one
    tokenizer = task_tokenizer(task)
    model = make_tiny_model(sizes, tokenizer, seed)
    accuracy = warm_start(
        model, tokenizer, task, plan, held_out=held_out, seed=seed, should_stop=should_stop, on_progress=on_progress
    )
    with created_directory(directory) as temporary:
        save_policy(model, tokenizer, temporary)
    seconds = time.monotonic() - started
    logger.info("warm start took %.1f s and reached accuracy %.2f: %s", seconds, accuracy, directory)
    return directory


def _directory(cache_dir: Path, name: str, values: dict[str, object]) -> Path:
    described = json.dumps([_source_hash(), values], sort_keys=True)
    key = hashlib.sha256(described.encode()).hexdigest()[:16]
    return Path(cache_dir).expanduser() / "policies" / f"{name}-{key}"


@cache
def _source_hash() -> str:
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()
