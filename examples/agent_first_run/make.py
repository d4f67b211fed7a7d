"""Makes the tasks of this example and the conversations of its warm start: ``python -m examples.agent_first_run.make DIR``.

Notes lead to a code, over one to three of them. A policy that reads them, turn after turn, finds it; a hasty one takes the number of a note
for the code. Tasks are
directories as Harbor has them, ``DIR/train`` and ``DIR/eval``. Conversations are those in ``recorded.jsonl``, which Terminus-2 had with a
scripted policy (``record.py``), with other numbers. The same ``DIR`` is written every time.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = Path(__file__).parent / "recorded.jsonl"
NUM_TRAIN, NUM_EVAL, NUM_GUESSES = 384, 64, 300
MAX_NOTES = 3
NUM_DECOYS = 3
NUMBERS = range(100, 1000)

_TOML = """version = "1.0"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
memory_mb = 256
storage_mb = 16
"""
_DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY notes /app/\n"
_TEST = """if [ "$(cat /app/code)" = {code} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


class Puzzle(NamedTuple):
    """Notes, each of which names the next one, and the code that the last one holds."""

    notes: tuple[str, ...]
    code: str

    @property
    def instruction(self) -> str:
        return f"Note {self.notes[0]} leads to a code. Write it to the file code."

    @property
    def files(self) -> dict[str, str]:
        """What each note says, by its file name."""
        says = [f"see {note}" for note in self.notes[1:]] + [f"code {self.code}"]
        return dict(zip(self.notes, says, strict=True))


class Recorded(NamedTuple):
    """A conversation that a scripted policy had with the harness."""

    puzzle: Puzzle
    num_looks: int
    """Notes that it read. Where there are more, it took the next one's number for the code."""
    messages: list[dict[str, str]]


def draw_puzzle(rng: random.Random, first: int, num_notes: int) -> Puzzle:
    """Return a puzzle that begins at the note ``first``."""
    numbers = [str(number) for number in rng.sample(NUMBERS, MAX_NOTES + 1) if number != first]
    return Puzzle((str(first), *numbers[1:num_notes]), numbers[0])


def write_task(puzzle: Puzzle, directory: Path, decoys: Sequence[str] = ()) -> None:
    """Write a Harbor task; ``decoys`` are notes that lead elsewhere."""
    notes, tests = directory / "environment" / "notes", directory / "tests"
    for folder in (notes, tests):
        folder.mkdir(parents=True, exist_ok=True)
    files = {decoy: f"code {decoy[::-1]}" for decoy in decoys} | puzzle.files
    for name, text in files.items():
        (notes / name).write_text(f"{text}\n")
    (directory / "environment" / "Dockerfile").write_text(_DOCKERFILE)
    (directory / "task.toml").write_text(_TOML)
    (directory / "instruction.md").write_text(puzzle.instruction)
    (tests / "test.sh").write_text(_TEST.format(code=puzzle.code))


def load_recorded() -> list[Recorded]:
    """Return the conversations of ``recorded.jsonl``."""
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return [Recorded(Puzzle(tuple(row["notes"]), row["code"]), row["num_looks"], row["messages"]) for row in rows]


def retold(recorded: Recorded, puzzle: Puzzle) -> list[dict[str, str]]:
    """Return the conversation as it would have been with ``puzzle``, which has as many notes."""
    numbers = dict(zip([*recorded.puzzle.notes, recorded.puzzle.code], [*puzzle.notes, puzzle.code], strict=True))
    pattern = re.compile("|".join(numbers))
    return [
        {"role": message["role"], "content": pattern.sub(lambda found: numbers[found[0]], message["content"])}
        for message in recorded.messages
    ]


def make_conversations(firsts: Sequence[int], rng: random.Random) -> list[dict[str, Any]]:
    """Return the rows of the warm start: notes from ``firsts`` on read to the end, and hasty ones."""
    recorded = load_recorded()
    worked = [one for one in recorded if one.num_looks == len(one.puzzle.notes)]
    guessed = [one for one in recorded if one.num_looks < len(one.puzzle.notes)]
    rows: list[dict[str, Any]] = []
    for first in firsts:
        told = rng.choice(worked)
        puzzle = draw_puzzle(rng, first, len(told.puzzle.notes))
        rows.append({"messages": retold(told, puzzle)})
    for first in rng.sample(firsts, NUM_GUESSES):
        told = rng.choice(guessed)
        puzzle = draw_puzzle(rng, first, len(told.puzzle.notes))
        rows.append({"messages": retold(told, puzzle), "guess": True})
    return rows


def make(directory: Path) -> None:
    """Write tasks and conversations; held-out tasks begin at notes that no other task or conversation begins at."""
    rng = random.Random(0)
    firsts = rng.sample(NUMBERS, len(NUMBERS))
    held_out, others = firsts[:NUM_EVAL], firsts[NUM_EVAL:]
    for part, begins in (("eval", held_out), ("train", rng.sample(others, NUM_TRAIN))):
        for first in begins:
            decoys = [str(number) for number in rng.sample(NUMBERS, NUM_DECOYS)]
            puzzle = draw_puzzle(rng, first, rng.randint(1, MAX_NOTES))
            write_task(puzzle, directory / part / f"note-{first}", decoys)
    rows = make_conversations(others, rng)
    (directory / "warm_start.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where tasks and conversations are written")
    make(parser.parse_args().directory)
