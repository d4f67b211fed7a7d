"""Environments that judge an answer: a number or an expression, a program by its tests, or whatever a function of the user's judges.

``gsm8k``, ``math``, ``math_verify`` and ``code`` have one turn; in ``code_multi_turn`` failures are told. Programs run in the sandbox.

Flows in: a row's columns, then what the policy says. Flows out: the reward. Does not know who plays.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.columns import TokenIds
from skyrl_async.errors import ConfigError
from skyrl_async.generators.gym.environment import max_turns_of, turn_reward
from skyrl_async.rewards.code_tests import judge_program, program_in, read_tests
from skyrl_async.rewards.math_answers import (
    MAX_CHARACTERS,
    as_number,
    final_answer,
    is_equal_answer,
    is_right_answer,
    is_same_answer,
    require_math_verify,
)
from skyrl_async.rewards.sandbox import Limits, require_sandbox

logger = logging.getLogger(__name__)

DEFAULT_MAX_TURNS = 8
"""Turns of an environment of several turns, for rows without ``max_turns``."""
_NO_PROGRAM = "no fenced block of Python"
Extras = dict[str, Any]
RewardFunction = Callable[[str, Extras], float | Sequence[float]]
"""A user's reward: called with the answer and the row's columns, ``prompt`` among them, in a thread, so it may block."""


def ended(reward: float | NDArray[np.float64], **metadata: Any) -> BaseTextEnvStepOutput:
    """Return the output of a last step."""
    return BaseTextEnvStepOutput(
        observations=[], reward=reward, done=True, metadata=metadata, postprocessed_action=None
    )


def told(
    observation: str, *, reward: float = 0.0, postprocessed_action: str | None = None, **metadata: Any
) -> BaseTextEnvStepOutput:
    """Return the output of a step that another one follows."""
    return BaseTextEnvStepOutput(
        observations=[{"role": "user", "content": observation}],
        reward=reward,
        done=False,
        metadata=metadata,
        postprocessed_action=postprocessed_action,
    )


def ground_truth_of(extras: Mapping[str, Any] | None, expected: str) -> Any:
    """Return ``reward_spec.ground_truth`` (``reward_model`` in verl's files); ``ConfigError`` says what it should be."""
    return _reward_spec(extras, expected)["ground_truth"]


def _reward_spec(extras: Mapping[str, Any] | None, expected: str) -> Mapping[str, Any]:
    columns = extras or {}
    for name in ("reward_spec", "reward_model"):
        spec = columns.get(name)
        if isinstance(spec, Mapping) and spec.get("ground_truth") not in (None, ""):
            return spec
    found = {name: columns[name] for name in ("reward_spec", "reward_model") if name in columns}
    raise ConfigError(f"reward_spec.ground_truth must be {expected}, found {found or f'the columns {sorted(columns)}'}")


class Gsm8kEnv(BaseTextEnv):
    """The reward is 1.0 for the right number after ``####``; with ``reward_spec.method`` flexible the last number counts."""

    is_fast = True

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        spec = _reward_spec(extras, "the right number")
        self.ground_truth = str(spec["ground_truth"])
        self.is_flexible = spec.get("method") == "flexible"
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
        self.ground_truth = _right_answer(ground_truth_of(extras, "the right answer"))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = final_answer(action)
        return ended(float(answer is not None and self.is_right(answer)))

    def is_right(self, answer: str) -> bool:
        """Whether a final answer equals the right one."""
        return is_same_answer(answer, self.ground_truth)


def _right_answer(truth: Any) -> str:
    """The answer that a row's truth is, or marks, or holds as a list of one; ``ConfigError`` for what no answer could equal."""
    found = truth
    if isinstance(truth, str) and truth.lstrip().startswith(("[", "{")):
        with suppress(ValueError):  # most such texts are intervals and sets
            found = json.loads(truth)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    elif isinstance(truth, str) and isinstance(found, list) and all(isinstance(end, int | float) for end in found):
        found = truth  # [1, 2] is an interval
    if not isinstance(found, str | int | float):
        raise ConfigError(
            f"reward_spec.ground_truth must be one answer (a text, a number, or a list of one), got {str(truth)[:200]!r}: "
            "write the answer itself there, or judge answers by task.reward"
        )
    answer = final_answer(str(found)) or str(found)
    if len(answer) > MAX_CHARACTERS:
        raise ConfigError(
            f"reward_spec.ground_truth must be an answer of at most {MAX_CHARACTERS} characters, got {len(answer)}: {answer[:200]!r}...; "
            r"mark the answer in it by \boxed{}, Answer: or ####"
        )
    if not is_same_answer(answer, answer):
        raise ConfigError(
            f"reward_spec.ground_truth must be an answer, got {str(truth)[:200]!r}, which is layout alone"
        )
    return answer


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

    def step(self, action: str, token_ids: TokenIds | None = None) -> BaseTextEnvStepOutput:
        self.turns += 1
        columns = self.extras if token_ids is None else {**self.extras, "response_token_ids": token_ids}
        reward, by_token = turn_reward(self.function(action, columns), "task.reward")
        return ended(reward if by_token is None else by_token)


class CodeEnv(BaseTextEnv):
    """The reward is 1.0 for a program, the last fenced block of Python, that passes every test of the row.

    Tests are in ``reward_spec.ground_truth`` (``rewards.code_tests`` says how); a column ``time_limit_s`` sets the CPU seconds of
    a run, ``memory_limit_mb`` its memory.
    """

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__()
        require_sandbox()
        truth = ground_truth_of(extras, "tests (an object with inputs and outputs)")
        try:
            self.tests = read_tests(truth)
        except ValueError as error:
            raise ConfigError(f"reward_spec.ground_truth: {error}") from error
        self.limits = limits_of(extras or {})
        self.share_passed = 0.0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reason = self.judge(action)
        return ended(float(reason is None), reason=reason)

    def judge(self, action: str) -> str | None:
        """Test the program in ``action``; return why it fails, None where it does not."""
        self.turns += 1
        source = program_in(action)
        if source is None:
            self.share_passed = 0.0
            return _NO_PROGRAM
        verdict = judge_program(source, self.tests, self.limits)
        self.share_passed = verdict.num_passed / verdict.num_tests
        if verdict.reason is not None:
            logger.debug("a program failed: %s", verdict.reason)
        return verdict.reason

    def get_metrics(self) -> dict[str, Any]:
        return {"tests_passed": self.share_passed}


class MultiTurnCodeEnv(CodeEnv):
    """The same over ``max_turns`` turns (a column; 8 without it): a program that fails is told why, and may be mended."""

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__(env_config, extras)
        self.max_turns = max_turns_of(extras or {}, DEFAULT_MAX_TURNS)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reason = self.judge(action)
        if reason is None or self.turns >= self.max_turns:
            return ended(float(reason is None), reason=reason)
        return told(f"Not yet: {reason}", reason=reason)


def column_of(extras: Extras | None, name: str, default: float) -> Any:
    """Return what a row has in a column; null is the default: Parquet files have it where other rows' ``extra_info`` says more."""
    value = (extras or {}).get(name)
    return default if value is None else value


def limits_of(extras: Extras) -> Limits:
    """Return the limits that a row's columns set; ``ConfigError`` for what is no positive number."""
    default = Limits()
    cpu_s = column_of(extras, "time_limit_s", default.cpu_s)
    memory_mb = column_of(extras, "memory_limit_mb", default.memory_mb)
    for name, value in (("time_limit_s", cpu_s), ("memory_limit_mb", memory_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a number > 0, got {value!r}")
    cpu_s, memory_mb = max(1, round(cpu_s)), max(1, round(memory_mb))
    return Limits(cpu_s=cpu_s, wall_s=max(default.wall_s, 3.0 * cpu_s), memory_mb=memory_mb)
