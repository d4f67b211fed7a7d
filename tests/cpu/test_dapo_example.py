"""examples/dapo: rows of DAPO-Math-17k's form are prompts, and the environment that its command names rewards them."""

from pathlib import Path

from skyrl_async.data.dataset import load_prompts
from skyrl_async.tasks.registry import make_environment

SAMPLE = Path(__file__).parents[2] / "examples" / "dapo" / "sample.jsonl"


def test_rows_of_dapo_math_17k_are_used_as_they_are() -> None:
    first, second = load_prompts([SAMPLE], "aime")
    rewards = []
    for prompt in (first, second):
        for answer in ("Ten of them.\nAnswer: 10", "Answer: 1", "I do not know"):
            environment = make_environment(prompt.env_class, {**prompt.extras, "seed": 3, "max_turns": 1})
            environment.init(list(prompt.messages))
            rewards.append(environment.step(answer)["reward"])
    assert rewards == [1.0, -1.0, -1.0, -1.0, 1.0, -1.0]
