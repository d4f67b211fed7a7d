"""Tasks of the package ``reasoning-gym``, more than a hundred of them, by name: their questions as prompts, their scores as rewards.

An item is drawn from the dataset's seed and the item's index, so that a prompt names both and its environment draws it again. The
package is the extra ``reasoning-gym``; it is imported when a task of it is asked for, which takes some seconds.

Flows in: a dataset's name, its parameters, how many prompts. Flows out: prompts, and rewards. This module does not know tokens or who
plays.
"""

import difflib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.environments.answers import Extras, ended
from skyrl_async.errors import ConfigError
from skyrl_async.types import Prompt

NAME = "reasoning_gym"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
MAX_DRAWS_PER_PROMPT = 20
"""Items drawn for each distinct question asked for, before a dataset counts as too small."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnv(BaseTextEnv):
    """One turn; the reward is the dataset's score, in [0, 1], of what the last ``<answer>`` holds."""

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        item = (extras or {}).get(NAME)
        if not isinstance(item, Mapping) or not {"dataset", "config", "seed", "size", "index"} <= item.keys():
            raise ConfigError(f"column {NAME} must have dataset, config, seed, size and index, got {item!r}")
        self.item = item

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answers = _ANSWER.findall(action)
        if not answers:
            return ended(0.0)
        item = self.item
        dataset = _dataset(item["dataset"], json.dumps(item["config"], sort_keys=True), item["seed"], item["size"])
        return ended(float(dataset.score_answer(answers[-1].strip(), dataset[item["index"]])))


def make_prompts(
    dataset: str, config: Mapping[str, Any], num_train: int, num_eval: int, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Return training and held-out prompts of a dataset, no question twice; the same for the same arguments.

    Args:
        dataset: its name in reasoning-gym.
        config: its parameters, such as ``{"min_terms": 2}`` of ``chain_sum``.

    Raises:
        ConfigError: there is no such dataset, it refuses the parameters, or it has too few different questions.
    """
    num = num_train + num_eval
    size = MAX_DRAWS_PER_PROMPT * num
    source = _dataset(dataset, json.dumps(dict(config), sort_keys=True), seed, size)
    prompts: dict[str, Prompt] = {}
    for index in range(size):
        if len(prompts) == num:
            break
        question = source[index]["question"]
        item = {"dataset": dataset, "config": dict(config), "seed": seed, "size": size, "index": index}
        prompt = Prompt(
            uid=f"{dataset}-{seed}-{index}",
            messages=({"role": "user", "content": f"{question}\n\n{INSTRUCTION}"},),
            env_class=NAME,
            extras={NAME: item},
        )
        prompts.setdefault(question, prompt)
    if len(prompts) < num:
        raise ConfigError(
            f"task.num_train_prompts + task.num_eval_prompts must be <= {len(prompts)} for task.reasoning_gym.dataset={dataset}, which "
            f"gave so many different questions in {size}, got {num_train} + {num_eval}; ask for fewer, or harder ones"
        )
    chosen = tuple(prompts.values())
    return chosen[num_eval:], chosen[:num_eval]


@lru_cache(maxsize=16)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym; ``config`` is JSON, so that it can be remembered."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            f"task.reasoning_gym.dataset must be one of the {len(DATASETS)} of reasoning-gym, got {name!r}{hint}: "
            f"{', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.reasoning_gym.config={config} is refused by {name}: {error}") from error
