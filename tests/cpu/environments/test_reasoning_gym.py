"""Tasks of reasoning-gym, where the extra is installed; where it is not, the refusal."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.composition.data import prepare_prompts
from skyrl_async.config.load import from_overrides
from skyrl_async.environments import reasoning_gym
from skyrl_async.environments.reasoning_gym import make_prompts, marked_answer
from skyrl_async.errors import ConfigError
from skyrl_async.tasks.registry import make_environment
from tests.cpu.config.test_config import policy_directory

spec = importlib.util.find_spec("reasoning_gym")
is_installed = spec is not None
is_in_prefix = spec is not None and str(spec.origin).startswith((sys.prefix, sys.base_prefix))
needs_package = pytest.mark.skipif(not is_in_prefix, reason="needs the extra reasoning-gym, where the sandbox reads it")
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of a dependency, where it is compiled anew


def prompts_of(dataset: str = "chain_sum", num: int = 12, seed: int = 0, **config: Any) -> Any:
    return make_prompts(dataset, config, num, 4, seed)


def reward_of(dataset: str, answer: str, **config: Any) -> float:
    prompt = prompts_of(dataset, num=1, **config)[0][0]
    return float(make_environment(prompt.env_class, dict(prompt.extras)).step(f"<answer>{answer}</answer>")["reward"])


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 4 </answer>", "4"),
        ("<answer>4</answer> no <answer>\n5\n</answer>.", "5"),
        ("<answer>4</answer> no </answer>", "4"),
        ("<answer>4</answer> no <answer>5", "4"),
        ("the <answer> is <answer>4</answer>", "is <answer>4"),
        ("<answer></answer>", ""),
        ("</answer>4<answer>", None),
        ("4", None),
    ],
)
def test_the_last_closed_mark_holds_the_answer(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer
    found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    assert answer == (found[-1].strip() if found else None)


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<answer>a</answer>"])
def test_the_answer_is_found_in_linear_time(piece: str) -> None:
    """Marks without an end took minutes on this length; the deadline is that of the test."""
    marked_answer(piece * 100_000)


@pytest.mark.parametrize("hash_seed", [None, "random"])
def test_a_dataset_that_draws_others_in_every_process_wants_pythons_hash_seed(
    monkeypatch: pytest.MonkeyPatch, hash_seed: str | None
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if hash_seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    with pytest.raises(ConfigError, match="dataset=knight_swap draws other questions .* PYTHONHASHSEED=0"):
        prompts_of("knight_swap")


@needs_package
def test_a_process_with_the_same_hash_seed_draws_the_same_items() -> None:
    program = (
        "from skyrl_async.environments.reasoning_gym import make_prompts\n"
        "print([prompt.messages[0]['content'] for prompt in make_prompts('ransom_note', {}, 4, 2, 0)[0]])"
    )
    drawn = [
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("0", "0", "1")
    ]
    assert drawn[0].stdout == drawn[1].stdout != drawn[2].stdout, drawn[0].stderr.decode()


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
@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["n_queens", "binary_matrix", "spiral_matrix", "countdown", "simple_integration"])
def test_an_answer_that_a_scorer_evaluates_runs_no_code_in_this_process(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "run_by_an_answer", False, raising=False)
    assert reward_of(dataset, "setattr(__import__('threading'), 'run_by_an_answer', True)") < 1.0
    assert not threading.run_by_an_answer  # type: ignore[attr-defined]


@needs_package
@pytest.mark.slow
def test_an_answer_that_would_take_for_ever_to_evaluate_scores_nothing_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompts_of("n_queens", num=1)[0][0]
    monkeypatch.setattr(reasoning_gym, "LIMITS", replace(reasoning_gym.LIMITS, cpu_s=2))
    monkeypatch.setattr(reasoning_gym, "_warned", set())
    environment = make_environment(prompt.env_class, dict(prompt.extras))
    assert environment.step("<answer>9**9**8</answer>")["reward"] == 0.0
    assert "an answer to n_queens scores 0.0" in caplog.text and "used more than 2 s of CPU time" in caplog.text


@needs_package
@pytest.mark.slow
def test_an_answer_at_which_the_scorer_raises_scores_nothing_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reasoning_gym, "_warned", set())
    prompt = prompts_of("prime_factorization", num=1)[0][0]
    environment = make_environment(prompt.env_class, dict(prompt.extras))
    with caplog.at_level(logging.WARNING):
        rewards = [environment.step(f"<answer>{answer}</answer>")["reward"] for answer in ("none", "2 x 3")]
    assert rewards == [0.0, 0.0]
    assert [record.message for record in caplog.records] == [
        "an answer to prime_factorization scores 0.0, as others like it will without a word: the scorer raised ValueError: "
        "invalid literal for int() with base 10: 'none'"
    ]


@needs_package
@pytest.mark.slow
def test_the_item_that_is_scored_is_the_one_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some datasets draw another item in a process with another hash seed: these two among them."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    for dataset in ("word_ladder", "polynomial_multiplication"):
        prompt = prompts_of(dataset, num=1)[0][0]
        item = prompt.extras["reasoning_gym"]
        assert reasoning_gym._score(item, reasoning_gym._drawn(item)[1]["answer"]) == (1.0, None)


@needs_package
def test_a_comparison_of_texts_takes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reasoning_gym, "call_function")
    assert reward_of("leg_counting", "no number") == 0.0


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
