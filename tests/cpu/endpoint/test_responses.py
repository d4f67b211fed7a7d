"""``POST /v1/responses`` as the real openai client meets it, over a real socket; the sampler is scripted."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.generation import chat_tool_call
from skyrl_async.endpoint.routes.responses import ResponsesCall, ResponsesRequest, chat_messages
from skyrl_async.errors import NoEngineError
from skyrl_async.types import StructuredOutput, ToolCall
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

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
CHAT_WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS},
}
PATCH = {"type": "custom", "name": "f"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING_CALLER = ("<think>", "\nlet me see\n", "</think>\n\nOne mo", "ment.", CALL, CALL.replace("Oslo", "Rome"))
USER = {"role": "user", "content": "hello"}


@contextlib.asynccontextmanager
async def client_of(sampler: ScriptedSampler) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        scripted_endpoint(sampler) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=RUN_KEY, max_retries=0) as client,
    ):
        yield client


async def test_a_string_is_answered_with_text_usage_and_what_was_asked() -> None:
    sampler = ScriptedSampler()
    async with client_of(sampler) as client:
        response = await client.responses.create(
            model="policy", input="hello", instructions="Be brief.", metadata={"a": "b"}, store=True, temperature=0.5
        )
    assert response.output_text == "héllo"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    prompt = tuple(RENDERER.render([{"role": "system", "content": "Be brief."}, USER]))
    assert sampler.prompts == [prompt]
    assert sampler.sampled[0].temperature == 0.5
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(prompt), 7, len(prompt) + 7)
    assert "token_ids" not in (response.model_extra or {})


async def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    sampler = ScriptedSampler((THINKING_CALLER,))
    async with client_of(sampler) as client:
        response = await client.responses.create(model="policy", input="hello", tools=[WEATHER])
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text.strip() == "let me see"
    assert message.content[0].text.strip() == "One moment."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"}
    assert sampler.prompts == [tuple(RENDERER.render([USER], tools=[CHAT_WEATHER]))]


async def test_a_stream_brings_the_events_of_each_item_in_order_and_adds_up_to_the_whole_response() -> None:
    async with client_of(ScriptedSampler((THINKING_CALLER,))) as client:
        whole = await client.responses.create(model="policy", input="hello", tools=[WEATHER])
        events = [
            e async for e in await client.responses.create(model="policy", input="hello", tools=[WEATHER], stream=True)
        ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    condensed = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert condensed == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == whole.output_text
    assert _without_names(final) == _without_names(whole)
    assert [e.item for e in events if e.type == "response.output_item.done"] == final.output


def _without_names(response: Any) -> Any:
    """A response without what is new each time."""
    dumped = response if isinstance(response, dict) else response.model_dump()
    for item in [dumped, *dumped["output"]]:
        for key in ("id", "call_id", "created_at", "completed_at"):
            item.pop(key, None)
    return dumped


async def test_the_sdks_stream_helper_accumulates_text_calls_and_parsed_output() -> None:
    class Weather(BaseModel):
        city: str

    sampler = ScriptedSampler((("hé", "llo", CALL), ('{"city":', ' "Oslo"}')))
    async with client_of(sampler) as client:
        async with client.responses.stream(model="policy", input="hello", tools=[WEATHER]) as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
            called = await stream.get_final_response()
        async with client.responses.stream(model="policy", input="hello", text_format=Weather) as stream:
            parsed = (await stream.get_final_response()).output_parsed
    assert snapshots[-1].strip() == "héllo"
    assert called.output[-1].name == "weather"
    assert parsed == Weather(city="Oslo")
    schema = sampler.sampled[1].structured
    assert schema is not None and schema.json_schema is not None
    assert json.loads(schema.json_schema)["properties"]["city"]["type"] == "string"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ["max_output_tokens", "max_tokens"])
async def test_an_answer_cut_by_the_budget_is_incomplete_and_says_why(name: str, is_streamed: bool) -> None:
    fields: Any = {"model": "policy", "input": "hello", "stream": is_streamed, "extra_body": {name: 4}}
    async with client_of(ScriptedSampler()) as client:
        response = await client.responses.create(**fields)
        if is_streamed:
            events = [event async for event in response]
            assert events[-1].type == "response.incomplete"
            response = events[-1].response
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "hél"
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_empty_answer_is_an_empty_message(is_streamed: bool) -> None:
    async with client_of(ScriptedSampler((("",),))) as client:
        response = await client.responses.create(model="policy", input="hello", stream=is_streamed)
        if is_streamed:
            response = [event async for event in response][-1].response
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tokens_log_probs_and_versions_come_on_request(is_streamed: bool) -> None:
    async with client_of(ScriptedSampler()) as client:
        response = await client.responses.create(
            model="policy",
            input="hello",
            include=["message.output_text.logprobs"],
            top_logprobs=1,
            extra_body={"return_token_ids": True},
            stream=is_streamed,
        )
        if is_streamed:
            events = [event async for event in response]
            streamed = [p for e in events if e.type == "response.output_text.delta" for p in e.logprobs]
            response = events[-1].response
            assert [p.token for p in streamed] == [p.token for p in response.output[0].content[0].logprobs]
    extra = response.model_extra
    assert tuple(extra["prompt_token_ids"]) == tuple(RENDERER.render([USER]))
    assert tuple(extra["token_ids"]) == (*spelled("héllo"), END)
    assert extra["token_logprobs"] == [-0.5] * 3 + [-1.0] * 4
    assert extra["policy_versions"] == [{"version": 7, "start": 0, "end": 3}, {"version": 8, "start": 3, "end": 7}]
    logprobs = response.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs[:-1]).decode() == "héllo"
    assert logprobs[0].top_logprobs[0].token == "h"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_conversation_with_tools_is_one_token_exact_row(is_streamed: bool) -> None:
    sampler = ScriptedSampler((THINKING_CALLER, ("Let me check again.", CALL), ("It rains", " in Oslo.")))
    items: list[Any] = [dict(USER)]
    async with (
        scripted_endpoint(sampler) as url,
        training_session(url) as (key, rows),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        for _ in sampler.scripts:
            arguments: Any = {"model": "policy", "input": items, "tools": [WEATHER], "instructions": "Help."}
            if is_streamed:
                async with client.responses.stream(**arguments) as stream:
                    response = await stream.get_final_response()
            else:
                response = await client.responses.create(**arguments)
            items += [item.model_dump(exclude_unset=True) for item in response.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
                for item in response.output
                if item.type == "function_call"
            ]
    for earlier, sampled, later in zip(sampler.prompts, sampler.completions, sampler.prompts[1:], strict=False):
        assert later[: len(earlier) + len(sampled)] == (*earlier, *sampled)
    assert len(rows) == 1
    assert sum(rows[0]["loss_mask"]) == sum(map(len, sampler.completions))
    assert (rows[0]["num_turns"], rows[0]["reward"]) == (3, 1.0)


ASSISTANT_CALL = {
    "role": "assistant",
    "content": "One moment.",
    "reasoning_content": "let me see",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ],
}
TURN: list[Any] = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me see"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
]
HEX_A, HEX_B = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "developer", "content": "x"}], [{"role": "developer", "content": "x"}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (TURN, [ASSISTANT_CALL]),
        (
            [*TURN, {"type": "function_call_output", "call_id": "c1", "output": "rain"}],
            [ASSISTANT_CALL, {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        ),
        (
            [{"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]}],
            [{"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        ),
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, *TURN[1:2]],
            [{"role": "assistant", "content": "One moment.", "reasoning_content": "s"}],
        ),
        (
            [{**TURN[1], "id": f"msg_{HEX_A}_0"}, {**TURN[3], "id": f"fc_{HEX_B}_0"}],
            [
                {"role": "assistant", "content": "One moment."},
                {"role": "assistant", "content": "", "tool_calls": [ASSISTANT_CALL["tool_calls"][1]]},
            ],
        ),
    ],
)
def test_items_become_the_messages_of_a_chat_client(items: Any, expected: list[dict[str, Any]]) -> None:
    assert list(chat_messages(items, None)) == expected


texts = st.text(max_size=8)
answers = st.tuples(
    texts,
    texts,
    st.lists(st.builds(ToolCall, id=st.uuids().map(str), name=st.just("f"), arguments=texts), max_size=3),
)


def _written(reasoning: str, text: str, calls: Sequence[ToolCall]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    body = ResponsesRequest.model_validate({"input": "hi"})
    answer = PlannedAnswer(reasoning=reasoning, text=text, tool_calls=calls)
    return asyncio.run(reply_and_events(ResponsesCall, body, answer))


@given(st.lists(answers, min_size=1, max_size=4))
def test_any_answers_come_back_as_the_messages_they_were(turns: list[tuple[str, str, list[ToolCall]]]) -> None:
    items: list[Any] = []
    expected: list[dict[str, Any]] = []
    for reasoning, text, calls in turns:
        items += _written(reasoning, text, calls)[0]["output"]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": [chat_tool_call(call) for call in calls]} if calls else {}
        expected.append(message)
    assert list(chat_messages(items, None)) == expected


@given(answers)
def test_the_events_of_any_answer_add_up_to_the_response(answer: tuple[str, str, list[ToolCall]]) -> None:
    reply, events = _written(*answer)
    response = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == answer[1]
    assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == answer[0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert _without_names(response) == _without_names(reply)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, "weather"),
    ],
)
def test_tool_choices_are_understood(choice: Any, expected: str) -> None:
    request = ResponsesRequest(input="hi", tools=[WEATHER], tool_choice=choice).to_generation(None)[0]
    assert request.tool_choice == expected
    assert request.tools == (CHAT_WEATHER,)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        ({"type": "json_schema", "name": "x", "schema": {"a": 1}}, StructuredOutput(json_schema='{"a": 1}')),
    ],
)
def test_text_formats_constrain_the_answer(form: Any, expected: StructuredOutput | None) -> None:
    request = ResponsesRequest.model_validate({"input": "hi", "text": {"format": form, "verbosity": "low"}})
    assert request.to_generation(None)[0].sampling.structured == expected


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": 5}, "input", "int"),
        ({"input": []}, "input", "at least one"),
        ({"input": ["x"]}, "input.0", "object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "nothing is stored"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "'computer_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_image"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "robot"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input.0.arguments", "string"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id", "string"),
        ({"tools": [{"type": 5}]}, "tools.0.type", "string"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "string"),
        ({"tool_choice": "required"}, "tool_choice", "no function"),
        ({"tool_choice": "required", "tools": [{"type": "local_shell"}]}, "tool_choice", "ignored.*: local_shell"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [PATCH]}, "tool_choice", "ignored.*: custom f"),
        ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [PATCH]}, "tool_choice.type", "ignored.*: custom f"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "allowed_tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "object"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
        ({"conversation": {"id": "c"}}, "conversation", "send the earlier items in input"),
        ({"background": True}, "background", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str, says: str) -> None:
    body = body if "input" in body or not body else {"input": "hello", **body}
    response = await refusal("/v1/responses", body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"] or re.search(says, error["message"])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_that_are_no_functions_are_ignored_and_named_in_the_metadata(is_streamed: bool) -> None:
    sampler = ScriptedSampler()
    namespace = {"type": "namespace", "name": "agents", "tools": [PATCH]}
    tools: Any = [PATCH, WEATHER, {"type": "web_search"}, {"type": "local_shell"}, namespace]
    fields: Any = {"model": "policy", "input": "hello", "tools": tools, "metadata": {"a": "b"}}
    async with client_of(sampler) as client:
        if is_streamed:
            events = [event async for event in await client.responses.create(**fields, stream=True)]
            response: Any = events[-1]
            response = response.response
        else:
            response = await client.responses.create(**fields)
    ignored = "custom f, web_search, local_shell, custom agents.f"
    assert response.metadata == {"a": "b", "ignored_tools": ignored}
    assert response.output_text == "héllo"
    assert sampler.prompts == [tuple(RENDERER.render([USER], tools=[CHAT_WEATHER]))]


async def test_an_overlong_prompt_and_a_wrong_model_get_the_usual_errors() -> None:
    async with client_of(ScriptedSampler(max_model_len=10)) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 10 tokens") as caught:
            await client.responses.create(model="policy", input="hello", stream=True)
        with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
            await client.responses.create(model="other", input="hello")
    assert caught.value.code == "context_length_exceeded"


async def test_a_failure_in_mid_stream_is_raised_by_the_sdk() -> None:
    kinds: list[str] = []

    async def read(client: openai.AsyncOpenAI) -> None:
        async for event in await client.responses.create(model="policy", input="hello", stream=True):
            kinds.append(event.type)

    async with client_of(ScriptedSampler(failure=NoEngineError("no engine is left"))) as client:
        with pytest.raises(openai.APIError, match="no engine is left"):
            await read(client)
    assert kinds[-1] == "response.output_text.delta"


async def test_a_session_label_is_passed_on_from_body_or_header() -> None:
    sampler = ScriptedSampler()
    async with client_of(sampler) as client:
        await client.responses.create(model="policy", input="hello", extra_body={"session_id": "a"})
        await client.responses.create(model="policy", input="hello", extra_headers={"X-Session-ID": "b"})
    assert sampler.labels == ["a", "b"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("type", "role", "content", "text", "call_id", "name", "arguments", "output", "id", "summary")
            ),
            inner | st.sampled_from(("message", "user", "assistant", "input_text", "function_call", "reasoning")),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(json_values, st.dictionaries(st.sampled_from(sorted(ResponsesRequest.model_fields)), json_values, max_size=3))
def test_any_body_is_a_request_or_a_refusal(items: Any, fields: dict[str, Any]) -> None:
    try:
        body = ResponsesRequest.model_validate({"input": items, **fields})
    except ValueError:
        return
    with contextlib.suppress(ApiError):
        assert body.to_generation(None)[0].messages
