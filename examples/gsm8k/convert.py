"""Converts the full GSM8K, as its hub's repository holds it, into this trainer's and SkyRL's format.

    python -m examples.gsm8k.convert DIR/main OUT

``DIR`` is a local copy of ``openai/gsm8k``; ``OUT`` gets ``train.jsonl`` and ``eval.jsonl``.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_async.data.sources import rows_of
from skyrl_async.errors import DatasetError
from skyrl_async.rewards.math_answers import as_number, strict_answer

INSTRUCTIONS = {
    "gsm8k": 'Think step by step, and give the final answer as a number after "####".',
    "calculator": 'For a calculation write <calc>3*14</calc>. Give the final answer as a number after "####".',
    "python_tool": "A fenced block of Python is run, and you are told what it prints. Give the final answer in \\boxed{}.",
}
"""What is asked of the policy, by the environment that will play it."""


def converted(folder: Path, split: str, env_class: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``split`` in the format. Raises ``DatasetError`` for a row without a marked number."""
    for index, (place, row) in enumerate(rows_of(folder / split)):
        answer = as_number(strict_answer(str(row.get("answer"))) or "")
        if not row.get("question") or answer is None:
            raise DatasetError(f"{place} needs question, and answer with a number after ####, got {row}")
        yield {
            "uid": f"gsm8k-{split}-{index}",
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTIONS[env_class]}"}],
            "env_class": env_class,
            "reward_spec": {"method": "rule", "ground_truth": str(answer)},
            "extra_info": {"split": split, "index": index, "answer": row["answer"]},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with train-*.parquet and test-*.parquet")
    parser.add_argument("out", type=Path)
    parser.add_argument("--env-class", choices=list(INSTRUCTIONS), default="gsm8k", help="who plays the rows")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train.jsonl"), ("test", "eval.jsonl")):
        try:
            rows = [json.dumps(row) for row in converted(arguments.folder, split, arguments.env_class)]
        except DatasetError as error:
            parser.error(f"{arguments.folder} must be a local copy of openai/gsm8k's main: {error}")
        (arguments.out / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        print(f"{arguments.out / name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
