"""What a publish costs: its phases, and how long engines stand still, against a plain copy of the same bytes in memory.

A random Qwen3 policy of each size, one policy worker and one vLLM engine in processes of their own, eight requests at all times.
Versions are published one after the other; a row holds medians over them. The first two are left out: there the engine finds out where
each weight goes, and memory is used for the first time. The copy is made by one thread of this process, between two buffers that were
written before, after each publish and beside the same requests. ``acknowledge_ms`` pass before a pause: in them the engine ends the step
that it is in, whose tokens count. ``asked_to_resumed_per_copy`` is with that. With ``--lora-rank`` adapters train on every linear layer: a
row for them merged into the weights that are published, and one for them published alone. With ``--device cuda`` the worker and the engine
share one GPU, and the copy is made on it.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import arguments, conditions, report
from skyrl_async.composition.publishing import directory_in_memory, shared_memory
from skyrl_async.config.schema.policy import LoraConfig, LoraPublish
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import SendingPolicy
from skyrl_async.types import EngineRequest, PauseMode, SamplingParams
from skyrl_async.weight_sync.broadcast import WeightBroadcast, from_devices, from_files_alone
from skyrl_async.weight_sync.publisher import PublishTimes, WeightPublisher

NUM_REQUESTS = 8
MAX_MODEL_LEN = 1024
NUM_TOKENS = 256
MAX_PER_COPY = 1.5
"""From the request to the last engine resumed, over a plain copy."""
NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A policy."""

    name: str
    dtype: str
    """As served; training keeps float32."""
    shape: dict[str, int]
    """Of ``Qwen3Config``."""


def _size(name: str, dtype: str, vocabulary: int, width: int, layers: int, heads: int, head_width: int) -> Size:
    return Size(
        name=name,
        dtype=dtype,
        shape={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": head_width,
        },
    )


SIZES = (
    _size("2M", "float32", 512, 192, 4, 4, 48),
    _size("60M", "float32", 16384, 512, 14, 8, 64),
    _size("500M", "bfloat16", 32768, 1024, 28, 16, 128),
    _size("2B", "bfloat16", 151936, 2048, 28, 16, 128),  # for GPUs
)


@dataclass(slots=True)
class Clocked:
    """When tokens came."""

    times: list[float] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, begin: float, end: float) -> int:
        """Tokens that came between."""
        return bisect_left(self.times, end) - bisect_left(self.times, begin)

    async def play(self, engine: InferenceEngine, number: int) -> None:
        """Requests one after the other, for ever."""
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        for turn in range(1 << 30):
            request = EngineRequest(
                request_id=f"{number}-{turn}",
                prompt_token_ids=np.arange(16, dtype=np.int32),
                sampling=sampling,
                stream_interval=1,
            )
            async for block in engine.stream(request):
                self.times += [time.monotonic()] * len(block.token_ids)
                self._came.set()

    async def more(self, num_tokens: int) -> float:
        """Wait until so many more have come; returns how many that are per second."""
        num_before, began = len(self.times), time.monotonic()
        while len(self.times) < num_before + num_tokens:
            self._came.clear()
            await self._came.wait()
        return num_tokens / (time.monotonic() - began)


