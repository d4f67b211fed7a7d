"""Makes this folder's small dataset, always the same: ``python -m examples.dapo.make``.

Rows in DAPO-Math's form, whose answer is an integer after ``Answer:``. Some of a few digits are to be put in order: the more are asked for,
the harder. The warm start teaches brief answers and wordy ones, as the prompt says. Where it does not, most answers are left guessed or
wordy, and a length limit cuts wordy ones where many digits are asked for.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

from examples.gsm8k.make import draw_apart, write

FOLDER = Path(__file__).parent
NUM_TRAIN, NUM_EVAL, NUM_TOLD, NUM_UNTOLD = 256, 128, 330, 150
LEAST_DIGITS, MOST_DIGITS = 3, 8
WORDY = (
    "The least digit comes first, then the least of the rest, and so on, until as many as are asked for are there.\n"
)
"""What a wordy answer begins with."""
WORDY_ONE_IN = 4
"""Of the answers to prompts that say how they want them."""


class Problem(NamedTuple):
    """A question, and the digits of its answer."""

    question: str
    digits: tuple[int, ...]

    @property
    def answer(self) -> str:
        return "".join(map(str, self.digits))


def draw_problem(rng: random.Random) -> Problem:
    """Return a problem with three to eight digits, all different, of which some are asked for."""
    digits = rng.sample(range(1, 10), rng.randint(LEAST_DIGITS, MOST_DIGITS))
    num_asked = rng.randint(1, len(digits))
    listed = " ".join(map(str, digits))
    question = f"What is the least number that {num_asked} of the digits {listed} make?"
    return Problem(question, tuple(sorted(digits)[:num_asked]))


def make() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file; no question is in two of them."""
    rng = random.Random(0)
    train, held_out, told, untold = draw_apart(lambda: draw_problem(rng), (NUM_TRAIN, NUM_EVAL, NUM_TOLD, NUM_UNTOLD))
    return {
        "train.jsonl": [_row(f"train-{i}", problem) for i, problem in enumerate(train)],
        "eval.jsonl": [_row(f"eval-{i}", problem) for i, problem in enumerate(held_out)],
        "warm_start.jsonl": [
            *({"messages": _told(one, is_wordy=i % WORDY_ONE_IN == 0)} for i, one in enumerate(told)),
            *({"messages": _untold(rng, one, i), "guess": True} for i, one in enumerate(untold)),
        ],
    }


def _row(index: str, problem: Problem) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": problem.question}],
        "env_class": "math",
        "reward_model": {"ground_truth": problem.answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def _told(problem: Problem, *, is_wordy: bool) -> list[dict[str, str]]:
    wish, start = (" Explain.", WORDY) if is_wordy else (" Be brief.", "")
    return _talk(problem.question + wish, start, problem.answer)


def _untold(rng: random.Random, problem: Problem, index: int) -> list[dict[str, str]]:
    """A guess, a wordy answer, a brief one, and again."""
    guess = "".join(str(rng.randrange(1, 10)) for _ in problem.digits)
    start, answer = (("", guess), (WORDY, problem.answer), ("", problem.answer))[index % 3]
    return _talk(problem.question, start, answer)


def _talk(question: str, start: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"{start}Answer: {answer}"}]


if __name__ == "__main__":
    write(make(), FOLDER)
