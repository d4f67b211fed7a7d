"""Environments by name from a row's ``env_class``: what they take, what they reward, and what they answer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_async.composition.algorithms import make_advantages
from skyrl_async.composition.data import environment_factory, prepare_prompts
from skyrl_async.config.load import from_overrides
from skyrl_async.environments.answers import FunctionEnv
from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import Group, SamplingParams
from tests.cpu.config.test_config import policy_directory
from tests.cpu.data.test_dataset import write_rows
from tests.cpu.tiny_run import build_policy, make_client


def rewarded(env_class: str, truth: Any, action: str, **columns: Any) -> float:
    environment = make_environment(env_class, {"reward_spec": {"method": "rule", "ground_truth": truth}, **columns})
    outcome = environment.step(action)
    assert outcome["done"] and outcome["observations"] == []
    return float(outcome["reward"])


def fenced(source: str) -> str:
    return f"So:\n```python\n{source}\n```"


DOUBLING = json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})


@pytest.mark.parametrize(
    ("env_class", "truth", "right", "wrong"),
    [
        ("gsm8k", "1000", "#### $1,000.00", "1000"),
        ("math", r"\frac{1}{2}", r"\boxed{0.5}", r"0.5"),
        ("math", r"so \boxed{3}", "Answer: 3", "Answer: 4"),
        ("code", DOUBLING, fenced("print(2 * int(input()))"), "print(2 * int(input()))"),
        ("calculator", "42", "#### 42", "#### 43"),
        ("python_tool", "42", r"\boxed{42}", r"\boxed{43}"),
    ],
)
def test_an_environment_of_a_name_rewards_the_right_answer(env_class: str, truth: str, right: str, wrong: str) -> None:
    assert (rewarded(env_class, truth, right), rewarded(env_class, truth, wrong)) == (1.0, 0.0)


def test_a_row_may_ask_for_the_flexible_answer() -> None:
    environment = make_environment("gsm8k", {"reward_spec": {"method": "flexible", "ground_truth": 18}})
    assert environment.step("that makes 18 in all")["reward"] == 1.0


def test_rows_of_verl_have_their_truth_in_reward_model() -> None:
    flexible = make_environment("gsm8k", {"reward_model": {"method": "flexible", "ground_truth": 18}})
    assert flexible.step("that makes 18 in all")["reward"] == 1.0
    environment = make_environment("math", {"reward_model": {"style": "rule", "ground_truth": "7"}})
    assert environment.step(r"\boxed{7}")["reward"] == 1.0


@pytest.mark.parametrize(
    ("env_class", "columns", "message"),
    [
        (
            "gsm8k",
            {"answer": "3"},
            r"reward_spec\.ground_truth must be the right number, found the columns \['answer'\]",
        ),
        ("gsm8k", {"reward_spec": {"method": "rule"}}, r"must be the right number, found \{'reward_spec': \{'method'"),
        ("gsm8k", {"reward_spec": {"ground_truth": "many"}}, r"must be a number, got 'many'"),
        ("math", {}, "must be the right answer"),
        *(
            (
                "math",
                {"reward_spec": {"ground_truth": truth}},
                r"ground_truth must be one answer \(.*\), got .*: write the",
            )
            for truth in (["1", "2"], '["1", "2"]', [["1"]], {"answer": 1}, '{"answer": 1}', [1, 2], [])
        ),
        ("math", {"reward_spec": {"ground_truth": "$ $"}}, r"must be an answer, got '\$ \$', which is layout alone"),
        (
            "math",
            {"reward_spec": {"ground_truth": "1" * 501}},
            "an answer of at most 500 characters, got 501: '1.*mark the",
        ),
        ("code", {"reward_spec": {"ground_truth": "[3]"}}, r"must be an object with inputs and outputs"),
        ("code", {"reward_spec": {"ground_truth": DOUBLING}, "time_limit_s": 0}, r"time_limit_s must be a number > 0"),
        (
            "code",
            {"reward_spec": {"ground_truth": DOUBLING}, "time_limit_s": float("inf")},
            r"time_limit_s must be a number > 0, got inf",
        ),
        *(
            (
                "calculator",
                {"reward_spec": {"ground_truth": "42"}, "max_turns": found},
                rf"max_turns must be a whole number >= 1, got {found!r}",
            )
            for found in ("eight", 0, 2.5, float("inf"))
        ),
    ],
)
def test_a_row_without_what_its_environment_needs_is_refused(env_class: str, columns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(env_class, columns)


@pytest.mark.parametrize("truth", [["34"], '["34"]', [34], "[34]", 34, f"{'so ' * 500}#### 34"])
def test_the_right_answer_may_be_a_list_of_one_or_marked_in_a_text(truth: Any) -> None:
    assert rewarded("math", truth, r"\boxed{34}") == 1.0


@pytest.mark.parametrize("truth", ["[1, 2]", "{1, 2}", r"\{1, 2\}", "[1, 2)"])
def test_an_interval_or_a_set_is_one_answer(truth: str) -> None:
    assert rewarded("math", truth, rf"\boxed{{{truth}}}") == 1.0


def test_an_environment_that_somebody_registered_under_one_of_the_names_stays() -> None:
    from skyrl_gym.envs.registration import register, registry

    ours = registry.pop("math")
    try:
        register(id="math", entry_point="examples.own_dataset.environment:ReverseWordEnv")
        assert make_environment("math", {"word": "river"}).step("revir")["reward"] == 1.0
    finally:
        registry["math"] = ours


def test_a_call_of_the_calculator_is_answered_and_what_follows_it_cut_off() -> None:
    extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": 3}
    environment = make_environment("calculator", extras)
    outcome = environment.step("I ask. <calc>6*7</calc> = 41\n#### 41")
    assert (outcome["done"], outcome["reward"]) == (False, 0.0)
    assert outcome["observations"] == [{"role": "user", "content": "= 42"}]
    assert outcome["postprocessed_action"] == "I ask. <calc>6*7</calc>"
    later = make_environment("calculator", extras)
    later.restore(json.loads(json.dumps(environment.snapshot())))
    for env in (environment, later):
        assert env.step("<calc>1/0</calc>")["observations"][0]["content"].startswith("= error")
        last = env.step("#### 42")
        assert (last["done"], last["reward"], env.get_metrics()) == (True, 1.0, {"tool_calls": 2.0})


@pytest.mark.parametrize(("env_class", "column"), [("calculator", "max_turns"), ("python_tool", "time_limit_s")])
def test_a_column_that_is_null_is_as_one_that_is_not_there(env_class: str, column: str) -> None:
    make_environment(env_class, {"reward_spec": {"ground_truth": "1"}, column: None})


def test_calls_end_with_the_turns() -> None:
    environment = make_environment("calculator", {"reward_spec": {"ground_truth": "1"}, "max_turns": 1})
    outcome = environment.step("<calc>1</calc>")
    assert (outcome["done"], outcome["reward"], outcome["observations"]) == (True, 0.0, [])


def test_a_block_of_python_is_run_and_answered_with_what_it_prints() -> None:
    environment = make_environment("python_tool", {"reward_spec": {"ground_truth": "45"}})
    outcome = environment.step(fenced("print(sum(range(10)))"))
    assert outcome["observations"] == [{"role": "user", "content": "```output\n45\n\n```"}]
    assert "ZeroDivisionError" in environment.step(fenced("1/0"))["observations"][0]["content"]
    assert environment.step(r"\boxed{45}")["reward"] == 1.0


def test_a_program_that_fails_is_told_why_and_may_be_corrected() -> None:
    environment = make_environment("code_multi_turn", {"reward_spec": {"ground_truth": DOUBLING}, "max_turns": 3})
    first = environment.step("no program")
    assert first["observations"] == [{"role": "user", "content": "Not yet: no fenced block of Python"}]
    second = environment.step(fenced("print(int(input()))"))
    assert second["observations"][0]["content"] == r"Not yet: test 1 ('2\n'): wrote '2\n' instead of '4\n'"
    third = environment.step(fenced("print(2 * int(input()))"))
    assert (third["done"], third["reward"], environment.get_metrics()) == (True, 1.0, {"tests_passed": 1.0})


def length_reward(answer: str, row: dict[str, Any]) -> float:
    """Named by its path in the tests below."""
    assert row["prompt"][0]["content"] == "Say."
    return len(answer) / row["longest"]


def token_reward(answer: str, row: dict[str, Any]) -> list[float]:
    """A reward per sampled token, which grows with its place."""
    return [place / 8 for place in range(len(row["response_token_ids"]))]


NOT_A_FUNCTION = 3
OWN = f"task.reward={__name__}:length_reward"


@pytest.fixture(scope="module")
def own_dataset(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("dataset")
    file = write_rows(directory / "a.jsonl", *({"uid": str(i), "prompt": "Say.", "longest": 10_000} for i in range(8)))
    return ["task=dataset", f"task.train_files=[{file}]", f"policy.path={policy_directory(directory / 'policy')}"]


@pytest.mark.slow
async def test_a_function_by_its_path_rewards_rows_that_name_no_environment(
    tmp_path: Path, own_dataset: list[str]
) -> None:
    config = from_overrides(*own_dataset, OWN)
    prompt = prepare_prompts(config).train[0]
    client, renderer = make_client(build_policy(tmp_path / "tiny"))
    generator = GymGenerator(client, renderer, environment_factory(config))
    request = GroupRequest(prompt=prompt, num_samples=2, sampling=SamplingParams(max_tokens=8), seed=1)
    rows = await generator.generate(request)
    assert len(rows) == 2 and all(0 < row.reward < 1 for row in rows)

    by_token = from_overrides(
        *own_dataset, f"task.reward={__name__}:token_reward", "trainer.algorithm.advantage_estimator=gae"
    )
    generator = GymGenerator(client, renderer, environment_factory(by_token))
    rows = tuple(replace(row, values=np.zeros(len(row.logprobs))) for row in await generator.generate(request))
    group = Group(uid=prompt.uid, admission_index=0, scheduled_version=0, trajectories=rows)
    (found,) = make_advantages(by_token.trainer.algorithm).of_step([group])
    for row, advantages in zip(rows, found.advantages, strict=True):
        expected = [place / 8 for place in range(len(row.logprobs))]
        assert row.reward == sum(expected) and row.turn_rewards == (row.reward,)
        assert advantages.tolist() == [sum(expected[place:]) for place in range(len(expected))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.reward=nomodule"], r"task\.reward must be package\.module:function, got 'nomodule'"),
        ([OWN, "generator.entrypoint=examples.own_generator.scored:make"], "must be null with generator.entrypoint"),
        (["task.reward=no_such_module:f"], r"task\.reward='no_such_module:f' cannot be imported: No module"),
        ([f"task.reward={__name__}:missing"], "cannot be imported: module .* has no attribute 'missing'"),
        ([f"task.reward={__name__}:NOT_A_FUNCTION"], "must be a function, got int"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_anything_starts(
    own_dataset: list[str], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_prompts(from_overrides(*own_dataset, *overrides))


@pytest.mark.parametrize("found", [None, "good", float("nan")])
def test_a_reward_that_is_no_number_is_named(found: Any) -> None:
    judge: Callable[..., Any] = lambda answer, row: found  # noqa: E731
    with pytest.raises(GenerationError, match=r"task\.reward must return a"):
        FunctionEnv(judge, {}).step("x")
