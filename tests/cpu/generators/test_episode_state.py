"""The state of one episode: what a checkpoint takes of it, without an environment or a sampler."""

from typing import Any

import numpy as np
import pytest

from skyrl_async.columns import token_ids
from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import StepOutcome
from skyrl_async.generators.gym.episode_state import EpisodeState, TrajectoryBuilder, Turn
from skyrl_async.types import ENVIRONMENT_VERSION, Completion, FinishReason, Trajectory, TurnSpan


def completion(prompt: Any, num_tokens: int, *, version: int = 3) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=range(100, 100 + num_tokens),
        logprobs=[-0.25] * num_tokens,
        versions=[version] * num_tokens,
        text="",
        finish_reason=FinishReason.STOP,
        num_aborts=1,
    )


def answered(
    state: EpisodeState,
    between: list[int],
    observation: dict[str, Any],
    num_kept: int | None = None,
    token_rewards: Any = None,
) -> None:
    """A turn of three tokens after those ``between``, and its answer."""
    sampled = completion([*state.builder.token_ids, *between], 3)
    turn = Turn(completion=sampled, stop_string="", text_ends=token_ids([1, 2, 3]))
    outcome = StepOutcome(
        observations=[observation],
        reward=0.5,
        token_rewards=token_rewards,
        is_done=False,
        postprocessed_action=None,
        snapshot="{}",
    )
    state.add_turn(turn, num_kept, "abc", outcome)


@pytest.fixture
def state() -> EpisodeState:
    """Two turns, the second without its last token."""
    state = EpisodeState()
    state.open([{"role": "user", "content": "hello"}], "{}")
    answered(state, [1, 2], {"role": "user", "content": "again"})
    answered(state, [7], {"role": "user", "content": "again"}, 2, np.array([0.75, -0.25], np.float32))
    return state


def built(state: EpisodeState) -> Trajectory:
    return state.builder.build(is_truncated=False, metrics={})


def test_a_row_has_the_environments_tokens_between_those_of_the_policy(state: EpisodeState) -> None:
    assert built(state) == Trajectory(
        prompt_token_ids=[1, 2],
        response_token_ids=[100, 101, 102, 7, 100, 101],
        loss_mask=[1, 1, 1, 0, 1, 1],
        logprobs=[-0.25, -0.25, -0.25, 0.0, -0.25, -0.25],
        versions=[3, 3, 3, ENVIRONMENT_VERSION, 3, 3],
        reward=1.0,
        turn_rewards=(0.5, 0.5),
        token_rewards=(0.0, 0.0, 0.5, 0.0, 0.75, -0.25),
        turn_spans=(TurnSpan(index=0, start=0, end=3), TurnSpan(index=1, start=4, end=6)),
        num_turns=2,
        num_aborts=2,
        messages=tuple(state.builder.messages),
    )
    assert [message.start for message in state.builder.messages if message.is_reply] == [2, 6]
    assert state.builder.num_sampled_tokens == 5 and state.builder.num_response_tokens == 6


def test_an_episode_without_turns_has_an_empty_row() -> None:
    row = TrajectoryBuilder().build(is_truncated=True, metrics={})
    assert (len(row.prompt_token_ids), len(row.response_token_ids), row.num_turns) == (0, 0, 0)


def test_a_turn_that_does_not_continue_the_one_before_is_refused_and_changes_nothing(state: EpisodeState) -> None:
    row = built(state)
    with pytest.raises(GenerationError, match="turn 2 must begin with the 8 tokens before it"):
        state.builder.add_turn(completion([1, 2, 100], 1))
    assert built(state) == row


@pytest.mark.parametrize("waits", [False, True])
def test_an_episode_goes_on_from_its_state(state: EpisodeState, waits: bool) -> None:
    if waits:
        sampled = completion(state.builder.token_ids, 4)
        state.turn = Turn(completion=sampled, stop_string="</s>", text_ends=token_ids([1, 2, 3, 4]))
    saved = state.sample_state()
    assert saved is not None and saved.state is not None and saved.num_tokens == 5 + 4 * waits
    restored = EpisodeState.from_json(saved.state)
    assert built(restored) == built(state)
    assert (restored.messages, built(restored).reward, restored.num_steps) == (state.messages, 1.0, 2)
    if state.turn is not None:
        assert restored.turn is not None and restored.turn.completion == state.turn.completion
        assert restored.turn.text_ends.tolist() == [1, 2, 3, 4] and restored.turn.text == "</s>"
    answered(restored, [8], {})
    assert restored.builder.num_sampled_tokens == 8


def test_a_state_does_not_change_with_the_episode(state: EpisodeState) -> None:
    observation: dict[str, Any] = {"role": "user", "content": ["first"]}
    answered(state, [7], observation)
    saved = state.sample_state()
    assert saved is not None and saved.state is not None
    row, messages = built(EpisodeState.from_json(saved.state)), [*saved.state["messages"]]
    observation["content"].append("second")
    answered(state, [8], observation)
    assert built(EpisodeState.from_json(saved.state)) == row and saved.state["messages"] == messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "again", "again", ["first"]]


def test_columns_and_messages_are_not_copied_for_a_state(state: EpisodeState) -> None:
    one, two = (state.sample_state() for _ in range(2))
    assert one is not None and one.state is not None and two is not None and two.state is not None
    assert one.state["tokens"]["token_ids"] is two.state["tokens"]["token_ids"] is state.builder.token_ids
    assert one.state["messages"] is two.state["messages"]


def test_an_episode_with_messages_that_are_no_json_begins_anew(state: EpisodeState) -> None:
    answered(state, [7], {"role": "user", "content": {1, 2}})
    saved = state.sample_state()
    assert saved is not None and saved.state is None and saved.num_tokens == 8
    assert state.messages is not None and state.messages[-1]["content"] == {1, 2}
