"""The vLLM engine against vLLM itself, on CPU: a random Qwen3 of two layers, untied and tied."""

import asyncio
import gc
import itertools
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from skyrl_async.columns import token_ids
from skyrl_async.errors import EngineDeadError, EngineStartError, PromptTooLongError, PublishError, RequestRefusedError
from skyrl_async.inference.generation import head_of, joined
from skyrl_async.inference.vllm.engine import VLLMEngine, VLLMEngineConfig
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    SamplingParams,
    StructuredOutput,
    WeightUpdate,
)
from skyrl_async.weights.shared_tensor import SharedTensor
from tests.engine_checks import (
    EOS,
    MAX_MODEL_LEN,
    PROMPTS,
    check_limited_tokens,
    follow,
    generate_all,
    generate_with_retries,
    make_moe_policy,
    make_policy,
    make_request,
    make_update,
    publish,
    reference_logprobs,
    tokens_of,
    truncate,
    wait_for_blocks,
)
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Path]:
    root = tmp_path_factory.mktemp("policies")

    def get(seed: int, is_tied: bool) -> Path:
        directory = root / f"{seed}-{is_tied}"
        return directory if directory.exists() else make_policy(directory, seed=seed, is_tied=is_tied)

    return get


async def start(directory: Path, name: str = "engine", **more: object) -> VLLMEngine:
    config = VLLMEngineConfig(name=name, policy_dir=str(directory), **more)  # type: ignore[arg-type]
    return await VLLMEngine.start(config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy_dir: Callable[[int, bool], Path]) -> AsyncIterator[VLLMEngine]:
    """Serves the untied policy of seed 0, as version 0, at the beginning of every test."""
    engine = await start(policy_dir(0, False))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine_0(
    engine: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> AsyncIterator[VLLMEngine]:
    yield engine
    await publish(engine, make_update(policy_dir(0, False), tmp_path, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh_engine_1(policy_dir: Callable[[int, bool], Path]) -> AsyncIterator[VLLMEngine]:
    """Booted from the untied policy of seed 1, as version 1; never updated."""
    engine = await start(policy_dir(1, False), "fresh", version=1)
    yield engine
    await engine.close()


async def test_an_engine_samples_tokens_with_logprobs_versions_and_a_finish_reason(engine_0: VLLMEngine) -> None:
    requests = [make_request(str(i), PROMPTS[0], max_tokens=200, temperature=1.0, ignore_eos=False) for i in range(12)]
    outputs = await generate_all(engine_0, requests)
    for output in outputs:
        assert len(output.token_ids) == len(output.logprobs) == len(output.versions)
        assert set(output.versions) == {0}
        assert max(output.logprobs) <= 0
        if output.finish_reason is FinishReason.STOP:
            assert output.token_ids.tolist().index(EOS) == len(output.token_ids) - 1
        else:
            assert EOS not in output.token_ids and len(output.token_ids) == 200
    assert FinishReason.STOP in {output.finish_reason for output in outputs}
    past_eos = await generate_all(engine_0, [make_request(str(i), max_tokens=300, temperature=1.0) for i in range(6)])
    assert {len(output.token_ids) for output in past_eos} == {300}
    with pytest.raises(PromptTooLongError, match="512"):
        await engine_0.generate(make_request("long", (5,) * MAX_MODEL_LEN))


async def test_an_engine_tells_how_much_of_a_prompt_it_had_cached(engine_0: VLLMEngine) -> None:
    prompt = tuple(5 + i % 290 for i in range(400))
    first = await engine_0.generate(make_request("uncached", prompt, max_tokens=3))
    again = await engine_0.generate(make_request("cached", prompt, max_tokens=3))
    blocks = [block async for block in engine_0.stream(make_request("streamed", prompt, max_tokens=3))]
    assert first.num_cached_tokens == 0
    assert 0 < again.num_cached_tokens < len(prompt)
    assert {block.num_cached_tokens for block in blocks} == {again.num_cached_tokens}


async def test_log_probs_of_a_prompt_are_those_of_its_decode_though_a_prefix_is_cached(engine_0: VLLMEngine) -> None:
    prompt = tuple(9 + i % 280 for i in range(300))
    output = await engine_0.generate(make_request("decoded", prompt, max_tokens=20, temperature=1.0))
    computed = await engine_0.prompt_logprobs("read", follow(prompt, output))
    assert len(computed) == 319
    assert computed[-20:] == pytest.approx(output.logprobs, abs=1e-4)


async def test_stop_tokens_the_minimum_the_bias_allowed_tokens_and_bad_words_are_obeyed(engine_0: VLLMEngine) -> None:
    names = itertools.count()

    async def generate(sampling: SamplingParams) -> EngineOutput:
        request = EngineRequest(
            request_id=f"limited-{next(names)}", prompt_token_ids=token_ids(PROMPTS[0]), sampling=sampling
        )
        return await engine_0.generate(request)

    await check_limited_tokens(generate)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_float32_forward_at_the_sampling_temperature(
    engine_0: VLLMEngine, policy_dir: Callable[[int, bool], Path], temperature: float
) -> None:
    output = await engine_0.generate(make_request("a", max_tokens=200, temperature=temperature))
    expected = reference_logprobs(policy_dir(0, False), PROMPTS[0], output, temperature)
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-4


async def test_bfloat16_weights_are_served_within_the_limit_of_the_probe(
    policy_dir: Callable[[int, bool], Path],
) -> None:
    engine = await start(policy_dir(0, False), "bfloat16", dtype="bfloat16")
    output = await engine.generate(make_request("a", max_tokens=100, temperature=1.0))
    expected = reference_logprobs(policy_dir(0, False), PROMPTS[0], output, 1.0)
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 0.3
    await engine.close()


async def test_the_likeliest_tokens_are_those_of_a_float32_forward_whole_and_in_blocks(
    engine_0: VLLMEngine, policy_dir: Callable[[int, bool], Path]
) -> None:
    request = make_request("a", max_tokens=60, temperature=0.7, num_top_logprobs=5)
    blocks = [block async for block in engine_0.stream(request)]
    whole = await engine_0.generate(make_request("b", max_tokens=60, num_top_logprobs=5, top_k=3, temperature=0.7))
    assert len(blocks) > 3
    for output, num_kept in (*((block, 5) for block in blocks), (whole, 3)):
        assert len(output.top_logprobs) == len(output.logprobs) == len(output.token_ids)
        tokens, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
        for token, logprob, top in zip(tokens, logprobs, output.top_logprobs, strict=True):
            assert len(top) == num_kept  # top_k=3 leaves three of the five asked for
            assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
            assert dict(top).get(token, logprob) == logprob
    model = Qwen3ForCausalLM.from_pretrained(policy_dir(0, False), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[0], *tokens_of(blocks)]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1).topk(5)
    found = [top for block in blocks for top in block.top_logprobs]
    assert [[token for token, _ in top] for top in found] == expected.indices.tolist()
    assert (torch.tensor([[p for _, p in top] for top in found]) - expected.values).abs().max() < 1e-4


async def test_a_request_may_set_the_size_of_its_blocks(engine_0: VLLMEngine) -> None:
    sizes = {}
    for interval in (None, 20):
        request = make_request("a", max_tokens=64, stream_interval=interval)
        sizes[interval] = [len(block.token_ids) async for block in engine_0.stream(request)]
    assert sizes[None][0] == 1 and sum(sizes[None]) == sum(sizes[20]) == 64
    assert sizes[20][0] > 20 and min(sizes[20][:-1], default=20) >= 20  # one that is slow to read gets more at once
    short = [block async for block in engine_0.stream(make_request("b", max_tokens=5, stream_interval=20))]
    assert [len(block.token_ids) for block in short] == [5]


async def test_an_aborting_pause_freezes_the_engine_while_a_request_is_in_it_that_cannot_be_continued(
    engine_0: VLLMEngine,
) -> None:
    penalised = make_request("p", max_tokens=120, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.1)
    expected = await engine_0.generate(penalised)
    plain = make_request("w", max_tokens=400)
    assert expected.token_ids.tolist() != (await engine_0.generate(plain)).token_ids[:120].tolist()
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(engine_0.generate(penalised))
        beside = group.create_task(engine_0.generate(plain))
        for _ in range(3):
            await wait_for_blocks(engine_0, 1)
            assert not kept.done()
            await engine_0.pause(PauseMode.ABORT)
            await engine_0.resume()
        assert not beside.done()
        assert (await kept) == expected
        await engine_0.pause(PauseMode.ABORT)
        await engine_0.resume()
    assert beside.result().finish_reason is FinishReason.ABORT


async def test_an_engine_without_a_tokenizer_refuses_grammars_and_unknown_tokens_and_serves_on(
    engine_0: VLLMEngine,
) -> None:
    constrained = make_request("a", structured=StructuredOutput(json_object=True))
    with pytest.raises(RequestRefusedError, match=r"cannot constrain an answer.*has no tokenizer \(none of tokenizer"):
        await engine_0.generate(constrained)
    with pytest.raises(RequestRefusedError, match="presence_penalty"):
        await engine_0.generate(make_request("b", presence_penalty=5.0))
    with pytest.raises(RequestRefusedError, match="cannot serve a prompt with token id 300: the policy has 0 to 299"):
        await engine_0.generate(make_request("c", (5, 300)))
    await engine_0.pause(PauseMode.ABORT)
    assert (await engine_0.statistics())["num_requests"] == 0
    await engine_0.resume()


async def test_a_tokenizer_that_cannot_be_read_is_a_start_error_that_says_so(
    policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    for file in policy_dir(0, False).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        EngineStartError, match=r"engine broken did not come up: PolicyError: .*tokenizer\.json cannot be"
    ):
        await start(tmp_path, "broken")


async def test_a_resume_comes_after_a_pause_that_was_cancelled_halfway(engine_0: VLLMEngine) -> None:
    core = psutil.Process((await engine_0.statistics())["core_process_id"])
    core.send_signal(signal.SIGSTOP)
    pause = asyncio.ensure_future(engine_0.pause(PauseMode.ABORT))
    await asyncio.wait([pause], timeout=0.01)
    pause.cancel()
    await asyncio.wait([pause])
    resume = asyncio.ensure_future(engine_0.resume())
    core.send_signal(signal.SIGCONT)
    await resume
    assert (await engine_0.generate(make_request("a"))).finish_reason is FinishReason.LENGTH
    with pytest.raises(PublishError, match="not paused"):
        await engine_0.load_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0))


