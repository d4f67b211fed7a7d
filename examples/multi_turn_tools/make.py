"""Makes this folder's small dataset, always the same: ``python -m examples.multi_turn_tools.make``.

Sums and differences of numbers with two digits, which a policy of half a million parameters cannot work out by itself, and need
not: it has a calculator, one call per step.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

from examples.gsm8k.make import draw_apart, write

FOLDER = Path(__file__).parent
NUM_TRAIN, NUM_EVAL, NUM_WORKED, NUM_GUESSES = 256, 128, 360, 60
MAX_STEPS = 2
WORDS = {"+": "plus", "-": "minus"}


class Problem(NamedTuple):
    """A question, and for each step the call of the calculator and its result."""

    question: str
    calls: tuple[tuple[str, int], ...]


def draw_problem(rng: random.Random) -> Problem:
    """Return a problem of one or two steps."""
    total = rng.randrange(11, 100)
    question, calls = f"{total}", []
    for _ in range(rng.randint(1, MAX_STEPS)):
        number = rng.randrange(11, 100)
        sign = rng.choice("+-") if total > number else "+"
        question += f" {WORDS[sign]} {number}"
        call, total = f"{total}{sign}{number}", total + number if sign == "+" else total - number
        calls.append((call, total))
    return Problem(f"{question}?", tuple(calls))


def make() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file; no question is in two of them."""
    rng = random.Random(0)
    train, held_out, worked, guessed = draw_apart(
        lambda: draw_problem(rng), (NUM_TRAIN, NUM_EVAL, NUM_WORKED, NUM_GUESSES)
    )
    return {
        "train.jsonl": [_row(f"train-{i}", problem) for i, problem in enumerate(train)],
        "eval.jsonl": [_row(f"eval-{i}", problem) for i, problem in enumerate(held_out)],
        "warm_start.jsonl": [
            *({"messages": _worked(problem)} for problem in worked),
            *({"messages": [_asked(one), _said(f"#### {rng.randrange(11, 200)}")], "guess": True} for one in guessed),
        ],
    }


def _row(uid: str, problem: Problem) -> dict[str, Any]:
    return {
        "uid": uid,
        "prompt": [_asked(problem)],
        "env_class": "calculator",
        "reward_spec": {"method": "rule", "ground_truth": str(problem.calls[-1][1])},
    }


def _worked(problem: Problem) -> list[dict[str, str]]:
    """The conversation with the calculator, as ``env_class=calculator`` leads it."""
    messages = [_asked(problem)]
    for call, result in problem.calls:
        messages += [_said(f"<calc>{call}</calc>"), {"role": "user", "content": f"= {result}"}]
    return [*messages, _said(f"#### {problem.calls[-1][1]}")]


def _asked(problem: Problem) -> dict[str, str]:
    return {"role": "user", "content": problem.question}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    write(make(), FOLDER)
