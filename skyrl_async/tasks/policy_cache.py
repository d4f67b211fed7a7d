"""A cache of tiny policies on disk: a second run with the same values uses the first one's.

A directory's name contains a hash of all inputs, including the source text of this package. A directory appears whole or not at all, so
that runs may share a cache.
"""

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from skyrl_async.tasks.registry import BuiltInTask, tools_of
from skyrl_async.tasks.tiny_policy import (
    PolicySizes,
    build_tiny_policy,
    created_directory,
    make_tiny_model,
    save_policy,
)
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.tasks.warm_start import WarmStartPlan, WarmStartProgress, warm_start

logger = logging.getLogger(__name__)

NUM_TOKENIZER_CONVERSATIONS = 200


def task_tokenizer(task: BuiltInTask) -> PreTrainedTokenizerFast:
    """Return the tokenizer of ``task``'s texts; it is always the same."""
    rng = random.Random(0)
    conversations = [task.conversation(task.draw_prompt(rng), rng) for _ in range(NUM_TOKENIZER_CONVERSATIONS)]
    texts = [message["content"] for conversation in conversations for message in conversation]
    return train_tokenizer(texts, tools_of(task.draw_prompt(rng)))


def prepare_initial_policy(cache_dir: Path, task: BuiltInTask, sizes: PolicySizes, *, seed: int) -> Path:
    """Return a directory with ``task``'s tokenizer and random weights. It takes a second if it is not in the cache.

    Architecture and tokenizer are those of ``prepare_tiny_policy``: engines can boot on it while the warm start runs.
    """
    directory = _directory(cache_dir, f"{task.name}-initial", {"sizes": asdict(sizes), "seed": seed})
    if not directory.is_dir():
        build_tiny_policy(directory, sizes, task_tokenizer(task), seed)
    return directory


def prepare_tiny_policy(
    cache_dir: Path,
    task: BuiltInTask,
    sizes: PolicySizes,
    plan: WarmStartPlan,
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
    values = {"sizes": asdict(sizes), "plan": asdict(plan), "held_out": sorted(held_out), "seed": seed}
    directory = _directory(cache_dir, f"{task.name}-warm", values)
    if directory.is_dir():
        logger.info("the warm-started policy is in the cache: %s", directory)
        return directory
    started = time.monotonic()
    torch.set_num_threads(1)  # two OpenMP threads on cores that an engine shares are several times slower than one
    tokenizer = task_tokenizer(task)
    model = make_tiny_model(sizes, tokenizer, seed)
    accuracy = warm_start(
        model,
        tokenizer,
        task,
        plan,
        held_out=held_out,
        seed=seed,
        should_stop=should_stop,
        on_progress=on_progress,
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
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
