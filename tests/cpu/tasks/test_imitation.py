"""Conversations from files as what a tiny policy learns before reinforcement."""

import random
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.composition.data import PolicyFiles, Prompts, load_renderer
from skyrl_async.config.load import from_overrides
from skyrl_async.data.sources import rows_of
from skyrl_async.errors import ConfigError, DatasetError
from skyrl_async.tasks.imitation import MIN_CONVERSATIONS, ImitationTask
from skyrl_async.tasks.tiny_policy import task_tokenizer
from skyrl_async.types import Prompt
from tests.cpu.data.test_dataset import write_rows


def talk(question: str, *answers: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
    return {"messages": messages[:-1], **more}


WORKED = [talk(f"{i}+1?", f"{i}+1={i + 1}", f"#### {i + 1}") for i in range(MIN_CONVERSATIONS)]
GUESSES = [talk("7+1?", "#### 3", guess=True)]


def task(*rows: dict[str, Any], held_out: tuple[Prompt, ...] = ()) -> ImitationTask:
    return ImitationTask(((f"line {i}", row) for i, row in enumerate(rows, start=1)), held_out)


def test_conversations_are_repeated_as_they_are_and_guesses_come_in_the_mixture_alone() -> None:
    imitated, rng = task(*WORKED, *GUESSES), random.Random(0)
    drawn = [imitated.draw_prompt(rng) for _ in range(400)]
    clean = [imitated.conversation(prompt, rng) for prompt in drawn]
    assert all(one in [row["messages"] for row in WORKED] for one in clean)
    assert all(list(prompt.messages) == one[:1] for prompt, one in zip(drawn, clean, strict=True))
    mixed = [imitated.conversation(prompt, rng, terse_share=0.7, slip_rate=0.0) for prompt in drawn]
    assert 0.6 < sum(one == GUESSES[0]["messages"] for one in mixed) / len(mixed) < 0.8
    assert imitated.conversation(drawn[0], rng, terse_share=0.0, slip_rate=0.0) == clean[0]


def test_the_name_under_which_policies_are_cached_is_of_the_contents() -> None:
    assert task(*WORKED).name == task(*WORKED).name != task(*WORKED, *GUESSES).name


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 1 needs messages, .* got None"),
        ({"messages": []}, "line 1 needs messages that begin with a prompt"),
        ({"messages": ["x"]}, "line 1 needs messages, a list of objects"),
        ({"messages": [{"role": "user"}]}, "line 1 has in messages .* must have a role and a content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 1 needs messages that .* end with the assistant's"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        task(row)


def test_too_few_conversations_and_those_of_held_out_prompts_are_refused() -> None:
    with pytest.raises(DatasetError, match=rf"at least {MIN_CONVERSATIONS} conversations .* got 1"):
        task(WORKED[0], *WORKED[:1], *GUESSES)
    held_out = Prompt(uid="e", messages=({"role": "user", "content": "3+1?"},), env_class="gsm8k")
    with pytest.raises(DatasetError, match=r"line 4 answers a prompt of task\.eval_files; take it out"):
        task(*WORKED, held_out=(held_out,))


def test_a_dataset_with_conversations_gets_a_tiny_policy_and_its_tokenizer(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "train.jsonl", {"prompt": "1+1?", "env_class": "gsm8k", "reward_spec": {"ground_truth": 2}}
    )
    files = write_rows(tmp_path / "warm.jsonl", *WORKED)
    config = from_overrides(
        *("task=dataset", f"task.train_files=[{rows}]", f"policy.warm_start.files=[{files}]", f"cache_dir={tmp_path}")
    )
    policy = PolicyFiles(config, Prompts(train=(), held_out=()), say=print).initial()
    tokenizer = load_renderer(policy, trust_remote_code=False).tokenizer
    assert tokenizer.get_vocab() == task_tokenizer(ImitationTask(rows_of(files), ())).get_vocab()
    assert tokenizer.decode(tokenizer.encode("1+1=2\n#### 2")) == "1+1=2\n#### 2"


def test_conversations_are_refused_where_no_tiny_policy_learns_them(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "warm.jsonl", *WORKED)
    with pytest.raises(
        ConfigError, match=r"policy\.warm_start\.files must be empty unless policy=tiny and task=dataset, harbor or"
    ):
        from_overrides(f"policy.warm_start.files=[{file}]")
    with pytest.raises(ConfigError, match=r"policy\.warm_start\.files must name files that exist, got 'gone.jsonl'"):
        from_overrides("task=dataset", f"task.train_files=[{file}]", "policy.warm_start.files=[gone.jsonl]")
