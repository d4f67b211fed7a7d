"""The inference client over modelled engines in virtual time: retries in token space, routing, failures, stop strings."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.columns import column
from skyrl_async.errors import EngineDeadError, InferenceError, NoEngineError, PromptTooLongError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.generation import GenerationState, call_until_end, generate_to_end, joined
from skyrl_async.inference.text import CompletionText
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    SamplingParams,
    StructuredOutput,
    WeightUpdate,
)


class LetterTokenizer:
    """Token i is the letter ``chr(97 + i % 26)``: enough to test text without a model."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(chr(97 + t % 26) for t in token_ids)


class ByteTokenizer:
    """Tokens are the bytes of UTF-8 text, so that characters span tokens."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def engine(name: str = "e0", num_tokens: int = 200) -> ModelledEngine:
    return ModelledEngine(name, num_tokens_of=lambda prompt, seed: num_tokens)


def client(
    *engines: ModelledEngine, max_model_len: int = 10_000, carries_tokens: bool = False
) -> InferenceEngineClient:
    return InferenceEngineClient(
        engines, tokenizer=LetterTokenizer(), max_model_len=max_model_len, carries_tokens=carries_tokens
    )


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, path="", manifest={}, num_bytes=0)


async def publish(target: ModelledEngine, version: int, mode: PauseMode = PauseMode.ABORT) -> None:
    await target.pause(mode)
    await target.load_weights(update(version))
    await target.resume()


@given(pauses=st.lists(st.floats(0.01, 1.9), max_size=6), mode=st.sampled_from(PauseMode))
def test_a_request_aborted_k_times_gives_the_tokens_of_an_uninterrupted_one(
    pauses: list[float], mode: PauseMode
) -> None:
    async def main():
        served = engine()

        async def storm() -> None:
            for version, at in enumerate(sorted(pauses), 1):
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                await publish(served, version, mode)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storm())
            return await client(served).generate_tokens((1, 2), SamplingParams(max_tokens=500))

    completion = run_in_virtual_time(main())
    assert completion.token_ids.tolist() == [i % 100 for i in range(200)]
    assert completion.finish_reason is FinishReason.STOP
    assert list(completion.versions) == sorted(completion.versions)
    assert len(completion.logprobs) == len(completion.versions) == 200
    if mode is PauseMode.ABORT:
        assert completion.num_aborts >= len(completion.versions.distinct) - 1


def test_a_budget_used_up_at_the_abort_means_length() -> None:
    async def main():
        served = engine(num_tokens=32)

        async def abort_after_16() -> None:
            await asyncio.sleep(0.163)
            await publish(served, 1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(abort_after_16())
            return await client(served, max_model_len=20).generate_tokens((1, 2, 3, 4), SamplingParams(max_tokens=16))

    completion = run_in_virtual_time(main())
    assert (len(completion.token_ids), completion.finish_reason) == (16, FinishReason.LENGTH)


def test_the_tokens_of_an_engine_that_dies_in_mid_stream_are_continued_elsewhere() -> None:
    async def main():
        first, second = engine("e0"), engine("e1")

        async def kill() -> None:
            await asyncio.sleep(1.0)
            first.kill()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            user = client(first, second)
            deltas = [d async for d in user.stream_tokens((1,), SamplingParams(max_tokens=500))]
        return deltas, user.statistics()

    deltas, statistics = run_in_virtual_time(main())
    assert [t for d in deltas for t in d.token_ids] == [i % 100 for i in range(200)]
    assert statistics["engines"] == 1.0 and statistics["engine_failures_total"] == 1.0


class BlockByBlock(ModelledEngine):
    """Samples whole answers as streams too, which a test can watch in one place."""

    async def generate(self, request: EngineRequest) -> EngineOutput:
        return joined([block async for block in self.stream(request)])


class Recording(BlockByBlock):
    """Knows what it was asked for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.requests: list[EngineRequest] = []

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        async for block in super().stream(request):
            yield block


def recording(name: str) -> Recording:
    return Recording(name, num_tokens_of=lambda prompt, seed: 200)


async def kill_after(seconds: float, target: ModelledEngine) -> None:
    await asyncio.sleep(seconds)
    target.kill()


