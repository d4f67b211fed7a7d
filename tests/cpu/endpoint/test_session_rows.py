"""A session's rows hold what was sampled, each token trained once; the rest is context."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.config.schema.server import BranchPolicyName
from skyrl_async.endpoint.sessions.message_key import RAW_PROMPT_ROLE
from skyrl_async.endpoint.sessions.rows import rows as rows_of
from skyrl_async.endpoint.sessions.settings import SessionOutcome, SessionSettings
from skyrl_async.endpoint.sessions.tree import Match, Turn, TurnTree
from skyrl_async.types import ENVIRONMENT_VERSION, FinishReason, Message, RowMessage, Trajectory, TurnSpan
from tests.cpu.session_trees import FIRST_SAMPLED_ID, Policy, assistant, call, completion, system, tool, user


def rows(tree: TurnTree, **how: Any) -> tuple[Trajectory, ...]:
    """The rows for an outcome and settings, given field by field."""
    outcome = {name: how.pop(name) for name in list(how) if name in SessionOutcome.model_fields}
    return rows_of(tree, SessionOutcome(**outcome), SessionSettings(**how))


@pytest.fixture
def policy() -> Policy:
    return Policy(TurnTree())


def only(found: tuple[Trajectory, ...]) -> Trajectory:
    (row,) = found
    return row


def test_a_reward_that_is_left_out_is_the_exact_sum() -> None:
    outcome = SessionOutcome.model_validate({"rewards": [{"turn": 0, "value": [1e17, 1.0, -1e17]}]})
    assert outcome.reward == 1.0


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
    row = only(rows(policy.tree, reward=0.5, metrics={"tests_passed": 1.0}))
    assert row == Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=(10, 11, 5, 12),
        loss_mask=(1, 1, 0, 1),
        logprobs=(-0.1, -0.2, 0.0, -0.3),
        versions=(3, 3, ENVIRONMENT_VERSION, 4),
        reward=0.5,
        turn_spans=(TurnSpan(index=0, start=0, end=2), TurnSpan(index=1, start=3, end=4)),
        num_turns=2,
        num_aborts=3,
        metrics={"tests_passed": 1.0},
        messages=(
            RowMessage(role="user", start=0),
            RowMessage(role="assistant", start=2, is_reply=True),
            RowMessage(role="user", start=4),
            RowMessage(role="assistant", start=5, is_reply=True),
        ),
    )


def ids_of(row: Trajectory) -> list[int]:
    """Prompt and response."""
    return [*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()]


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
    assert main.loss_mask.tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert branch.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert tuple(branch.versions[:3]) == (*main.versions[:2], ENVIRONMENT_VERSION)
    assert branch.logprobs[:3].tolist() == [*main.logprobs[:2], 0.0]
    assert branch.response_token_ids[:2].tolist() == main.response_token_ids[:2].tolist()
    assert np.array_equal(rewritten.prompt_token_ids, forked.tree.turns[4].addition.prompt_token_ids)
    assert rewritten.loss_mask.tolist() == [1]
    assert [row.weight for row in (main, branch, rewritten)] == [1 / 3] * 3
    assert [row.num_turns for row in (main, branch, rewritten)] == [3, 1, 1]
    assert [row.num_aborts for row in (main, branch, rewritten)] == [3, 4, 0]
    spans = [[(span.index, span.start, span.end) for span in row.turn_spans] for row in (main, branch, rewritten)]
    assert spans == [[(0, 0, 2), (1, 3, 6), (2, 7, 8)], [(3, 3, 8)], [(4, 0, 1)]]


def test_a_policy_may_keep_one_branch_of_a_session(forked: Policy) -> None:
    _, branch, rewritten = forked.tree.turns[2:]
    longest = only(rows(forked.tree, reward=1.0, branches=BranchPolicyName.longest))
    assert ids_of(longest) == branch.token_ids.tolist()
    assert longest.loss_mask.tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert (longest.num_turns, longest.weight) == (2, 1.0)
    last = only(rows(forked.tree, reward=1.0, branches=BranchPolicyName.last))
    assert ids_of(last) == rewritten.token_ids.tolist()


AGENT, TITLE = system("You repair programs."), system("You write titles.")
TASK, RUN_TESTS = user("repair the function median in stats.py"), call("run", {"command": "pytest"})
TOOLS = [{"type": "function", "function": {"name": "run"}}]


def repair(policy: Policy, num_turns: int, *, tools: list[dict[str, Any]] | None = TOOLS) -> list[Message]:
    """An agent's conversation, as it stands after its last turn."""
    messages = [AGENT, TASK]
    for i in range(num_turns):
        reply = assistant(f"I run the tests for time number {i}.", tool_calls=[RUN_TESTS] if tools else [])
        policy.answer(messages, reply, tools=tools, num_tokens=40)
        messages += [reply, tool("1 failed") if tools else user("1 failed")]
    return messages


