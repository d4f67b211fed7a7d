"""Every field of vLLM's requests: honoured, refused by name, or known to change nothing."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.fields import REFUSED
from skyrl_async.endpoint.routes.chat_completions import ChatCompletionRequest
from skyrl_async.endpoint.routes.completions import CompletionRequest
from skyrl_async.endpoint.routes.messages import MessagesRequest
from skyrl_async.endpoint.routes.responses import ResponsesRequest
from skyrl_async.types import Completion, CompletionDelta, SamplingParams, StructuredOutput
from tests.cpu.scripted_sampler import RENDERER, RUN_KEY, ScriptedSampler
from tests.cpu.session_endpoint import HeldSampler, endpoint, error_of, events_of, user
from tests.cpu.tiny_chat import END

IGNORED: Mapping[str, str] = {
    "cache_salt": "prefixes are cached for all",
    "ec_transfer_params": "nothing is disaggregated",
    "enable_response_messages": "the reply has no copy of its messages",
    "guided_decoding_backend": "the engine has one",
    "include_reasoning": "reasoning stands in a field of its own",
    "kv_transfer_params": "nothing is disaggregated",
    "length_penalty": "belongs to beam search, which is refused",
    "max_tool_calls": "limits tools that the server runs",
    "media_io_kwargs": "there is text only",
    "mm_payload": "there is text only",
    "mm_processor_kwargs": "there is text only",
    "parallel_tool_calls": "the policy's calls are told as they were sampled",
    "prompt_cache_key": "prefixes are cached for all",
    "reasoning_effort": "the policy decides how long it reasons",
    "request_id": "replies have ids of their own",
    "return_mm_kwargs": "there is text only",
    "return_prompt_text": "return_token_ids has the prompt's tokens",
    "return_token_offsets": "belongs to surfaces that only render",
    "routed_experts_prompt_start": "experts are not reported",
    "service_tier": "there is one",
    "spaces_between_special_tokens": "nothing is put between tokens",
    "store": "nothing is stored",
    "stream_interval": "blocks of a stream are the engine's",
    "truncation": "prompts are not cut, and an overlong one is refused",
    "truncation_side": "belongs to truncate_prompt_tokens, which is refused",
    "user": "sessions have keys",
    "vllm_xargs": "there are no extensions",
    "watermarking": "no watermark is configured",
}
"""Fields that change nothing that is sampled -> why."""


REFUSED_UNLESS_TRUE = {"add_generation_prompt"}
CHAT = "/v1/chat/completions"
NOT_VLLMS = {"best_of", "guided_whitespace_pattern", "guided_decoding_backend"}
"""Of OpenAI, and of older vLLMs."""


def test_every_field_of_the_installed_vllm_is_honoured_refused_or_known_to_change_nothing() -> None:
    from vllm.entrypoints.anthropic import protocol as messages
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completions
    from vllm.entrypoints.openai.responses import protocol as responses

    surfaces: list[tuple[Any, Any]] = [
        (chat.ChatCompletionRequest, ChatCompletionRequest),
        (completions.CompletionRequest, CompletionRequest),
        (responses.ResponsesRequest, ResponsesRequest),
        (messages.AnthropicMessagesRequest, MessagesRequest),
    ]
    decided = {*REFUSED, *REFUSED_UNLESS_TRUE, *IGNORED}
    known = set(NOT_VLLMS)
    for theirs, ours in surfaces:
        honoured = {field.validation_alias or name for name, field in ours.model_fields.items()}
        assert set(theirs.model_fields) - honoured - decided - {"metadata"} == set(), theirs.__name__
        known |= set(theirs.model_fields)
    assert decided <= known
    page = (Path(__file__).parents[3] / "docs" / "reference" / "endpoint.md").read_text()
    assert {name for name in decided if f"`{name}" not in page} == set()
    assert len(decided) == len(REFUSED) + len(REFUSED_UNLESS_TRUE) + len(IGNORED)


def asked(**fields: Any) -> SamplingParams:
    """How a chat with these fields samples."""
    return ChatCompletionRequest.model_validate({"messages": [user()], **fields}).to_generation(None)[0].sampling


@pytest.mark.parametrize("name", sorted({*REFUSED, *REFUSED_UNLESS_TRUE}))
def test_a_field_that_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    refused: Any = False if name in REFUSED_UNLESS_TRUE else 7
    bodies: list[Any] = [
        ChatCompletionRequest(messages=[user()], **{name: refused}),
        ResponsesRequest(input="x", **{name: refused}),
        MessagesRequest(messages=[user()], **{name: refused}),
    ]
    if name != "echo":
        bodies.append(CompletionRequest(prompt="x", **{name: refused}))
    for body in bodies:
        with pytest.raises(ApiError, match=name) as caught:
            body.to_generation(None)
        assert (caught.value.status, caught.value.param) == (400, name)
    assert asked(**{name: None}) == asked(**{name: name in REFUSED_UNLESS_TRUE}) == asked()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
        ({"include_stop_str_in_output": True}, {"includes_stop": True}),
        ({"logit_bias": {"5": 200, "6": -1.5}}, {"logit_bias": ((5, 100.0), (6, -1.5))}),
        ({"allowed_token_ids": [5]}, {"allowed_token_ids": (5,)}),
        ({"guided_json": {"a": 1}}, {"structured": StructuredOutput(json_schema='{"a": 1}')}),
        ({"guided_json": '{"a": 1}'}, {"structured": StructuredOutput(json_schema='{"a": 1}')}),
        ({"guided_choice": ["a", "b"]}, {"structured": StructuredOutput(choice=("a", "b"))}),
        ({"structured_outputs": {"regex": "a+", "grammar": None}}, {"structured": StructuredOutput(regex="a+")}),
        ({"structured_outputs": {"grammar": "g"}}, {"structured": StructuredOutput(grammar="g")}),
        ({"structured_outputs": {"json": {}}}, {"structured": StructuredOutput(json_schema="{}")}),
    ],
)
def test_fields_that_engines_support_reach_the_sampler(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: getattr(asked(**fields), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {str(10**6): 1}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
async def test_values_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with endpoint(ScriptedSampler()) as served, served.client(RUN_KEY) as http:
        response = await http.post(CHAT, json={"messages": [user()], **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens", 3), ("logit_bias", {"5": 1}), ("allowed_token_ids", [5, 6]), ("bad_words", ["hello"])],
)
async def test_inexact_parameters_are_refused_only_in_sessions_that_train(name: str, value: Any) -> None:
    sampler = HeldSampler()
    body = {"messages": [user()], name: value}
    async with endpoint(sampler) as served, served.client(RUN_KEY) as outside:
        training, free = await served.begin(sampling={"temperature": 1.0}), await served.begin()
        refused = await training.http.post(CHAT, json=body)
        answered = [await http.post(CHAT, json=body) for http in (outside, free.http)]
        harmless = await training.post([user()], stop_token_ids=[5], include_stop_str_in_output=True, min_tokens=0)
    assert (refused.status_code, error_of(refused)["param"]) == (400, name)
    assert "trainer" in error_of(refused)["message"]
    assert [reply.status_code for reply in answered] == [200, 200]
    assert all(getattr(sampling, name) for sampling in sampler.sampled[:2])
    assert harmless.status_code == 200 and sampler.sampled[2].stop_token_ids == (5,)


async def test_bad_words_are_the_tokens_that_spell_them() -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as served, served.client(RUN_KEY) as http:
        await http.post(CHAT, json={"messages": [user()], "bad_words": ["hello", " he"]})
    words = sampler.sampled[0].bad_words
    assert tuple(RENDERER.encode("hello")) in words and tuple(RENDERER.encode("he")) in words
    assert {RENDERER.decode(word).strip() for word in words} == {"hello", "he"}


async def test_the_token_that_stopped_an_answer_is_its_stop_reason() -> None:
    async with endpoint(ScriptedSampler()) as served, served.client(RUN_KEY) as http:
        reply = await http.post(CHAT, json={"messages": [user()], "stop_token_ids": [END]})
        plain = await http.post(CHAT, json={"messages": [user()]})
    assert [r.json()["choices"][0]["stop_reason"] for r in (reply, plain)] == [END, None]


async def test_tokens_in_log_probs_may_be_written_as_ids() -> None:
    sampler = ScriptedSampler()
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 50}
    async with endpoint(sampler) as served, served.client(RUN_KEY) as http:
        chat = await http.post(CHAT, json={"messages": [user()], "logprobs": True, "top_logprobs": 1, **fields})
        raw = await http.post("/v1/completions", json={"prompt": "x", "logprobs": 1, **fields})
    content = chat.json()["choices"][0]["logprobs"]["content"]
    names = [f"token_id:{i}" for i in sampler.completions[0]]
    assert [entry["token"] for entry in content] == names
    assert [entry["top_logprobs"][0]["token"] for entry in content] == names
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "héllo"
    logprobs = raw.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == names
    assert [list(position) for position in logprobs["top_logprobs"]] == [[name] for name in names]


LABELS = [
    ("x", 7, ["7"]),
    ("x", "a", ["a"]),
    ("x", 0, ["0"]),
    ("x", [8], ["8"]),
    ([1, 2, 3], ["b"], ["b"]),
    (["x", "y"], [1, "c"], ["1", "c"]),
    ([[1, 2], [3]], [5, 6], ["5", "6"]),
    (["x", "y"], "all", ["all", "all"]),
    (["x", "y"], None, ["header", "header"]),
]


@pytest.mark.parametrize(("prompt", "session_id", "expected"), LABELS)
async def test_prompts_have_labels_of_their_own(prompt: Any, session_id: Any, expected: list[str]) -> None:
    sampler = ScriptedSampler()
    body = {"prompt": prompt, "session_id": session_id}
    async with endpoint(sampler) as served, served.client(RUN_KEY) as http:
        reply = await http.post("/v1/completions", json=body, headers={"X-Session-ID": "header"})
    assert reply.status_code == 200
    assert sampler.labels == expected


async def test_labels_that_are_not_as_many_as_prompts_are_refused_and_a_chats_may_be_a_number() -> None:
    sampler = ScriptedSampler()
    async with endpoint(sampler) as served, served.client(RUN_KEY) as http:
        refused = [
            await http.post("/v1/completions", json={"prompt": prompt, "session_id": [1, 2]})
            for prompt in ("x", [1, 2, 3], ["x", "y", "z"])
        ]
        chat = await http.post(CHAT, json={"messages": [user()], "session_id": 12})
    assert [(r.status_code, error_of(r)["param"]) for r in refused] == [(400, "session_id")] * 3
    assert chat.status_code == 200 and sampler.labels == ["12"]


class CachingSampler(ScriptedSampler):
    """Had five tokens of the first prompt, six of the second, and so on."""

    async def generate_tokens(self, *args: Any, **kwargs: Any) -> Completion:
        num_cached_tokens = 5 + len(self.prompts)
        return replace(await super().generate_tokens(*args, **kwargs), num_cached_tokens=num_cached_tokens)

    async def stream_tokens(self, *args: Any, **kwargs: Any) -> AsyncIterator[CompletionDelta]:
        num_cached_tokens = 5 + len(self.prompts)
        async for delta in super().stream_tokens(*args, **kwargs):
            yield replace(delta, num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_usage_tells_how_much_of_the_prompt_was_cached(is_streamed: bool) -> None:
    options = {"stream": is_streamed, "stream_options": {"include_usage": True}}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [user()], "n": 2},
        "/v1/completions": {"prompt": ["x", "y"]},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [user()]},
    }
    usages = []
    for path, body in bodies.items():
        async with endpoint(CachingSampler()) as served, served.client(RUN_KEY) as http:
            answered = await http.post(path, json={**body, **options})
        events = [event for event in events_of(answered.text) if event] if is_streamed else [answered.json()]
        parts = [part for event in events for part in (event, event.get("response") or {})]
        usages.append([part["usage"] for part in parts if part.get("usage")][-1])
    assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usages[1]["prompt_tokens_details"] == {"cached_tokens": 5 + 6}
    assert usages[2]["input_tokens_details"]["cached_tokens"] == 5
    num_prompt_tokens = len(RENDERER.render([user()]))
    assert (usages[3]["cache_read_input_tokens"], usages[3]["input_tokens"]) == (5, num_prompt_tokens - 5)
