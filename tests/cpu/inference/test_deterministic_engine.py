"""The deterministic engine: every bit of its output depends on weights, prompt and sampling parameters alone."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_async.columns import TokenIds, token_ids
from skyrl_async.errors import EngineDeadError, InferenceError, PromptTooLongError, PublishError, RequestRefusedError
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.inference.generation import joined
from skyrl_async.inference.policy_files import UpdateValidator
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    SamplingParams,
    StructuredOutput,
    WeightUpdate,
)
from tests.engine_checks import check_limited_tokens, follow, make_adapter_update, make_merged_policy, tokens_of

PROMPT = (5, 6, 7, 8)
RANDOM = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, top_k=50, min_p=0.001, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LIMITED = replace(RANDOM, min_tokens=12, stop_token_ids=tuple(range(5, 60)), bad_words=((70, 71), (72,)))


def make_policy(directory: Path, seed: int, *, is_tied: bool = False) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        eos_token_id=1,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("policies")
    return make_policy(root / "0", 0), make_policy(root / "1", 1)


def make_update(policy_dir: Path, version: int) -> WeightUpdate:
    path = policy_dir / "model.safetensors"
    weights = load_file(path)
    manifest = {name: ("float32", tuple(tensor.shape)) for name, tensor in weights.items()}
    return WeightUpdate(version=version, path=str(path), manifest=manifest, num_bytes=0)


def make_request(
    sampling: SamplingParams, prompt: Sequence[int] | TokenIds = PROMPT, num_sampled_tokens: int = 0
) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=token_ids(prompt), sampling=sampling, num_sampled_tokens=num_sampled_tokens
    )


def continued(request: EngineRequest, output: EngineOutput) -> EngineRequest:
    num_tokens = len(output.token_ids)
    sampling = SamplingParams(
        **{name: getattr(request.sampling, name) for name in SamplingParams.__slots__}
        | {
            "max_tokens": request.sampling.max_tokens - num_tokens,
            "min_tokens": max(0, request.sampling.min_tokens - num_tokens),
        }
    )
    return make_request(sampling, follow(request.prompt_token_ids, output), request.num_sampled_tokens + num_tokens)


async def generate_interrupted(
    engine: DeterministicEngine, request: EngineRequest, pauses: list[int], act: Callable[[], Awaitable[None]]
) -> EngineOutput:
    """Pause in abort mode after so many turns of the event loop, act, resume, and continue in token space; joined."""
    segments: list[EngineOutput] = []
    for num_turns in [*pauses, None]:
        call = asyncio.ensure_future(engine.generate(request))
        if num_turns is not None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await engine.pause(PauseMode.ABORT)
            await act()
            await engine.resume()
        segments.append(await call)
        if segments[-1].finish_reason is not FinishReason.ABORT:
            break
        request = continued(request, segments[-1])
    return joined(segments)


async def nothing() -> None:
    pass


@pytest.mark.slow
@given(pauses=st.lists(st.integers(1, 12), max_size=4), sampling=st.sampled_from([GREEDY, RANDOM, LIMITED]))
def test_a_request_aborted_anywhere_gives_the_bits_of_an_uninterrupted_one(
    policies: tuple[Path, Path], pauses: list[int], sampling: SamplingParams
) -> None:
    async def run() -> None:
        engine = DeterministicEngine("engine", policies[0])
        expected = await engine.generate(make_request(sampling))
        assert await generate_interrupted(engine, make_request(sampling), pauses, nothing) == expected

    asyncio.run(run())


async def test_requests_running_together_give_the_bits_of_requests_running_alone(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0])
    requests = [make_request(RANDOM, (5 + i, 6)) for i in range(4)]
    alone = [await engine.generate(request) for request in requests]
    async with asyncio.TaskGroup() as group:
        together = [group.create_task(engine.generate(request)) for request in requests]
    assert [task.result() for task in together] == alone
    assert len({tuple(output.token_ids) for output in alone}) == 4


async def test_seeds_draw_different_tokens_and_logprobs_are_those_of_the_forward(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0])
    model = Qwen3ForCausalLM.from_pretrained(policies[0], dtype=torch.float32)
    outputs = [
        await engine.generate(make_request(SamplingParams(max_tokens=30, temperature=0.7, seed=seed, ignore_eos=True)))
        for seed in range(3)
    ]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    for output in outputs:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(output.token_ids).long()[:, None])[:, 0]
        assert (torch.tensor(output.logprobs) - expected).abs().max() < 1e-5


async def test_the_likeliest_tokens_of_each_position_are_those_of_the_forward(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0])
    model = Qwen3ForCausalLM.from_pretrained(policies[0], dtype=torch.float32)
    sampling = SamplingParams(max_tokens=12, temperature=0.7, top_k=2, seed=1, ignore_eos=True, num_top_logprobs=3)
    output = await engine.generate(make_request(sampling))
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.7).topk(2)
    for position, tokens, values in zip(output.top_logprobs, expected.indices, expected.values, strict=True):
        assert [token for token, _ in position] == tokens.tolist()  # top_k=2 leaves two of the three asked for
        torch.testing.assert_close(torch.tensor([p for _, p in position]), values.log_softmax(-1))
    plain = await engine.generate(make_request(replace(sampling, num_top_logprobs=0)))
    assert plain == replace(output, top_logprobs=())


async def test_stop_tokens_the_minimum_the_bias_allowed_tokens_and_bad_words_are_obeyed(
    policies: tuple[Path, Path],
) -> None:
    engine = DeterministicEngine("engine", policies[0])
    await check_limited_tokens(lambda sampling: engine.generate(make_request(sampling)))


@pytest.mark.parametrize(
    "sampling",
    [replace(GREEDY, presence_penalty=1.0), replace(GREEDY, structured=StructuredOutput(json_object=True))],
)
async def test_penalties_and_grammars_are_refused(policies: tuple[Path, Path], sampling: SamplingParams) -> None:
    with pytest.raises(RequestRefusedError, match=r"neither penalties nor structured output.*engine\.backend=vllm"):
        await DeterministicEngine("engine", policies[0]).generate(make_request(sampling))


def test_an_engine_is_not_copied_to_where_no_update_reaches_it(policies: tuple[Path, Path]) -> None:
    with pytest.raises(InferenceError, match=r"engine det is deterministic and cannot be sent to another process"):
        pickle.dumps(DeterministicEngine("det", policies[0]))


@pytest.mark.parametrize("is_tied", [False, True])
async def test_an_update_changes_weights_version_and_checksum_to_those_of_a_fresh_engine(
    tmp_path: Path, is_tied: bool
) -> None:
    old, new = make_policy(tmp_path / "0", 0, is_tied=is_tied), make_policy(tmp_path / "1", 1, is_tied=is_tied)
    updated, fresh = DeterministicEngine("updated", old), DeterministicEngine("fresh", new, version=4)
    before = await updated.checksum()
    await updated.pause(PauseMode.ABORT)
    await updated.load_weights(make_update(new, 4))
    await updated.resume()
    assert await updated.checksum() == await fresh.checksum() != before
    assert await updated.version() == 4
    assert await updated.generate(make_request(RANDOM)) == await fresh.generate(make_request(RANDOM))


async def test_an_adapter_takes_the_place_of_the_one_before(policies: tuple[Path, Path], tmp_path: Path) -> None:
    engine = DeterministicEngine("engine", policies[0], adapter_rank=4)
    await engine.pause(PauseMode.ABORT)
    for version in (1, 2):
        update = make_adapter_update(policies[0], tmp_path, version, seed=version)
        await engine.load_weights(update)
    merged = DeterministicEngine("merged", make_merged_policy(policies[0], update, tmp_path / "merged"))
    found, expected = engine._model.state_dict(), merged._model.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    assert await engine.version() == 2
    with pytest.raises(PublishError, match="holds all weights, and this engine takes adapters of rank 4"):
        await engine.load_weights(make_update(policies[1], 3))


def test_an_adapter_over_weights_of_unknown_shapes_is_held_to_its_rank(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()  # no safetensors, whose headers say what shapes there are
    update = make_adapter_update(policies[0], tmp_path, 1, seed=0, rank=4)
    UpdateValidator(str(tmp_path / "bin"), 4).check(update)
    with pytest.raises(PublishError, match=r"lora_A.weight as \(4, 64\), expected \(8, 64\)"):
        UpdateValidator(str(tmp_path / "bin"), 8).check(update)
    *_, b = update.manifest
    alone = {name: entry for name, entry in update.manifest.items() if name != b}
    with pytest.raises(PublishError, match=f"lacks {b}"):
        UpdateValidator(str(tmp_path / "bin"), 4).check(replace(update, manifest=alone))


async def test_keep_gives_the_bits_of_abort_and_retry_across_an_update(policies: tuple[Path, Path]) -> None:
    kept, aborted = DeterministicEngine("kept", policies[0]), DeterministicEngine("aborted", policies[0])

    async def publish() -> None:
        await aborted.load_weights(make_update(policies[1], 1))

    expected = await generate_interrupted(aborted, make_request(RANDOM), [9], publish)
    call = asyncio.ensure_future(kept.generate(make_request(RANDOM)))
    for _ in range(9):
        await asyncio.sleep(0)
    await kept.pause(PauseMode.KEEP)
    await kept.load_weights(make_update(policies[1], 1))
    await asyncio.sleep(0)
    assert not call.done()
    await kept.resume()
    assert await call == expected
    assert expected.versions.distinct == {0, 1}


async def test_an_abort_ends_requests_frozen_by_keep_while_later_ones_wait(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0])
    frozen = asyncio.ensure_future(engine.generate(make_request(GREEDY)))
    await asyncio.sleep(0)
    await engine.pause(PauseMode.KEEP)
    await asyncio.sleep(0)
    await engine.pause(PauseMode.ABORT)
    later = asyncio.ensure_future(engine.generate(make_request(GREEDY)))
    assert (await frozen).finish_reason is FinishReason.ABORT
    assert not later.done()
    await engine.resume()
    assert (await later).finish_reason is FinishReason.LENGTH


async def test_a_refused_update_leaves_the_old_weights(policies: tuple[Path, Path], tmp_path: Path) -> None:
    engine = DeterministicEngine("engine", policies[0])
    before = await engine.checksum()
    good = make_update(policies[1], 1)
    with pytest.raises(PublishError, match="not paused"):
        await engine.load_weights(good)
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    bad = WeightUpdate(version=1, path=str(tmp_path / "other.safetensors"), manifest=good.manifest, num_bytes=0)
    await engine.pause(PauseMode.ABORT)
    with pytest.raises(PublishError, match="the file"):
        await engine.load_weights(bad)
    assert await engine.checksum() == before and await engine.version() == 0


async def test_a_closed_engine_fails_what_is_in_flight_and_what_comes(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0])
    await engine.pause(PauseMode.ABORT)
    waiting = asyncio.ensure_future(engine.generate(make_request(GREEDY)))
    await asyncio.sleep(0)
    await engine.close()
    for call in (waiting, engine.generate(make_request(GREEDY)), engine.checksum(), engine.resume()):
        with pytest.raises(EngineDeadError, match="engine is gone"):
            await call


@pytest.mark.slow
async def test_stop_tokens_budget_and_context_end_a_request(policies: tuple[Path, Path]) -> None:
    engine = DeterministicEngine("engine", policies[0], max_model_len=20)
    stopping = [SamplingParams(max_tokens=60, temperature=2.0, seed=seed) for seed in range(40)]
    outputs = [await engine.generate(make_request(sampling)) for sampling in stopping]
    for output in outputs:
        is_stopped = output.finish_reason is FinishReason.STOP
        assert output.token_ids.tolist().count(1) == is_stopped == (output.token_ids[-1] == 1)
        assert is_stopped or len(output.token_ids) == 16
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP, FinishReason.LENGTH}
    with pytest.raises(PromptTooLongError):
        await engine.generate(make_request(GREEDY, (5,) * 20))
    with pytest.raises(
        RequestRefusedError, match=r"engine engine cannot serve a prompt with token id -1: the policy has 0 to \d+"
    ):
        await engine.generate(make_request(GREEDY, (5, -1)))


async def test_a_request_that_is_evicted_comes_back_with_its_tokens_and_others_stay(
    policies: tuple[Path, Path],
) -> None:
    engine = DeterministicEngine("engine", policies[0])
    expected = await engine.generate(make_request(GREEDY))
    first, second = make_request(GREEDY), replace(make_request(GREEDY), request_id="other")
    moving, staying = asyncio.ensure_future(engine.generate(first)), asyncio.ensure_future(engine.generate(second))
    for _ in range(6):
        await asyncio.sleep(0)
    await engine.pause(PauseMode.KEEP)
    await engine.evict([first.request_id])
    output = await moving
    assert output.finish_reason is FinishReason.ABORT
    assert output.token_ids.tolist() == expected.token_ids[: len(output.token_ids)].tolist()
    await engine.resume()
    rest = await engine.generate(continued(first, output))
    assert tokens_of([output, rest]) == expected.token_ids.tolist()
    assert await staying == expected
