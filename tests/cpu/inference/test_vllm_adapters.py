"""Adapters in a vLLM engine, on CPU: against engines that were booted with the same adapters in their weights, by peft."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from skyrl_async.columns import TokenIds
from skyrl_async.errors import PublishError
from skyrl_async.inference.generation import joined
from skyrl_async.inference.vllm.engine import VLLMEngine, VLLMEngineConfig
from skyrl_async.types import EngineOutput, FinishReason, PauseMode, WeightUpdate
from skyrl_async.weights.formats import CONFIG_FILE, tensor_names
from skyrl_async.weights.transfer_group import GLOO, WeightSender
from tests.engine_checks import (
    PROMPTS,
    generate_all,
    generate_with_retries,
    make_adapter_update,
    make_merged_policy,
    make_policy,
    make_request,
    make_update,
    publish,
    reference_logprobs,
    wait_for_blocks,
)
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

REQUESTS = [make_request(str(i), prompt, max_tokens=80) for i, prompt in enumerate(PROMPTS)]
LONG = 400
"""Tokens of an answer that is in flight for longer than a busy machine takes to publish."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a policy with a tied head, two adapters over it, and the policy with the first in its weights."""
    root = tmp_path_factory.mktemp("adapters")
    make_policy(root / "policy", seed=0, is_tied=True)
    make_merged_policy(root / "policy", adapter(root, 0), root / "merged")
    return root


def adapter(root: Path, version: int) -> WeightUpdate:
    """Even versions are one adapter, odd ones another."""
    directory = root / f"version-{version}"
    while directory.exists():
        directory = directory.with_name(f"{directory.name}-again")
    return make_adapter_update(root / "policy", directory, version, seed=version % 2)


async def start(root: Path, name: str = "engine", **more: object) -> VLLMEngine:
    config = VLLMEngineConfig(name=name, policy_dir=str(root / "policy"), adapter_rank=4, **more)  # type: ignore[arg-type]
    return await VLLMEngine.start(config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(root: Path) -> AsyncIterator[VLLMEngine]:
    engine = await start(root)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine_1(engine: VLLMEngine, root: Path) -> VLLMEngine:
    """Serves the other adapter, as version 1."""
    await publish(engine, adapter(root, 1))
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def merged_engine(root: Path) -> AsyncIterator[VLLMEngine]:
    """Was booted with the adapter of even versions in its weights."""
    engine = await VLLMEngine.start(VLLMEngineConfig(name="merged", policy_dir=str(root / "merged")))
    yield engine
    await engine.close()


def assert_same_answers(found: list[EngineOutput], expected: list[EngineOutput], *, version: int) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here.token_ids.tolist() == there.token_ids.tolist() and set(here.versions) == {version}
        assert (torch.tensor(here.logprobs) - torch.tensor(there.logprobs)).abs().max() < 1e-4


def assert_sampled_from(policy: Path, prompt: Sequence[int] | TokenIds, output: EngineOutput, where: range) -> None:
    """The log-probs of these tokens are those of the policy's float32 forward over all of them."""
    expected = reference_logprobs(policy, prompt, output, 1.0)
    assert (torch.tensor(output.logprobs) - expected)[where.start : where.stop].abs().max() < 1e-4


async def test_a_published_adapter_is_sampled_as_weights_that_hold_it_and_one_alone_is_kept(
    engine: VLLMEngine, merged_engine: VLLMEngine, root: Path
) -> None:
    checksums = []
    for version in range(4):
        await publish(engine, adapter(root, version), is_staged=True)
        checksums.append(await engine.checksum())
        assert await engine._llm.list_loras() == [1] and await engine.version() == version
        if version % 2 == 0:
            outputs = await generate_all(engine, REQUESTS)
            assert_same_answers(outputs, await generate_all(merged_engine, REQUESTS), version=version)
    assert checksums[:2] == checksums[2:] and checksums[0] != checksums[1]


@pytest.mark.parametrize("mode", PauseMode)
async def test_requests_in_flight_go_on_with_the_new_adapter_and_bear_exact_versions(
    engine_1: VLLMEngine, root: Path, mode: PauseMode
) -> None:
    requests = [make_request(str(i), prompt, max_tokens=LONG) for i, prompt in enumerate(PROMPTS[:3])]
    before = await generate_all(engine_1, requests)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate_with_retries(engine_1, request)) for request in requests]
        await wait_for_blocks(engine_1, 3)
        await publish(engine_1, adapter(root, 2), mode)
    for task, request, old in zip(tasks, requests, before, strict=True):
        segments = task.result()
        assert [s.finish_reason for s in segments[:-1]] == [FinishReason.ABORT] * (mode is PauseMode.ABORT)
        whole = joined(segments)
        num_old = tuple(whole.versions).count(1)
        assert 0 < num_old < LONG and tuple(whole.versions) == (1,) * num_old + (2,) * (LONG - num_old)
        assert whole.token_ids[:num_old].tolist() == old.token_ids[:num_old].tolist()
        assert_sampled_from(root / "merged", request.prompt_token_ids, whole, range(num_old, LONG))


async def test_an_adapter_that_was_broadcast_is_served_as_one_that_is_mapped(engine_1: VLLMEngine, root: Path) -> None:
    await publish(engine_1, adapter(root, 2))
    mapped = await engine_1.checksum()
    sender, update = WeightSender(torch.device("cpu")), adapter(root, 3)
    await publish(engine_1, update)
    place = sender.open("127.0.0.1", num_receivers=1, backend=GLOO, timeout_s=PATIENCE_S)
    await engine_1.connect_transfer(asdict(place) | {"rank": 1})
    broadcast = replace(adapter(root, 2), version=4)
    async with asyncio.TaskGroup() as tasks:
        path = Path(broadcast.path)
        tasks.create_task(asyncio.to_thread(sender.send, path, 1000), name="send")
        tasks.create_task(engine_1.receive_weights(broadcast, ()), name="receive")
    path.rename(path.with_name("elsewhere"))  # noqa: ASYNC240 - as on another machine
    try:
        await publish(engine_1, broadcast)
    finally:
        path.with_name("elsewhere").rename(path)
        sender.close()
    assert await engine_1.checksum() == mapped and await engine_1.version() == 4


