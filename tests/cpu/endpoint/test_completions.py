"""``/v1/completions``, ``/tokenize`` and ``/detokenize`` through a real endpoint, the openai client and raw HTTP."""

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from skyrl_async.types import CompletionDelta, StructuredOutput
from tests.cpu.scripted_sampler import RENDERER, RUN_KEY, refusal
from tests.cpu.session_endpoint import TOOL, HeldSampler, endpoint, error_of, user
from tests.cpu.tiny_chat import END, spelled


@contextlib.asynccontextmanager
async def clients(sampler: HeldSampler) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
    """The openai client and raw HTTP, both with the run's key."""
    async with (
        endpoint(sampler) as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=RUN_KEY, max_retries=0) as client,
        served.client(RUN_KEY) as http,
    ):
        yield client, http


async def complete(client: AsyncOpenAI, prompt: Any, **arguments: Any) -> Any:
    return await client.completions.create(model="policy", prompt=prompt, **arguments)


async def streamed(client: AsyncOpenAI, prompt: Any, **arguments: Any) -> tuple[dict[int, str], list[Any]]:
    """The text of each choice, and all chunks."""
    texts: dict[int, str] = {}
    chunks = [chunk async for chunk in await complete(client, prompt, stream=True, **arguments)]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


@pytest.mark.parametrize("prompt", ["hello again", RENDERER.encode("hello again").tolist()])
async def test_a_prompt_is_text_or_ids_and_is_continued_as_it_stands(prompt: Any) -> None:
    sampler = HeldSampler()
    async with clients(sampler) as (client, _):
        reply = await complete(client, prompt)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("héllo", "stop", 0, None)
    assert sampler.prompts == [tuple(RENDERER.encode("hello again"))]
    assert sampler.sampled[0].max_tokens == 16
    num_prompt = len(sampler.prompts[0])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt, 7)
    assert (reply.object, reply.model) == ("text_completion", "policy")
    assert "token_ids" not in choice.model_extra


async def test_text_is_not_parsed_for_reasoning_or_calls() -> None:
    written = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with clients(HeldSampler(scripts=((written,),))) as (client, _):
        reply = await complete(client, "hello", max_tokens=200)
    assert reply.choices[0].text == written


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompts", [["hello", "again"], [[5], [6, 7]]])
async def test_several_prompts_of_n_choices_come_in_their_order(prompts: Any, is_streamed: bool) -> None:
    sampler = HeldSampler(scripts=(("a",), ("b",), ("c",), ("d",)))
    async with clients(sampler) as (client, _):
        if is_streamed:
            texts, chunks = await streamed(client, prompts, n=2, seed=3, stream_options={"include_usage": True})
            usage = chunks[-1].usage
        else:
            reply = await complete(client, prompts, n=2, seed=3)
            texts, usage = {choice.index: choice.text for choice in reply.choices}, reply.usage
    ids = [tuple(RENDERER.encode(prompt)) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    assert sorted(sampler.prompts) == sorted([ids[0]] * 2 + [ids[1]] * 2)
    assert sorted(texts) == [0, 1, 2, 3] and sorted(texts.values()) == list("abcd")
    assert [sampler.prompts["abcd".index(texts[i])] for i in range(4)] == [ids[0]] * 2 + [ids[1]] * 2
    assert sorted(sampling.seed or 0 for sampling in sampler.sampled) == [3, 3, 4, 4]
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, ids)), 8)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echoed_prompt_comes_before_the_answer(is_streamed: bool) -> None:
    async with clients(HeldSampler()) as (client, _):
        if is_streamed:
            texts, _ = await streamed(client, "hello ", echo=True)
            assert texts == {0: "hello héllo"}
        else:
            assert (await complete(client, "hello ", echo=True)).choices[0].text == "hello héllo"


async def test_a_stream_brings_the_text_in_pieces_and_ends_with_its_reason() -> None:
    async with clients(HeldSampler()) as (client, http):
        _, chunks = await streamed(client, "hello")
        raw = (await http.post("/v1/completions", json={"prompt": "hello", "stream": True})).text
    assert [chunk.choices[0].text for chunk in chunks] == ["hé", "llo"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert raw.strip().split("\n\n")[-1] == "data: [DONE]"
    assert "usage" not in raw


async def test_a_stop_string_is_left_out_and_named() -> None:
    sampler = HeldSampler()
    async with clients(sampler) as (client, _):
        reply = await complete(client, "hello", stop=["lo"])
        texts, chunks = await streamed(client, "hello", stop=["lo"])
    assert (reply.choices[0].text, reply.choices[0].model_extra["stop_reason"]) == ("hél", "lo")
    assert texts == {0: "hél"}
    assert [chunk.choices[0].model_extra["stop_reason"] for chunk in chunks] == [None, "lo"]


async def test_an_answer_cut_by_the_budget_ends_with_length() -> None:
    async with clients(HeldSampler(scripts=(("abc", "def"),))) as (client, _):
        reply = await complete(client, "hello", max_tokens=4)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("abcd", "length")
    assert reply.usage.completion_tokens == 4


async def test_logprobs_name_the_tokens_their_values_and_offsets() -> None:
    async with clients(HeldSampler(scripts=(("ab", "c"),))) as (client, _):
        reply = await complete(client, "hello", logprobs=1)
        _, chunks = await streamed(client, "hello", logprobs=1)
        without = await complete(client, "hello", logprobs=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "<|im_end|>"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -1.0, -1.0]
    assert logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}, {"c": -1.0}, {"<|im_end|>": -1.0}]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == [0, 1, 2, 3]
    assert without.choices[0].logprobs.top_logprobs is None
    assert without.choices[0].logprobs.token_logprobs == [-0.5, -0.5, -1.0, -1.0]


