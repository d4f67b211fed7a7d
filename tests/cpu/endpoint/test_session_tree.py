"""A request is matched to the deepest turn it continues, however the harness changes it, and ids only ever grow."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import begins_with
from skyrl_async.endpoint.sessions.message_key import message_key
from skyrl_async.endpoint.sessions.tree import Match, Turn, TurnTree
from skyrl_async.errors import StateError
from skyrl_async.types import Message
from tests.cpu.session_trees import Policy, assistant, call, completion, tool, user

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture
def policy() -> Policy:
    return Policy(TurnTree())


def test_a_conversation_grows_as_one_chain_of_ids(policy: Policy) -> None:
    messages: list[Message] = [user("a")]
    turns = []
    for i in range(10):
        turns.append(policy.answer(messages, assistant(f"reply {i}")))
        messages += [assistant(f"reply {i}"), user(f"question {i}")]
    assert [turn.parent for turn in turns] == [None, *turns[:-1]]
    for parent, child in pairwise(turns):
        assert begins_with(child.token_ids, parent.token_ids)
    assert policy.tree.turns == tuple(turns)
    assert policy.tree.newest[1] == (*messages[:-2], assistant("reply 9"))
    assert (policy.tree.num_turns, policy.tree.num_sampled_tokens) == (10, 20)


def test_the_newest_conversation_tells_which_of_its_messages_were_sampled_also_in_a_rewritten_history(
    policy: Policy,
) -> None:
    example = [user("for example"), assistant("an answer")]
    first = [*example, user("a")]
    policy.answer(first, assistant("b"))
    policy.answer([*first, assistant("b"), user("c")], assistant("d"))
    assert policy.tree.newest_turns == [None, None, None, 0, None, 1]
    rewritten = [*example, user("a, shortened"), assistant("b"), user("c"), assistant("d"), user("e")]
    policy.answer(rewritten, assistant("b"))
    assert policy.tree.newest_turns == [None, None, None, 0, None, 1, None, 2]
    policy.answer([*first, assistant("never sampled"), user("c")], assistant("f"))
    assert policy.tree.newest_turns == [None, None, None, None, None, 3]


def test_a_turn_gives_back_its_completion_whole(policy: Policy) -> None:
    first = policy.answer([user("a")], assistant("b"))
    sent = completion((*first.token_ids, 7, 8), (9,), text="c", num_aborts=2, version=3)
    messages = [user("a"), assistant("b"), user("c")]
    turn = policy.tree.commit(policy.tree.match(messages), messages, assistant("c"), sent)
    assert turn.addition.prompt_token_ids.tolist() == [7, 8]
    assert turn.token_ids.tolist() == [*sent.prompt_token_ids, 9]
    assert (turn.addition.text, turn.addition.num_aborts, tuple(turn.addition.versions)) == ("c", 2, (3,))


def test_a_new_session_matches_nothing(policy: Policy) -> None:
    match = policy.tree.match([user("a")])
    assert (match.turn, match.num_messages) == (None, 0)


def test_a_request_asked_again_is_a_sibling(policy: Policy) -> None:
    one, two = (policy.answer([user("a")], assistant(text)) for text in "xy")
    assert one.parent is two.parent is None
    assert policy.tree.match([user("a"), assistant("x"), user("b")]).turn is one
    assert policy.tree.match([user("a"), assistant("y"), user("b")]).turn is two


def test_a_rewritten_history_begins_a_branch_where_it_was_rewritten(policy: Policy) -> None:
    first = policy.answer([user("a")], assistant("b"))
    policy.answer([user("a"), assistant("b"), user("c")], assistant("d"))
    match = policy.tree.match([user("a"), assistant("b"), user("summary")])
    assert (match.turn, match.num_messages) == (first, 2)
    assert policy.tree.match([user("summary")]).turn is None


def test_turns_nobody_sampled_are_context(policy: Policy) -> None:
    """As aider's examples, and harnesses that put words into the policy's mouth."""
    messages = [user("example"), assistant("never sampled"), user("a")]
    assert policy.tree.match(messages).turn is None
    first = policy.answer(messages, assistant("b"))
    longer = [*messages, assistant("b"), user("c"), assistant("never sampled"), user("d")]
    match = policy.tree.match(longer)
    assert (match.turn, match.num_messages) == (first, 4)
    second = policy.answer(longer, assistant("e"))
    assert second.parent is first
    assert policy.tree.match([*longer, assistant("e")]).turn is second


def test_a_request_that_ends_in_a_sampled_turn_is_covered_whole(policy: Policy) -> None:
    turn = policy.answer([user("a")], assistant("b"))
    match = policy.tree.match([user("a"), assistant("b")])
    assert (match.turn, match.num_messages) == (turn, 2)


def test_other_tools_begin_a_conversation_of_their_own(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"), tools=TOOLS)
    continued = [user("a"), assistant("b"), user("c")]
    assert policy.tree.match(continued).turn is None
    assert policy.tree.match(continued, tools=[*TOOLS, *TOOLS]).turn is None
    assert policy.tree.match(continued, tools=json.loads(json.dumps(TOOLS, sort_keys=True))).turn is not None


def test_reasoning_may_be_dropped_but_not_changed(policy: Policy) -> None:
    turn = policy.answer([user("a")], assistant("b", reasoning_content="because"))
    forms_sent_back = [
        assistant("b"),
        assistant("b", reasoning_content=None),
        assistant("b", reasoning=" because\n"),
        assistant("b", reasoning_content="because"),
    ]
    assert [policy.tree.match([user("a"), returned, user("c")]).turn for returned in forms_sent_back] == [turn] * 4
    assert policy.tree.match([user("a"), assistant("b", reasoning="why not"), user("c")]).turn is None


def test_nothing_after_changed_reasoning_matches(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b", reasoning="because"))
    policy.answer([user("a"), assistant("b"), user("c")], assistant("d"))
    changed = [user("a"), assistant("b", reasoning="why not"), user("c"), assistant("d"), user("e")]
    assert policy.tree.match(changed).turn is None


def test_a_branch_with_changed_reasoning_is_continued(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b", reasoning="because"))
    changed = [user("a"), assistant("b", reasoning="why not"), user("c")]
    turn = policy.answer(changed, assistant("d"))
    assert turn.parent is None
    assert policy.tree.match([*changed, assistant("d"), user("e")]).turn is turn


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_choices_of_equal_text_are_told_apart_by_tool_call_ids(policy: Policy, chosen: int) -> None:
    replies = [assistant(None, tool_calls=[call("f", {"x": 1}, f"call_{i}")]) for i in range(3)]
    turns = [policy.answer([user("a")], reply) for reply in replies]
    returned = assistant("", tool_calls=[call("f", '{"x":1}', f"call_{chosen}")])
    messages = [user("a"), returned, tool("result", f"call_{chosen}")]
    assert policy.tree.match(messages).turn is turns[chosen]
    after = policy.answer(messages, assistant("done"))
    assert after.parent is turns[chosen]
    policy.answer([user("a"), replies[2], tool("result", "call_2")], assistant("done"))
    assert (
        policy.tree.match([*messages, assistant("done"), user("more")]).turn in policy.tree.turns[3 + (chosen == 2) :]
    )
    assert policy.tree.match([*messages, assistant("done")]).turn.path()[0] is turns[chosen]


def test_choices_of_equal_text_without_ids_mean_the_newest(policy: Policy) -> None:
    replies = [assistant(None, tool_calls=[call("f", {}, f"call_{i}")]) for i in range(2)]
    _, newest = (policy.answer([user("a")], reply) for reply in replies)
    returned = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    assert policy.tree.match([user("a"), returned, user("b")]).turn is newest


def test_ids_that_the_harness_made_up_do_not_hide_a_turn(policy: Policy) -> None:
    turn = policy.answer([user("a")], assistant(None, tool_calls=[call("f", {}, "call_1")]))
    returned = assistant(None, tool_calls=[call("f", {}, "toolu_9")])
    assert policy.tree.match([user("a"), returned, tool("x", "toolu_9")]).turn is turn


def test_a_reply_may_come_back_with_the_stop_string_that_its_text_lacks(policy: Policy) -> None:
    """As smolagents sends it; the ids hold it already."""
    turn = policy.answer([user("a")], assistant("code"), other_forms=[assistant("code"), assistant("code</code>")])
    for text in ("code", "code</code>"):
        messages = [user("a"), assistant(text), user("b")]
        assert policy.tree.match(messages).turn is turn
        after = policy.answer(messages, assistant("c"))
        assert after.parent is turn
        assert policy.tree.match([*messages, assistant("c")]).turn is after


def test_a_prompt_rendered_anew_is_committed_without_a_parent_and_found_again(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"))
    messages = [user("a"), assistant("b"), user("c")]
    turn = policy.tree.commit(Match(turn=None, num_messages=0), messages, assistant("d"), completion((1, 2), (3,)))
    assert turn.parent is None
    assert turn.num_messages == 4
    assert policy.tree.match([*messages, assistant("d"), user("e")]).turn is turn


def test_a_prompt_that_does_not_begin_with_the_parent_s_ids_is_refused(policy: Policy) -> None:
    parent = policy.answer([user("a")], assistant("b"))
    messages = [user("a"), assistant("b"), user("c")]
    for prompt in (parent.token_ids[:-1], (*parent.token_ids[:-1], 0, 1), ()):
        with pytest.raises(StateError, match="must begin with its 3 ids, but does not"):
            policy.tree.commit(policy.tree.match(messages), messages, assistant("d"), completion(prompt, (5,)))
    assert policy.tree.turns == (parent,)


@pytest.mark.parametrize("name", ["logprobs", "versions"])
def test_a_completion_without_one_value_per_token_is_refused(policy: Policy, name: str) -> None:
    done = completion((1,), (2, 3))
    object.__setattr__(done, name, (0,))
    with pytest.raises(StateError, match=f"a completion of 2 tokens must have as many {name}, got 1"):
        policy.tree.commit(policy.tree.match([user("a")]), [user("a")], assistant("b"), done)


def test_a_closed_tree_keeps_its_figures_only(policy: Policy) -> None:
    policy.answer([user("a")], assistant("b"))
    policy.tree.close()
    assert (policy.tree.num_turns, policy.tree.num_sampled_tokens) == (1, 2)
    assert (policy.tree.turns, policy.tree.newest) == ((), (None, ()))
    with pytest.raises(StateError, match="closed turn tree accepts no turn"):
        policy.answer([user("a")], assistant("b"))


@pytest.mark.parametrize("is_chain", [True, False], ids=["turns that extend each other", "turns rendered anew"])
def test_matching_and_committing_cost_as_much_as_there_are_messages(is_chain: bool) -> None:
    num_calls = {}
    for num_turns in (50, 100):
        policy = Policy(TurnTree())
        messages: list[Message] = [user("a")]
        for i in range(num_turns):
            reply = assistant(None, tool_calls=[call("f", {"i": i}, f"call_{i}")])
            match, prompt = policy.plan(messages)
            match = match if is_chain else Match(turn=None, num_messages=0)
            policy.tree.commit(match, messages, reply, completion(prompt, policy.ids(1)))
            messages = [*messages, reply, tool("x", f"call_{i}")]
        with counted_calls() as num_calls[num_turns]:
            policy.answer(messages, assistant("b"))
    assert num_calls[100].total() < 2.2 * num_calls[50].total()


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often which Python function is called in here: a measure of work that other processes do not disturb."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: counts.update([frame.f_code.co_name]) if event == "call" else None)
    try:
        yield counts
    finally:
        sys.setprofile(None)


# A harness that branches, repeats itself, makes up turns and changes messages, against a search through all turns.

CONTENTS = st.sampled_from(["a", "b", ""])
REPLIES = st.builds(
    lambda content, reasoning, names: assistant(
        content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": [call(name, {"k": 1.0, "a": "x"}, "") for name in names]} if names else {}),
    ),
    CONTENTS,
    st.sampled_from(["", "because", "so"]),
    st.lists(st.sampled_from("fg"), max_size=2),
)
TAILS = st.lists(st.builds(user, CONTENTS) | st.builds(assistant, CONTENTS), max_size=3)


class SendBack:
    """How a harness sends a reply back."""

    def __init__(self, data: st.DataObject, *, keeps_ids: bool, keeps_reasoning: bool) -> None:
        self.data = data
        self.keeps_ids = keeps_ids
        self.keeps_reasoning = keeps_reasoning

    def __call__(self, message: Message) -> Message:
        returned: dict[str, Any] = {"role": "assistant"}
        content = message.get("content")
        if content or self.data.draw(st.booleans()):
            forms = [content, f"\n{content} ", [{"type": "text", "text": content}]] if content else [None, "", "\n"]
            returned["content"] = self.data.draw(st.sampled_from(forms))
        if self.keeps_reasoning and message.get("reasoning_content"):
            returned["reasoning"] = message["reasoning_content"]
        if message.get("tool_calls"):
            returned["tool_calls"] = [self._call(one) for one in message["tool_calls"]]
        return returned

    def _call(self, sent: dict[str, Any]) -> dict[str, Any]:
        function = dict(sent["function"])
        parsed = json.loads(function["arguments"])
        function["arguments"] = self.data.draw(
            st.sampled_from([function["arguments"], json.dumps(parsed, indent=1), parsed])
        )
        return {"id": sent["id"], "function": function} if self.keeps_ids else {"function": function}


class Harness:
    """Keeps what it said and was told, per turn, and asks for more from anywhere."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.policy = Policy(TurnTree())
        self.conversations: dict[Turn, list[Message]] = {}
        """The messages of each turn as they first were, before the harness changed them."""
        self.send_back = SendBack(data, keeps_ids=data.draw(st.booleans()), keeps_reasoning=data.draw(st.booleans()))

    def step(self) -> None:
        chosen = self.data.draw(st.sampled_from([None, *self.conversations]))
        meant = [user("a")] if chosen is None else self.conversations[chosen]
        tail = self.data.draw(TAILS)
        messages = [self.send_back(m) if m["role"] == "assistant" else m for m in meant] + tail
        self.check(messages, chosen)
        for _ in range(self.data.draw(st.integers(1, 2))):
            reply = self.data.draw(REPLIES)
            ids = [
                call | {"id": f"call_{self.policy.tree.num_turns}_{i}"}
                for i, call in enumerate(reply.get("tool_calls", ()))
            ]
            reply = {**reply, "tool_calls": ids} if ids else reply
            turn = self.policy.answer(messages, reply, num_tokens=self.data.draw(st.integers(1, 3)))
            self.conversations[turn] = [*meant, *tail, reply]

    def check(self, messages: list[Message], chosen: Turn | None) -> None:
        match = self.policy.tree.match(messages)
        keys = [message_key(m) for m in messages]
        said = [
            turn for turn, sent in self.conversations.items() if [message_key(m) for m in sent] == keys[: len(sent)]
        ]
        possible = [turn for turn in said if self.reasons_alike(turn, messages)]
        deepest = max((turn.num_messages for turn in possible), default=0)
        assert match.num_messages == deepest
        assert match.turn is None or match.turn in possible
        if chosen is not None:
            assert chosen in possible, "a changed message hides no turn"
        if self.send_back.keeps_ids and chosen is not None and deepest == chosen.num_messages and has_ids(chosen):
            assert match.turn is chosen

    def reasons_alike(self, turn: Turn, messages: list[Message]) -> bool:
        pairs = [(messages[one.num_messages - 1].get("reasoning"), one.message) for one in turn.path()]
        return all(not returned or returned == sent.get("reasoning_content") for returned, sent in pairs)


def has_ids(turn: Turn) -> bool:
    return all(one.message.get("tool_calls") for one in turn.path())


@pytest.mark.slow
@given(data=st.data())
def test_any_history_matches_the_deepest_turn_that_it_continues(data: st.DataObject) -> None:
    harness = Harness(data)
    for _ in range(data.draw(st.integers(1, 8))):
        harness.step()
    for turn in harness.policy.tree.turns:
        parent = turn.parent
        assert parent is None or begins_with(turn.token_ids, parent.token_ids)
        assert turn.num_messages == len(harness.conversations[turn])
