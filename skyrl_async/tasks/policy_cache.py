"""The tiny policy's directories, made once and kept: the architecture at once, the warm-started weights when they are ready.

Flows in: a task, sizes, a plan, a seed. Flows out: Hugging Face directories below the cache directory, named by a hash of all that
makes them, the source text included. Concurrent runs may make the same one: whoever is first wins. Knows neither engines nor
reinforcement.
"""

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from skyrl_async.tasks import lagged_fibonacci, relay, tiny_policy, tokenizer, warm_start
from skyrl_async.tasks.registry import BuiltInTask
from skyrl_async.tasks.tiny_policy import (
    PolicySizes,
    build_tiny_policy,
    created_directory,
    make_tiny_model,
    save_policy,
)
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.tasks.warm_start import WarmStartPlan, WarmStartProgress
from skyrl_async.types import Prompt

logger = logging.getLogger(__name__)

_NUM_TOKENIZER_CONVERSATIONS = 400


def prepare_initial_policy(*, cache_dir: Path, task: BuiltInTask, sizes: PolicySizes, seed: int) -> Path:
    """The policy with random weights: enough for an engine to boot from. A second or two, once."""
    directory = cache_dir / f"{task.name}-initial-{_key(task, sizes, seed)}"
    if not directory.is_dir():
        build_tiny_policy(directory, sizes, task_tokenizer(task), seed)
    return directory


def prepare_tiny_policy(
    *,
    cache_dir: Path,
    task: BuiltInTask,
    sizes: PolicySizes,
    plan: WarmStartPlan,
    held_out: tuple[Prompt, ...],
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
) -> Path:
    """The warm-started policy; learns it (some 20 s on one core) where it is not cached.

    Args:
        cache_dir: where directories are kept between runs.
        task: what is taught.
        sizes: of the model.
        plan: how much is taught.
        held_out: prompts that must not be seen.
        seed: of weights and data.
        should_stop: asked before each batch; ``PolicyError`` is raised when it says so.
        on_progress: called now and then, in this thread.
    """
    uids = frozenset(prompt.uid for prompt in held_out)
    directory = cache_dir / f"{task.name}-warm-{_key(task, sizes, seed, asdict(plan), sorted(uids))}"
    if directory.is_dir():
        return directory
    started = time.monotonic()
    words = task_tokenizer(task)
    model = make_tiny_model(sizes, words, seed)
    accuracy = warm_start.warm_start(
        model, words, task, plan, held_out=uids, seed=seed, should_stop=should_stop, on_progress=on_progress
    )
    with created_directory(directory) as temporary:
        save_policy(model, words, temporary)
    logger.info("warm start took %.1f s, greedy accuracy %.2f: %s", time.monotonic() - started, accuracy, directory)
    return directory


def task_tokenizer(task: BuiltInTask) -> PreTrainedTokenizerFast:
    """The tokenizer of the task's own words; the same for every seed."""
    rng = random.Random(0)
    conversations = [task.clean_conversation(task.draw_prompt(rng), rng) for _ in range(_NUM_TOKENIZER_CONVERSATIONS)]
    return train_tokenizer(message["content"] for messages in conversations for message in messages)


def _key(task: BuiltInTask, sizes: PolicySizes, seed: int, *more: object) -> str:
    modules = (lagged_fibonacci, relay, tiny_policy, tokenizer, warm_start)
    sources = [Path(str(module.__file__)).read_text() for module in modules]
    described = json.dumps([task.name, asdict(sizes), seed, more, sources, Path(__file__).read_text()])
    return hashlib.sha256(described.encode()).hexdigest()[:16]
