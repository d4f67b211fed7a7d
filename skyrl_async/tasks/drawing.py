"""Training and held-out prompts of a task that draws them at random, and how many there can be.

Flows in: what draws a prompt, and how many are asked for. Flows out: distinct prompts. This module does not know tasks.
"""

import random
from collections.abc import Callable

from skyrl_async.errors import ConfigError
from skyrl_async.types import Prompt


def require_enough_prompts(task_name: str, num_train: int, num_eval: int, *, max_prompts: int) -> None:
    """Raise ``ConfigError`` when more than ``max_prompts`` are asked for."""
    if num_train + num_eval > max_prompts:
        raise ConfigError(
            f"task.num_train_prompts + task.num_eval_prompts must be <= {max_prompts} for task.name={task_name}, "
            f"got {num_train} + {num_eval}; ask for fewer"
        )


def distinct_prompts(
    draw: Callable[[random.Random], Prompt], num_train: int, num_eval: int, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Training and held-out prompts, all of different uids; ``draw`` must know far more of them."""
    rng = random.Random(seed)
    prompts: dict[str, Prompt] = {}
    while len(prompts) < num_train + num_eval:
        prompt = draw(rng)
        prompts.setdefault(prompt.uid, prompt)
    chosen = tuple(prompts.values())
    return chosen[num_eval:], chosen[:num_eval]
