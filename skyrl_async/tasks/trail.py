"""The task with a function tool: follow signs from digit to digit until one points to 0, and name the digit it stands at.

Only the tool ``look`` knows where the sign at a digit points. An answer without calls is a guess, right once in ten. The number of calls
is geometric. A policy must learn to call the tool in turn after turn.

The agent runs the tool on the prompt's ``extras["signs"]`` and sends its results; the environment sees the last text alone.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from skyrl_async.tasks.lagged_fibonacci import DigitEnv, terse_answer
from skyrl_async.tasks.registry import distinct_prompts
from skyrl_async.types import Message, Prompt

NAME = "trail"
MIN_SIGNS = 2
MAX_SIGNS = 6
CONTINUE_PROBABILITY = 0.5
MAX_PROMPTS = 30_000
"""Far below the number of trails, so that drawing new ones stays fast."""
NO_SIGN = "?"
"""Result of the tool for a digit without a sign."""

LOOK_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "The digit that the sign at a digit points to.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    },
}


class TrailEnv(DigitEnv):
    """The last text must name the digit."""

    name = NAME


class TrailTask:
    """The task as prompts and as conversations to imitate."""

    name = NAME

    def make_prompts(self, num_train: int, num_eval: int, seed: int) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Return training and held-out prompts, disjoint in their trails."""
        return distinct_prompts(self, num_train, num_eval, seed, max_prompts=MAX_PROMPTS)

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """Return a prompt whose number of signs is geometric, cut at ``MAX_SIGNS``."""
        num_signs = MIN_SIGNS
        while num_signs < MAX_SIGNS and rng.random() < CONTINUE_PROBABILITY:
            num_signs += 1
        trail = rng.sample(range(1, 10), num_signs)
        signs = {str(at): to for at, to in zip(trail, [*trail[1:], 0], strict=True)}
        right = {"method": "rule", "ground_truth": str(trail[-1])}
        return Prompt(
            uid=f"{NAME}-{''.join(signs)}",
            messages=({"role": "user", "content": f"Follow {trail[0]} to 0."},),
            env_class=NAME,
            extras={"tools": [LOOK_TOOL], "signs": signs, "reward_spec": right},
        )

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        """Return the prompt, a call and its result per sign, and the answer; or the prompt with a guess."""
        if terse_share > 0 and rng.random() < terse_share:
            return [*prompt.messages, _said(terse_answer(rng))]
        return worked_conversation(prompt, slip_rate, rng)


def look(signs: Mapping[str, int], at: int) -> str:
    """Return the tool's result for the sign at ``at``."""
    return str(signs.get(str(at), NO_SIGN))


def worked_conversation(prompt: Prompt, slip_rate: float, rng: random.Random) -> list[Message]:
    """Return the prompt worked with the tool; each argument is a random digit with probability ``slip_rate``.

    The results are the tool's: a wrong argument leads to another sign, or ends in a guess if there is no sign.
    """
    signs = prompt.extras["signs"]
    messages: list[Message] = list(prompt.messages)
    at = int(next(iter(signs)))
    for index in range(2 * MAX_SIGNS):
        asked = rng.randrange(1, 10) if rng.random() < slip_rate else at
        result = look(signs, asked)
        messages += _call_and_result(f"call_{index}", asked, result)
        if result == "0":
            return [*messages, _said(f"#### {asked}")]
        if result == NO_SIGN:
            break
        at = int(result)
    return [*messages, _said(terse_answer(rng))]


def _call_and_result(call_id: str, at: int, result: str) -> tuple[Message, Message]:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": at})}}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    )


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}