def test_a_client_that_carries_tokens_takes_those_of_a_whole_generation_to_another_engine() -> None:
    async def main() -> None:
        first, second = recording("e0"), recording("e1")
        user = client(first, second, carries_tokens=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_after(1.0, first))
            completion = await user.generate_tokens((1,), SamplingParams(max_tokens=2000))
        assert completion.token_ids.tolist() == [i % 100 for i in range(200)]
        assert completion.num_aborts == 1
        [asked] = second.requests
        assert asked.num_sampled_tokens == len(asked.prompt_token_ids) - 1 == 96
        assert asked.sampling.max_tokens == 2000 - 96
        assert user.num_abandoned_tokens == 0

    run_in_virtual_time(main())


PENALISED = SamplingParams(max_tokens=500, presence_penalty=1.0)
CONSTRAINED = SamplingParams(max_tokens=500, structured=StructuredOutput(json_object=True))


@pytest.mark.parametrize("sampling", [PENALISED, CONSTRAINED])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_generation_that_cannot_be_continued_begins_anew_when_its_engine_dies(
    sampling: SamplingParams, stop: tuple[str, ...]
) -> None:
    async def main() -> None:
        first, second = recording("e0"), recording("e1")
        user = client(first, second, carries_tokens=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_after(1.0, first))
            deltas = [d async for d in user.stream_tokens((1,), replace(sampling, stop=stop))]
        [whole] = deltas
        assert whole.engines == ("e0", "e1")
        assert whole.engine_seconds == pytest.approx(asyncio.get_running_loop().time(), rel=0.05)
        assert whole.token_ids.tolist() == [i % 100 for i in range(200)]
        assert len(whole.text) == 199 and whole.finish_reason is FinishReason.STOP
        [asked] = second.requests
        assert (asked.prompt_token_ids.tolist(), asked.num_sampled_tokens, asked.sampling.max_tokens) == ([1], 0, 500)
        assert user.num_abandoned_tokens == (96 if stop else 0)  # an open call's are not known
        assert user.statistics()["requests_total"] == 1

    run_in_virtual_time(main())


def test_a_stop_string_ends_a_generation_that_cannot_be_continued_without_waiting_for_its_budget() -> None:
    async def main():
        completion = await client(engine()).generate_tokens((1,), replace(PENALISED, stop=("pqr",)))
        return completion.text, len(completion.token_ids), asyncio.get_running_loop().time()

    text, num_tokens, seconds = run_in_virtual_time(main())
    assert (text, num_tokens) == ("abcdefghijklmno", 18)
    assert seconds < 0.5


def test_aborts_that_an_engine_has_continued_by_itself_are_added_up() -> None:
    class Continuing(ModelledEngine):
        async def generate(self, request: EngineRequest) -> EngineOutput:
            return replace(await super().generate(request), num_aborts=2)

    async def main():
        user = client(Continuing("e0", num_tokens_of=lambda prompt, seed: 20))
        completion = await user.generate_tokens((1,), SamplingParams(max_tokens=50))
        return completion.num_aborts, user.statistics()["aborts_total"]

    assert run_in_virtual_time(main()) == (2, 2.0)


@given(pauses=st.lists(st.floats(0.01, 1.9), max_size=6), max_tokens=st.sampled_from([48, 500]), streams=st.booleans())
def test_beside_its_engine_a_request_goes_on_through_aborts_to_its_end(
    pauses: list[float], max_tokens: int, streams: bool
) -> None:
    async def main() -> None:
        served = engine()
        asked = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=max_tokens))

        async def storm() -> None:
            for version, at in enumerate(sorted(pauses), 1):
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                await publish(served, version)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storm())
            if streams:
                streamed = call_until_end(asked, GenerationState(), served.stream)
                blocks = [block async for block in streamed]
            else:
                blocks = [await generate_to_end(served, asked, GenerationState())]
        num_tokens = min(max_tokens, 200)
        assert [t for block in blocks for t in block.token_ids] == [i % 100 for i in range(num_tokens)]
        versions = [v for block in blocks for v in block.versions]
        assert versions == sorted(versions)
        assert sum(block.num_aborts for block in blocks) >= len(set(versions)) - 1
        assert all(block.finish_reason is None for block in blocks[:-1])
        assert blocks[-1].finish_reason is (FinishReason.STOP if max_tokens > 200 else FinishReason.LENGTH)

    run_in_virtual_time(main())