def make_policy(directory: Path, size: Size, seed: int, device: str) -> int:
    """Write a random policy, made on the device; returns its parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **size.shape, max_position_embeddings=MAX_MODEL_LEN, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, size.dtype))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.asynccontextmanager
async def publisher_of(
    size: Size, lora: LoraConfig | None, policy_dir: Path, root: Path, *, transfer: str, device: str
) -> AsyncIterator[tuple[WeightPublisher, InferenceEngine]]:
    """A publisher over a policy worker and an engine that run."""
    from skyrl_async.inference.engines.ray import start_ray_engines
    from skyrl_async.inference.vllm.boot import VLLMEngineConfig
    from skyrl_async.training.workers.policy_workers import PolicyWorkers

    settings = TrainingSettings(
        policy_path=str(policy_dir),
        serve_dtype=size.dtype,
        lora=lora,
        device=device,
        shares_weights=transfer == "ipc",
    )
    num_gpus = 0.5 if device == "cuda" else 0.0
    adapter = settings.published_adapter
    config = VLLMEngineConfig(
        name="engine-0",
        policy_dir=str(policy_dir),
        dtype=size.dtype,
        device=device,
        gpu_memory_utilization=0.3,
        adapter_rank=0 if adapter is None else adapter.rank,
        max_model_len=MAX_MODEL_LEN,
        call_timeout_s=300.0,
    )
    async with contextlib.AsyncExitStack() as stack:
        policy = await PolicyWorkers.start(settings, num_workers=1, num_gpus_per_worker=num_gpus)
        stack.push_async_callback(policy.close)  # started first: it takes most memory while it makes its optimizer's
        (engine,) = await start_ray_engines([config], num_gpus=num_gpus, log_dir=root / "logs", start_timeout_s=600.0)
        stack.push_async_callback(engine.close)
        directory = stack.enter_context(directory_in_memory(shared_memory()))
        publisher = WeightPublisher(
            client=InferenceEngineClient([engine], max_model_len=MAX_MODEL_LEN),
            policy=policy,
            directory=directory,
            bucket_bytes=64 << 20,
            load_bucket_bytes=64 << 20,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, time.monotonic),
            broadcast=_broadcast(policy, transfer),
            share=from_devices(policy) if transfer == "ipc" else from_files_alone,
        )
        yield publisher, engine


def _broadcast(policy: SendingPolicy, transfer: str) -> WeightBroadcast | None:
    if transfer != "gloo":
        return None
    return WeightBroadcast(
        policy=policy, backend=transfer, must_receive=lambda _: True, bucket_bytes=64 << 20, timeout_s=60.0
    )


def copy_seconds(num_bytes: int, device: str) -> float:
    """Of a plain copy, between buffers that are used again for every 128 MiB (1 GiB on a GPU): several times what caches hold."""
    size = min(num_bytes, 128 << 20 if device == "cpu" else 1 << 30)
    source, target = (make(size, dtype=torch.uint8, device=device) for make in (torch.ones, torch.zeros))
    _synchronize(device)
    started = time.perf_counter()
    for start in range(0, num_bytes, size):
        num_left = min(size, num_bytes - start)
        target[:num_left].copy_(source[:num_left])
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


async def measure(
    size: Size, lora: LoraConfig | None, *, num_publishes: int, seed: int, transfer: str, device: str
) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = make_policy(Path(scratch) / "policy", size, seed, device)
        root, policy_dir = Path(scratch), Path(scratch) / "policy"
        processes = publisher_of(size, lora, policy_dir, root, transfer=transfer, device=device)
        async with processes as (publisher, engine):
            tokens, done, copies, during, rates = Clocked(), [], [], [], []
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(tokens.play(engine, i), name=f"request-{i}") for i in range(NUM_REQUESTS)]
                for version in range(num_publishes + NUM_WARM_UP):
                    await tokens.more(2 * NUM_REQUESTS)  # the load before has every request's past computed anew
                    rate = await tokens.more(4 * NUM_REQUESTS)
                    began = time.monotonic()
                    times = await publisher.publish(version)
                    sent = began + times.gather + times.send
                    if version >= NUM_WARM_UP:
                        done.append(times)
                        copies.append(copy_seconds(times.num_bytes, device))
                        during.append(tokens.count(began, sent))
                        rates.append(rate)
                for task in playing:
                    task.cancel()
            publisher.close()
    published = "weights" if lora is None else "adapter" if lora.served_rank else "merged weights"
    row = _row(size, num_parameters, done, copies, during)
    return {"published": published} | row | {"tokens_per_s_before": median(rates)}


def _row(
    size: Size, num_parameters: int, done: list[PublishTimes], copies: list[float], during: list[int]
) -> dict[str, Any]:
    def ms(seconds: list[float]) -> float:
        return 1e3 * median(seconds)

    return {
        "policy": size.name,
        "parameters": num_parameters,
        "dtype": size.dtype,
        "mib": done[0].num_bytes / 2**20,
        "gather_ms": ms([times.gather for times in done]),
        "send_ms": ms([times.send for times in done]),
        "stage_ms": ms([times.stage for times in done]),
        "acknowledge_ms": ms([times.acknowledge for times in done]),
        "load_ms": ms([times.load for times in done]),
        "pause_ms": ms([times.pause for times in done]),
        "copy_ms": ms(copies),
        "pause_per_copy": median([times.pause / copy for times, copy in zip(done, copies, strict=True)]),
        "asked_to_resumed_per_copy": median(
            [(times.acknowledge + times.pause) / copy for times, copy in zip(done, copies, strict=True)]
        ),
        "tokens_during_send": median(during),
    }


def _ways(rank: int | None) -> list[LoraConfig | None]:
    if rank is None:
        return [None]
    return [LoraConfig(rank=rank, alpha=float(rank), publish=publish) for publish in LoraPublish]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=[size.name for size in SIZES],
        help="of the policies; all but 2B",
    )
    parser.add_argument("--lora-rank", type=int, help="of adapters that train in place of the weights; none by default")
    parser.add_argument(
        "--transfer", choices=["shm", "gloo", "ipc"], default="shm", help="how the engine comes by a version"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the policy worker and the engine")
    options = parser.parse_args()
    if options.transfer == "ipc" and options.device != "cuda":
        parser.error("--transfer ipc needs --device cuda: CUDA IPC is for memory of CUDA devices")
    import ray

    torch.set_num_threads(1)
    num_publishes = 3 if options.quick else 9
    wanted = options.sizes or (["2M", "60M"] if options.quick else ["2M", "60M", "500M"])
    under = conditions(
        num_publishes=num_publishes,
        num_requests=NUM_REQUESTS,
        is_quick=options.quick,
        transfer=options.transfer,
        device=torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    )
    measure_one = partial(
        measure,
        num_publishes=num_publishes,
        seed=options.seed,
        transfer=options.transfer,
        device=options.device,
    )
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4)
    try:
        rows = [
            asyncio.run(measure_one(size, lora))
            for size in SIZES
            if size.name in wanted
            for lora in _ways(options.lora_rank)
        ]
    finally:
        ray.shutdown()
    large = [row for row in rows if row["policy"] != "2M" and row["published"] != "adapter"]
    most = max((row["asked_to_resumed_per_copy"] for row in large), default=None)
    figures = {
        "pause_per_copy_from_60m": max((row["pause_per_copy"] for row in large), default=None),
        "asked_to_resumed_per_copy_from_60m": most,
        "is_goal_met": None if most is None else most <= MAX_PER_COPY,
        "conditions": under,
    }
    report("a publish, milliseconds", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
