"""The endpoint beside vLLM's and SGLang's routers: the same chat requests over one and two engines, as single requests and as sessions.

Each router stands before bare vLLM servers with our engines' settings, one server per engine; ours is the endpoint over that many engines.
A session is an agent's: turn after turn, each with all messages before it. All serve the untrained default policy, and sample given
numbers of tokens, with token ids and log-probs; SGLang's router leaves ``return_token_ids`` out of what it passes on, so its replies have
log-probs only. All route by cached prefixes, as they do by default.

``ratio_tokens_per_s`` is of the median over the rounds to that of the bare server without a router; with two engines, to two servers of
which each client uses one. It needs both routers: ``uv run --extra routers -m benchmarks.endpoint_routers``.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.endpoint_overhead import LOGPROBS, Server, bare_server, free_port, process_server
from benchmarks.report import arguments, conditions, report
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace import Trace

ROUTERS = {"vllm_router": "vllm-router", "sglang_router": "sglang-router"}
"""Module -> name of its package."""
NUM_CLIENTS = 32
LOADS = {"single": (1, 128), "sessions": (12, 32)}
"""Turns of a session, and tokens sampled in each."""
_NUM_ROUNDS = 5


async def play(client: httpx.AsyncClient, server: Server, name: str, num_turns: int, num_tokens: int) -> None:
    """One session."""
    headers = {"Authorization": f"Bearer {server.api_key}", "X-Session-ID": name}
    body = {"model": "policy", "ignore_eos": True, "max_tokens": num_tokens, **LOGPROBS}
    messages: list[dict[str, Any]] = []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Extend {1000 + hash((name, turn)) % 9000} until 0."})
        answer = await client.post(
            f"{server.url}/chat/completions", json=body | {"messages": messages}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        assert reply["usage"]["completion_tokens"] == num_tokens
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


async def measure(
    clients: Sequence[httpx.AsyncClient], servers: Sequence[Server], load: str, num_sessions: int
) -> float:
    """Tokens per second; each client plays one session after another on one of ``servers``."""
    left = iter(range(num_sessions))
    marker = time.monotonic_ns()  # no prefix was cached in a measurement before

    async def work(client: httpx.AsyncClient, server: Server) -> None:
        for i in left:
            await play(client, server, f"{marker}-{i}", *LOADS[load])

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for client, server in zip(clients, itertools.cycle(servers)):
            group.create_task(work(client, server))
    num_turns, num_tokens = LOADS[load]
    return num_sessions * num_turns * num_tokens / (time.perf_counter() - started)


async def compare(config: Config, *, num_sessions: int) -> list[dict[str, Any]]:
    """One row per load, over the engines of ``config``."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = await stack.enter_async_context(
            started_parts(config, directory, trace=Trace(None, time.monotonic), say=lambda text: print(f"[{text}]"))
        )
        await parts.publisher.publish(0)
        await parts.policy.export_hf(directory / "policy")
        bare = [
            await stack.enter_async_context(bare_server(config, directory / "policy", directory / f"bare-{i}.log"))
            for i in range(config.engine.num_engines)
        ]
        told = json.loads((directory / "endpoint.json").read_text())
        servers = {"bare": bare, "ours": [Server(url=told["base_url"], api_key=told["api_key"])]}
        for module in ROUTERS:
            servers[module] = [await stack.enter_async_context(router(module, bare, directory / f"{module}.log"))]
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(timeout=None, verify=False)) for _ in range(NUM_CLIENTS)
        ]
        rows = []
        for load, (num_turns, _) in LOADS.items():
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for i in range(_NUM_ROUNDS + 1):
                for name in list(servers)[:: 1 if i % 2 else -1]:
                    rate = await measure(clients, servers[name], load, max(NUM_CLIENTS, num_sessions // num_turns))
                    if i:  # the first round warms up
                        rates[name].append(rate)
            medians = {name: statistics.median(found) for name, found in rates.items()}
            row: dict[str, Any] = {"engines": len(bare), "load": load, "bare_tokens_per_s": medians.pop("bare")}
            for name, median in medians.items():
                row[f"ratio_tokens_per_s_{name}"] = median / row["bare_tokens_per_s"]
            print(row, flush=True)
            rows.append(row)
        return rows


@contextlib.asynccontextmanager
async def router(module: str, servers: Sequence[Server], log: Path) -> AsyncIterator[Server]:
    """One of ``ROUTERS`` before bare servers."""
    urls = " ".join(server.url.removesuffix("/v1") for server in servers)
    words = f"-m {module}.launch_router --worker-urls {urls} --host 127.0.0.1 --prometheus-port {free_port()} --log-level error"
    async with process_server(words, {}, log) as server:
        yield server


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration, such as engine.max_num_seqs=256")
    options = parser.parse_args()
    fixed = ["server.enabled=true", "policy.warm_start.enabled=false", f"trainer.seed={options.seed}"]
    under = conditions(seed=options.seed, loads=LOADS, clients=NUM_CLIENTS, overrides=options.overrides)
    rows = []
    for num_engines in (1, 2):
        config = from_overrides(*fixed, f"engine.num_engines={num_engines}", *options.overrides)
        rows += asyncio.run(compare(config, num_sessions=128 if options.quick else 512))
    report("chat completions over bare vLLM servers", {"conditions": under}, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