def ask_title(policy: Policy, **how: Any) -> Turn:
    return policy.answer([TITLE, TASK], assistant("The median of stats"), num_tokens=5, **how)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_title_asked_beside_a_task_is_no_row_and_takes_no_weight(
    policy: Policy, position: int, tools: list[dict[str, Any]] | None
) -> None:
    messages = [AGENT, TASK]
    for i in range(3):
        if i == position:
            title = ask_title(policy, finish_reason=FinishReason.LENGTH)
        reply = assistant("I look at it.")
        policy.answer(messages, reply, tools=tools, num_tokens=2)
        messages += [reply, user("go on")]
    row = only(rows(policy.tree, reward=1.0))
    assert (row.num_turns, row.num_sampled_tokens, row.weight, row.is_truncated) == (3, 6, 1.0, False)
    assert policy.tree.side_requests == (title,)
    assert policy.tree.newest[1] == tuple(messages[:-1])
    for branches in (BranchPolicyName.longest, BranchPolicyName.last):
        assert only(rows(policy.tree, reward=1.0, branches=branches)).num_turns == 3
    trained = rows(policy.tree, reward=1.0, trains_side_requests=True)
    assert [row.weight for row in trained] == [0.5, 0.5] and sum(row.num_sampled_tokens for row in trained) == 11


def test_in_a_session_of_single_turns_only_much_shorter_answers_are_side_requests(policy: Policy) -> None:
    title = ask_title(policy)
    policy.answer([AGENT, TASK], assistant("It is right as it is."), num_tokens=19)
    assert policy.tree.side_requests == ()
    policy.answer([AGENT, user("and the mean?")], assistant("So is that."), num_tokens=20)
    assert policy.tree.side_requests == (title,)
    assert [row.weight for row in rows(policy.tree, reward=1.0)] == [0.5, 0.5]


def summarised_by_another(policy: Policy) -> None:
    """A compaction that keeps the messages under a system prompt of its own, and a history that begins with what it said."""
    messages = [*repair(policy, 2), user("Summarise.")]
    policy.answer([system("You summarise."), *messages[1:]], assistant("The tests were run twice."), num_tokens=5)
    policy.answer([AGENT, TASK, user("So far: The tests were run twice.")], assistant("Done."), tools=TOOLS)


def summarised_in_a_text(policy: Policy) -> None:
    said = "\n".join(str(message.get("content")) for message in repair(policy, 2))
    summary = assistant("Summary:\nThe tests were run twice.")
    policy.answer([system("You summarise."), user(f"Summarise this:\n{said}")], summary, num_tokens=5)


def handed_to_a_specialist(policy: Policy) -> None:
    """The OpenAI Agents SDK's handoff: the history goes on under the instructions of another agent."""
    handing_over = assistant("", tool_calls=[call("transfer_to_specialist", {})])
    policy.answer([system("You are the triage."), TASK], handing_over, tools=TOOLS, num_tokens=5)
    policy.answer([AGENT, TASK, handing_over, tool("done")], assistant("It is repaired."), num_tokens=90)


def helped_by_an_agent_that_is_a_tool(policy: Policy) -> None:
    messages = repair(policy, 1)
    policy.answer([system("You find causes."), TASK], assistant("The list is not sorted."), num_tokens=5)
    messages[-1] = tool("The list is not sorted.")
    policy.answer(messages, assistant("I sort it."), tools=TOOLS)


def helped_by_an_agent_with_tools(policy: Policy) -> None:
    repair(policy, 2)
    policy.answer(
        [system("You write documents."), user("document it")], assistant("", tool_calls=[RUN_TESTS]), tools=TOOLS
    )


def planned_written_and_reviewed(policy: Policy) -> None:
    """Three prompts without tools, each with part of what the one before said."""
    plan = "1. Sort the list.\n2. Take the middle."
    code = "def median(values):\n    return sorted(values)[len(values) // 2]"
    policy.answer([system("You plan."), TASK], assistant(f"The plan:\n{plan}"), num_tokens=5)
    policy.answer([AGENT, user(f"Do this: {plan}")], assistant(f"Here:\n```\n{code}\n```"), num_tokens=90)
    policy.answer([system("You review."), user(f"Is it right?\n{code}")], assistant("yes"), num_tokens=2)


