"""The keys of ``task``: what is asked, and who judges the answers."""

import math
from dataclasses import dataclass, field
from typing import Any

from skyrl_async.config.schema.fields import bounded, require

BUILT_IN_TASKS = ("lagged_fibonacci", "relay", "trail")
DATASET_TASK = "dataset"
REASONING_GYM_TASK = "reasoning_gym"
HARBOR_TASK = "harbor"


@dataclass
class HarborTaskConfig:
    path: str | None = None
    """Directory of Harbor tasks to train on (task.toml, instruction.md, environment/, tests/), at any depth."""
    eval_path: str | None = None
    """The same for held-out tasks; null evaluates nothing."""


@dataclass
class ReasoningGymConfig:
    dataset: str | None = None
    """Name in reasoning-gym, such as chain_sum."""
    config: dict[str, Any] = field(default_factory=dict)
    """The dataset's parameters, such as {min_terms: 2, max_terms: 3}."""


@dataclass
class TaskConfig:
    name: str = "lagged_fibonacci"
    """lagged_fibonacci, relay or trail (built in, made on the spot), dataset (files of your own), harbor (directories of Harbor tasks), or
    reasoning_gym (its tasks by name).
    """
    train_files: list[str] = field(default_factory=list)
    """Training prompts, for name=dataset: jsonl or parquet files, a directory of them, a directory that Hugging Face datasets saved
    (save_to_disk), or DIR/train for DIR/train-*.parquet. Columns as in SkyRL: uid (optional), prompt, env_class, and extras such as
    reward_spec.
    """
    train_weights: list[float] = field(default_factory=list)
    """Passes over each of train_files in an epoch; empty: 1 each. 2 takes every row twice, 0.25 a quarter of the rows, the next quarter in
    the next epoch.
    """
    eval_files: list[str] = field(default_factory=list)
    """The same for held-out prompts; empty evaluates nothing."""
    env_class: str | None = None
    """Environment (skyrl_gym registry name, or module:Class) of rows that name none."""
    reward: str | None = None
    """package.module:function that judges every answer in place of the rows' environments: called with the answer, a text, and the row's
    columns, it returns a number, or a list with one number per sampled token (the column response_token_ids; agents: without
    response_token_ids). One turn; it runs in a thread and may block.
    """
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    """Which task of reasoning-gym, for name=reasoning_gym (the extra reasoning-gym)."""
    harbor: HarborTaskConfig = field(default_factory=HarborTaskConfig)
    """Which tasks, for name=harbor."""
    num_train_prompts: int = bounded(2048, ge=1)
    """Training prompts made by a built-in task or by reasoning_gym."""
    num_eval_prompts: int = bounded(512, ge=0)
    """Held-out prompts made by a built-in task or by reasoning_gym; never trained on, nor warm-started on."""
    seed: int = 0
    """Seed of the prompts that are made, of the choice of held-out ones, and of the order in which a fractional weight takes rows."""

    def __post_init__(self) -> None:
        if self.name == DATASET_TASK:
            expected = "at least one file when task.name=dataset"
            require(bool(self.train_files), "task.train_files", expected, self.train_files)
        if self.name == REASONING_GYM_TASK:
            dataset = self.reasoning_gym.dataset
            require(bool(dataset), "task.reasoning_gym.dataset", "a name when task.name=reasoning_gym", dataset)
        if self.name == HARBOR_TASK:
            path = self.harbor.path
            require(bool(path), "task.harbor.path", "a directory of Harbor tasks when task.name=harbor", path)
        num_files, weights = len(self.train_files), self.train_weights
        expected = f"empty or as long as task.train_files ({num_files})"
        require(not weights or len(weights) == num_files, "task.train_weights", expected, weights)
        are_positive = all(math.isfinite(weight) and weight > 0 for weight in weights)
        require(are_positive, "task.train_weights", "numbers > 0 (leave a file out instead of weighing it 0)", weights)
