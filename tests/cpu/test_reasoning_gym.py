"""Tasks of reasoning-gym, where the extra is installed; where it is not, the refusal."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.composition.data import prepare_prompts
from skyrl_async.config.load import from_overrides
from skyrl_async.environments.reasoning_gym import make_prompts
from skyrl_async.errors import ConfigError
from skyrl_async.tasks.registry import make_environment
from tests.cpu.test_config import policy_directory

is_installed = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="needs the extra reasoning-gym")


def prompts_of(dataset: str = "chain_sum", num: int = 12, seed: int = 0, **config: Any) -> Any:
    return make_prompts(dataset, config, num, 4, seed)


@pytest.mark.skipif(is_installed, reason="reasoning-gym is installed")
def test_a_missing_package_is_named_with_the_extra_that_installs_it(tmp_path: Path) -> None:
    policy = f"policy.path={policy_directory(tmp_path / 'policy')}"
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym, .* skyrl-async\[reasoning-gym\]"):
        from_overrides("task=reasoning_gym", "task.reasoning_gym.dataset=chain_sum", policy)


def test_a_task_without_the_name_of_its_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.reasoning_gym\.dataset must be a name when task\.name=reasoning_gym"):
        from_overrides("task=reasoning_gym")


def test_a_row_that_names_no_item_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"column reasoning_gym must have dataset, config, seed, size and index"):
        make_environment("reasoning_gym", {"reasoning_gym": {"dataset": "chain_sum"}})


@needs_package
def test_prompts_are_distinct_disjoint_and_of_the_seed() -> None:
    train, held_out = prompts_of()
    questions = [prompt.messages[0]["content"] for prompt in (*train, *held_out)]
    assert (len(train), len(held_out), len(set(questions))) == (12, 4, 16)
    assert prompts_of() == (train, held_out) != prompts_of(seed=1)
    assert prompts_of(num=3)[1][0].messages == held_out[0].messages


@needs_package
def test_the_answer_in_the_marks_is_scored_by_the_dataset() -> None:
    prompt = prompts_of(min_terms=2, max_terms=2)[0][0]
    question = prompt.messages[0]["content"]
    left, sign, right = question.split(":")[1].split("=")[0].split()
    answer = int(left) + int(right) if sign == "+" else int(left) - int(right)

    def reward(action: str) -> float:
        return float(make_environment(prompt.env_class, dict(prompt.extras)).step(action)["reward"])

    assert reward(f"so <answer> {answer} </answer>") == 1.0
    assert reward(f"<answer>{answer + 1}</answer>") < 1.0
    assert reward(str(answer)) == 0.0


@needs_package
@pytest.mark.parametrize(
    ("dataset", "config", "num", "message"),
    [
        (
            "chain_sums",
            {},
            4,
            r"of reasoning-gym, got 'chain_sums'; did you mean chain_sum.*: .*, chain_sum, .*, leg_counting, ",
        ),
        ("chain_sum", {"min_term": 1}, 4, r"task\.reasoning_gym\.config=.*min_term.* is refused by chain_sum"),
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 2000, r"ask for fewer"),
    ],
)
def test_what_the_package_lacks_is_refused(dataset: str, config: dict[str, Any], num: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prompts_of(dataset, num, **config)


@needs_package
def test_the_command_line_names_the_dataset_and_its_parameters(tmp_path: Path) -> None:
    config = from_overrides(
        *("task=reasoning_gym", "task.reasoning_gym.dataset=chain_sum", "task.reasoning_gym.config={max_terms: 2}"),
        *(
            "task.num_train_prompts=8",
            "task.num_eval_prompts=2",
            f"policy.path={policy_directory(tmp_path / 'policy')}",
        ),
    )
    prompts = prepare_prompts(config)
    assert (len(prompts.train), len(prompts.held_out)) == (8, 2)
    assert prompts.train[0].extras["reasoning_gym"]["config"] == {"max_terms": 2}
