"""Environments with a tool that is called in text, turn after turn: ``calculator`` and ``python_tool``.

A turn with a call is answered by its result; one without is the final answer, and is judged. What a policy writes behind a call, such
as a result of its own invention, is cut off.

Flows in: a row's columns, then what the policy says. Flows out: results of calls, and the reward. This module does not know tokens or
who plays.
"""

from fractions import Fraction
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.arithmetic import value_of
from skyrl_async.environments.answers import (
    DEFAULT_MAX_TURNS,
    Extras,
    Gsm8kEnv,
    MathEnv,
    ended,
    limits_of,
    told,
)
from skyrl_async.generators.gym.environment import max_turns_of
from skyrl_async.rewards.sandbox import require_sandbox, run_program

_SHOWN_CHARACTERS = 2000
MAX_CHARACTERS = 200
_SHOWN_DIGITS = 6


class _ToolEnv(BaseTextEnv):
    """Answers calls of a tool; stands before the environment that judges the final answer."""

    tool: str
    """Name of the tool in the record of samples."""
    marks: tuple[str, str]
    """What stands before and after a call."""

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__(env_config, extras)
        self.max_turns = max_turns_of(extras or {}, DEFAULT_MAX_TURNS)
        self.num_calls = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        call = first_call(action, *self.marks)
        if call is None:
            return super().step(action)
        self.turns += 1
        self.num_calls += 1
        content, said = call
        result = self.result_of(content)
        called: dict[str, Any] = {"tool_name": self.tool, "tool_input": content}
        if self.turns >= self.max_turns:  # no turn is left to use the result
            return ended(0.0, **called)
        return told(result, postprocessed_action=said, **called)

    def result_of(self, content: str) -> str:
        """Run the tool on what stands between the marks."""
        raise NotImplementedError

    def get_metrics(self) -> dict[str, Any]:
        return {"tool_calls": float(self.num_calls)}


class CalculatorEnv(_ToolEnv, Gsm8kEnv):
    """``<calc>3*14</calc>`` is answered ``= 42``; the final answer is judged as by ``gsm8k``."""

    tool = "calculator"
    marks = ("<calc>", "</calc>")

    def result_of(self, content: str) -> str:
        return f"= {calculate(content)}"

    def snapshot(self) -> dict[str, int]:
        """Return all that an episode has besides its messages."""
        return {"turns": self.turns, "num_calls": self.num_calls}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from where ``snapshot`` was taken."""
        self.turns, self.num_calls = state["turns"], state["num_calls"]


class PythonToolEnv(_ToolEnv, MathEnv):
    """A fenced block of Python is run, by itself, and answered with what it prints; the final answer is judged as by ``math``."""

    is_fast = False
    tool = "python"
    marks = ("```python\n", "```")

    def __init__(self, env_config: Any = None, extras: Extras | None = None) -> None:
        super().__init__(env_config, extras)
        require_sandbox()
        self.limits = limits_of(extras or {})

    def result_of(self, content: str) -> str:
        outcome = run_program(content, limits=self.limits)
        printed = outcome.output[:_SHOWN_CHARACTERS] + (f"[{outcome.failure}]" if outcome.failure else "")
        return f"```output\n{printed}\n```"


def first_call(action: str, opening: str, closing: str) -> tuple[str, str] | None:
    """Return the first closed call in ``action`` and what the policy said up to its end; None without one. Takes linear time."""
    before, _, rest = action.partition(opening)
    content, end, _ = rest.partition(closing)
    return (content, before + opening + content + closing) if end else None


def calculate(expression: str) -> str:
    """Return the value of ``expression``, rounded where it has more than six decimals; else ``error: ...``."""
    text = expression.strip().replace(",", "").replace("^", "**")
    if len(text) > MAX_CHARACTERS:
        return f"error: longer than {MAX_CHARACTERS} characters"
    try:
        return _decimal(value_of(text))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def _decimal(value: Fraction) -> str:
    """Rounded to the digits that are shown, without zeros at the end; never by way of a float, which has 16 digits."""
    rounded = round(value * 10**_SHOWN_DIGITS)
    whole, decimals = divmod(abs(rounded), 10**_SHOWN_DIGITS)
    sign, shown = "-" if rounded < 0 else "", f"{decimals:0{_SHOWN_DIGITS}d}".rstrip("0")
    return f"{sign}{whole}.{shown}" if shown else f"{sign}{whole}"