def test_beside_its_engine_a_request_that_cannot_be_continued_comes_back_aborted() -> None:
    async def main() -> list[FinishReason | None]:
        served = engine()
        asked = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=PENALISED)
        async with asyncio.TaskGroup() as tasks:
            whole = tasks.create_task(generate_to_end(served, asked, GenerationState()))
            await asyncio.sleep(1.0)
            await publish(served, 1)
        return [(await whole).finish_reason]

    assert run_in_virtual_time(main()) == [FinishReason.ABORT]


class MarkupTokenizer:
    """Token 0 ends an answer and 1 opens a tool call; both are special. All others are letters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True, **_: object) -> str:
        special = {0: "<eos>", 1: "<tool>"}
        shown = [t for t in token_ids if not (skip_special_tokens and t in special)]
        return "".join(special.get(t, chr(97 + t % 26)) for t in shown)


@pytest.mark.parametrize("streaming", [False, True])
def test_special_tokens_are_kept_where_asked_for_but_never_the_one_that_ended_the_answer(streaming: bool) -> None:
    class Scripted(BlockByBlock):
        async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
            for tokens, reason in (((1, 7), None), ((8, 1, 0), FinishReason.STOP)):
                n = len(tokens)
                yield EngineOutput(token_ids=tokens, logprobs=(-1.0,) * n, versions=(0,) * n, finish_reason=reason)

    async def main(skip_special_tokens: bool) -> tuple[str, int]:
        served = Scripted("e0", num_tokens_of=lambda prompt, seed: 5)
        user = InferenceEngineClient([served], tokenizer=MarkupTokenizer(), max_model_len=100)
        sampling = SamplingParams(max_tokens=9, skip_special_tokens=skip_special_tokens)
        if streaming:
            deltas = [d async for d in user.stream_tokens((1,), sampling)]
            return "".join(d.text for d in deltas), sum(len(d.token_ids) for d in deltas)
        completion = await user.generate_tokens((1,), sampling)
        return completion.text, len(completion.token_ids)

    assert run_in_virtual_time(main(False)) == ("<tool>hi<tool>", 5)
    assert run_in_virtual_time(main(True)) == ("hi", 5)


def test_top_logprobs_stay_with_their_tokens_through_aborts_and_a_stop_string() -> None:
    class Ranking(BlockByBlock):
        async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
            async for block in super().stream(request):
                yield replace(block, top_logprobs=tuple(((t, -1.0), (t + 1, -2.0)) for t in block.token_ids.tolist()))

    async def main(streaming: bool) -> tuple[list[int], tuple[object, ...]]:
        served = Ranking("e0", num_tokens_of=lambda prompt, seed: 200)
        sampling = SamplingParams(max_tokens=500, stop=("stu",), num_top_logprobs=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_after(0.165, served))
            if streaming:
                deltas = [d async for d in client(served).stream_tokens((1,), sampling)]
                return [t for d in deltas for t in d.token_ids.tolist()], tuple(
                    x for d in deltas for x in d.top_logprobs
                )
            completion = await client(served).generate_tokens((1,), sampling)
        return completion.token_ids.tolist(), completion.top_logprobs

    for streaming in (False, True):
        tokens, top_logprobs = run_in_virtual_time(main(streaming))
        assert tokens == list(range(21))
        assert top_logprobs == tuple(((t, -1.0), (t + 1, -2.0)) for t in tokens)


async def publish_after(seconds: float, target: ModelledEngine) -> None:
    await asyncio.sleep(seconds)
    await publish(target, 1)


def test_without_any_engine_left_the_error_says_so() -> None:
    async def main() -> None:
        only = engine()
        only.kill()
        await client(only).generate_tokens((1,), SamplingParams(max_tokens=5))

    with pytest.raises(NoEngineError, match="every one has died"):
        run_in_virtual_time(main())


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths() -> None:
    async def main() -> None:
        await client(engine(), max_model_len=4).generate_tokens((1, 2, 3, 4), SamplingParams(max_tokens=5))

    with pytest.raises(PromptTooLongError, match="maximum context length is 4 tokens, but the prompt has 4"):
        run_in_virtual_time(main())


def test_a_paused_engine_holds_a_new_request_until_it_resumes() -> None:
    async def main() -> tuple[float, set[int]]:
        served = engine(num_tokens=16)
        await served.pause(PauseMode.ABORT)

        async def publish_later() -> None:
            await asyncio.sleep(5)
            await served.load_weights(update(1))
            await served.resume()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_later())
            completion = await client(served).generate_tokens((1,), SamplingParams(max_tokens=16))
        return asyncio.get_running_loop().time(), completion.versions.distinct

    seconds, versions = run_in_virtual_time(main())
    assert seconds > 5 and versions == {1}


def test_neither_prompt_nor_messages_is_an_error() -> None:
    async def main() -> None:
        await client(engine()).generate(sampling=SamplingParams(max_tokens=5))

    with pytest.raises(ValueError, match="either prompt_token_ids or messages"):
        run_in_virtual_time(main())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_string_is_found_across_segments_and_its_tokens_kept(streaming: bool) -> None:
    async def main():
        served = engine()
        sampling = SamplingParams(max_tokens=500, stop=("pqr",))

        async def cut_inside_the_stop_string() -> None:
            await asyncio.sleep(0.165)
            await publish(served, 1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cut_inside_the_stop_string())
            user = client(served)
            if streaming:
                deltas = [d async for d in user.stream_tokens((1,), sampling)]
                return "".join(d.text for d in deltas), sum(len(d.token_ids) for d in deltas), deltas[-1].finish_reason
            completion = await user.generate_tokens((1,), sampling)
            return completion.text, len(completion.token_ids), completion.finish_reason

    assert run_in_virtual_time(main()) == ("abcdefghijklmno", 18, FinishReason.STOP)


class SentencePieceTokenizer:
    """Pieces as sentencepiece writes them: ``▁`` is a space, dropped where the decoded text begins; ``<x>`` are special."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], **_: object) -> str:
        text = "".join(self.pieces[t] for t in token_ids if not self.pieces[t].startswith("<"))
        return text.replace("▁", " ").removeprefix(" ")


