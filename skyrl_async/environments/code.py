"""Environments that judge a program by tests, in the sandbox: ``code``, and ``code_multi_turn``, where failures are told.

Flows in: a row's tests, then what the policy says. Flows out: the reward, and what a test said. This module does not know tokens or
who plays.
"""

import logging
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.environments.answers import Extras, ended, ground_truth_of
from skyrl_async.errors import ConfigError
from skyrl_async.rewards.code_tests import judge_program, program_in, read_tests
from skyrl_async.rewards.sandbox import Limits, require_sandbox

logger = logging.getLogger(__name__)

_NO_PROGRAM = "no fenced block of Python"


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
        self.max_turns = int((extras or {}).get("max_turns", 8))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reason = self.judge(action)
        if reason is None or self.turns >= self.max_turns:
            return ended(float(reason is None), reason=reason)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"Not yet: {reason}"}],
            reward=0.0,
            done=False,
            metadata={"reason": reason},
            postprocessed_action=None,
        )


def limits_of(extras: Extras) -> Limits:
    """Return the limits that a row's columns set; ``ConfigError`` for what is no positive number."""
    default = Limits()
    cpu_s, memory_mb = extras.get("time_limit_s", default.cpu_s), extras.get("memory_limit_mb", default.memory_mb)
    for name, value in (("time_limit_s", cpu_s), ("memory_limit_mb", memory_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} must be a number > 0, got {value!r}")
    return Limits(cpu_s=max(1, round(cpu_s)), wall_s=max(default.wall_s, 3.0 * cpu_s), memory_mb=int(memory_mb))
