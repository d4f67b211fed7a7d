"""Environments of one turn that judge a final answer: ``gsm8k``, ``math`` and ``math_verify``, and a function of the user's.

Flows in: a row's columns, then what the policy says. Flows out: the reward. This module does not know tokens or who plays.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.rewards.math_answers import (
    as_number,
    final_answer,
    is_equal_answer,
    is_right_answer,
    is_same_answer,
    require_math_verify,
)

Extras = dict[str, Any]
RewardFunction = Callable[[str, Extras], float]
"""A user's reward: called with the answer and the row's columns, ``prompt`` among them, in a thread, so it may block."""


def ended(reward: float, **metadata: Any) -> BaseTextEnvStepOutput:
    """Return the output of a last step."""
    return BaseTextEnvStepOutput(
        observations=[], reward=reward, done=True, metadata=metadata, postprocessed_action=None
    )


def ground_truth_of(extras: Mapping[str, Any] | None, expected: str) -> Any:
    """Return ``reward_spec.ground_truth`` (``reward_model`` in verl's files); ``ConfigError`` says what it should be."""
    columns = extras or {}
    for name in ("reward_spec", "reward_model"):
        spec = columns.get(name)
        if isinstance(spec, Mapping) and spec.get("ground_truth") not in (None, ""):
            return spec["ground_truth"]
    found = {name: columns[name] for name in ("reward_spec", "reward_model") if name in columns}
    raise ConfigError(f"reward_spec.ground_truth must be {expected}, found {found or f'the columns {sorted(columns)}'}")


def method_of(extras: Mapping[str, Any] | None) -> str | None:
    """Return ``reward_spec.method``, if the row has one."""
    spec = (extras or {}).get("reward_spec")
    return spec.get("method") if isinstance(spec, Mapping) else None


class Gsm8kEnv(BaseTextEnv):
    """The reward is 1.0 for the right number after ``####``; with ``reward_spec.method`` flexible the last number counts."""

    is_fast = True

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras, "the right number"))
        self.is_flexible = method_of(extras) == "flexible"
        if as_number(self.ground_truth) is None:
            raise ConfigError(f"reward_spec.ground_truth must be a number, got {self.ground_truth!r}")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        return ended(float(is_right_answer(action, self.ground_truth, is_flexible=self.is_flexible)))


class MathEnv(BaseTextEnv):
    r"""The reward is 1.0 for an answer equal to the right one: in ``\boxed{}``, or after ``Answer:`` or ``####``."""

    is_fast = True

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        truth = str(ground_truth_of(extras, "the right answer"))
        self.ground_truth = final_answer(truth) or truth

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = final_answer(action)
        return ended(float(answer is not None and self.is_right(answer)))

    def is_right(self, answer: str) -> bool:
        """Whether a final answer equals the right one."""
        return is_same_answer(answer, self.ground_truth)


class MathVerifyEnv(MathEnv):
    """The same for answers that are equal as expressions, which takes seconds of computing (``rewards.math_answers.is_equal_answer``)."""

    is_fast = False

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__(env_config, extras)
        require_math_verify()

    def is_right(self, answer: str) -> bool:
        return is_equal_answer(answer, self.ground_truth)


class FunctionEnv(BaseTextEnv):
    """One turn, rewarded by a function of the user's (``task.reward``)."""

    def __init__(self, function: RewardFunction, extras: Extras) -> None:
        super().__init__()
        self.function = function
        self.extras = extras

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.extras = {"prompt": prompt, **self.extras}
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        found = self.function(action, self.extras)
        try:
            reward = float(found)
        except (TypeError, ValueError) as error:
            raise GenerationError(f"task.reward must return a number, got {found!r}") from error
        if not math.isfinite(reward):
            raise GenerationError(f"task.reward must return a finite number, got {reward}")
        return ended(reward)
