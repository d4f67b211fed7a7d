"""Tasks of the package ``reasoning-gym``, more than a hundred of them, by name: their questions as prompts, their scores as rewards.

An item is drawn from the dataset's seed and the item's index, so that a prompt names both and its environment draws it again. The
package is the extra ``reasoning-gym``; it is imported when a task of it is asked for, which takes some seconds.

Scorers that do more than compare texts run in the sandbox: many of them evaluate the answer as Python, or with sympy. An answer may hence
run code, take for ever, or make the scorer raise. Whatever it does costs that answer its score and nothing else.

Flows in: a dataset's name, its parameters, how many prompts. Flows out: prompts, and rewards. This module does not know tokens or who
plays.
"""

import base64
import json
import logging
import math
import os
import pickle
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.environments.answers import Extras, ended
from skyrl_async.errors import ConfigError, did_you_mean
from skyrl_async.rewards.sandbox import Limits, call_function, require_sandbox
from skyrl_async.types import Prompt

logger = logging.getLogger(__name__)

NAME = "reasoning_gym"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
MAX_DRAWS_PER_PROMPT = 20
"""Items drawn for each distinct question asked for, before a dataset counts as too small."""
HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Datasets whose items depend on Python's hash seed; found by drawing from 105 of 0.1.25 under two."""
LIMITS = Limits(cpu_s=5, wall_s=30.0, memory_mb=2048)
"""Limits of the computation of one score. An answer that needs more scores nothing."""
_warned: set[str] = set()
"""Datasets that a warning has already named."""

# Importing the package whole takes seconds, most of it for matplotlib, which one dataset's dependency draws with. Hence the packages on
# the way to the dataset's module stay empty, and what would draw does too.
_PROGRAM = """
import base64, importlib, importlib.util, pickle, sys, types

class Empty(types.ModuleType):
    def __getattr__(self, name):
        return None

DRAWING = ("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot", "mpl_toolkits", "mpl_toolkits.mplot3d")

def score(module, name, config, seed, size, item, answer):
    sys.modules.update({drawing: Empty(drawing) for drawing in DRAWING})
    packages = module.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ".".join(packages[:depth])
        spec = importlib.util.find_spec(package) or sys.exit(f"{package} is not found here")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.import_module("reasoning_gym.coaching")
    importlib.import_module(module)
    dataset = importlib.import_module("reasoning_gym.factory").create_dataset(name, seed=seed, size=size, **config)
    item = pickle.loads(base64.b64decode(item))
    try:
        return float(dataset.score_answer(answer, item))
    except Exception as error:
        return f"the scorer raised {type(error).__name__}: {error}"[:300]
"""


class ReasoningGymEnv(BaseTextEnv):
    """One turn; the reward is the dataset's score, in [0, 1], of what the last ``<answer>`` holds; 0.0 where that has none."""

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        require_sandbox()
        item = (extras or {}).get(NAME)
        if not isinstance(item, Mapping) or not {"dataset", "config", "seed", "size", "index"} <= item.keys():
            raise ConfigError(f"column {NAME} must have dataset, config, seed, size and index, got {item!r}")
        self.item = item

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = marked_answer(action)
        if answer is None:
            return ended(0.0)
        score, reason = _score(self.item, answer)
        name = self.item["dataset"]
        if reason is not None and name not in _warned:
            _warned.add(name)
            logger.warning("an answer to %s scores 0.0, as others like it will without a word: %s", name, reason)
        return ended(score)


def marked_answer(text: str) -> str | None:
    """Return what the last ``<answer>`` of ``text`` holds; None where none is closed. Time is linear in the length of ``text``."""
    for piece in reversed(text.split("</answer>")[:-1]):
        _, mark, answer = piece.partition("<answer>")
        if mark:
            return answer.strip()
    return None


def make_prompts(
    dataset: str, config: Mapping[str, Any], num_train: int, num_eval: int, seed: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Return training and held-out prompts of a dataset, no question twice; the same for the same arguments.

    Args:
        dataset: its name in reasoning-gym.
        config: its parameters, such as ``{"min_terms": 2}`` of ``chain_sum``.

    Raises:
        ConfigError: there is no such dataset, it refuses the parameters, has too few different questions, cannot score here, or draws
            others in every process.
    """
    require_sandbox()
    _require_repeatable(dataset)
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
    for prompt in chosen[:1]:
        _check_scores(dataset, prompt.extras[NAME])
    return chosen[num_eval:], chosen[:num_eval]


def _require_repeatable(dataset: str) -> None:
    """Raise ``ConfigError`` unless every process of the run, and one that takes it up, draws the same items."""
    if dataset in HASH_SEEDED and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        raise ConfigError(
            f"task.reasoning_gym.dataset={dataset} draws other questions in every process, because it goes through Python's sets: start "
            "the run with PYTHONHASHSEED=0 in its environment, also when it is resumed"
        )


def _check_scores(dataset: str, item: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless an innocent answer is scored: a package that the sandbox cannot use would make all answers wrong."""
    _, reason = _score(item, _drawn(item)[1]["answer"] or "")
    if reason is not None:
        raise ConfigError(
            f"task.reasoning_gym.dataset={dataset} cannot score an answer of its own in the sandbox, which reads only packages that are "
            f"installed where Python is ({sys.prefix}): {reason}"
        )


def _score(item: Mapping[str, Any], answer: str) -> tuple[float, str | None]:
    """The score of an answer, and None; or 0.0 and why there is none."""
    from reasoning_gym.dataset import ProceduralDataset

    source, drawn = _drawn(item)
    kind = type(source)
    if kind.score_answer is ProceduralDataset.score_answer and isinstance(drawn["answer"], str):
        return float(source.score_answer(answer, drawn)), None  # it compares two texts
    return sandboxed_score(kind.__module__, item, drawn, answer)


def sandboxed_score(
    module: str, item: Mapping[str, Any], drawn: Mapping[str, Any], answer: str
) -> tuple[float, str | None]:
    """Return the score of an answer, in [0, 1], and None; or 0.0 and why there is none. Blocks for some tenths of a second.

    Args:
        module: the dotted name of the module that defines the dataset's class.
        item: names the dataset, as in a prompt's column.
        drawn: what the dataset drew for it in this process. It is handed over, because some datasets draw another one in another process.

    Raises:
        GenerationError: the sandbox could not be set up.
    """
    handed = base64.b64encode(pickle.dumps(dict(drawn))).decode()
    arguments = (module, item["dataset"], dict(item["config"]), item["seed"], item["size"], handed, answer)
    outcome, results = call_function(_PROGRAM, "score", [arguments], limits=LIMITS)
    if results is None:
        return 0.0, outcome.failure or "the score is no JSON"
    score = results[0]
    if isinstance(score, str):
        return 0.0, score
    if not isinstance(score, float) or not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return 0.0, f"the score must be a number in [0, 1], got {str(score)[:100]}"
    return score, None


def _drawn(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """The dataset that an item is of, and what that draws for it."""
    source = _dataset(item["dataset"], json.dumps(item["config"], sort_keys=True), item["seed"], item["size"])
    return source, source[item["index"]]


@lru_cache(maxsize=16)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym; ``config`` is JSON, so that it can be remembered."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS, n=3)
        raise ConfigError(
            f"task.reasoning_gym.dataset must be one of the {len(DATASETS)} of reasoning-gym, got {name!r}{hint}: "
            f"{', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"task.reasoning_gym.config={config} is refused by {name}: {error}") from error