PIECES = ["▁a", "b", "▁", "c▁", "<s>", "▁b", "<im_end>"]


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_text_of_a_sentencepiece_tokenizer_with_special_tokens_streams_as_a_whole(
    token_ids: list[int], sizes: list[int]
) -> None:
    tokenizer = SentencePieceTokenizer(PIECES)
    streamed, growing = "", text_of(tokenizer)
    for block in stream_once(token_ids, sizes):
        growing.push(column(block, np.int32))
        streamed += growing.take()
    whole, rest = growing.finish()
    assert streamed + rest == whole == tokenizer.decode(token_ids)


def stream_once(token_ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The tokens in blocks of these sizes; the last takes what is left."""
    position = 0
    for size in sizes:
        yield token_ids[position : position + size]
        position += size
    yield token_ids[position:]


def text_of(tokenizer, stop: tuple[str, ...] = (), **options: bool | int) -> CompletionText:
    return CompletionText(tokenizer, SamplingParams(max_tokens=500, stop=stop, **options))


def cut_at_stop(
    tokenizer, stop: tuple[str, ...], blocks: Iterable[list[int]], **options: bool | int
) -> tuple[str, str, int | None]:
    """Streamed text, whole text, tokens kept."""
    growing, kept, streamed = text_of(tokenizer, stop, **options), None, ""
    for block in blocks:
        kept = growing.push(column(block, np.int32))
        if kept is not None:
            break
        streamed += growing.take()
    whole, rest = growing.finish()
    return streamed + rest, whole, kept


@given(
    text=st.text(alphabet="abcé€", max_size=20),
    stop=st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=30, max_size=30),
    num_bytes_cut=st.integers(0, 2),
    min_tokens=st.integers(0, 9),
    includes_stop=st.booleans(),
)
def test_where_a_stop_string_cuts_does_not_depend_on_the_blocks(
    text: str, stop: list[str], sizes: list[int], num_bytes_cut: int, min_tokens: int, includes_stop: bool
) -> None:
    encoded = text.encode()
    token_ids = list(encoded[: len(encoded) - num_bytes_cut])
    options = {"min_tokens": min_tokens, "includes_stop": includes_stop}
    by_token = cut_at_stop(ByteTokenizer(), tuple(stop), [[t] for t in token_ids], **options)
    by_block = cut_at_stop(ByteTokenizer(), tuple(stop), stream_once(token_ids, sizes), **options)
    assert by_block == by_token
    assert by_token[0] == by_token[1]
    _, whole, kept = by_token
    if kept is None:
        decoded = ByteTokenizer().decode(token_ids)
        assert not any(decoded.encode().find(s.encode(), max(0, min_tokens - len(s.encode()) + 1)) >= 0 for s in stop)
    else:
        assert kept > min_tokens or not min_tokens
        assert whole.endswith(tuple(stop)) or not includes_stop


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ("a|", 2)), (2, ("a|b|", 4)), (3, ("a|b|", 4)), (4, None)])
def test_a_stop_string_within_the_fewest_tokens_is_passed_over_and_stays_on_demand(
    min_tokens: int, expected: tuple[str, int] | None
) -> None:
    for blocks in ([list(b"a|b|c")], [[t] for t in b"a|b|c"]):
        cut = cut_at_stop(ByteTokenizer(), ("|",), blocks, min_tokens=min_tokens, includes_stop=True)
        assert cut == (("a|b|c", "a|b|c", None) if expected is None else (expected[0], *expected))


def test_the_fewest_tokens_shrink_with_the_tokens_so_far_of_a_continued_request() -> None:
    async def main():
        served = recording("e0")

        async def storm() -> None:
            for version, at in enumerate((0.1, 0.5, 1.5), 1):
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                await publish(served, version)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storm())
            await client(served).generate_tokens((1, 2), SamplingParams(max_tokens=300, min_tokens=100))
        return served.requests

    requests = run_in_virtual_time(main())
    assert len(requests) == 4
    sampled = [request.num_sampled_tokens for request in requests]
    assert sampled[1] > 0 and sampled[-1] > 100
    assert [request.sampling.min_tokens for request in requests] == [max(0, 100 - num) for num in sampled]


def test_a_stop_string_before_an_incomplete_last_character_still_ends_the_text() -> None:
    token_ids = list("so STOP €".encode())[:-1]
    assert cut_at_stop(ByteTokenizer(), ("STOP",), [token_ids]) == ("so ", "so ", 7)


def test_of_two_stop_strings_the_first_to_be_complete_ends_the_text() -> None:
    assert cut_at_stop(ByteTokenizer(), ("bcd", "c"), [list(b"abcd")]) == ("ab", "ab", 3)


def test_the_end_of_a_stop_string_is_found_without_decoding_a_long_text_again() -> None:
    decoded = list[int]()

    class Counting(ByteTokenizer):
        def decode(self, token_ids: list[int], **options: bool) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids, **options)

    growing = text_of(Counting(), ("STOP",))
    for _ in range(100):
        assert growing.push(column(list(b"so be it, "), np.int32)) is None
    decoded.clear()
    assert growing.push(column(list(b"but STOP now"), np.int32)) == 1008
    assert max(decoded) < 50


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_streamed_text_is_the_whole_text_whatever_the_blocks(text: str, cuts: list[int]) -> None:
    token_ids = list(text.encode("utf-8", errors="ignore"))
    whole = ByteTokenizer().decode(token_ids)
    streamed, growing, position = "", text_of(ByteTokenizer()), 0
    for size in [*cuts, len(token_ids)]:
        growing.push(column(token_ids[position : position + size], np.int32))
        position += size
        streamed += growing.take()
        assert "�" not in streamed or "�" in whole
    end, rest = growing.finish()
    assert end == whole and streamed + rest == whole


@given(
    text=st.text(alphabet="ab", max_size=30),
    stop=st.text(alphabet="ab", min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_a_stop_string_cuts_at_its_first_occurrence_with_the_fewest_tokens(text: str, stop: str, size: int) -> None:
    token_ids = list(text.encode())
    growing, kept, streamed = text_of(ByteTokenizer(), (stop,)), None, ""
    for start in range(0, len(token_ids), size):
        kept = growing.push(column(token_ids[start : start + size], np.int32))
        if kept is not None:
            break
        streamed += growing.take()
    whole, rest = growing.finish()
    assert streamed + rest == whole
    if stop in text:
        assert whole == text[: text.index(stop)] and kept == text.index(stop) + len(stop)
    else:
        assert whole == text and kept is None


def test_sampling_parameters_reach_the_engine_with_the_rest_of_the_budget() -> None:
    served = recording("e0")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_after(0.5, served))
            await client(served).generate_tokens((7,), SamplingParams(max_tokens=100, temperature=0.7), priority=3)

    run_in_virtual_time(main())
    first, second = served.requests
    assert second.sampling == replace(first.sampling, max_tokens=100 - second.num_sampled_tokens)
    assert second.prompt_token_ids.tolist() == [7, *range(second.num_sampled_tokens)]
    assert first.request_id != second.request_id and second.priority == 3


class Watched(BlockByBlock):
    """Knows which requests are in it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.open: set[str] = set()

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.open.add(request.request_id)
        try:
            async for block in super().stream(request):
                yield block
        finally:
            self.open.remove(request.request_id)


@pytest.mark.parametrize("ending", ["consumer leaves", "consumer is cancelled", "stop string", "engine dies"])
def test_a_stream_that_ends_early_leaves_nothing_in_the_engine_and_is_accounted(ending: str) -> None:
    sampling = SamplingParams(max_tokens=500, stop=("pqr",) if ending == "stop string" else ())

    async def main() -> dict[str, float]:
        served = Watched("e0", num_tokens_of=lambda prompt, seed: 200)
        user = client(served)

        async def consume() -> None:
            async with aclosing(user.stream_tokens((1,), sampling)) as deltas:
                async for _ in deltas:
                    assert len(served.open) == 1
                    if ending == "consumer leaves":
                        return

        consumer = asyncio.ensure_future(consume())
        await asyncio.sleep(1.0)
        if ending == "consumer is cancelled":
            consumer.cancel()
        if ending == "engine dies":
            served.kill()
        await asyncio.wait([consumer])
        if not consumer.cancelled():
            assert isinstance(consumer.exception(), NoEngineError if ending == "engine dies" else type(None))
        assert served.open == set()
        return user.statistics()

    statistics = run_in_virtual_time(main())
    assert statistics["running_requests"] == 0
    delivered, abandoned = statistics["tokens_total"], statistics["abandoned_tokens_total"]
    assert (delivered, abandoned) == {
        "consumer leaves": (0, 16),
        "consumer is cancelled": (0, 96),
        "stop string": (18, 0),
        "engine dies": (0, 96),
    }[ending]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_engine_that_ends_a_request_without_a_reason_is_an_error_and_not_an_endless_retry(streaming: bool) -> None:
    class Silent(ModelledEngine):
        async def generate(self, request: EngineRequest) -> EngineOutput:
            return replace(await super().generate(request), finish_reason=None)

        async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
            async for block in super().stream(request):
                yield replace(block, finish_reason=None)

    async def main() -> None:
        user = client(Silent("e0", num_tokens_of=lambda prompt, seed: 20))
        sampling = SamplingParams(max_tokens=50)
        try:
            if streaming:
                [d async for d in user.stream_tokens((1,), sampling)]
            else:
                await user.generate_tokens((1,), sampling)
        finally:
            assert user.statistics()["running_requests"] == 0

    with pytest.raises(InferenceError, match="e0 ended request .* without a finish reason"):
        run_in_virtual_time(main())


def test_without_a_tokenizer_completions_have_no_text_and_stop_strings_are_refused() -> None:
    async def main():
        one = InferenceEngineClient([engine()], max_model_len=10_000)
        answer = await one.generate(prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=5))
        with pytest.raises(InferenceError, match="without a tokenizer"):
            await one.generate(prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=5, stop=("a",)))
        return answer, one

    answer, one = run_in_virtual_time(main())
    assert (len(answer.token_ids), answer.text) == (5, "")
    assert one.statistics()["running_requests"] == 0


