"""``POST /v1/messages`` as the real anthropic client meets it, over a real socket; the sampler is scripted."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.generation import chat_tool_call
from skyrl_async.endpoint.routes.messages import MessagesCall, MessagesRequest, chat_messages, tool_input
from skyrl_async.errors import NoEngineError
from skyrl_async.types import ToolCall
from tests.cpu.scripted_sampler import (
    RENDERER,
    RUN_KEY,
    PlannedAnswer,
    ScriptedSampler,
    refusal,
    reply_and_events,
    scripted_endpoint,
    training_session,
)
from tests.cpu.tiny_chat import END, spelled

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CHAT_WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING_CALLER = ("<think>", "\nlet me see\n", "</think>\n\nOne mo", "ment.", CALL, CALL.replace("Oslo", "Rome"))
USER: Any = {"role": "user", "content": "hello"}


@contextlib.asynccontextmanager
async def client_of(sampler: ScriptedSampler) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        scripted_endpoint(sampler) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=RUN_KEY, max_retries=0) as client,
    ):
        yield client


async def create(client: anthropic.AsyncAnthropic, **arguments: Any) -> Any:
    """A message, streamed and accumulated by the SDK with ``is_streamed``."""
    is_streamed = arguments.pop("is_streamed", False)
    arguments = {"model": "policy", "max_tokens": 1000, "messages": [USER], **arguments}
    if not is_streamed:
        return await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_message_is_answered_with_text_usage_and_stop_reason(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    async with client_of(sampler) as client:
        reply = await create(
            client,
            system="Be brief.",
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
            is_streamed=is_streamed,
        )
    assert [(block.type, block.text) for block in reply.content] == [("text", "héllo")]
    assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == (
        "assistant",
        "policy",
        "end_turn",
        None,
    )
    prompt = tuple(RENDERER.render([{"role": "system", "content": "Be brief."}, USER]))
    assert sampler.prompts == [prompt]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt), 7)
    sampled = sampler.sampled[0]
    assert (sampled.max_tokens, sampled.temperature, sampled.top_p, sampled.top_k) == (1000, 0.5, 0.9, 5)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_thinking_text_and_calls_are_blocks_of_their_own(is_streamed: bool) -> None:
    sampler = ScriptedSampler((THINKING_CALLER,))
    async with client_of(sampler) as client:
        reply = await create(client, tools=[WEATHER], is_streamed=is_streamed)
    thinking, text, *calls = reply.content
    assert thinking.thinking.strip() == "let me see"
    assert thinking.signature
    assert text.text.strip() == "One moment."
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert len({call.id for call in calls}) == 2
    assert reply.stop_reason == "tool_use"
    assert sampler.prompts == [tuple(RENDERER.render([USER], tools=[CHAT_WEATHER]))]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_thinking_that_is_switched_off_is_left_out(is_streamed: bool) -> None:
    async with client_of(ScriptedSampler((THINKING_CALLER,))) as client:
        reply = await create(client, tools=[WEATHER], thinking={"type": "disabled"}, is_streamed=is_streamed)
    assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]


async def test_a_stream_brings_the_events_of_each_block_in_order() -> None:
    async with client_of(ScriptedSampler((THINKING_CALLER,))) as client:
        stream: Any = await create(client, tools=[WEATHER], stream=True)
        events = [event async for event in stream]
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
    condensed = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    call = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert condensed == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *call,
        *call,
        *("message_delta", "message_stop"),
    ]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stop_sequences_and_the_budget_are_told_apart(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    async with client_of(sampler) as client:
        stopped = await create(client, stop_sequences=["zz", "lo"], is_streamed=is_streamed)
        cut = await create(client, max_tokens=4, is_streamed=is_streamed)
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("hél", "stop_sequence", "lo")
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("hél", "max_tokens", None)
    assert sampler.sampled[0].stop == ("zz", "lo")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_empty_answer_is_an_empty_block_of_text(is_streamed: bool) -> None:
    async with client_of(ScriptedSampler((("",),))) as client:
        reply = await create(client, is_streamed=is_streamed)
    assert [(block.type, block.text) for block in reply.content] == [("text", "")]


async def test_tokens_log_probs_and_versions_come_on_request() -> None:
    async with client_of(ScriptedSampler()) as client:
        whole = await create(client, extra_body={"return_token_ids": True})
        stream: Any = await create(client, extra_body={"return_token_ids": True}, stream=True)
        events = [event async for event in stream]
    (delta,) = [event for event in events if event.type == "message_delta"]
    for extra in (whole.model_extra, events[0].message.model_extra | delta.model_extra):
        assert tuple(extra["prompt_token_ids"]) == tuple(RENDERER.render([USER]))
        assert tuple(extra["token_ids"]) == (*spelled("héllo"), END)
        assert extra["token_logprobs"] == [-0.5] * 3 + [-1.0] * 4
        assert extra["policy_versions"] == [{"version": 7, "start": 0, "end": 3}, {"version": 8, "start": 3, "end": 7}]


async def test_the_sdk_parses_structured_output() -> None:
    class Weather(BaseModel):
        city: str

    sampler = ScriptedSampler((('{"city":', ' "Oslo"}'),))
    async with client_of(sampler) as client:
        reply = await client.messages.parse(model="policy", max_tokens=100, messages=[USER], output_format=Weather)
    assert reply.parsed_output == Weather(city="Oslo")
    structured = sampler.sampled[0].structured
    assert structured is not None and structured.json_schema is not None
    assert json.loads(structured.json_schema)["properties"]["city"]["type"] == "string"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_conversation_with_tools_is_one_token_exact_row(is_streamed: bool) -> None:
    sampler = ScriptedSampler((THINKING_CALLER, ("Let me check again.", CALL), ("It rains", " in Oslo.")))
    messages: list[Any] = [USER]
    async with (
        scripted_endpoint(sampler) as url,
        training_session(url) as (key, rows),
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        for _ in sampler.scripts:
            reply = await create(client, messages=messages, tools=[WEATHER], system="Help.", is_streamed=is_streamed)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    for earlier, sampled, later in zip(sampler.prompts, sampler.completions, sampler.prompts[1:], strict=False):
        assert later[: len(earlier) + len(sampled)] == (*earlier, *sampled)
    assert len(rows) == 1
    assert sum(rows[0]["loss_mask"]) == sum(map(len, sampler.completions))
    assert (rows[0]["num_turns"], rows[0]["reward"]) == (3, 1.0)


@pytest.mark.parametrize("is_one_text", [False, True])
async def test_a_line_that_claude_code_changes_in_each_request_is_no_part_of_the_prompt(is_one_text: bool) -> None:
    sampler = ScriptedSampler((("a",), ("b",)))
    messages: list[Any] = [USER]
    async with (
        scripted_endpoint(sampler) as url,
        training_session(url) as (key, rows),
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        for digest in ("97bd6", "24c2d"):
            texts = [f"x-anthropic-billing-header: cc_version=2.1.177.01c; cch={digest};", "You help.", "Be brief."]
            system: Any = "\n".join(texts) if is_one_text else [{"type": "text", "text": text} for text in texts]
            reply = await create(client, messages=messages, system=system)
            messages += [{"role": "assistant", "content": reply.content}, USER]
    assert sampler.prompts[0] == tuple(RENDERER.render([{"role": "system", "content": "You help.\nBe brief."}, USER]))
    assert [row["num_turns"] for row in rows] == [2]


async def test_tokens_are_counted_as_they_will_be_sampled_from() -> None:
    sampler = ScriptedSampler(max_model_len=10)
    async with client_of(sampler) as client:
        counted = await client.messages.count_tokens(model="policy", messages=[USER], system="Help.", tools=[WEATHER])
    assert counted.input_tokens == len(
        tuple(RENDERER.render([{"role": "system", "content": "Help."}, USER], tools=[CHAT_WEATHER]))
    )
    assert sampler.prompts == []


SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_server_tools_are_ignored_and_named_in_the_metadata(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    tools: Any = [SEARCH, WEATHER, {"type": "bash_20250124", "name": "bash"}]
    fields: Any = {"model": "policy", "messages": [USER], "tools": tools}
    async with client_of(sampler) as client:
        counted = await client.messages.count_tokens(**fields)
        if is_streamed:
            events = [event async for event in await client.messages.create(**fields, max_tokens=100, stream=True)]
            message: Any = events[0]
            message = message.message
        else:
            message = await client.messages.create(**fields, max_tokens=100)
    assert message.model_extra["metadata"] == {"ignored_tools": "web_search_20250305 web_search, bash_20250124 bash"}
    assert sampler.prompts == [tuple(RENDERER.render([USER], tools=[CHAT_WEATHER]))]
    assert counted.input_tokens == len(sampler.prompts[0])


CHAT_CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
]
CALLS = [
    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
]
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        ([USER], None, [USER]),
        ([USER], "s", [{"role": "system", "content": "s"}, USER]),
        ([USER], [{"type": "text", "text": "s", "cache_control": {}}], [{"role": "system", "content": "s"}, USER]),
        ([{"role": "system", "content": "s"}, USER], None, [{"role": "system", "content": "s"}, USER]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            None,
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [{"role": "user", "content": [RESULT, {"type": "text", "text": "a"}]}],
            None,
            [CHAT_RESULT, {"role": "user", "content": "a"}],
        ),
        ([{"role": "user", "content": [RESULT]}], None, [CHAT_RESULT]),
        ([{"role": "user", "content": []}], None, [{"role": "user", "content": ""}]),
        (
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "let me see", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "One moment."},
                        *CALLS,
                    ],
                },
                {"role": "user", "content": [RESULT]},
            ],
            None,
            [
                {
                    "role": "assistant",
                    "content": "One moment.",
                    "reasoning_content": "let me see",
                    "tool_calls": CHAT_CALLS,
                },
                CHAT_RESULT,
            ],
        ),
    ],
)
def test_blocks_become_the_messages_of_a_chat_client(
    messages: Any, system: Any, expected: list[dict[str, Any]]
) -> None:
    assert list(chat_messages(messages, system)) == expected


texts = st.text(max_size=8)
json_arguments = st.dictionaries(texts, st.integers() | texts | st.none(), max_size=3).map(json.dumps)
answers = st.tuples(
    texts,
    texts,
    st.lists(
        st.builds(ToolCall, id=st.uuids().map(str), name=st.just("f"), arguments=json_arguments | texts), max_size=3
    ),
)


def _written(reasoning: str, text: str, calls: Sequence[ToolCall]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    body = MessagesRequest.model_validate({"messages": [USER]})
    answer = PlannedAnswer(reasoning=reasoning, text=text, tool_calls=calls)
    return asyncio.run(reply_and_events(MessagesCall, body, answer))


@given(st.lists(answers, min_size=1, max_size=4))
def test_any_answers_come_back_as_the_messages_they_were(turns: list[tuple[str, str, list[ToolCall]]]) -> None:
    sent: list[Any] = [{"role": "assistant", "content": _written(*turn)[0]["content"]} for turn in turns]
    expected: list[dict[str, Any]] = []
    for reasoning, text, calls in turns:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": [chat_tool_call(call) for call in calls]} if calls else {}
        expected.append(message)
    back = chat_messages([*sent, USER], None)
    assert [_with_parsed_arguments(m) for m in back] == [_with_parsed_arguments(m) for m in [*expected, USER]]


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": _parsed(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls}


def _parsed(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if parsed is None and arguments.strip() in ("", "null"):
        return {}
    return parsed if isinstance(parsed, dict) else arguments


@given(answers)
def test_the_events_of_any_answer_add_up_to_the_message(answer: tuple[str, str, list[ToolCall]]) -> None:
    message, events = _written(*answer)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta") == answer[1]
    assert "".join(delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta") == answer[0]
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if delta["type"] == "input_json_delta"]
    assert inputs == [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert sum(event["type"] == "content_block_stop" for event in events) == len(message["content"])


@pytest.mark.parametrize(
    "arguments", ["[1]", '"x"', "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000]
)
def test_arguments_that_are_no_json_object_survive_in_an_object(arguments: str) -> None:
    given_input = tool_input(arguments)
    json.dumps(given_input, allow_nan=False, ensure_ascii=False).encode()
    block = {"type": "tool_use", "id": "c", "name": "f", "input": given_input}
    (message, _) = chat_messages([{"role": "assistant", "content": [block]}, USER], None)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, "weather"),
    ],
)
def test_tool_choices_are_understood(choice: Any, expected: str) -> None:
    request = MessagesRequest(messages=[USER], tools=[WEATHER], tool_choice=choice).to_generation(None)[0]
    assert request.tool_choice == expected
    assert request.tools == (CHAT_WEATHER,)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type", "'image'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, None, "server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, None, "tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "messages.0.content.0.content.0.type",
            "'image'",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "The best"}]}, "messages", "prefill"),
        ({"system": [{"type": "image"}]}, "system.0.type", "'image'"),
        ({"system": 5}, "system", "int"),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice",
            "can be called here: web_search_20250305 web_search",
        ),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema", "int"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no function"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'some'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "'xml'"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str | None, says: str) -> None:
    response = await refusal("/v1/messages", {"messages": [USER], **body})
    assert (response.status_code, response.json()["type"]) == (400, "error")
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert says in error["message"]


async def test_a_failure_in_mid_stream_is_raised_by_the_sdk() -> None:
    texts: list[str] = []

    async def read(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(model="policy", max_tokens=10, messages=[USER]) as stream:
            async for text in stream.text_stream:
                texts.append(text)

    async with client_of(ScriptedSampler(failure=NoEngineError("no engine is left"))) as client:
        with pytest.raises(anthropic.APIError, match="no engine is left"):
            await read(client)
    assert texts == ["hé"]


async def test_the_sdk_raises_its_own_errors() -> None:
    async with client_of(ScriptedSampler(max_model_len=10)) as client:
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 10 tokens"):
            await create(client, is_streamed=True)
        with pytest.raises(anthropic.NotFoundError, match="'other' is not served here"):
            await create(client, model="other")
        client.api_key = "wrong"
        with pytest.raises(anthropic.AuthenticationError):
            await create(client)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "role", "content", "text", "tool_use_id", "name", "input", "id", "thinking")),
            inner | st.sampled_from(("user", "assistant", "text", "tool_use", "tool_result", "thinking")),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values, st.dictionaries(st.sampled_from(sorted(MessagesRequest.model_fields)), json_values, max_size=3))
def test_any_body_is_a_request_or_a_refusal(messages: Any, fields: dict[str, Any]) -> None:
    try:
        body = MessagesRequest.model_validate({"messages": messages, **fields})
    except ValueError:
        return
    with contextlib.suppress(ApiError):
        assert body.to_generation(None)[0].messages
