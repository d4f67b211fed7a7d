"""Makes this folder's small dataset, always the same: ``python -m examples.gsm8k.make``.

Word problems in the form of GSM8K, of one to three steps whose numbers stay below 10: what a policy of half a million parameters can
work out, and cannot guess.
"""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

FOLDER = Path(__file__).parent
NUM_TRAIN, NUM_EVAL, NUM_WORKED, NUM_GUESSES = 256, 128, 520, 60
MAX_STEPS = 3
NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pens", "nuts", "eggs", "cups")


class Problem(NamedTuple):
    """A question, and the lines of its worked answer."""

    question: str
    lines: tuple[str, ...]
    answer: int


class Asked(Protocol):
    """A problem of any kind."""

    @property
    def question(self) -> str: ...


P = TypeVar("P", bound=Asked)


def draw_problem(rng: random.Random) -> Problem:
    """Return a problem of one to three steps."""
    total = rng.randrange(1, 10)
    question, lines = f"{rng.choice(NAMES)} has {total} {rng.choice(THINGS)}", []
    for _ in range(rng.randint(1, MAX_STEPS)):
        change = rng.choice([change for change in range(-total, 10 - total) if change != 0])
        question += f", gets {change}" if change > 0 else f", gives {-change}"
        lines.append(f"{total}{change:+d}={total + change}")
        total += change
    return Problem(f"{question}. How many?", tuple(lines), total)


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
            *({"messages": _talk(one, "\n".join([*one.lines, f"#### {one.answer}"]))} for one in worked),
            *({"messages": _talk(one, f"#### {rng.randrange(10)}"), "guess": True} for one in guessed),
        ],
    }


def draw_apart(draw: Callable[[], P], sizes: Iterable[int]) -> list[list[P]]:
    """Return lists of problems, of which no two have the same question."""
    seen: dict[str, P] = {}

    def unseen() -> P:
        while (problem := draw()).question in seen:
            pass
        return seen.setdefault(problem.question, problem)

    return [[unseen() for _ in range(size)] for size in sizes]


def write(rows_of_file: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write each file as one JSON object per line."""
    for name, rows in rows_of_file.items():
        (folder / name).write_text(as_text(rows), encoding="utf-8")


def as_text(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as a jsonl file has them."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _row(uid: str, problem: Problem) -> dict[str, Any]:
    return {
        "uid": uid,
        "prompt": [{"role": "user", "content": problem.question}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(problem.answer)},
    }


def _talk(problem: Problem, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    write(make(), FOLDER)
