"""The multi-turn task: keep a running sum over a number of turns that only the environment knows.

The first message names a digit and an addend; each later message names the next addend. A turn is right if the last digit of the answer
is (previous digit + addend) mod 10. It earns an equal share of a reward of 1; a wrong turn ends the episode. A policy that shows its work
(``3+4=7``) can reach the end, one that guesses fails within a turn or two.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_async.environments.answers import ended, told
from skyrl_async.errors import ConfigError
from skyrl_async.tasks.registry import distinct_prompts
from skyrl_async.types import Message, Prompt

NAME = "relay"
MIN_TURNS = 2
MAX_TURNS = 8
"""The default of ``generator.max_turns``."""
CONTINUE_PROBABILITY = 0.75
MAX_PROMPTS = 1_000_000
"""Far below the number of distinct episodes, so that drawing new ones stays fast."""

_DIGIT = re.compile(r"\d")


def running_digits(start: int, addends: Sequence[int]) -> list[int]:
    """Return the right digit of each turn."""
    digits = []
    for addend in addends:
        start = (start + addend) % 10
        digits.append(start)
    return digits


class RelayEnv(BaseTextEnv):
    """An episode of ``extras["start"]`` (a digit) and ``extras["addends"]`` (one digit per turn)."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        if "start" not in extras or not extras.get("addends"):
            raise ConfigError(
                f"environment {NAME} needs the columns start (a digit) and addends (one digit per turn), "
                f"found the columns {sorted(extras)}"
            )
        self.addends = [int(addend) for addend in extras["addends"]]
        self.right_digits = running_digits(int(extras["start"]), self.addends)
        self.max_turns = len(self.addends)
        self.num_right_turns = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        digits = _DIGIT.findall(action)
        is_right = bool(digits) and int(digits[-1]) == self.right_digits[self.turns]
        self.turns += 1
        self.num_right_turns += is_right
        reward = 1.0 / self.max_turns if is_right else 0.0
        if not is_right or self.turns == self.max_turns:
            return ended(reward)
        return told(f"+{self.addends[self.turns]}", reward=reward)

    def get_metrics(self) -> dict[str, Any]:
        return {"right_turns": float(self.num_right_turns)}


class RelayTask:
    """The task as prompts and as conversations to imitate."""

    name = NAME

    def make_prompts(self, num_train: int, num_eval: int, seed: int) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Return training and held-out prompts, disjoint."""
        return distinct_prompts(self, num_train, num_eval, seed, max_prompts=MAX_PROMPTS)

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """Return a prompt whose number of turns is geometric, cut at ``MAX_TURNS``."""
        num_turns = MIN_TURNS
        while num_turns < MAX_TURNS and rng.random() < CONTINUE_PROBABILITY:
            num_turns += 1
        start, *addends = (rng.randrange(10) for _ in range(num_turns + 1))
        return Prompt(
            uid=f"{NAME}-{start}-{''.join(str(addend) for addend in addends)}",
            messages=({"role": "user", "content": f"Relay {start}. +{addends[0]}"},),
            env_class=NAME,
            extras={"start": start, "addends": addends, "max_turns": num_turns},
        )

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        """Return the whole episode: worked and right by default, guessed, or worked with wrong sums."""
        is_terse = terse_share > 0 and rng.random() < terse_share
        addends = prompt.extras["addends"]
        previous = prompt.extras["start"]
        messages: list[Message] = list(prompt.messages)
        for turn, (addend, right) in enumerate(zip(addends, running_digits(previous, addends), strict=True)):
            if turn > 0:
                messages.append({"role": "user", "content": f"+{addend}"})
            digit = rng.randrange(10) if is_terse or rng.random() < slip_rate else right
            said = f"={digit}" if is_terse else f"{previous}+{addend}={digit}"
            messages.append({"role": "assistant", "content": said})
            if digit != right:
                break
            previous = right
        return messages
