"""What the endpoint costs: the same chat requests through it and through a bare vLLM server with the same engine settings, in one run.

Both serve the untrained default policy, and sample given numbers of tokens. Each concurrency is measured in several rounds, bare
and ours in turn, and each ratio is of one round: its median over the rounds, and as ``..._range`` the least and the greatest. A
difference that lies within the range says nothing: on two cores shared with others single rounds were between 0.74 and 1.33 where
the median was 1. ``--quick`` has as many rounds, of a third of the requests, which scatter more.

``ratio_tokens_per_s`` is ours over bare (higher is better), ``ratio_p50`` and ``ratio_p99`` are ours over bare in latency (lower is
better); ``ratio_tokens_per_s_with_updates`` is ours, with a weight update every second, over bare without any.
``ratio_tokens_per_s_with_logprobs`` is of requests for token ids and log-probs on both sides, which is what sessions record of every
request. The requests' client, which is the same for both, runs in this process.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import arguments, conditions, report
from skyrl_async.composition.parts import Parts
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace import Trace

CONCURRENCIES = {1: 24, 16: 192, 64: 384, 256: 768}
"""Requests open at once -> requests of one measurement, of about four seconds."""
MIN_TOKENS, MAX_TOKENS = 32, 224
"""Sampled per request, evenly spread: answers of one length would all end, and begin, in the same moment."""
BARE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # As ours: by default it closes idle connections after 5 s, just when the client is about to use them again.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
_UPDATE_INTERVAL_S = 1.0
_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Something that answers chat requests."""

    url: str
    """With ``/v1``."""
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one measurement showed."""

    tokens_per_s: float
    p50: float
    """Seconds."""
    p99: float


def num_tokens(i: int) -> int:
    """Length of answer ``i``, the same in every measurement."""
    return MIN_TOKENS + i * 97 % (MAX_TOKENS - MIN_TOKENS + 1)


async def measure(
    clients: Sequence[httpx.AsyncClient], server: Server, concurrency: int, num_requests: int, **more: Any
) -> Load:
    """Send ``num_requests``, ``concurrency`` at a time, each from a client of its own; ``more`` goes into the bodies."""
    latencies: list[float] = []
    left = iter(range(num_requests))
    body = {
        "model": "policy",
        "ignore_eos": True,
        "temperature": 1.0,
    }

    async def work(client: httpx.AsyncClient) -> None:
        for i in left:
            started = time.perf_counter()
            messages = [{"role": "user", "content": f"Extend {1000 + i % 9000} until 0."}]
            headers = {"Authorization": f"Bearer {server.api_key}"}
            answer = await client.post(
                f"{server.url}/chat/completions",
                json=body | more | {"messages": messages, "max_tokens": num_tokens(i)},
                headers=headers,
            )
            assert answer.json()["usage"]["completion_tokens"] == num_tokens(i), answer.text
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(concurrency):
            group.create_task(work(clients[i]), name=f"client-{i}")
    seconds = time.perf_counter() - started
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return Load(tokens_per_s=sum(map(num_tokens, range(num_requests))) / seconds, p50=cuts[49], p99=cuts[98])


@contextlib.asynccontextmanager
async def bare_server(config: Config, policy_dir: Path, log: Path) -> AsyncIterator[Server]:
    """vLLM's own OpenAI server, with the settings that our engines are started with."""
    words = (
        f"-m vllm.entrypoints.launchers.api_server.entry --model {policy_dir} --served-model-name policy "
        f"--host 127.0.0.1 --dtype {config.policy.dtype.name} --max-num-seqs {config.engine.max_num_seqs} --enforce-eager "
        "--distributed-executor-backend uni --scheduling-policy priority --disable-log-stats --disable-uvicorn-access-log "
        "--generation-config vllm"
    )
    environment = BARE_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_cache_gb)}
    async with process_server(words, environment, log) as server:
        yield server


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.asynccontextmanager
async def process_server(words: str, environment: dict[str, str], log: Path) -> AsyncIterator[Server]:
    """A server that Python runs with the arguments ``words`` and a ``--port``, and whose output goes to ``log``."""
    port = free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words.split(), "--port", str(port)),
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        await _until_up(server, process, log)
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _until_up(server: Server, process: asyncio.subprocess.Process, log: Path) -> None:
    """A server outside this package says that it is up by answering, and by nothing else."""
    async with asyncio.timeout(180), httpx.AsyncClient() as client:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"a server ended:\n{(await asyncio.to_thread(log.read_text))[-2000:]}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{server.url}/models")).status_code == 200:
                    return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def updates(parts: Parts, version: int) -> AsyncIterator[list[float]]:
    """A weight update every second while the block runs; yields the list of their pauses, seconds."""
    pauses: list[float] = []

    async def publish() -> None:
        number = version
        while True:
            await asyncio.sleep(_UPDATE_INTERVAL_S)
            number += 1
            pauses.append((await parts.publisher.publish(number)).pause)

    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(publish(), name="updates")
        yield pauses
        publishing.cancel()