async def test_offsets_are_places_in_the_text_where_tokens_split_a_character_too() -> None:
    async with clients(HeldSampler(scripts=(("h\u20ac", "al", "lo"),))) as (client, _):
        reply = await complete(client, "hello", logprobs=1)
        _, chunks = await streamed(client, "hello", logprobs=1)
    offsets = reply.choices[0].logprobs.text_offset
    assert offsets == [0, 1, 1, 1, 2, 3, 4, 5, 6] and reply.choices[0].text[offsets[4]] == "a"
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == offsets


class ImpossibleSampler(HeldSampler):
    """Names an alternative that truncation has ruled out."""

    async def stream_tokens(self, *args: Any, **arguments: Any) -> AsyncIterator[CompletionDelta]:
        async for block in super().stream_tokens(*args, **arguments):
            top = tuple(((i, -0.5), (END, -math.inf)) for i in block.token_ids[:1])
            yield replace(block, top_logprobs=top + block.top_logprobs[1:])


async def test_an_impossible_alternative_has_a_log_prob_that_json_can_hold() -> None:
    async with clients(ImpossibleSampler(scripts=(("ab",),))) as (client, _):
        reply = await complete(client, "hello", logprobs=2)
        chat = await client.chat.completions.create(model="policy", messages=[user()], logprobs=True, top_logprobs=2)
    assert reply.choices[0].logprobs.top_logprobs[0] == {"a": -0.5, "<|im_end|>": -9999.0}
    assert [top.logprob for top in chat.choices[0].logprobs.content[0].top_logprobs] == [-0.5, -9999.0]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_token_ids_log_probs_and_versions_come_on_request(is_streamed: bool) -> None:
    async with clients(HeldSampler(scripts=(("ab", "c"),))) as (client, _):
        if is_streamed:
            _, chunks = await streamed(client, "hello", extra_body={"return_token_ids": True})
            parts = [chunk.choices[0].model_extra for chunk in chunks]
        else:
            parts = [(await complete(client, "hello", extra_body={"return_token_ids": True})).choices[0].model_extra]
    assert [i for part in parts for i in part["token_ids"]] == [*spelled("abc"), END]
    assert [p for part in parts for p in part["token_logprobs"]] == [-0.5, -0.5, -1.0, -1.0]
    assert tuple(parts[0]["prompt_token_ids"]) == tuple(RENDERER.encode("hello"))
    assert not any("prompt_token_ids" in part for part in parts[1:])
    assert [span["version"] for part in parts for span in part["policy_versions"]] == [7, 8]


async def test_an_answer_may_be_constrained_and_penalised() -> None:
    sampler = HeldSampler()
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with clients(sampler) as (client, _):
        await complete(client, "hello", presence_penalty=0.5, extra_body={"response_format": form})
    assert sampler.sampled[0].structured == StructuredOutput(json_schema='{"type": "object"}')
    assert sampler.sampled[0].presence_penalty == 0.5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, None),
        ({"prompt": "a", "echo": True, "logprobs": 1}, None),
    ],
)
async def test_a_wrong_body_is_refused_with_the_field_named(body: dict[str, Any], param: str | None) -> None:
    sampler = HeldSampler()
    async with clients(sampler) as (_, http):
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert not sampler.prompts


async def test_an_overlong_prompt_and_a_wrong_model_get_the_usual_errors() -> None:
    async with clients(HeldSampler(max_model_len=20)) as (client, _):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 20 tokens") as caught:
            await complete(client, [5] * 20)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_and_messages_become_ids_and_ids_become_text(prefix: str) -> None:
    async with clients(HeldSampler()) as (_, http):
        text = (await http.post(f"{prefix}/tokenize", json={"prompt": "hello é", "return_token_strs": True})).json()
        chat = (await http.post(f"{prefix}/tokenize", json={"messages": [user()], "tools": [TOOL]})).json()
        bare = {"messages": [user()], "add_generation_prompt": False}
        bare_chat = (await http.post(f"{prefix}/tokenize", json=bare)).json()
        back = (await http.post(f"{prefix}/detokenize", json={"tokens": text["tokens"]})).json()
    assert tuple(text["tokens"]) == tuple(RENDERER.encode("hello é"))
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 10_000)
    assert "".join(text["token_strs"]).startswith("hello ")
    assert tuple(chat["tokens"]) == tuple(RENDERER.render([user()], tools=[TOOL]))
    assert tuple(bare_chat["tokens"]) == tuple(RENDERER.render([user()], add_generation_prompt=False))
    assert back == {"prompt": "hello é"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [user()]}, None),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    response = await refusal(path, body)
    wrong_model = await refusal(path, {"prompt": "a", "tokens": [1], "model": "other"})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert wrong_model.status_code == 404
