"""What a session keeps: through a real endpoint and the real openai client, whatever a harness sends becomes exact rows."""

import json
from typing import Any

import pytest

from skyrl_async.config.schema.server import BranchPolicyName, ReasoningPolicy
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.types import SamplingParams
from tests.cpu.scripted_sampler import ENGINE, RENDERER, RUN_KEY, ScriptedSampler
from tests.cpu.session_endpoint import (
    CALL,
    THOUGHT,
    TOOL,
    HeldSampler,
    OpenSession,
    check_exact,
    endpoint,
    error_of,
    events_of,
    user,
)
from tests.cpu.tiny_chat import END, spelled

TURNS = ((THOUGHT, CALL), ("I look. ", CALL), (THOUGHT, "it is ", "3"), ("bye",))


def result(message: dict[str, Any], content: Any = "7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


@pytest.mark.parametrize("is_streamed", [[False] * 4, [True] * 4, [True, False, True, False]])
async def test_a_chat_of_four_turns_with_tools_is_one_exact_row(is_streamed: list[bool]) -> None:
    sampler = HeldSampler(scripts=TURNS)
    async with endpoint(sampler) as served:
        session = await served.begin()
        messages: list[Any] = [{"role": "system", "content": "be brief"}, user()]
        for streams in is_streamed:
            reply = await session.reply(messages, is_streamed=streams, tools=[TOOL])
            messages += [reply, result(reply) if "tool_calls" in reply else user("more")]
        status = await session.status()
        (row,) = await session.finish(0.5, metrics={"steps": 4})
    check_exact(row, sampler)
    assert (row["reward"], row["weight"], row["num_turns"], row["metrics"]) == (0.5, 1.0, 4, {"steps": 4})
    assert not row["is_truncated"] and not row["is_abandoned"]
    assert [span["version"] for span in row["policy_versions"]][:4] == [7, 8, -1, 7]
    replies = [message for message in row["messages"] if message["is_reply"]]
    assert [(said["engines"], said["engine_seconds"], said["asked_at"]) for said in replies] == [
        ([ENGINE], 0.5, 100.0)
    ] * 4
    called = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    assert [[call["id"] for call in said["tool_calls"]] for said in replies[:2]] == [[one["id"]] for (one,) in called]
    assert replies[0]["tool_calls"][0]["name"] == "f" and json.loads(replies[0]["tool_calls"][0]["arguments"]) == {
        "a": 1
    }
    observed = [(said["tool_call_id"], said["name"]) for said in row["messages"] if said["role"] == "tool"]
    assert observed == [(one["id"], "f") for (one,) in called]
    assert (status["num_turns"], status["num_requests"]) == (4, 4)
    assert status["num_sampled_tokens"] == sum(row["loss_mask"])
    assert (status["messages"][-1]["content"], status["last_text"]) == ("bye", "bye")


@pytest.mark.parametrize("trains", [False, True])
async def test_a_title_asked_after_the_answer_is_trained_only_if_side_requests_are(trains: bool) -> None:
    sampler = HeldSampler(scripts=(("let me ",), ("It is 3 in all.",), ("Counting",)))
    async with endpoint(sampler, session_settings=SessionSettings(trains_side_requests=trains)) as served:
        session = await served.begin()
        messages: list[Any] = [{"role": "system", "content": "count"}, user()]
        messages += [await session.reply(messages), user("go on")]
        await session.reply(messages)
        await session.reply([{"role": "developer", "content": "write a title"}, user()])
        status = await session.status()
        rows = await session.finish()
        finished = await session.status()
    assert (status["last_text"], status["last_finish_reason"]) == ("It is 3 in all.", "stop")
    assert [message["content"] for message in status["messages"]][-1] == "It is 3 in all."
    assert status["num_turns"] == 3 and status["num_sampled_tokens"] == sum(map(len, sampler.completions))
    figures = [0, 0] if trains else [1, len(sampler.completions[2])]
    for shown in (status, finished):
        assert [shown["num_side_requests"], shown["num_side_tokens"]] == figures
    num_trained = sum(map(len, sampler.completions)) - figures[1]
    assert sum(sum(row["loss_mask"]) for row in rows) == num_trained
    assert [row["weight"] for row in rows] == ([0.5, 0.5] if trains else [1.0])


def without_reasoning(reply: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in reply.items() if not key.startswith("reasoning")}


def in_parts(reply: dict[str, Any]) -> dict[str, Any]:
    return without_reasoning(reply) | {"content": [{"type": "text", "text": reply.get("content") or ""}]}


def rewritten_arguments(reply: dict[str, Any]) -> dict[str, Any]:
    calls = [c | {"function": {"name": "f", "arguments": json.dumps({"a": 1}, indent=1)}} for c in reply["tool_calls"]]
    return {"role": "assistant", "content": "\n", "tool_calls": calls, "audio": None, "annotations": []}


@pytest.mark.parametrize("send_back", [without_reasoning, in_parts, rewritten_arguments])
async def test_a_reply_is_recognised_in_every_form_that_harnesses_send_back(send_back: Any) -> None:
    sampler = HeldSampler(scripts=TURNS)
    async with endpoint(sampler) as served:
        session = await served.begin()
        reply = await session.reply([user()], tools=[TOOL])
        await session.reply([user(), send_back(reply), result(reply)], tools=[TOOL])
        (row,) = await session.finish()
    check_exact(row, sampler)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_that_a_harness_puts_back_is_no_branch(is_streamed: bool) -> None:
    """The tokens keep it in any case; smolagents sends it back, others do not."""
    sampler = HeldSampler(scripts=(("code</code>",), ("more</code>",), ("end",)))
    async with endpoint(sampler) as served:
        session = await served.begin()
        messages: list[Any] = [user()]
        for closing in ("</code>", ""):
            reply = await session.reply(messages, is_streamed=is_streamed, stop=["</code>"])
            assert not reply["content"].endswith("</code>")
            messages += [reply | {"content": reply["content"] + closing}, user("go on")]
        await session.reply(messages)
        (row,) = await session.finish()
    check_exact(row, sampler)
    assert sampler.completions[0] == spelled("code</code>")


async def test_the_trainers_sampling_replaces_what_a_harness_asks() -> None:
    sampler = HeldSampler()
    async with endpoint(sampler) as served:
        session = await served.begin(
            sampling={"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 50}, priority=3
        )
        for max_tokens in (20, 80):
            await session.chat(
                [user()], temperature=0, top_p=0.1, presence_penalty=1.5, frequency_penalty=1, max_tokens=max_tokens
            )
        plain = await served.begin()
        await plain.chat([user()], temperature=0, max_tokens=20)
    ours = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, top_k=5, min_p=0.1)
    assert sampler.sampled[0] == ours
    assert sampler.sampled[1].max_tokens == 50
    assert sampler.sampled[2] == SamplingParams(max_tokens=20, temperature=0)
    assert sampler.labels[:2] == [session.id] * 2


async def test_sessions_with_equal_prompts_stay_apart() -> None:
    sampler = HeldSampler(scripts=(("a",), ("b",), ("c",), ("d",)))
    async with endpoint(sampler) as served:
        one, two = await served.begin(), await served.begin()
        replies = [await session.reply([user()]) for session in (one, two)]
        for session, reply in zip((one, two), replies, strict=True):
            await session.reply([user(), reply, user("on")])
        (row_of_one,), (row_of_two,) = await one.finish(), await two.finish()
    assert replies[0]["content"] == "a" and replies[1]["content"] == "b"
    for row, turns in ((row_of_one, (0, 2)), (row_of_two, (1, 3))):
        first, last = (sampler.prompts[i] + sampler.completions[i] for i in turns)
        assert tuple(row["prompt_token_ids"] + row["response_token_ids"]) == last
        assert last[: len(first)] == first


def trained(rows: list[dict[str, Any]]) -> list[int]:
    """The tokens that the rows train, all of them."""
    return [i for row in rows for i, mask in zip(row["response_token_ids"], row["loss_mask"], strict=True) if mask]


async def rewrite_history(session: OpenSession) -> None:
    first = await session.reply([user()])
    await session.reply([user(), first, user("on")])
    await session.reply([user(), {"role": "assistant", "content": "a summary"}, user("on")])
    await session.reply([user(), first, user("elsewhere")])


async def test_a_rewritten_history_is_a_branch_and_every_sampled_token_is_trained_once() -> None:
    sampler = HeldSampler(scripts=(("a",), ("b",), ("c",), ("d",)))
    async with endpoint(sampler) as served:
        session = await served.begin()
        await rewrite_history(session)
        rows = await session.finish()
    assert len(rows) == 3
    assert sum(row["weight"] for row in rows) == pytest.approx(1.0)
    assert sorted(trained(rows)) == sorted(i for completion in sampler.completions for i in completion)
    summarised = rows[1]
    assert RENDERER.decode(summarised["prompt_token_ids"]).count("a summary") == 1
    assert sum(row["num_turns"] for row in rows) == 4


@pytest.mark.parametrize(("policy", "kept"), [(BranchPolicyName.last, "ad"), (BranchPolicyName.longest, "ab")])
async def test_the_branch_policy_says_which_branches_are_trained(policy: BranchPolicyName, kept: str) -> None:
    sampler = HeldSampler(scripts=(("a",), ("bbb",), ("c",), ("d",)))
    async with endpoint(sampler, session_settings=SessionSettings(branches=policy)) as served:
        session = await served.begin()
        await rewrite_history(session)
        (row,) = await session.finish()
    assert row["weight"] == 1.0
    assert set(RENDERER.decode(trained([row]), skip_special_tokens=True)) == set(kept)


@pytest.mark.parametrize(("policy", "is_kept"), [(ReasoningPolicy.keep, True), (ReasoningPolicy.template, False)])
async def test_the_reasoning_policy_decides_whether_earlier_reasoning_stays(
    policy: ReasoningPolicy, is_kept: bool
) -> None:
    sampler = HeldSampler(scripts=((THOUGHT, "xyz"), ("uvw",)))
    async with endpoint(sampler, session_settings=SessionSettings(reasoning_policy=policy)) as served:
        session = await served.begin()
        reply = await session.reply([user()])
        await session.reply([user(), reply, user("on")])
        rows = await session.finish()
    assert reply["reasoning_content"].strip() == "hm"
    assert ("hm" in RENDERER.decode(sampler.prompts[1])) is is_kept
    assert len(rows) == (1 if is_kept else 2)
    assert sorted(trained(rows)) == sorted(i for completion in sampler.completions for i in completion)


async def test_under_the_template_policy_what_the_template_keeps_is_one_row() -> None:
    sampler = HeldSampler(scripts=(("xyz",), ("uvw",)))
    settings = SessionSettings(reasoning_policy=ReasoningPolicy.template)
    async with endpoint(sampler, session_settings=settings) as served:
        session = await served.begin()
        reply = await session.reply([user()])
        await session.reply([user(), reply, user("on")])
        (row,) = await session.finish()
    check_exact(row, sampler)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_n_choices_are_sibling_turns_and_each_can_be_continued(is_streamed: bool) -> None:
    sampler = HeldSampler(scripts=(("a",), ("b",), ("c",)))
    async with endpoint(sampler) as served:
        session = await served.begin()
        if is_streamed:
            texts = {0: "", 1: ""}
            async for chunk in await session.chat([user()], n=2, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            contents = list(texts.values())
        else:
            contents = [choice.message.content for choice in (await session.chat([user()], n=2)).choices]
        await session.reply([user(), {"role": "assistant", "content": contents[0]}, user("on")])
        rows = await session.finish()
    assert sorted(contents) == ["a", "b"]
    assert [row["weight"] for row in rows] == [0.5, 0.5]
    assert sorted(row["num_turns"] for row in rows) == [1, 2]
    assert sorted(trained(rows)) == sorted(i for completion in sampler.completions for i in completion)


FORCED = (
    ("required", '[{"name": "f", "parameters": {"a": 1}}]'),
    ({"type": "function", "function": {"name": "f"}}, '{"a": 1}'),
)


@pytest.mark.parametrize(("tool_choice", "text"), FORCED)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("trains_constrained", [False, True])
async def test_a_forced_call_is_constrained_and_is_context_unless_it_may_be_trained(
    tool_choice: Any, text: str, is_streamed: bool, trains_constrained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = HeldSampler(scripts=((text[:5], text[5:]), ("done",)))
    async with endpoint(sampler, session_settings=SessionSettings(trains_constrained=trains_constrained)) as served:
        session = await served.begin()
        reply = await session.reply([user()], is_streamed=is_streamed, tools=[TOOL], tool_choice=tool_choice)
        await session.reply([user(), reply, result(reply)], tools=[TOOL])
        (row,) = await session.finish()
    structured = sampler.sampled[0].structured
    assert structured is not None and structured.json_schema is not None
    assert '"integer"' in structured.json_schema
    (call,) = reply["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert tuple(row["prompt_token_ids"] + row["response_token_ids"]) == sampler.prompts[1] + sampler.completions[1]
    first = row["logprobs"][: len(sampler.completions[0])]
    assert {0.0, -0.5} <= set(first), "as sampled, trained or not"
    assert ("sampled under a grammar are not trained" in caplog.text) != trains_constrained
    is_chosen = [logprob != 0.0 for logprob in row["logprobs"]]
    is_trained = [trains_constrained] * len(first) + [True] * (len(is_chosen) - len(first))
    assert [bool(mask) for mask in row["loss_mask"]] == [all(both) for both in zip(is_chosen, is_trained, strict=True)]


async def test_completions_of_a_session_are_turns_without_parents() -> None:
    sampler = HeldSampler(scripts=(("a",), ("b",)))
    async with endpoint(sampler) as served:
        session = await served.begin()
        for prompt in ("hello", "hello a"):
            await session.openai.completions.create(model="policy", prompt=prompt)
        rows = await session.finish()
    assert [RENDERER.decode(row["prompt_token_ids"]) for row in rows] == ["hello", "hello a"]
    assert [row["response_token_ids"] for row in rows] == [[*spelled("a"), END], [*spelled("b"), END]]


async def test_what_is_sampled_outside_of_a_session_is_kept_nowhere() -> None:
    sampler = HeldSampler()
    async with endpoint(sampler) as served:
        reply = await served.controller.post("/v1/chat/completions", json={"messages": [user()]})
        figures = served.serving.sessions.statistics()
    assert reply.status_code == 200
    assert figures["open_sessions"] == 0 and figures["created_total"] == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_that_are_no_functions_are_ignored_and_named_in_the_metadata(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    patch = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    body = {"messages": [user()], "tools": [patch, TOOL, {"type": "web_search"}], "stream": is_streamed}
    async with endpoint(sampler) as served, served.client(RUN_KEY) as http:
        answered = await http.post("/v1/chat/completions", json=body)
        choices: Any = ["required", {"type": "function", "function": {"name": "patch"}}, patch]
        refused = [
            await http.post("/v1/chat/completions", json=body | {"tools": [patch], "tool_choice": choice})
            for choice in choices
        ]
        counted = await http.post("/v1/tokenize", json=body)
    reply = events_of(answered.text)[0] if is_streamed else answered.json()
    assert reply["metadata"] == {"ignored_tools": "custom patch, web_search"}
    assert sampler.prompts == [tuple(RENDERER.render([user()], tools=[TOOL]))]
    assert counted.json()["count"] == len(sampler.prompts[0])
    messages = [error_of(response)["message"] for response in refused]
    assert [response.status_code for response in refused] == [400] * 3
    assert all("ignored, because only functions can be called here: custom patch" in m for m in messages[:2])
    assert "'custom' is not supported" in messages[2]