async def test_an_engine_is_no_less_alive_while_it_computes_a_checksum(engine_0: VLLMEngine) -> None:
    """That of large weights takes longer than a heartbeat may."""
    core = psutil.Process((await engine_0.statistics())["core_process_id"])
    core.send_signal(signal.SIGSTOP)
    checksum = asyncio.ensure_future(engine_0.checksum())
    await asyncio.wait([checksum], timeout=0.01)
    await asyncio.wait_for(engine_0.ping(), timeout=5.0)
    core.send_signal(signal.SIGCONT)
    assert await checksum == await engine_0.checksum()


async def test_a_heartbeat_says_how_many_tokens_of_prompts_were_cached(engine_0: VLLMEngine) -> None:
    prompt, before = list(range(3, 300)), await engine_0.ping()
    outputs = [await engine_0.generate(make_request(f"cached-{i}", prompt)) for i in range(2)]
    after = await engine_0.ping()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2 * len(prompt)
    num_cached = outputs[0].num_cached_tokens + outputs[1].num_cached_tokens
    assert after.num_cached_tokens - before.num_cached_tokens == num_cached >= 128
    assert (after.num_waiting, after.num_preemptions) == (0, before.num_preemptions)


@pytest.mark.parametrize("caches_prefixes", [True, False])
async def test_a_heartbeat_says_how_often_requests_lost_their_room_and_an_update_takes_none_from_those_it_keeps(
    policy_dir: Callable[[int, bool], Path], tmp_path: Path, caches_prefixes: bool
) -> None:
    room = {"num_gpu_blocks_override": 1 + MAX_MODEL_LEN // 128}  # for one answer of full length
    engine = await start(policy_dir(0, False), enable_prefix_caching=caches_prefixes, extra_args=room)
    try:
        kept = asyncio.ensure_future(engine.generate(make_request("kept", max_tokens=200)))
        await wait_for_blocks(engine, 2, num_others=1)
        await publish(engine, make_update(policy_dir(1, False), tmp_path, 1), PauseMode.KEEP)
        assert set((await kept).versions) == {0, 1}
        assert (await engine.ping()).num_preemptions == 0
        await generate_all(engine, [make_request(str(i), max_tokens=400) for i in range(2)])
        assert (await engine.ping()).num_preemptions > 0
    finally:
        await engine.close()


async def test_a_heartbeat_says_what_was_computed_in_iterations_that_follow_each_other_and_how_long_they_took(
    engine_0: VLLMEngine,
) -> None:
    before, began = await engine_0.ping(), time.perf_counter()
    blocks = engine_0.stream(make_request("first", max_tokens=120))
    await anext(blocks)  # its prefill began while the engine was idle: how long that took is not known
    await engine_0.pause(PauseMode.KEEP)
    paused = time.perf_counter()
    await engine_0.ping()
    paused = time.perf_counter() - paused
    await engine_0.resume()
    await engine_0.generate(make_request("second", list(range(3, 20)), max_tokens=4))
    assert [block async for block in blocks][-1].finish_reason is FinishReason.LENGTH
    after, lasted = await engine_0.ping(), time.perf_counter() - began
    decode, prefill = after.decode - before.decode, after.prefill - before.prefill
    assert (prefill.num, prefill.num_requests, prefill.num_prefills, prefill.num_prefill_tokens) == (1, 2, 1, 17)
    # The one after the pause is not counted either. Where both ran, each iteration had two requests.
    assert (decode.num, decode.num_requests) == (120 - 3, 120 - 3 + 3)
    assert 0 < decode.seconds + prefill.seconds < lasted - paused


async def test_weights_that_are_refused_do_not_pause_an_engine(engine_0: VLLMEngine) -> None:
    with pytest.raises(PublishError, match="lacks lm_head.weight"):
        await engine_0.switch_weights(WeightUpdate(version=1, path="", manifest={}, num_bytes=0), PauseMode.ABORT)
    assert (await engine_0.generate(make_request("a"))).finish_reason is FinishReason.LENGTH


async def test_a_greedy_request_aborted_many_times_gives_the_tokens_of_an_uninterrupted_one(
    engine_0: VLLMEngine,
) -> None:
    requests = [make_request(str(i), prompt, max_tokens=300) for i, prompt in enumerate(PROMPTS)]
    expected = await generate_all(engine_0, requests)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate_with_retries(engine_0, request)) for request in requests]
        for _ in range(5):
            await wait_for_blocks(engine_0, 1)
            await engine_0.pause(PauseMode.ABORT)
            await engine_0.resume()
    for task, output in zip(tasks, expected, strict=True):
        assert len(task.result()) >= 3
        whole = joined(task.result())
        assert whole.token_ids.tolist() == output.token_ids.tolist()
        assert (torch.tensor(whole.logprobs) - torch.tensor(output.logprobs)).abs().max() < 1e-4


