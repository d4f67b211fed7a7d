"""What the engine tests of tests/cpu and tests/gpu share: tiny policies, updates, requests, retries, and a reference."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl_async.columns import TokenIds, token_ids
from skyrl_async.inference.engines.ray import RayEngine
from skyrl_async.inference.vllm.engine import VLLMEngine, VLLMEngineConfig
from skyrl_async.types import (
    Adapter,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    SamplingParams,
    WeightUpdate,
)
from skyrl_async.weights.formats import tensor_names

EOS = 1
MAX_MODEL_LEN = 512
PROMPTS = [tuple(range(5 + i, 9 + 2 * i)) for i in range(6)]


_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def config_on_gpu(name: str, policy_dir: Path, **settings: Any) -> VLLMEngineConfig:
    """An engine of this configuration does not measure, as it boots, what other tests leave of the GPU: they end meanwhile."""
    return VLLMEngineConfig(
        name=name,
        policy_dir=str(policy_dir),
        device="cuda",
        gpu_memory_utilization=0.1,
        extra_args={"kv_cache_memory_bytes": 1 << 30},
        **settings,
    )


def make_policy(directory: Path, *, seed: int, is_tied: bool, max_model_len: int = MAX_MODEL_LEN) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(**_SIZES, max_position_embeddings=max_model_len, tie_word_embeddings=is_tied)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_moe_policy(directory: Path, *, seed: int) -> Path:
    """Two of four experts compute each token."""
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**_SIZES, **experts, max_position_embeddings=MAX_MODEL_LEN, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def make_update(policy_dir: Path, directory: Path, version: int) -> WeightUpdate:
    """The policy's weights in one file, as the trainer sends them; the borders of load buckets fall inside of fused layers."""
    weights = load_file(policy_dir / "model.safetensors")
    directory.mkdir(exist_ok=True)
    path = directory / f"{version}.safetensors"
    save_file(weights, path)
    return WeightUpdate(
        version=version,
        path=str(path),
        manifest={name: ("float32", tuple(tensor.shape)) for name, tensor in weights.items()},
        num_bytes=sum(tensor.nbytes for tensor in weights.values()),
        load_bucket_bytes=1,
    )


def make_adapter_update(
    policy_dir: Path,
    directory: Path,
    version: int,
    *,
    seed: int,
    rank: int = 4,
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
) -> WeightUpdate:
    """A random adapter over the policy's weights, described by peft's own file."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(policy_dir / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in projections:
            a, b = tensor_names(layer)
            tensors[a] = 0.1 * torch.randn(rank, weight.shape[1], generator=random)
            tensors[b] = 0.1 * torch.randn(weight.shape[0], rank, generator=random)
    directory = directory / f"adapter-{version}"
    directory.mkdir(parents=True)
    adapter = Adapter(rank=rank, alpha=2.5 * rank)
    LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(projections)).save_pretrained(directory)
    path = directory / "adapter_model.safetensors"
    save_file(tensors, path)
    return WeightUpdate(
        version=version,
        path=str(path),
        manifest={name: ("float32", tuple(tensor.shape)) for name, tensor in tensors.items()},
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        adapter=adapter,
    )


def make_merged_policy(policy_dir: Path, update: WeightUpdate, directory: Path) -> Path:
    """The policy with the update's adapter in its weights, by peft."""
    base = Qwen3ForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, Path(update.path).parent)
    model.merge_and_unload().save_pretrained(directory)
    return directory


def truncate(path: Path) -> Path:
    truncated = path.with_suffix(".truncated")
    truncated.write_bytes(path.read_bytes()[:-10])
    return truncated


def make_request(
    request_id: str,
    prompt: Sequence[int] | TokenIds = PROMPTS[0],
    *,
    max_tokens: int = 64,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    stream_interval: int | None = None,
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=token_ids(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=temperature, **sampling),
        stream_interval=stream_interval,
    )


async def publish(
    engine: VLLMEngine | RayEngine, update: WeightUpdate, mode: PauseMode = PauseMode.ABORT, *, is_staged: bool = False
) -> None:
    if is_staged:
        await engine.stage_weights(update)
    await engine.switch_weights(update, mode)
    await engine.resume()


async def generate_all(engine: VLLMEngine, requests: list[EngineRequest]) -> list[EngineOutput]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request)) for request in requests]
    return [task.result() for task in tasks]


async def generate_with_retries(engine: VLLMEngine, request: EngineRequest) -> list[EngineOutput]:
    """Continue in token space until the engine says it is finished; one output per segment."""
    segments: list[EngineOutput] = []
    prompt, remaining = request.prompt_token_ids, request.sampling.max_tokens
    while True:
        segment = await engine.generate(
            make_request(f"{request.request_id}-{len(segments)}", prompt, max_tokens=remaining)
        )
        segments.append(segment)
        prompt, remaining = follow(prompt, segment), remaining - len(segment.token_ids)
        if segment.finish_reason is not FinishReason.ABORT:
            return segments


async def wait_for_blocks(engine: VLLMEngine | RayEngine, num_blocks: int, *, num_others: int = 0) -> None:
    """Until a request of its own has been given so many blocks since ``num_others`` others arrived, and they sampled too.

    Only in an engine of this process do requests arrive in the order in which they were sent.
    """
    for number in itertools.count():  # one may end before a busy machine lets the others begin
        request = make_request(f"metronome-{number}", max_tokens=500)
        async with contextlib.aclosing(engine.stream(request)) as blocks:
            async for _ in blocks:
                if num_others and (await engine.statistics())["num_requests"] <= num_others:
                    continue
                num_others = 0
                num_blocks -= 1
                if num_blocks == 0:
                    return


def follow(prompt: Sequence[int] | TokenIds, output: EngineOutput) -> TokenIds:
    """The prompt that goes on after an output."""
    return np.concatenate([token_ids(prompt), output.token_ids])


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids.tolist()]


def reference_logprobs(
    policy_dir: Path, prompt: Sequence[int] | TokenIds, output: EngineOutput, temperature: float
) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    whole = torch.from_numpy(follow(prompt, output)).long()
    with torch.no_grad():
        logprobs = (model(whole[None]).logits[0] / temperature).log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, whole[len(prompt) :, None])[:, 0]


async def check_limited_tokens(generate: Callable[[SamplingParams], Awaitable[EngineOutput]]) -> None:
    """``generate`` obeys stop tokens, the minimum, the bias, allowed tokens and bad words, from the first token on."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    first, second, *_ = (await generate(greedy)).token_ids.tolist()

    async def sampled(**limits: Any) -> tuple[list[int], FinishReason | None]:
        output = await generate(replace(greedy, **limits))
        return output.token_ids.tolist(), output.finish_reason

    assert await sampled(stop_token_ids=(first,)) == ([first], FinishReason.STOP)
    later, _ = await sampled(stop_token_ids=(first,), min_tokens=5)
    assert first not in later[:5] and len(later) > 5
    ended, reason = await sampled(ignore_eos=False, logit_bias=((EOS, 100.0),), min_tokens=5)
    assert len(ended) == 6 and ended.index(EOS) == 5 and reason is FinishReason.STOP
    assert (await sampled(logit_bias=((17, 100.0),)))[0] == [17] * 12
    assert set((await sampled(allowed_token_ids=(7, 8, 9)))[0]) <= {7, 8, 9}
    assert first not in (await sampled(bad_words=((first,),)))[0]
    in_order, _ = await sampled(bad_words=((first, second),))
    assert in_order[0] == first and (first, second) not in pairwise(in_order)
