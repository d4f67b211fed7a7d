"""A session's rows hold what was sampled, each token trained once; the rest is context."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_async.inference.sessions.rows import BranchPolicy, rows
from skyrl_async.inference.sessions.tree import Match, Turn, TurnTree
from skyrl_async.types import ENVIRONMENT_VERSION, FinishReason, Message, Trajectory
from tests.cpu.session_trees import FIRST_SAMPLED_ID, Policy, assistant, completion, user


@pytest.fixture
def policy() -> Policy:
    return Policy(TurnTree())


def only(found: tuple[Trajectory, ...]) -> Trajectory:
    (row,) = found
    return row


def test_a_conversation_is_one_row_with_what_came_between_as_context(policy: Policy) -> None:
    messages = [user("a")]
    first = policy.tree.commit(
        policy.tree.match(messages),
        messages,
        assistant("b"),
        completion((1, 2), (10, 11), logprobs=(-0.1, -0.2), version=3, num_aborts=1),
    )
    messages = [user("a"), assistant("b"), user("c")]
    policy.tree.commit(
        policy.tree.match(messages),
        messages,
        assistant("d"),
        completion((*first.token_ids, 5), (12,), logprobs=(-0.3,), version=4, num_aborts=2),
    )
    row = only(rows(policy.tree, reward=0.5, metrics={"tests_passed": 1.0}, sample_index=2))
    assert row == Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=(10, 11, 5, 12),
        loss_mask=(1, 1, 0, 1),
        logprobs=(-0.1, -0.2, 0.0, -0.3),
        versions=(3, 3, ENVIRONMENT_VERSION, 4),
        reward=0.5,
        num_turns=2,
        num_aborts=3,
        sample_index=2,
        metrics={"tests_passed": 1.0},
    )


@pytest.fixture
def forked(policy: Policy) -> Policy:
    """Turns 0-1-2, a branch 0-3 after turn 0, and turn 4 on a history of its own."""
    first, again = assistant("b"), [user("a"), assistant("b"), user("c")]
    policy.answer([user("a")], first, num_aborts=1)
    policy.answer(again, assistant("d"), num_tokens=3, num_aborts=2)
    policy.answer([*again, assistant("d"), user("e")], assistant("f"), num_tokens=1)
    policy.answer([user("a"), first, user("z")], assistant("g"), num_tokens=5, num_aborts=4)
    policy.answer([user("summary")], assistant("h"), num_tokens=1)
    return policy


def test_the_first_row_with_a_shared_turn_trains_it(forked: Policy) -> None:
    main, branch, rewritten = rows(forked.tree, reward=1.0)
    assert main.loss_mask == (1, 1, 0, 1, 1, 1, 0, 1)
    assert branch.loss_mask == (0, 0, 0, 1, 1, 1, 1, 1)
    assert branch.versions[:3] == (ENVIRONMENT_VERSION,) * 3 and branch.logprobs[:3] == (0.0,) * 3
    assert branch.response_token_ids[:2] == main.response_token_ids[:2]
    assert rewritten.prompt_token_ids == forked.tree.turns[4].prompt_token_ids
    assert rewritten.loss_mask == (1,)
    assert [row.weight for row in (main, branch, rewritten)] == [1 / 3] * 3
    assert [row.num_turns for row in (main, branch, rewritten)] == [3, 1, 1]
    assert [row.num_aborts for row in (main, branch, rewritten)] == [3, 4, 0]


def test_one_branch_may_stand_for_the_session(forked: Policy) -> None:
    _, branch, rewritten = forked.tree.turns[2:]
    longest = only(rows(forked.tree, reward=1.0, branches=BranchPolicy.LONGEST))
    assert longest.prompt_token_ids + longest.response_token_ids == branch.token_ids
    assert (longest.loss_mask, longest.num_turns, longest.weight) == ((1, 1, 0, 1, 1, 1, 1, 1), 2, 1.0)
    last = only(rows(forked.tree, reward=1.0, branches=BranchPolicy.LAST))
    assert last.prompt_token_ids + last.response_token_ids == rewritten.token_ids


def test_choices_of_one_request_are_rows_of_one_prompt(policy: Policy) -> None:
    for text in "xyz":
        policy.answer([user("a")], assistant(text))
    found = rows(policy.tree, reward=1.0)
    assert [row.loss_mask for row in found] == [(1, 1)] * 3
    assert len({row.prompt_token_ids for row in found}) == 1


def test_turns_that_a_grammar_constrained_are_context_or_where_they_may_be_trained_their_forced_tokens_are(
    policy: Policy,
) -> None:
    policy.answer([user("a")], assistant("b"), num_tokens=3, logprobs=(0.0, -0.5, -0.0), is_constrained=True, version=7)
    policy.answer([user("a"), assistant("b"), user("c")], assistant("d"), num_tokens=1, version=7)
    unknown = ENVIRONMENT_VERSION
    row = only(rows(policy.tree, reward=1.0))
    assert row.loss_mask == (0, 0, 0, 0, 1)
    assert row.versions == (unknown, unknown, unknown, unknown, 7)
    row = only(rows(policy.tree, reward=1.0, trains_constrained=True))
    assert row.loss_mask == (0, 1, 0, 0, 1)
    assert row.versions == (unknown, 7, unknown, unknown, 7)


def test_certain_tokens_of_free_turns_are_trained(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"), logprobs=(0.0, -0.5))
    assert only(rows(policy.tree, reward=1.0)).loss_mask == (1, 1)


def test_a_row_with_nothing_to_train_is_dropped_unless_it_is_the_only_one(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"), logprobs=(0.0, 0.0), is_constrained=True)
    forced = only(rows(policy.tree, reward=1.0))
    assert (forced.loss_mask, forced.weight) == ((0, 0), 1.0)
    policy.answer([user("a")], assistant("c"))
    free = only(rows(policy.tree, reward=1.0))
    assert (free.loss_mask, free.weight) == ((1, 1), 1.0)


def test_an_abandoned_session_trains_nothing(forked: Policy) -> None:
    found = rows(forked.tree, reward=0.0, is_abandoned=True)
    assert len(found) == 3
    assert sum(row.weight for row in found) == pytest.approx(1)
    for row in found:
        assert row.is_abandoned and row.num_sampled_tokens == 0
        assert set(row.versions) == {ENVIRONMENT_VERSION} and set(row.logprobs) == {0.0}


def test_a_session_without_turns_has_no_rows() -> None:
    assert rows(TurnTree(), reward=1.0) == rows(TurnTree(), reward=0.0, is_abandoned=True) == ()


def test_a_row_is_truncated_when_its_last_turn_is_or_when_told(policy: Policy) -> None:
    policy.answer([user("a")], assistant("cut"), finish_reason=FinishReason.LENGTH)
    policy.answer([user("b")], assistant("whole"))
    policy.answer([user("a"), assistant("cut"), user("go on")], assistant("c"))
    assert [row.is_truncated for row in rows(policy.tree, reward=1.0)] == [False, False]
    policy.answer([user("b")], assistant("cut"), finish_reason=FinishReason.LENGTH)
    assert [row.is_truncated for row in rows(policy.tree, reward=1.0)] == [False, False, True]
    assert [row.is_truncated for row in rows(policy.tree, reward=1.0, is_truncated=True)] == [True] * 3


@st.composite
def trees(draw: st.DrawFn) -> TurnTree:
    """Turns that extend any turn before them, or none, with tools and grammars; some rendered anew, some without tokens."""
    policy = Policy(TurnTree())
    conversations: list[list[Message]] = [[]]
    for i in range(draw(st.integers(0, 8))):
        messages = [*draw(st.sampled_from(conversations)), user(draw(st.sampled_from("ab")))]
        match, prompt = policy.plan(messages)
        if draw(st.integers(0, 4)) == 0:
            match, prompt = Match(turn=None, num_messages=0), tuple(range(1, 2 + len(messages)))
        num_tokens = draw(st.integers(0, 3))
        reply = assistant(draw(st.sampled_from(["x", f"reply {i}"])))
        done = completion(
            prompt,
            policy.ids(num_tokens),
            version=i,
            logprobs=draw(st.lists(st.sampled_from([0.0, -0.5]), min_size=num_tokens, max_size=num_tokens)),
            finish_reason=draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
            num_aborts=draw(st.integers(0, 2)),
        )
        policy.tree.commit(match, messages, reply, done, is_constrained=draw(st.booleans()))
        conversations.append([*messages, reply])
    return policy.tree


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    tree=trees(),
    branches=st.sampled_from(BranchPolicy),
    is_abandoned=st.booleans(),
    is_truncated=st.booleans(),
    trains_constrained=st.booleans(),
)
def test_each_sampled_token_is_trained_once_as_it_was_sampled(
    tree: TurnTree, branches: BranchPolicy, is_abandoned: bool, is_truncated: bool, trains_constrained: bool
) -> None:
    how: dict[str, Any] = {
        "is_abandoned": is_abandoned,
        "is_truncated": is_truncated,
        "trains_constrained": trains_constrained,
    }
    found = rows(tree, reward=0.25, branches=branches, **how)
    assert bool(found) == bool(tree.turns)
    if found:
        assert sum(row.weight for row in found) == pytest.approx(1)
    sampled = {i: sample for turn in tree.turns for i, *sample in samples(turn, trains_constrained)}
    trained = Counter(i for row in found for i, mask in zip(row.response_token_ids, row.loss_mask, strict=True) if mask)
    assert max(trained.values(), default=1) == 1
    assert trained.keys() <= sampled.keys()
    if branches is BranchPolicy.ALL and not is_abandoned:
        assert trained.keys() == sampled.keys()
        if sampled:
            assert sum(row.num_aborts for row in found) <= sum(turn.addition.num_aborts for turn in tree.turns)
    for row in found:
        check_row(row, tree, sampled)
        assert row.is_abandoned == is_abandoned and (row.is_truncated or not is_truncated)


def samples(turn: Turn, trains_constrained: bool) -> list[tuple[int, float, int]]:
    """Id, log-prob and version of the tokens that are to be trained."""
    if turn.is_constrained and not trains_constrained:
        return []
    added = turn.addition
    together = zip(added.token_ids, added.logprobs, added.versions, strict=True)
    return [sample for sample in together if not (turn.is_constrained and sample[1] == 0.0)]


def check_row(row: Trajectory, tree: TurnTree, sampled: dict[int, list[float]]) -> None:
    """It is a leaf's ids exactly, and says of each token what its engine said, or nothing."""
    leaves = set(tree.turns) - {turn.parent for turn in tree.turns}
    (leaf, *_) = [turn for turn in leaves if turn.token_ids == row.prompt_token_ids + row.response_token_ids]
    path = leaf.path()
    assert row.prompt_token_ids == path[0].prompt_token_ids
    assert all(i < FIRST_SAMPLED_ID for i in row.prompt_token_ids)
    assert 1 <= row.num_turns <= len(path)
    spoken = zip(row.response_token_ids, row.loss_mask, row.logprobs, row.versions, strict=True)
    for token_id, mask, logprob, version in spoken:
        assert [logprob, version] == (sampled[token_id] if mask else [0.0, ENVIRONMENT_VERSION])


@settings(max_examples=100, deadline=None)
@given(tree=trees())
def test_turns_and_aborts_of_the_rows_add_up_to_the_session_s(tree: TurnTree) -> None:
    found = rows(tree, reward=1.0, is_abandoned=True)
    assert sum(row.num_turns for row in found) == tree.num_turns
    assert sum(row.num_aborts for row in found) == sum(turn.addition.num_aborts for turn in tree.turns)