def asked_by_a_harness_without_system_prompts(policy: Policy) -> None:
    """Terminus 2: its summary is asked in the history, its handoff begins anew."""
    policy.answer([TASK], assistant("I run the tests."), num_tokens=90)
    policy.answer([user("You take over from another agent.")], assistant("What is known?"), num_tokens=5)


@pytest.mark.parametrize(
    "play",
    [
        summarised_by_another,
        summarised_in_a_text,
        handed_to_a_specialist,
        helped_by_an_agent_that_is_a_tool,
        helped_by_an_agent_with_tools,
        planned_written_and_reviewed,
        asked_by_a_harness_without_system_prompts,
    ],
)
def test_turns_that_are_quoted_or_use_tools_are_part_of_the_task(policy: Policy, play: Any) -> None:
    play(policy)
    assert policy.tree.side_requests == ()
    trained = sum(row.num_sampled_tokens for row in rows(policy.tree, reward=1.0))
    assert trained == policy.tree.num_sampled_tokens


def test_a_title_that_repeats_its_prompt_does_not_count_as_quoted(policy: Policy) -> None:
    title = policy.answer([TITLE, TASK], assistant(TASK["content"]), num_tokens=5)
    repair(policy, 2)
    assert policy.tree.side_requests == (title,)


def test_a_session_with_raw_prompts_has_no_side_requests(policy: Policy) -> None:
    ask_title(policy)
    policy.tree.commit(
        Match(turn=None, num_messages=0),
        ({"role": RAW_PROMPT_ROLE, "content": "1 2"},),
        assistant("b"),
        completion((1, 2), tuple(range(2000, 2090))),
    )
    assert policy.tree.side_requests == ()


def test_choices_of_one_request_are_rows_of_one_prompt(policy: Policy) -> None:
    for text in "xyz":
        policy.answer([user("a")], assistant(text))
    found = rows(policy.tree, reward=1.0)
    assert [row.loss_mask.tolist() for row in found] == [[1, 1]] * 3
    assert len({tuple(row.prompt_token_ids) for row in found}) == 1


def test_turns_under_a_grammar_are_context_unless_they_may_be_trained(
    policy: Policy,
) -> None:
    policy.answer([user("a")], assistant("b"), num_tokens=3, logprobs=(0.0, -0.5, -0.0), is_constrained=True, version=7)
    policy.answer([user("a"), assistant("b"), user("c")], assistant("d"), num_tokens=1, version=7)
    row = only(rows(policy.tree, reward=1.0))
    assert row.loss_mask.tolist() == [0, 0, 0, 0, 1]
    assert tuple(row.versions) == (7, 7, 7, ENVIRONMENT_VERSION, 7)
    assert row.logprobs[:4].tolist() == [0.0, -0.5, 0.0, 0.0]
    row = only(rows(policy.tree, reward=1.0, trains_constrained=True))
    assert row.loss_mask.tolist() == [0, 1, 0, 0, 1]