async def assert_updated_is_as_fresh(
    updated: VLLMEngine, fresh: VLLMEngine, policies: tuple[Path, Path], directory: Path
) -> None:
    """``updated`` serves the first policy, ``fresh`` was booted from the second as version 1."""
    before = await updated.checksum()
    await publish(updated, make_update(policies[1], directory, 1))
    assert await updated.checksum() == await fresh.checksum() != before
    requests = [make_request(str(i), prompt, max_tokens=100) for i, prompt in enumerate(PROMPTS)]
    outputs = await generate_all(updated, requests)
    assert outputs == await generate_all(fresh, requests)
    assert set(outputs[0].versions) == {1} and await updated.version() == 1
    expected = reference_logprobs(policies[1], PROMPTS[0], outputs[0], 1.0)
    assert (torch.tensor(outputs[0].logprobs) - expected).abs().max() < 1e-4
    await publish(updated, make_update(policies[0], directory, 2))
    as_at_boot = await updated.checksum()
    for version, is_staged in ((3, False), (5, True), (7, True)):
        update = make_update(policies[1], directory, version)
        await publish(updated, update, is_staged=is_staged)
        assert await updated.checksum() == await fresh.checksum()
        if version == 5:
            again = await generate_all(updated, requests)
            assert [o.token_ids.tolist() for o in again] == [o.token_ids.tolist() for o in outputs]
        back = make_update(policies[0], directory, version + 1)
        await publish(updated, back, is_staged=is_staged)
        assert await updated.checksum() == as_at_boot
    assert await updated.checksum() == before


