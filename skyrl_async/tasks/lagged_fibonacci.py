"""The default task: extend a string of digits until a 0 appears, and name the digit before it.

The next digit is (last digit + the digit four back) mod 10. The number of steps is geometric, so that the lengths of honest answers have
a long tail, and a policy must learn to work instead of guessing.
"""

import random
import re
from functools import cache
from itertools import product
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.environments.answers import ended, ground_truth_of
from skyrl_async.tasks.registry import require_enough_prompts
from skyrl_async.types import Message, Prompt

NAME = "lagged_fibonacci"
NUM_SEED_DIGITS = 4
MAX_STEPS = 60
"""Seeds that need more steps are left out, so that a worked answer has at most about 370 tokens."""

_NUMBER = re.compile(r"\s*(-?\d+)")


def extend(seed_digits: str) -> str | None:
    """Return the digits appended to ``seed_digits``, the closing 0 included, or None past ``MAX_STEPS``."""
    digits = [int(d) for d in seed_digits]
    while digits[-1] != 0:
        if len(digits) == len(seed_digits) + MAX_STEPS:
            return None
        digits.append((digits[-1] + digits[-NUM_SEED_DIGITS]) % 10)
    return "".join(map(str, digits[len(seed_digits) :]))


@cache
def all_seed_digits() -> tuple[str, ...]:
    """Every seed of four digits 1-9 that reaches 0 within ``MAX_STEPS`` steps, in order."""
    seeds = ("".join(digits) for digits in product("123456789", repeat=NUM_SEED_DIGITS))
    return tuple(seed for seed in seeds if extend(seed) is not None)


def right_answer(seed_digits: str) -> str:
    """Return the digit before the 0."""
    extension = extend(seed_digits)
    if extension is None:
        raise ValueError(f"seed_digits must reach 0 within {MAX_STEPS} steps, got {seed_digits!r}")
    return (seed_digits + extension)[-2]


def worked_answer(seed_digits: str, slip_rate: float, rng: random.Random) -> str:
    """Return one line per step and the answer; each sum is a random digit with probability ``slip_rate``.

    After a wrong sum the work continues from the wrong digit; it stops at 0 or after ``MAX_STEPS``.
    """
    digits = [int(d) for d in seed_digits]
    lines = []
    for _ in range(MAX_STEPS):
        last, lagged = digits[-1], digits[-NUM_SEED_DIGITS]
        total = rng.randrange(10) if rng.random() < slip_rate else (last + lagged) % 10
        lines.append(f"{last}+{lagged}={total}")
        digits.append(total)
        if total == 0:
            break
    return "\n".join([*lines, f"#### {digits[-2]}"])


def terse_answer(rng: random.Random) -> str:
    """Return a guess without work."""
    return f"#### {rng.randrange(10)}"


def score(answer: str, ground_truth: str) -> float:
    """Return 1.0 if the number after the last ``####`` is ``ground_truth``, else 0.0."""
    _, marker, tail = answer.rpartition("####")
    number = _NUMBER.match(tail) if marker else None
    return float(number is not None and number.group(1) == ground_truth)


class DigitEnv(BaseTextEnv):
    """One turn; the reward is 1.0 for the right digit. Needs ``extras["reward_spec"]["ground_truth"]``."""

    name: str

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.ground_truth = str(ground_truth_of(extras, f"the right digit in environment {self.name}"))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        return ended(score(action, self.ground_truth))


class LaggedFibonacciEnv(DigitEnv):
    """A question for a digit, which also counts the steps that the answer shows."""

    name = NAME
    num_steps_shown = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.num_steps_shown = action.count("=")
        return super().step(action)

    def get_metrics(self) -> dict[str, Any]:
        return {"steps_shown": float(self.num_steps_shown)}


class LaggedFibonacciTask:
    """The task as prompts and as conversations to imitate."""

    name = NAME

    def make_prompts(self, num_train: int, num_eval: int, seed: int) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Return training and held-out prompts, disjoint, drawn without replacement."""
        seeds = list(all_seed_digits())
        require_enough_prompts(NAME, num_train, num_eval, max_prompts=len(seeds))
        random.Random(seed).shuffle(seeds)
        chosen = tuple(self._prompt(digits) for digits in seeds[: num_train + num_eval])
        return chosen[num_eval:], chosen[:num_eval]

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """Return any prompt of the task, drawn uniformly."""
        return self._prompt(rng.choice(all_seed_digits()))

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        """Return the prompt with its worked answer, or with a guess."""
        is_terse = terse_share > 0 and rng.random() < terse_share
        answer = terse_answer(rng) if is_terse else worked_answer(prompt.uid.removeprefix(f"{NAME}-"), slip_rate, rng)
        return [*prompt.messages, {"role": "assistant", "content": answer}]

    def _prompt(self, seed_digits: str) -> Prompt:
        return Prompt(
            uid=f"{NAME}-{seed_digits}",
            messages=({"role": "user", "content": f"Extend {seed_digits} until 0."},),
            env_class=NAME,
            extras={"reward_spec": {"method": "rule", "ground_truth": right_answer(seed_digits)}},
        )