def test_a_budget_of_no_tokens_is_refused_as_such() -> None:
    async def main() -> None:
        await client(engine()).generate_tokens((1,), SamplingParams(max_tokens=0))

    with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
        run_in_virtual_time(main())


@given(
    deaths=st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(0, 2)), max_size=2),
    publishes=st.lists(st.floats(0.01, 3.0), max_size=4),
    cancelled_at=st.floats(0.01, 3.0),
)
def test_deaths_publishes_and_cancellation_cost_no_token_and_leave_no_load(
    deaths: list[tuple[float, int]], publishes: list[float], cancelled_at: float
) -> None:
    async def main() -> tuple[list[list[int]], dict[str, float]]:
        engines = [engine(f"e{i}") for i in range(3)]
        user = client(*engines)

        async def die(at: float, index: int) -> None:
            await asyncio.sleep(at)
            engines[index].kill()

        async def publish_everywhere(at: float, version: int) -> None:
            await asyncio.sleep(at)
            for target in engines:
                with suppress(EngineDeadError):
                    await publish(target, version)

        async def cut(task: "asyncio.Task[object]") -> None:
            await asyncio.sleep(cancelled_at)
            task.cancel()

        async with asyncio.TaskGroup() as tasks:
            for at, index in deaths:
                tasks.create_task(die(at, index))
            for version, at in enumerate(publishes, 1):
                tasks.create_task(publish_everywhere(at, version))
            sampling = SamplingParams(max_tokens=500)
            played = [tasks.create_task(user.generate_tokens((1,), sampling)) for i in range(7)]
            tasks.create_task(cut(tasks.create_task(user.generate_tokens((2,), sampling))))
        return [task.result().token_ids.tolist() for task in played], user.statistics()

    answers, statistics = run_in_virtual_time(main())
    assert answers == [[i % 100 for i in range(200)]] * 7
    assert statistics["running_requests"] == 0
    assert statistics["tokens_total"] % 200 == 0


