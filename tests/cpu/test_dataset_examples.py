"""The small datasets of ``examples``: what is committed is what the scripts make, and it plays."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.dapo import make as dapo
from examples.gsm8k import convert
from examples.gsm8k import make as gsm8k
from examples.lora import make as lora
from examples.multi_turn_tools import make as tools
from skyrl_async.data.dataset import load_sources
from skyrl_async.data.sources import rows_of
from skyrl_async.errors import DatasetError
from skyrl_async.tasks.imitation import ImitationTask
from skyrl_async.tasks.registry import make_environment
from skyrl_async.tasks.tiny_policy import task_tokenizer

SCRIPTS = [gsm8k, tools, dapo, lora]
MAX_BYTES = 100_000


def rows(script: ModuleType, name: str) -> Iterator[dict[str, Any]]:
    return (dict(row) for _, row in rows_of(script.FOLDER / name))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_files_are_what_the_script_makes_and_small(script: ModuleType) -> None:
    for name, made in script.make().items():
        file = script.FOLDER / name
        assert file.read_text() == gsm8k.as_text(made)
        assert file.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_question_is_in_two_files_and_each_can_be_played(script: ModuleType) -> None:
    def check(prompt: Any) -> None:
        make_environment(prompt.env_class, prompt.extras).close()

    train, held_out = load_sources([script.FOLDER / "train.jsonl", script.FOLDER / "eval.jsonl"], None, check=check)
    asked = [prompt.messages[0]["content"] for prompt in (*train, *held_out)]
    asked += [row["messages"][0]["content"] for row in rows(script, "warm_start.jsonl")]
    assert len(set(asked)) == len(asked)
    ImitationTask(rows_of(script.FOLDER / "warm_start.jsonl"), [*train, *held_out])


@pytest.mark.parametrize("script", SCRIPTS)
def test_worked_conversations_are_those_that_the_environment_leads_to_a_reward_of_one(script: ModuleType) -> None:
    env_class = next(rows(script, "train.jsonl"))["env_class"]
    worked = [row["messages"] for row in rows(script, "warm_start.jsonl") if not row.get("guess")]
    for messages in worked:
        truth = messages[-1]["content"].split()[-1]
        environment = make_environment(env_class, {"reward_spec": {"ground_truth": truth}})
        told, outcome = messages[:1], {}
        for message in messages:
            if message["role"] == "assistant":
                outcome = environment.step(message["content"])
                told = [*told, message, *outcome["observations"]]
        assert told == messages and outcome["reward"] == 1.0


def test_the_answers_are_those_of_the_questions() -> None:
    for row in rows(gsm8k, "train.jsonl"):
        words = row["prompt"][0]["content"].replace(".", "").replace(",", "").split()
        signs = {"has": 1, "gets": 1, "gives": -1}
        total = sum(signs[word] * int(words[i + 1]) for i, word in enumerate(words) if word in signs)
        assert row["reward_spec"]["ground_truth"] == str(total)
    for row in rows(tools, "train.jsonl"):
        question = row["prompt"][0]["content"].rstrip("?").replace("plus", "+").replace("minus", "-")
        assert row["reward_spec"]["ground_truth"] == str(eval(question))
    for row in rows(dapo, "train.jsonl"):
        num_asked, digits = re.fullmatch(r".* (\d) of the digits ([\d ]+) make\?", row["prompt"][0]["content"]).groups()
        assert row["reward_model"]["ground_truth"] == "".join(sorted(digits.split())[: int(num_asked)])
    for row in rows(lora, "train.jsonl"):
        digits = row["prompt"][0]["content"].removeprefix("Sort ").rstrip(".").split()
        assert row["reward_spec"]["ground_truth"] == "".join(sorted(digits, reverse=True))


def test_of_the_habits_that_dapo_is_to_change_only_wordy_answers_are_long() -> None:
    task = ImitationTask(rows_of(dapo.FOLDER / "warm_start.jsonl"), [])
    tokenizer = task_tokenizer(task)
    lengths: dict[bool, list[int]] = {False: [], True: []}
    for row in rows(dapo, "warm_start.jsonl"):
        answer = row["messages"][-1]["content"]
        num_tokens = len(tokenizer(answer)["input_ids"]) + 1
        lengths[answer.startswith(dapo.WORDY)].append(num_tokens)
    max_tokens, buffer_len = 36, 24  # as in the README's command
    assert max(lengths[False]) <= max_tokens - buffer_len
    assert max_tokens - buffer_len < min(lengths[True]) <= max_tokens < max(lengths[True])


def write_split(folder: Path, split: str, answers: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"question": [f"q{i}?" for i in range(len(answers))], "answer": answers})
    parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def test_the_full_set_is_converted_to_rows_that_its_environment_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_split(tmp_path, "train", ["2*<<2*600=1200>>600=1200\n#### 1,200", "#### -3"])
    write_split(tmp_path, "test", ["#### 5"])
    monkeypatch.setattr("sys.argv", ["convert", str(tmp_path), str(tmp_path / "out")])
    convert.main()
    assert "train.jsonl: 2 rows" in capsys.readouterr().out
    (first, second), (held_out,) = load_sources(
        [tmp_path / "out" / f"{name}.jsonl" for name in ("train", "eval")], None
    )
    assert [p.extras["reward_spec"]["ground_truth"] for p in (first, second, held_out)] == ["1200", "-3", "5"]
    assert make_environment(first.env_class, first.extras).step("#### 1200")["reward"] == 1.0
    assert json.loads((tmp_path / "out" / "eval.jsonl").read_text())["uid"] == "gsm8k-test-0"


def test_a_folder_without_the_full_set_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["convert", str(tmp_path / "gsm8k"), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        convert.main()
    assert f"{tmp_path}/gsm8k must be a local copy of openai/gsm8k's main: dataset file" in capsys.readouterr().err


def test_a_row_of_the_full_set_without_a_number_is_named(tmp_path: Path) -> None:
    write_split(tmp_path, "train", ["#### 1", "none"])
    with pytest.raises(DatasetError, match=r"train-00000-of-00001\.parquet row 2 needs question, and answer"):
        list(convert.converted(tmp_path, "train", "gsm8k"))
