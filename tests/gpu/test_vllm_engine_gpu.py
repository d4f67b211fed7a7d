"""The engine checks of tests/cpu on CUDA: float32 for what must be exact, bfloat16 for what is served."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from skyrl_async.errors import EngineDeadError
from skyrl_async.inference.vllm.engine import VLLMEngine
from skyrl_async.types import FinishReason, PauseMode
from tests.engine_checks import (
    PROMPTS,
    config_on_gpu,
    generate_all,
    generate_with_retries,
    make_adapter_update,
    make_merged_policy,
    make_policy,
    make_request,
    make_update,
    publish,
    reference_logprobs,
    tokens_of,
    wait_for_blocks,
)
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass(frozen=True)
class Engines:
    """One engine to update, at seed 0 and version 0, and one booted from the weights of seed 1."""

    updated: VLLMEngine
    fresh: VLLMEngine
    policy_dirs: tuple[Path, Path]


async def start(policy_dir: Path, name: str, dtype: str = "float32", adapter_rank: int = 0) -> VLLMEngine:
    return await VLLMEngine.start(config_on_gpu(name, policy_dir, dtype=dtype, adapter_rank=adapter_rank))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["untied", "tied"])
async def booted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    root = tmp_path_factory.mktemp("policies")
    old, new = (make_policy(root / str(seed), seed=seed, is_tied=request.param) for seed in (0, 1))
    engines = Engines(await start(old, "updated"), await start(new, "fresh"), (old, new))
    yield engines
    await engines.updated.close()
    await engines.fresh.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engines(booted: Engines, tmp_path: Path) -> AsyncIterator[Engines]:
    yield booted
    await publish(booted.updated, make_update(booted.policy_dirs[0], tmp_path, 0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_float32_forward(engines: Engines, temperature: float) -> None:
    output = await engines.updated.generate(make_request("a", max_tokens=200, temperature=temperature))
    expected = reference_logprobs(engines.policy_dirs[0], PROMPTS[0], output, temperature)
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 3e-4, "products of 10 bits are off by more"


async def test_a_greedy_request_aborted_many_times_gives_the_tokens_of_an_uninterrupted_one(engines: Engines) -> None:
    engine = engines.updated
    requests = [make_request(str(i), prompt, max_tokens=300) for i, prompt in enumerate(PROMPTS)]
    expected = await generate_all(engine, requests)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate_with_retries(engine, request)) for request in requests]
        for _ in range(4):
            await wait_for_blocks(engine, 3)
            await engine.pause(PauseMode.ABORT)
            await engine.resume()
    assert [tokens_of(task.result()) for task in tasks] == [output.token_ids.tolist() for output in expected]


async def test_an_aborting_pause_freezes_an_engine_with_a_request_that_cannot_be_continued(engines: Engines) -> None:
    engine = engines.updated
    penalised = make_request("p", max_tokens=400, presence_penalty=1.5, frequency_penalty=0.5, num_top_logprobs=3)
    expected = await engine.generate(penalised)
    assert {len(top) for top in expected.top_logprobs} == {3}
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(engine.generate(penalised))
        for _ in range(3):
            await wait_for_blocks(engine, 2)
            await engine.pause(PauseMode.ABORT)
            await engine.resume()
    assert kept.result().token_ids.tolist() == expected.token_ids.tolist()


async def test_an_updated_engine_cannot_be_told_from_a_fresh_one(engines: Engines, tmp_path: Path) -> None:
    before = await engines.updated.checksum()
    await publish(engines.updated, make_update(engines.policy_dirs[1], tmp_path, 1))
    assert await engines.updated.checksum() == await engines.fresh.checksum() != before
    requests = [make_request(str(i), prompt, max_tokens=100) for i, prompt in enumerate(PROMPTS)]
    updated, fresh = await generate_all(engines.updated, requests), await generate_all(engines.fresh, requests)
    assert [output.token_ids.tolist() for output in updated] == [output.token_ids.tolist() for output in fresh]
    assert {version for output in updated for version in output.versions.distinct} == {1}


async def test_kept_requests_continue_as_a_fresh_engine_would_with_exact_versions(
    engines: Engines, tmp_path: Path
) -> None:
    requests = [make_request(str(i), prompt, max_tokens=300) for i, prompt in enumerate(PROMPTS)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engines.updated.generate(request)) for request in requests]
        await wait_for_blocks(engines.updated, 5)
        await publish(engines.updated, make_update(engines.policy_dirs[1], tmp_path, 3), PauseMode.KEEP)
    for task, request in zip(tasks, requests, strict=True):
        output = task.result()
        num_old = list(output.versions).count(0)
        assert 0 < num_old < 300 and output.versions.spans == ((0, num_old), (3, 300))
        prompt = np.concatenate([request.prompt_token_ids, output.token_ids[:num_old]])
        continued = await engines.fresh.generate(make_request("c", prompt, max_tokens=300 - num_old))
        assert output.token_ids[num_old:].tolist() == continued.token_ids.tolist()


async def test_bfloat16_weights_are_within_the_limit_of_the_probe(tmp_path: Path) -> None:
    policy_dir = make_policy(tmp_path / "policy", seed=2, is_tied=False)
    engine = await start(policy_dir, "bfloat16", "bfloat16")
    output = await engine.generate(make_request("a", max_tokens=100, temperature=1.0))
    expected = reference_logprobs(policy_dir, PROMPTS[0], output, 1.0)
    assert (torch.tensor(output.logprobs) - expected).abs().max() < 0.3
    assert output.finish_reason is FinishReason.LENGTH
    await engine.close()


async def test_a_killed_core_is_an_engine_death_and_leaves_no_process(tmp_path: Path) -> None:
    engine = await start(make_policy(tmp_path / "policy", seed=3, is_tied=False), "killed")
    core = psutil.Process((await engine.statistics())["core_process_id"])
    processes = [core, *core.children(recursive=True)]
    calls = [asyncio.ensure_future(engine.generate(make_request(str(i), max_tokens=450))) for i in range(3)]
    await wait_for_blocks(engine, 2)
    core.kill()
    done, pending = await asyncio.wait(calls, timeout=PATIENCE_S)
    assert not pending and {type(call.exception()) for call in done} == {EngineDeadError}
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


async def test_a_published_adapter_is_sampled_as_weights_that_hold_it_and_one_alone_is_kept(tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy", seed=0, is_tied=False)
    engine = await start(policy, "adapter", dtype="bfloat16", adapter_rank=4)
    for version in (1, 2):
        update = make_adapter_update(policy, tmp_path, version, seed=version)
        await publish(engine, update, PauseMode.KEEP)
    assert await engine._llm.list_loras() == [1]
    output = await engine.generate(make_request("a", max_tokens=100, temperature=1.0))
    merged = make_merged_policy(policy, update, tmp_path / "merged")
    expected = reference_logprobs(merged, PROMPTS[0], output, 1.0)
    assert output.versions.distinct == {2} and (torch.tensor(output.logprobs) - expected).abs().max() < 0.3
    await engine.close()