async def test_an_engine_serves_the_weights_it_booted_with_up_to_its_first_adapter_then_what_the_others_serve(
    engine: VLLMEngine, root: Path
) -> None:
    joining = await start(root, "joining")
    request = make_request("in flight", max_tokens=LONG)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(joining.generate(request))
        await wait_for_blocks(joining, 3)
        await publish(joining, adapter(root, 2), PauseMode.KEEP)
    output = task.result()
    num_old = tuple(output.versions).count(0)
    assert 0 < num_old < LONG
    assert_sampled_from(root / "policy", PROMPTS[0], output, range(num_old))
    assert_sampled_from(root / "merged", PROMPTS[0], output, range(num_old, LONG))

    await publish(engine, adapter(root, 2))
    assert await joining.checksum() == await engine.checksum()
    await joining.close()


async def test_a_new_request_does_not_see_prefixes_cached_under_the_old_adapter(
    engine_1: VLLMEngine, merged_engine: VLLMEngine, root: Path
) -> None:
    request = make_request("long", tuple(range(10, 210)))
    for mode in PauseMode:
        await publish(engine_1, adapter(root, 1))
        await engine_1.generate(request)
        await publish(engine_1, adapter(root, 2), mode)
        new = await engine_1.generate(request)
        assert_same_answers([new], [await merged_engine.generate(request)], version=2)


async def test_an_update_that_cannot_be_an_adapter_of_the_policy_is_refused_and_the_old_one_serves_on(
    engine_1: VLLMEngine, root: Path, tmp_path: Path
) -> None:
    checksum, before = await engine_1.checksum(), await generate_all(engine_1, REQUESTS)
    good = adapter(tmp_path_with_policy(root, tmp_path), 5)
    layer = "model.layers.1.mlp.up_proj"
    a, b = tensor_names(layer)
    renamed = {name.replace("layers.1.", "layers.7."): entry for name, entry in good.manifest.items()}
    bad = {
        "holds all weights, and this engine takes adapters of rank 4": make_update(root / "policy", tmp_path, 5),
        "adapts model.layers.7.mlp.down_proj, which is no matrix": replace(good, manifest=renamed),
        rf"has {a} as \(3, 64\), expected \(4, 64\)": replace(good, manifest=good.manifest | {a: ("float32", (3, 64))}),
        f"lacks {b}": replace(good, manifest={n: e for n, e in good.manifest.items() if n != b}),
        "norm.weight is no tensor of an adapter": replace(
            good, manifest=good.manifest | {"model.norm.weight": ("float32", (64,))}
        ),
        f"the manifest, against the first update, lacks {a}": without(good, layer, tmp_path / "less"),
        "lora_alpha as 99, expected 10": described(good, tmp_path / "described", lora_alpha=99),
        "adapter_config.json cannot be read": replace(good, path=linked(good, tmp_path / "undescribed")),
    }
    for message, update in bad.items():
        with pytest.raises(PublishError, match=message):
            await publish(engine_1, update)
        await engine_1.resume()
    assert await engine_1.checksum() == checksum and await engine_1.version() == 1
    assert_same_answers(await generate_all(engine_1, REQUESTS), before, version=1)


def tmp_path_with_policy(root: Path, tmp_path: Path) -> Path:
    (tmp_path / "policy").symlink_to(root / "policy")
    return tmp_path


def without(update: WeightUpdate, layer: str, directory: Path) -> WeightUpdate:
    """A whole adapter of fewer layers."""
    names = tensor_names(layer)
    directory.mkdir()
    path = directory / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(update.path).items() if n not in names}, path)
    return replace(
        update,
        path=str(path),
        manifest={name: entry for name, entry in update.manifest.items() if name not in names},
    )


def described(update: WeightUpdate, directory: Path, **changes: object) -> WeightUpdate:
    path = linked(update, directory)
    content = json.loads(Path(update.path).with_name(CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps(content | changes))
    return replace(update, path=path)


def linked(update: WeightUpdate, directory: Path) -> str:
    """The update's tensors in another directory, without a description."""
    directory.mkdir()
    path = directory / Path(update.path).name
    path.symlink_to(update.path)
    return str(path)


async def test_layers_that_vllm_would_leave_out_in_silence_are_refused(root: Path, tmp_path: Path) -> None:
    engine = await start(root, "restricted", adapter_targets=("self_attn.q_proj", "o_proj"))
    before = await engine.checksum()
    with pytest.raises(
        PublishError, match=r"cannot adapt model.layers.0.mlp.down_proj \(and 5 more layers\): name them"
    ):
        await publish(engine, adapter(root, 2))
    await engine.resume()
    assert await engine.checksum() == before
    some = make_adapter_update(root / "policy", tmp_path, 3, seed=3, projections=("q_proj", "o_proj"))
    await publish(engine, some)
    (output,) = await generate_all(engine, REQUESTS[:1])
    assert_sampled_from(make_merged_policy(root / "policy", some, tmp_path / "merged"), PROMPTS[0], output, range(80))
    await engine.close()


async def test_an_engine_for_all_weights_refuses_an_adapter(merged_engine: VLLMEngine, root: Path) -> None:
    with pytest.raises(PublishError, match="holds an adapter alone, and this engine takes all weights"):
        await publish(merged_engine, adapter(root, 2))
    await merged_engine.resume()