def test_certain_tokens_of_free_turns_are_trained(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"), logprobs=(0.0, -0.5))
    assert only(rows(policy.tree, reward=1.0)).loss_mask.tolist() == [1, 1]


def test_a_row_with_nothing_to_train_is_dropped_unless_it_is_the_only_one(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"), logprobs=(0.0, 0.0), is_constrained=True)
    forced = only(rows(policy.tree, reward=1.0))
    assert (forced.loss_mask.tolist(), forced.weight) == ([0, 0], 1.0)
    policy.answer([user("a")], assistant("c"))
    free = only(rows(policy.tree, reward=1.0))
    assert (free.loss_mask.tolist(), free.weight) == ([1, 1], 1.0)


def test_an_abandoned_session_trains_nothing_and_keeps_what_was_sampled(forked: Policy) -> None:
    found, finished = rows(forked.tree, reward=0.0, is_abandoned=True), rows(forked.tree, reward=1.0)
    assert len(found) == 3
    assert sum(row.weight for row in found) == pytest.approx(1)
    for row, whole in zip(found, finished, strict=True):
        assert row.is_abandoned and row.num_sampled_tokens == 0
        assert row.versions == whole.versions and np.array_equal(row.logprobs, whole.logprobs)


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
    conversations: list[list[Message]] = [[], [AGENT], [TITLE]]
    for i in range(draw(st.integers(0, 8))):
        messages = [*draw(st.sampled_from(conversations)), user(draw(st.sampled_from("ab")))]
        tools = draw(st.sampled_from([None, None, TOOLS]))
        match, prompt = policy.plan(messages, tools)
        if draw(st.integers(0, 4)) == 0:
            match, prompt = Match(turn=None, num_messages=0), tuple(range(1, 2 + len(messages)))
        num_tokens = draw(st.sampled_from([0, 1, 2, 3, 12]))
        reply = assistant(draw(st.sampled_from(["x", f"reply {i}"])))
        done = completion(
            prompt,
            policy.ids(num_tokens),
            version=i,
            logprobs=draw(st.lists(st.sampled_from([0.0, -0.5]), min_size=num_tokens, max_size=num_tokens)),
            finish_reason=draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
            num_aborts=draw(st.integers(0, 2)),
        )
        policy.tree.commit(match, messages, reply, done, tools=tools, is_constrained=draw(st.booleans()))
        conversations.append([*messages, reply])
    return policy.tree


@pytest.mark.slow
@given(
    tree=trees(),
    branches=st.sampled_from(BranchPolicyName),
    is_abandoned=st.booleans(),
    is_truncated=st.booleans(),
    trains_constrained=st.booleans(),
    trains_all=st.booleans(),
)
def test_each_sampled_token_is_trained_once_unless_it_is_of_a_side_request(
    tree: TurnTree,
    branches: BranchPolicyName,
    is_abandoned: bool,
    is_truncated: bool,
    trains_constrained: bool,
    trains_all: bool,
) -> None:
    how: dict[str, Any] = {
        "is_abandoned": is_abandoned,
        "is_truncated": is_truncated,
        "trains_constrained": trains_constrained,
        "trains_side_requests": trains_all,
    }
    found = rows(tree, reward=0.25, branches=branches, **how)
    assert bool(found) == bool(tree.turns)
    if found:
        assert sum(row.weight for row in found) == pytest.approx(1)
    of_task = [turn for turn in tree.turns if trains_all or turn not in tree.side_requests]
    sampled = {
        i
        for turn in of_task
        for i, logprob, _ in samples(turn)
        if not turn.is_constrained or (trains_constrained and logprob != 0.0)
    }
    trained = Counter(i for row in found for i, mask in zip(row.response_token_ids, row.loss_mask, strict=True) if mask)
    assert max(trained.values(), default=1) == 1
    assert trained.keys() <= sampled
    if branches is BranchPolicyName.all and not is_abandoned:
        assert trained.keys() == sampled
        if sampled:
            assert sum(row.num_aborts for row in found) <= sum(turn.addition.num_aborts for turn in tree.turns)
    for row in found:
        check_row(row, tree)
        assert row.is_abandoned == is_abandoned and (row.is_truncated or not is_truncated)


def samples(turn: Turn) -> Iterator[tuple[int, float, int]]:
    """Id, log-prob and version of its tokens."""
    return zip(turn.addition.token_ids, turn.addition.logprobs, turn.addition.versions, strict=True)


def check_row(row: Trajectory, tree: TurnTree) -> None:
    """It is a leaf's ids exactly, and says of each sampled token what its engine said."""
    leaves = set(tree.turns) - {turn.parent for turn in tree.turns}
    (leaf, *_) = [turn for turn in leaves if turn.token_ids.tolist() == ids_of(row)]
    path = leaf.path()
    assert np.array_equal(row.prompt_token_ids, path[0].addition.prompt_token_ids)
    assert all(i < FIRST_SAMPLED_ID for i in row.prompt_token_ids)
    assert 1 <= row.num_turns <= len(path)
    sampled = {i: said for turn in path for i, *said in samples(turn)}
    spoken = zip(row.response_token_ids, row.loss_mask, row.logprobs, row.versions, strict=True)
    for span in row.turn_spans:
        of_turn = tree.turns[span.index].addition.token_ids
        assert np.array_equal(row.response_token_ids[span.start : span.end], of_turn)
    assert sum(row.loss_mask[span.start : span.end].sum() for span in row.turn_spans) == row.num_sampled_tokens
    for token_id, mask, logprob, version in spoken:
        assert [logprob, version] == sampled.get(token_id, [0.0, ENVIRONMENT_VERSION])
        assert token_id in sampled or not mask


@given(tree=trees())
def test_turns_and_aborts_of_rows_add_up_to_those_of_the_session(tree: TurnTree) -> None:
    found = rows(tree, reward=1.0, is_abandoned=True)
    of_task = [turn for turn in tree.turns if turn not in tree.side_requests]
    assert sum(row.num_turns for row in found) == len(of_task) and bool(of_task) == bool(tree.turns)
    assert sum(row.num_aborts for row in found) == sum(turn.addition.num_aborts for turn in of_task)
    assert tree.newest[0] in of_task or not tree.turns
    for turn in tree.side_requests:
        assert turn.parent is None and all(other.parent is not turn for other in tree.turns)
