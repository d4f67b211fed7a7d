"""examples/dapo: rows of DAPO-Math-17k's form are prompts, and the environment that its full command names rewards them."""

import json
from pathlib import Path

from skyrl_async.data.dataset import load_sources
from skyrl_async.tasks.registry import make_environment

ROWS = Path(__file__).parents[2] / "examples" / "dapo" / "train.jsonl"


def test_rows_of_dapo_math_17k_are_used_as_they_are(tmp_path: Path) -> None:
    row = json.loads(ROWS.read_text().splitlines()[0])
    del row["env_class"]  # theirs have none
    file = tmp_path / "dapo-math-17k-cleaned.jsonl"
    file.write_text(json.dumps(row))
    ((prompt,),) = load_sources([file], "aime")
    truth = row["reward_model"]["ground_truth"]
    rewards = []
    for answer in (f"In order.\nAnswer: {truth}", f"Answer: 9{truth}", "I do not know"):
        environment = make_environment(prompt.env_class, {**prompt.extras, "seed": 3, "max_turns": 1})
        environment.init(list(prompt.messages))
        rewards.append(environment.step(answer)["reward"])
    assert rewards == [1.0, -1.0, -1.0]