async def test_an_updated_engine_cannot_be_told_from_a_fresh_one_with_the_same_weights(
    engine_0: VLLMEngine, fresh_engine_1: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    await assert_updated_is_as_fresh(engine_0, fresh_engine_1, (policy_dir(0, False), policy_dir(1, False)), tmp_path)


async def test_experts_of_an_update_are_those_that_compute(tmp_path: Path) -> None:
    """vLLM packs experts on CPUs at boot only; what it packed then would be taken for the packed new ones."""
    policies = [make_moe_policy(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    engine = await start(policies[0])
    for version, policy in enumerate((policies[1], policies[0], policies[1]), 1):
        await publish(engine, make_update(policy, tmp_path / "updates", version))
        (output,) = await generate_all(engine, [make_request(str(version), PROMPTS[0], max_tokens=40)])
        expected = reference_logprobs(policy, PROMPTS[0], output, 1.0)
        assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-4
    await engine.close()


async def test_weights_are_loaded_where_the_trainer_shares_them_and_from_the_file_where_that_cannot_be_opened(
    engine_0: VLLMEngine, fresh_engine_1: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    """In host memory; the file holds the weights of before, so it is seen which were taken."""
    copies = {
        name: SharedTensor(tensor, device=torch.device("cpu"))
        for name, tensor in load_file(policy_dir(1, False) / "model.safetensors").items()
    }
    handles = {name: copy.handle() for name, copy in copies.items()}
    update = make_update(policy_dir(0, False), tmp_path, 1)
    before = await engine_0.checksum()

    def sharing(shared: dict[str, Any]) -> WeightUpdate:
        return replace(update, shared=shared)

    await publish(engine_0, sharing({"cpu": handles}))
    assert await engine_0.checksum() == await fresh_engine_1.checksum() != before
    for copy in copies.values():
        copy.close()
    outputs = [await generate_all(engine, [make_request("a")]) for engine in (engine_0, fresh_engine_1)]
    assert outputs[0] == outputs[1], "nothing of what was shared is used any more"
    for shared in ({"cpu": handles}, {"another device": handles}):
        await publish(engine_0, sharing(shared))
        assert await engine_0.checksum() == before


async def test_nor_can_one_with_a_tied_head_and_one_left_unpacked_is_seen_by_the_checksum(
    policy_dir: Callable[[int, bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl_async.inference.vllm import weight_transfer

    fault, repack = tmp_path / "fault", weight_transfer._pack_again
    monkeypatch.setattr(weight_transfer, "_pack_again", lambda model: None if fault.exists() else repack(model))
    policies = policy_dir(0, True), policy_dir(1, True)
    fresh = await start(policies[1], "fresh", version=1)
    updated = await start(policies[0])  # its forked core inherits what may go wrong
    await assert_updated_is_as_fresh(updated, fresh, policies, tmp_path)
    fault.touch()
    await publish(updated, make_update(policies[1], tmp_path, 9))
    assert await updated.checksum() != await fresh.checksum()
    for engine in (fresh, updated):
        await engine.close()


async def test_aborted_requests_bear_the_version_of_each_segment(
    engine_0: VLLMEngine, fresh_engine_1: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    requests = [make_request(str(i), prompt, max_tokens=300) for i, prompt in enumerate(PROMPTS)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate_with_retries(engine_0, request)) for request in requests]
        await wait_for_blocks(engine_0, 2, num_others=len(requests))
        await publish(engine_0, make_update(policy_dir(1, False), tmp_path, 7))
    continued = []
    for task, request in zip(tasks, requests, strict=True):
        old, new = task.result()
        assert old.finish_reason is FinishReason.ABORT and len(old.token_ids)
        assert set(old.versions) == {0} and set(new.versions) == {7}
        prompt = follow(request.prompt_token_ids, old)
        continued.append(make_request(f"c-{request.request_id}", prompt, max_tokens=len(new.token_ids)))
    expected = await generate_all(fresh_engine_1, continued)
    assert [task.result()[1].token_ids.tolist() for task in tasks] == [output.token_ids.tolist() for output in expected]


async def test_kept_requests_and_streams_continue_as_a_fresh_engine_would_with_exact_versions(
    engine_0: VLLMEngine, fresh_engine_1: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    async def collect(request: EngineRequest) -> list[EngineOutput]:
        return [block async for block in engine_0.stream(request)]

    num_tokens = 300  # many are left when a busy machine gets to ask
    whole = [make_request(f"w{i}", prompt, max_tokens=num_tokens) for i, prompt in enumerate(PROMPTS)]
    streamed = [make_request(f"s{i}", prompt, max_tokens=num_tokens) for i, prompt in enumerate(PROMPTS)]
    before = await generate_all(engine_0, whole)
    async with asyncio.TaskGroup() as group:
        generates = [group.create_task(engine_0.generate(request)) for request in whole]
        streams = [group.create_task(collect(request)) for request in streamed]
        await wait_for_blocks(engine_0, 5)
        await publish(engine_0, make_update(policy_dir(1, False), tmp_path, 3), PauseMode.KEEP)
        await wait_for_blocks(engine_0, 2)
        held = await engine_0.partial_outputs(["gone", *(request.request_id for request in whole + streamed)])
    results = [task.result() for task in generates] + [joined(task.result()) for task in streams]
    assert held.keys() == {request.request_id for request in whole + streamed}
    for request, output in zip(whole + streamed, results, strict=True):
        known = held[request.request_id]
        n = len(known.token_ids)
        assert known.finish_reason is None and 0 < n < num_tokens
        assert known.token_ids.tolist() == output.token_ids[:n].tolist()
        assert known.logprobs.tolist() == output.logprobs[:n].tolist()
        assert known.versions == output.versions[:n] and set(known.versions) == {0, 3}
    for stream in streams:
        assert all(block.finish_reason is None for block in stream.result()[:-1])
    continued = []
    for output, request, old in zip(results, whole + streamed, before + before, strict=True):
        assert len(output.token_ids) == len(output.versions) == num_tokens
        num_old = tuple(output.versions).count(0)
        assert 0 < num_old < num_tokens and tuple(output.versions) == (0,) * num_old + (3,) * (num_tokens - num_old)
        assert output.token_ids[:num_old].tolist() == old.token_ids[:num_old].tolist()
        prompt = follow(request.prompt_token_ids, head_of(output, num_old))
        continued.append(make_request(f"c-{request.request_id}", prompt, max_tokens=num_tokens - num_old))
    for output, rest in zip(results, await generate_all(fresh_engine_1, continued), strict=True):
        assert output.token_ids[-len(rest.token_ids) :].tolist() == rest.token_ids.tolist()


async def test_a_new_request_does_not_see_prefixes_cached_under_the_old_weights(
    engine_0: VLLMEngine, fresh_engine_1: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    long_prompt = tuple(range(10, 210))
    for mode in PauseMode:
        await publish(engine_0, make_update(policy_dir(0, False), tmp_path, 0))
        await engine_0.generate(make_request("old", long_prompt))
        await publish(engine_0, make_update(policy_dir(1, False), tmp_path, 1), mode)
        new = await engine_0.generate(make_request("new", long_prompt))
        expected = await fresh_engine_1.generate(make_request("new", long_prompt))
        assert new.token_ids.tolist() == expected.token_ids.tolist()


async def test_an_update_that_cannot_be_the_policys_is_refused_and_the_old_weights_serve_on(
    engine_0: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    good = make_update(policy_dir(1, False), tmp_path, 5)
    checksum, before = await engine_0.checksum(), await engine_0.generate(make_request("before"))
    truncated = truncate(Path(good.path))
    norm = "model.norm.weight"
    others = {name: entry for name, entry in good.manifest.items() if name != norm}
    weights = load_file(good.path)
    save_file({name: weights[name] for name in others}, tmp_path / "less")
    bad_updates = {
        "lacks model.norm.weight": (good.path, others),
        "has model.more.weight": (good.path, good.manifest | {"model.more.weight": ("float32", (64,))}),
        r"model.norm.weight as \(65,\)": (good.path, good.manifest | {norm: ("float32", (65,))}),
        "dtype 'int7'": (good.path, good.manifest | {norm: ("int7", (64,))}),
        "the file lacks": (str(tmp_path / "less"), good.manifest),
        "No such file": (str(tmp_path / "missing"), good.manifest),
        "its header says": (str(truncated), good.manifest),
    }
    for message, (path, manifest) in bad_updates.items():
        update = WeightUpdate(version=5, path=path, manifest=manifest, num_bytes=0)
        with pytest.raises(PublishError, match=message):
            await publish(engine_0, update)
        await engine_0.resume()
    with pytest.raises(PublishError, match="not paused"):
        await engine_0.load_weights(good)
    other = replace(good, crc32=7, is_compared=True)
    with pytest.raises(PublishError, match="has the checksum [0-9a-f]{8}, and 00000007 was sent"):
        await publish(engine_0, other)
    await engine_0.resume()
    assert await engine_0.checksum() == checksum and await engine_0.version() == 0
    assert await engine_0.generate(make_request("before")) == before


async def test_requests_made_while_paused_wait_for_the_resume(engine_0: VLLMEngine) -> None:
    expected = await engine_0.generate(make_request("a"))
    await engine_0.pause(PauseMode.ABORT)
    await engine_0.pause(PauseMode.ABORT)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(engine_0.generate(make_request("b")))
        await engine_0.checksum()  # answered after the request has arrived
        assert not waiting.done()
        await engine_0.resume()
        await engine_0.resume()
    assert waiting.result() == expected


async def test_cancelling_a_call_or_leaving_a_stream_ends_the_request_in_the_engine(engine_0: VLLMEngine) -> None:
    calls = [asyncio.ensure_future(engine_0.generate(make_request(str(i), max_tokens=450))) for i in range(4)]
    await wait_for_blocks(engine_0, 2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    assert (await engine_0.statistics())["num_requests"] == 0


@pytest.mark.parametrize("vllm_is_first", [False, True], ids=["seen by the engine", "seen by vLLM first"])
async def test_a_killed_core_is_an_engine_death_for_every_call_at_once(
    policy_dir: Callable[[int, bool], Path], vllm_is_first: bool
) -> None:
    """vLLM watches over its core, too, in a thread, and leaves part of its shutdown to the event loop."""
    threads = set(threading.enumerate())
    engine = await start(policy_dir(0, False))
    (watch,) = (thread for thread in set(threading.enumerate()) - threads if thread.name == "MPClientEngineMonitor")
    core = psutil.Process((await engine.statistics())["core_process_id"])
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(engine.generate(make_request(str(i), max_tokens=450))) for i in range(3)
    ]
    await wait_for_blocks(engine, 2)
    core.send_signal(signal.SIGSTOP)
    calls += [asyncio.ensure_future(engine.pause(PauseMode.ABORT)), asyncio.ensure_future(engine.checksum())]
    await asyncio.wait(calls, timeout=0.01)
    core.send_signal(signal.SIGKILL)
    if vllm_is_first:
        watch.join(PATIENCE_S)  # the event loop stands still meanwhile
        await engine.close()
    done, pending = await asyncio.wait(calls, timeout=PATIENCE_S)
    assert not pending
    assert {type(call.exception()) for call in done} == {EngineDeadError}
    with pytest.raises(EngineDeadError, match="closed" if vllm_is_first else "core process"):
        await engine.generate(make_request("late"))
    with pytest.raises(EngineDeadError):
        await engine.version()
    await engine.close()


async def test_staged_weights_are_not_served_before_they_are_loaded_and_leave_nothing_behind(
    engine_0: VLLMEngine, policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    before = await engine_0.checksum()
    first, second = (make_update(policy_dir(1, False), tmp_path / str(v), v) for v in (1, 2))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine_0.generate(make_request("a", max_tokens=400)))
        await wait_for_blocks(engine_0, 1)
        await engine_0.stage_weights(first)
        assert await engine_0.checksum() == before
        await engine_0.stage_weights(second)
    assert set(running.result().versions) == {0}
    await publish(engine_0, first)  # what was staged is of another file
    assert await engine_0.checksum() != before and await engine_0.version() == 1
    await engine_0.stage_weights(second)
    (tmp_path / "2" / "2.safetensors").unlink()
    await publish(engine_0, second)  # its file was checked when it was staged, and is not read again
    assert await engine_0.version() == 2
    gone = replace(first, version=3, path=str(tmp_path / "1" / "gone.safetensors"))
    with pytest.raises(PublishError, match=r"engine engine cannot stage weights 3: .*No such file"):
        await engine_0.stage_weights(gone)
    assert {path.suffix for version in "12" for path in (tmp_path / version).iterdir()} == {".safetensors"}


async def test_a_control_call_that_gets_no_answer_ends_the_engine_at_its_deadline(
    policy_dir: Callable[[int, bool], Path],
) -> None:
    engine = await start(policy_dir(0, False))
    engine._config = replace(engine._config, call_timeout_s=0.5)  # a slow machine would not boot with it
    core = psutil.Process((await engine.statistics())["core_process_id"])
    core.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="no answer to pause within 0.5 s"):
        await engine.pause(PauseMode.ABORT)
    assert not psutil.pid_exists(core.pid)


async def test_a_policy_that_vllm_cannot_serve_is_a_start_error_and_leaves_no_process(
    policy_dir: Callable[[int, bool], Path], tmp_path: Path
) -> None:
    children = set(psutil.Process().children())
    (tmp_path / "config.json").write_text((policy_dir(0, False) / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # vLLM leaves the zmq context of a failed boot open
        with pytest.raises(EngineStartError, match="engine broken did not come up"):
            await start(tmp_path, "broken")
        gc.collect()
    assert set(psutil.Process().children()) <= children