def figures_of(loads: dict[str, list[Load]]) -> dict[str, Any]:
    """Medians over the rounds, and the range of each ratio: of ``bare``, ``ours``, ``bare_logprobs``, ``logprobs`` and ``updated``."""
    figures: dict[str, Any] = {
        "bare_tokens_per_s": statistics.median(load.tokens_per_s for load in loads["bare"]),
        "tokens_per_s": statistics.median(load.tokens_per_s for load in loads["ours"]),
        "bare_p50": statistics.median(load.p50 for load in loads["bare"]),
    }
    for name, ours, bare, figure in (
        ("ratio_tokens_per_s", "ours", "bare", "tokens_per_s"),
        ("ratio_p50", "ours", "bare", "p50"),
        ("ratio_p99", "ours", "bare", "p99"),
        ("ratio_tokens_per_s_with_logprobs", "logprobs", "bare_logprobs", "tokens_per_s"),
        ("ratio_tokens_per_s_with_updates", "updated", "bare", "tokens_per_s"),
    ):
        ratios = [getattr(x, figure) / getattr(y, figure) for x, y in zip(loads[ours], loads[bare], strict=True)]
        figures |= {name: statistics.median(ratios), f"{name}_range": [round(min(ratios), 2), round(max(ratios), 2)]}
    return figures


async def compare(
    parts: Parts,
    clients: Sequence[httpx.AsyncClient],
    bare: Server,
    ours: Server,
    concurrency: int,
    *,
    num_requests: int,
    num_rounds: int,
) -> dict[str, Any]:
    """One row, see ``figures_of``; the order of the two changing from round to round."""
    loads: dict[str, list[Load]] = {name: [] for name in ("bare", "ours", "bare_logprobs", "logprobs", "updated")}
    pauses: list[float] = []
    for i in range(num_rounds):
        turns = [
            ("bare", bare, {}),
            ("ours", ours, {}),
            ("bare_logprobs", bare, LOGPROBS),
            ("logprobs", ours, LOGPROBS),
        ]
        for name, server, more in turns[:: 1 if i % 2 == 0 else -1]:
            loads[name].append(await measure(clients, server, concurrency, num_requests, **more))
        async with updates(parts, version=concurrency * 1_000_000 + i * 10_000) as seconds:
            loads["updated"].append(await measure(clients, ours, concurrency, num_requests))
        pauses += seconds
    return {
        "concurrency": concurrency,
        **figures_of(loads),
        "updates": len(pauses),
        "pause_median_s": statistics.median(pauses) if pauses else None,
    }


async def run(config: Config, *, is_quick: bool) -> list[dict[str, Any]]:
    """All concurrencies, over one bare server and one endpoint, of which only one works at a time."""
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = await stack.enter_async_context(
            started_parts(config, directory, trace=Trace(None, time.monotonic), say=lambda text: print(f"[{text}]"))
        )
        await parts.publisher.publish(0)
        await parts.policy.export_hf(directory / "policy")
        print("[starting the bare server]")
        bare = await stack.enter_async_context(bare_server(config, directory / "policy", directory / "bare.log"))
        told = json.loads((directory / "endpoint.json").read_text())
        ours = Server(url=told["base_url"], api_key=told["api_key"])
        # A pool of many connections would take longer to find a free one than a server to answer.
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(timeout=None, verify=False))
            for _ in range(max(CONCURRENCIES))
        ]
        for server in (bare, ours):
            await measure(clients, server, 8, 32)
        for concurrency, num_requests in CONCURRENCIES.items():
            num_requests = max(concurrency, num_requests // (3 if is_quick else 1))
            row = await compare(
                parts, clients, bare, ours, concurrency, num_requests=num_requests, num_rounds=_NUM_ROUNDS
            )
            rows.append(row)
            least, greatest = row["ratio_tokens_per_s_range"]
            print(
                f"concurrency {concurrency}: {row['ratio_tokens_per_s']:.2f} of bare, {least} to {greatest} in {_NUM_ROUNDS} rounds",
                flush=True,
            )
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration, such as engine.max_num_seqs=256")
    options = parser.parse_args()
    overrides = [
        "server.enabled=true",
        "policy.warm_start.enabled=false",
        f"trainer.seed={options.seed}",
        *options.overrides,
    ]
    config = from_overrides(*overrides)
    under = conditions(seed=options.seed, tokens=(MIN_TOKENS, MAX_TOKENS), is_quick=options.quick, overrides=overrides)
    rows = asyncio.run(run(config, is_quick=options.quick))
    at_64 = next(row for row in rows if row["concurrency"] == 64)
    names = ("ratio_tokens_per_s", "ratio_tokens_per_s_with_updates")
    figures = {f"{name}{kind}_at_64": at_64[f"{name}{kind}"] for name in names for kind in ("", "_range")}
    figures["conditions"] = under
    report("chat completions, ours over a bare vLLM server", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
