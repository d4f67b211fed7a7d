"""Makes this folder's small dataset, always the same: ``python -m examples.lora.make``.

Digits to sort. The warm start teaches the weights rising and falling order, as the prompt says, and rising order mostly where it does not
say. Such prompts are trained, and falling order is what is rewarded: a habit for adapters over skills in the weights.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

from examples.gsm8k.make import draw_apart, write

FOLDER = Path(__file__).parent
NUM_TRAIN, NUM_EVAL, NUM_TOLD, NUM_UNTOLD = 256, 128, 400, 150
LEAST_DIGITS, MOST_DIGITS = 4, 7
FALLING_ONE_IN = 5
"""Of the answers to prompts that do not say which way."""


class Problem(NamedTuple):
    """A question that does not say which way, and its digits, all different."""

    question: str
    digits: tuple[str, ...]


def draw_problem(rng: random.Random) -> Problem:
    """Return four to seven digits."""
    digits = rng.sample("123456789", rng.randint(LEAST_DIGITS, MOST_DIGITS))
    return Problem(f"Sort {' '.join(digits)}.", tuple(digits))


def make() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file; no question is in two of them."""
    rng = random.Random(0)
    train, held_out, told, untold = draw_apart(lambda: draw_problem(rng), (NUM_TRAIN, NUM_EVAL, NUM_TOLD, NUM_UNTOLD))
    return {
        "train.jsonl": [_row(f"train-{i}", problem) for i, problem in enumerate(train)],
        "eval.jsonl": [_row(f"eval-{i}", problem) for i, problem in enumerate(held_out)],
        "warm_start.jsonl": [
            *({"messages": _talk(one, is_told=True, is_falling=i % 2 == 0)} for i, one in enumerate(told)),
            *(
                {"messages": _talk(one, is_told=False, is_falling=i % FALLING_ONE_IN == 0), "guess": True}
                for i, one in enumerate(untold)
            ),
        ],
    }


def _falling(problem: Problem) -> str:
    return "".join(sorted(problem.digits, reverse=True))


def _row(uid: str, problem: Problem) -> dict[str, Any]:
    return {
        "uid": uid,
        "prompt": [{"role": "user", "content": problem.question}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": _falling(problem)},
    }


def _talk(problem: Problem, *, is_told: bool, is_falling: bool) -> list[dict[str, str]]:
    way, digits = ("falling", _falling(problem)) if is_falling else ("rising", _falling(problem)[::-1])
    question = f"{problem.question[:-1]} {way}." if is_told else problem.question
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"{way}\n#### {digits}"}]


if __name__ == "__main__":
    write(make(), FOLDER)
