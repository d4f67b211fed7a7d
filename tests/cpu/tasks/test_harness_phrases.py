"""The tokenizer of a policy that imitates conversations with a harness, and the example's conversations."""

import random

import pytest

from examples.agent_first_run.make import Puzzle, load_recorded, make_conversations, retold
from skyrl_async.tasks.imitation import ImitationTask
from skyrl_async.tasks.tiny_policy import task_tokenizer
from skyrl_async.tasks.tokenizer import encode_conversation, train_tokenizer


def test_a_harness_prompt_of_thousands_of_characters_takes_few_tokens_and_is_spelled_exactly() -> None:
    rows = make_conversations(range(100, 1000), random.Random(0))
    task = ImitationTask([(f"row {index}", row) for index, row in enumerate(rows)], ())
    tokenizer = task_tokenizer(task)
    for row in rows[:20]:
        token_ids, _ = encode_conversation(tokenizer, row["messages"])
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert tokenizer.decode(token_ids) == text
        assert token_ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert len(text) > 3000
        assert len(token_ids) < 200


def test_short_conversations_give_the_tokenizer_no_phrases() -> None:
    texts = ["Extend the digits of 1234 until 0 appears."] * 50
    assert train_tokenizer(texts).get_added_vocab().keys() == train_tokenizer(["Extend"] * 2).get_added_vocab().keys()


@pytest.mark.parametrize(
    "recorded", load_recorded(), ids=lambda one: f"{len(one.puzzle.notes)} notes, {one.num_looks} read"
)
def test_a_retold_conversation_differs_in_its_numbers_alone(recorded) -> None:  # type: ignore[no-untyped-def]
    puzzle = Puzzle(("111", "222", "333")[: len(recorded.puzzle.notes)], "444")
    told = retold(recorded, puzzle)
    assert retold(recorded._replace(puzzle=puzzle, messages=told), recorded.puzzle) == recorded.messages
    assert puzzle.instruction in told[0]["content"]
    written = [*puzzle.notes, puzzle.code][recorded.num_looks]
    assert f"echo {written} > code" in told[2 * recorded.num_looks + 1]["content"]
