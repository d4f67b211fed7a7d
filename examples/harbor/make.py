"""Writes Harbor tasks: five kinds, four variants each, with a solution that passes and one that does not.

    uv run python -m examples.harbor.make examples/harbor/tasks

A verifier compares with what only ``tests/`` holds, which is copied into the environment after the agent has ended. The tasks need no
network and no image: bash, coreutils, awk, and for one kind python3.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_VARIANTS = 4

TOML = """\
schema_version = "1.4"

[task]
name = "skyrl-async/{name}"
description = "{description}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 60.0
memory_mb = 1024
storage_mb = 256
"""
DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ ./\n"
TEST = """\
#!/bin/bash
# Writes the reward: 1 if the work is as it should be, else 0.
mkdir -p /logs/verifier
if {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SCRIPT = "#!/bin/bash\nset -e\ncd /app\n{}\n"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task's texts."""

    name: str
    description: str
    instruction: str
    files: dict[str, str]
    """Of the environment: name -> content."""
    check: str
    """A shell condition that holds when the work is right."""
    secrets: dict[str, str]
    """Files of ``tests/`` that the check uses."""
    solution: str
    wrong: str
    """What looks like a solution and is none."""


def visitors(rng: random.Random, number: int) -> Task:
    """Count distinct addresses in a log."""
    addresses = [f"10.0.{rng.randrange(4)}.{rng.randrange(40)}" for _ in range(rng.randrange(30, 60))]
    log = "".join(f"{address} - GET /{rng.choice(('', 'about', 'price'))} 200\n" for address in addresses)
    return Task(
        name=f"visitors-{number}",
        description="Count the distinct addresses in a log",
        instruction=(
            "The file /app/access.log has one request a line, and begins each line with an address. Write the number of distinct "
            "addresses to /app/visitors.txt: the number alone.\n"
        ),
        files={"access.log": log},
        check='[ "$(tr -d "[:space:]" < /app/visitors.txt)" = "$(cat /tests/expected)" ]',
        secrets={"expected": f"{len(set(addresses))}\n"},
        solution="cut -d' ' -f1 access.log | sort -u | wc -l > visitors.txt",
        wrong="wc -l < access.log > visitors.txt",
    )


def ledger(rng: random.Random, number: int) -> Task:
    """Add up a column of a table, for one name."""
    names = ("ash", "birch", "cedar", "elm")
    rows = [(rng.choice(names), rng.randrange(1, 100)) for _ in range(40)]
    asked = rng.choice(names)
    total = sum(amount for name, amount in rows if name == asked)
    return Task(
        name=f"ledger-{number}",
        description="Add up the amounts of one name in a table",
        instruction=(
            f"The file /app/ledger.csv has the columns name and amount. Write the sum of the amounts of {asked} to /app/total.txt.\n"
        ),
        files={"ledger.csv": "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)},
        check='[ "$(tr -d "[:space:]" < /app/total.txt)" = "$(cat /tests/expected)" ]',
        secrets={"expected": f"{total}\n"},
        solution=f"awk -F, '$1 == \"{asked}\" {{ total += $2 }} END {{ print total }}' ledger.csv > total.txt",
        wrong="awk -F, '{ total += $2 } END { print total }' ledger.csv > total.txt",
    )


def chapters(rng: random.Random, number: int) -> Task:
    """Rename files so that they sort as their numbers do."""
    numbers = sorted(rng.sample(range(1, 30), 8))
    old = {f"chapter-{n}.txt": f"chapter {n}\n" for n in numbers}
    expected = "".join(f"chapter-{n:02d}.txt\n" for n in numbers)
    pad = 'for file in book/chapter-*.txt; do number="${file//[!0-9]/}"; new="book/chapter-$(printf %02d "$number").txt"; '
    return Task(
        name=f"chapters-{number}",
        description="Rename files to numbers of two digits",
        instruction=(
            "Rename the files /app/book/chapter-N.txt so that every number has two digits, such as chapter-07.txt. Contents stay.\n"
        ),
        files={f"book/{name}": text for name, text in old.items()},
        check=(
            '[ "$(ls /app/book)" = "$(cat /tests/expected)" ] '
            f'&& [ "$(cat /app/book/*)" = "$(printf "chapter %d\\n" {" ".join(map(str, numbers))})" ]'
        ),
        secrets={"expected": expected},
        solution=pad + '[ "$file" = "$new" ] || mv "$file" "$new"; done',
        wrong=pad.replace("%02d", "%03d") + 'mv "$file" "$new"; done',
    )


def broken_script(rng: random.Random, number: int) -> Task:
    """Repair a shell script that fails for names with spaces."""
    size = rng.randrange(2, 6)
    names = [f"{rng.choice(('red', 'blue', 'green'))} {rng.choice(('leaf', 'root', 'bark'))} {n}" for n in range(size)]
    broken = (
        "#!/bin/bash\n# Prints how many bytes the files have together.\ntotal=0\n"
        "for file in $(ls data); do\n  total=$((total + $(wc -c < data/$file)))\ndone\necho $total\n"
    )
    repaired = broken.replace("for file in $(ls data); do", "for file in data/*; do").replace("data/$file)", '"$file")')
    return Task(
        name=f"bytes-{number}",
        description="Repair a script that fails for names with spaces",
        instruction=(
            "The script /app/bytes.sh fails, because names of files in /app/data have spaces. Repair it. It must print the number of "
            "bytes of all files in data/ when it is run in /app.\n"
        ),
        files={"bytes.sh": broken} | {f"data/{name}": "x" * rng.randrange(1, 50) for name in names},
        check=(
            'cd /app && cp "/tests/another file" data/ && '
            '[ "$(timeout 5 bash bytes.sh 2> /dev/null)" = "$(cat data/* | wc -c)" ]'
        ),
        secrets={"another file": "y" * rng.randrange(50, 90)},
        solution=f"cat > bytes.sh <<'EOF'\n{repaired}EOF",
        wrong="printf '#!/bin/bash\\necho %d\\n' $(cat data/* | wc -c) > bytes.sh",
    )


def median(rng: random.Random, number: int) -> Task:
    """Repair a Python function; hidden cases judge it."""
    cases = [[rng.randrange(100) for _ in range(rng.randrange(1, 9))] for _ in range(12)] + [[1, 2], [4, 1, 3, 2]]
    broken = "def median(values):\n    ordered = sorted(values)\n    return ordered[len(ordered) // 2]\n"
    repaired = (
        "def median(values):\n    ordered, middle = sorted(values), len(values) // 2\n"
        "    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2\n"
    )
    hidden = (
        "import statistics\nimport sys\n\nsys.path.insert(0, '/app')\nfrom stats import median\n\n"
        f"for values in {cases}:\n    assert median(values) == statistics.median(values), values\n"
    )
    return Task(
        name=f"median-{number}",
        description="Repair a Python function",
        instruction="The function median in /app/stats.py is wrong for an even number of values. Repair it.\n",
        files={"stats.py": broken},
        check="timeout 10 python3 /tests/hidden.py",
        secrets={"hidden.py": hidden},
        solution=f"cat > stats.py <<'EOF'\n{repaired}EOF",
        wrong="sed -i 's|// 2|// 2 - 1|' stats.py",
    )


KINDS = (visitors, ledger, chapters, broken_script, median)


def tasks(seed: int = 0) -> Iterator[Task]:
    """The tasks, the same for the same seed."""
    for kind in KINDS:
        rng = random.Random(f"{kind.__name__}-{seed}")
        for number in range(NUM_VARIANTS):
            yield kind(rng, number)


def write(task: Task, place: Path) -> None:
    """Write one task's directory."""
    texts = {
        "task.toml": TOML.format(name=task.name, description=task.description),
        "instruction.md": task.instruction,
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST.format(check=task.check),
        "solution/solve.sh": SCRIPT.format(task.solution),
        "solution/wrong.sh": SCRIPT.format(task.wrong),
        **{f"environment/files/{name}": text for name, text in task.files.items()},
        **{f"tests/{name}": text for name, text in task.secrets.items()},
    }
    for name, text in texts.items():
        file = place / task.name / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the tasks are written")
    directory = parser.parse_args().directory
    for made in tasks():
        write(made, directory)