def test_tokens_come_without_log_probs_where_none_were_asked_for() -> None:
    joined = GenerationState(has_logprobs=False)
    joined.add(EngineOutput(token_ids=(1, 2), logprobs=(), versions=(0, 0), finish_reason=FinishReason.STOP))
    assert len(joined.output().logprobs) == 0
    told = GenerationState(has_logprobs=False)
    told.add(EngineOutput(token_ids=(1, 2), logprobs=(0.0, 0.0), versions=(0, 0), finish_reason=FinishReason.STOP))
    assert len(told.output().logprobs) == 0
    with pytest.raises(InferenceError, match="2 tokens with 0 log-probs"):
        GenerationState().add(EngineOutput(token_ids=(1, 2), logprobs=(), versions=(0, 0), finish_reason=None))


BLOCKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=8)


@given(blocks=BLOCKS, num_repeats=st.sampled_from([1, 100]), cut=st.floats(0, 1), has_top_logprobs=st.booleans())
def test_a_generation_has_the_columns_of_its_blocks_however_many_there_are(
    blocks: list[tuple[int, int]], num_repeats: int, cut: float, has_top_logprobs: bool
) -> None:
    state, tokens, versions = GenerationState(), [], []
    for size, version in blocks * num_repeats:
        block = list(range(len(tokens), len(tokens) + size))
        tops = tuple(((token, -1.0),) for token in block) if has_top_logprobs else ()
        state.add(
            EngineOutput(
                token_ids=block,
                logprobs=[-token / 2 for token in block],
                versions=[version] * size,
                finish_reason=None,
                top_logprobs=tops,
                num_cached_tokens=len(tokens) + 3,
            )
        )
        tokens, versions = tokens + block, versions + [version] * size
    for num_kept in (len(tokens), round(cut * len(tokens))):
        output, kept = state.output(), tokens[:num_kept]
        assert state.num_tokens == len(output.token_ids) == num_kept
        assert output.token_ids.dtype == np.int32 and output.token_ids.tolist() == kept
        assert output.logprobs.dtype == np.float32 and output.logprobs.tolist() == [-token / 2 for token in kept]
        assert list(output.versions) == versions[:num_kept]
        assert output.top_logprobs == tuple(((token, -1.0),) for token in kept if has_top_logprobs)
        assert output.num_cached_tokens == (3 if tokens else 0)
        state.truncate(round(cut * len(tokens)))


async def test_of_generations_that_end_at_once_few_go_on_in_a_turn_of_the_event_loop() -> None:
    served, num_ended, most_in_a_turn = engine(), 0, 0
    asked = client(served)

    async def ask() -> None:
        nonlocal num_ended
        await asked.generate_tokens([1], SamplingParams(max_tokens=1))
        num_ended += 1

    await served.pause(PauseMode.KEEP)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(ask())
        for _ in range(50):
            await asyncio.sleep(0)
        assert asked.statistics()["running_requests"] == 100
        await served.resume()
        while num_ended < 100:
            before = num_ended
            await asyncio.sleep(0)
            most_in_a_turn = max(most_in_a_turn, num_ended - before)
    assert most_in_a_turn <= 16
