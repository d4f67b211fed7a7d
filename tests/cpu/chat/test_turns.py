"""Training rows split into turns: with the templates of four families of models, in miniature."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer
from skyrl_async.chat.turns import TurnSplitter
from skyrl_async.columns import TokenIds
from skyrl_async.types import ENVIRONMENT_VERSION, Message, Trajectory
from tests.cpu.chat_templates import llama3, mistral, qwen3, qwen25

QUESTION: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
REPLY: list[Message] = [{"role": "assistant", "content": "who is there"}, {"role": "user", "content": "again"}]


def row_of(renderer: ChatRenderer, messages: Sequence[Message], replies: Sequence[Message]) -> Trajectory:
    """Two sampled turns with a user's turn between them; the first is of two versions."""
    prompt, answer = renderer.render(messages), renderer.encode("who is there")
    following = renderer.render_next(
        [*messages, *replies], np.concatenate([prompt, answer]), num_covered=len(messages) + 1
    )
    last = renderer.encode("it is me")
    num_between = len(following) - len(prompt) - len(answer)
    versions = [3] + [4] * (len(answer) - 1) + [ENVIRONMENT_VERSION] * num_between + [4] * len(last)
    response: TokenIds = np.concatenate([following[len(prompt) :], last])
    is_sampled = np.array(versions) != ENVIRONMENT_VERSION
    logprobs = np.zeros(len(response), np.float32)
    return Trajectory(
        prompt_token_ids=prompt,
        response_token_ids=response,
        loss_mask=is_sampled,
        logprobs=logprobs,
        versions=versions,
        reward=0.0,
    )


@pytest.mark.parametrize("make", [qwen25, qwen3, llama3])
def test_turns_have_the_roles_that_the_template_names_and_tile_the_row(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    renderer = ChatRenderer(make())
    row = row_of(renderer, QUESTION, REPLY)
    turns = TurnSplitter(renderer).turns(row)
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    for turn, said in zip(turns, ["Be brief.", "hello", "who is there", "again", "it is me"], strict=True):
        assert said in turn.text
    assert turns[0].start == 0 and turns[-1].end == len(row.prompt_token_ids) + len(row.response_token_ids)
    assert all(turn.end == after.start for turn, after in pairwise(turns))
    assert "".join(turn.text for turn in turns) == renderer.decode(
        np.concatenate([row.prompt_token_ids, row.response_token_ids])
    )


def test_without_names_of_roles_turns_are_split_by_who_wrote_them() -> None:
    renderer = ChatRenderer(mistral())
    turns = TurnSplitter(renderer).turns(row_of(renderer, QUESTION[1:], REPLY))
    assert [turn.role for turn in turns] == ["prompt", "assistant", "environment", "assistant"]
