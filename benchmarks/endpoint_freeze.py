"""What huge requests do to another session's stream: its longest silence, and how long ``/health`` takes.

A front end in a process of its own serves an engine that gives a token every ten milliseconds, in a context of ``context`` tokens. Bodies
of one prompt that are larger than such a prompt can be are refused unread; others are read, parsed and compared with the context. One
session streams while others send bodies of ``mib`` MiB, four each and all at once, from another process. ``gap_alone_s`` is the stream's
longest silence before that, and ``longest_gap_s`` beside it; ``statuses`` counts the answers. Memory is the front end's resident one, at
its peak and two seconds after the last answer. The kinds of body: one long message; many short ones; tool definitions; prompts as text
and as ids; items of the Responses API; Anthropic's messages; texts to be tokenized or counted; ``tokenized``, a message of an eighth of
that size that fits a context of 2**20 tokens; and values that say nothing, which are no prompt at all.
"""

import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import arguments, conditions, report
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.server.process import EndpointServer, EndpointSettings
from skyrl_async.tasks.lagged_fibonacci import LaggedFibonacciTask
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason

_CONTROLLER_KEY = "controller"
_TOKEN_INTERVAL_S = 0.01
_BODIES_PER_SESSION = 4
"""After three overflows a session is refused."""
_SPAWN = multiprocessing.get_context("spawn")


def _message(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _tool(i: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{i}", "description": "a tool " * 1000}}


CASES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "one message": ("/v1/chat/completions", lambda n: {"messages": _message("hello 12 " * (n // 9))}),
    "many messages": ("/v1/chat/completions", lambda n: {"messages": _message("hi " * 300) * (n // 940)}),
    "tools": (
        "/v1/chat/completions",
        lambda n: {"messages": _message("hi"), "tools": [_tool(i) for i in range(n // 7080)]},
    ),
    "prompt": ("/v1/completions", lambda n: {"prompt": "hello 12 " * (n // 9)}),
    "ids": ("/v1/completions", lambda n: {"prompt": [123] * (n // 5)}),
    "responses": ("/v1/responses", lambda n: {"input": "hello 12 " * (n // 9)}),
    "messages": ("/v1/messages", lambda n: {"max_tokens": 5, "messages": _message("hello 12 " * (n // 9))}),
    "tokenize": ("/v1/tokenize", lambda n: {"prompt": "hello 12 " * (n // 9)}),
    "count_tokens": ("/v1/messages/count_tokens", lambda n: {"messages": _message("hello 12 " * (n // 9))}),
    "tokenized": ("/v1/chat/completions", lambda n: {"messages": _message("hello 12 " * (n // 72)), "max_tokens": 5}),
    "empty lists": ("/v1/chat/completions", lambda n: {"messages": [[]] * (n // 4)}),
}
"""Name -> path, and a body of so many bytes."""


class PacedEngine:
    """An engine that gives one token after another, at a pace."""

    name = "paced"

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """One token, and no more."""
        return EngineOutput(token_ids=(50,), logprobs=(-1.0,), versions=(0,), finish_reason=FinishReason.LENGTH)

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Tokens until the request's last one."""
        for left in range(request.sampling.max_tokens - 1, -1, -1):
            await asyncio.sleep(_TOKEN_INTERVAL_S)
            yield EngineOutput(
                token_ids=(50,), logprobs=(-1.0,), versions=(0,), finish_reason=None if left else FinishReason.LENGTH
            )


def _serve(policy_path: str, max_model_len: int, told: Connection) -> None:
    settings = EndpointSettings(
        server=ServerConfig(),
        policy_path=policy_path,
        trust_remote_code=False,
        max_model_len=max_model_len,
        api_keys=(),
        controller_keys=(_CONTROLLER_KEY,),
    )

    async def serve() -> None:
        server = EndpointServer(settings, [PacedEngine()])
        told.send(await server.start())
        await asyncio.to_thread(told.recv)
        await server.stop()

    asyncio.run(serve())


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """A front end in a process of its own."""

    url: str
    pid: int

    def memory_mib(self, name: str) -> float:
        """``VmRSS``, or ``VmHWM`` for the peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def front_end(max_model_len: int) -> Iterator[FrontEnd]:
    """A front end for as long as the block lasts."""
    from skyrl_async.tasks.tiny_policy import task_tokenizer  # torch, which the two processes do without

    with tempfile.TemporaryDirectory() as directory:
        task_tokenizer(LaggedFibonacciTask()).save_pretrained(directory)
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(directory, max_model_len, there))
        process.start()
        try:
            host, port = here.recv()
            assert process.pid is not None
            yield FrontEnd(url=f"http://{host}:{port}", pid=process.pid)
            here.send("stop")
            process.join()
        finally:
            process.kill()
            process.join()


def _send(url: str, keys: list[str], case: str, num_bodies: int, num_bytes: int) -> Counter[int]:
    """Send all bodies at once, no two of them equal, and count the answers' statuses."""
    path, make = CASES[case]
    body = json.dumps(make(num_bytes)).encode()

    async def send() -> Counter[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

            async def post(i: int) -> int:
                headers = {"Authorization": f"Bearer {keys[i % len(keys)]}", "Content-Type": "application/json"}
                return (
                    await client.post(path, content=b'{"number":%d,%s' % (i, body[1:]), headers=headers)
                ).status_code

            return Counter(await asyncio.gather(*map(post, range(num_bodies))))

    return asyncio.run(send())


async def _longest_gap(client: httpx.AsyncClient, key: str, is_over: asyncio.Event) -> float:
    """The longest silence of a session's streams, one after another, until ``is_over``."""
    longest = 0.0
    body = {"messages": _message("hello"), "stream": True, "max_tokens": 300}
    while not is_over.is_set():
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            last: float | None = None
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    longest = max(longest, now - (last or now))
                    last = now
                if is_over.is_set():
                    break
    return longest


async def _longest_health(client: httpx.AsyncClient, is_over: asyncio.Event) -> float:
    longest = 0.0
    while not is_over.is_set():
        asked = time.perf_counter()
        await client.get("/health")
        longest = max(longest, time.perf_counter() - asked)
        await asyncio.sleep(_TOKEN_INTERVAL_S)
    return longest


async def measure(served: FrontEnd, case: str, *, num_bodies: int, mib: float, settle_s: float = 2.0) -> dict[str, Any]:
    """One row; the stream is alone for ``settle_s`` before the bodies, and memory is read so long after them."""
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:

        async def key() -> str:
            made = await client.post("/sessions", headers={"Authorization": f"Bearer {_CONTROLLER_KEY}"})
            return str(made.json()["api_key"])

        async def watch(work: Any) -> tuple[Any, float, float]:
            is_over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                gap = group.create_task(_longest_gap(client, await key(), is_over), name="stream")
                health = group.create_task(_longest_health(client, is_over), name="health")
                result = await work
                is_over.set()
            return result, gap.result(), health.result()

        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, mp_context=_SPAWN) as sender:
            _, gap_alone, _ = await watch(asyncio.sleep(settle_s))
            before = served.memory_mib("VmRSS")
            keys = [await key() for _ in range(0, num_bodies, _BODIES_PER_SESSION)]
            sending = loop.run_in_executor(sender, _send, served.url, keys, case, num_bodies, int(mib * 2**20))
            started = time.perf_counter()
            statuses, gap, health = await watch(sending)
            seconds = time.perf_counter() - started
        await asyncio.sleep(settle_s)
    return {
        "case": case,
        "bodies": num_bodies,
        "mib": mib,
        "statuses": dict(statuses),
        "seconds": seconds,
        "gap_alone_s": gap_alone,
        "longest_gap_s": gap,
        "longest_health_s": health,
        "rss_before_mib": before,
        "rss_peak_mib": served.memory_mib("VmHWM"),
        "rss_after_mib": served.memory_mib("VmRSS"),
    }


def run(cases: list[str], *, num_bodies: int, mib: float, context: int) -> list[dict[str, Any]]:
    """A row per case, each of a front end of its own."""
    rows = []
    for case in cases:
        is_tokenized = case == "tokenized"
        with front_end(2**20 if is_tokenized else context) as served:
            few = max(1, num_bodies // 25) if is_tokenized else num_bodies
            rows.append(asyncio.run(measure(served, case, num_bodies=few, mib=mib)))
        print(f"{case}: {rows[-1]}", flush=True)
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case", action="append", choices=list(CASES), help="one kind of body, instead of all")
    parser.add_argument("--mib", type=float, default=15.0, help="size of a body")
    parser.add_argument("--context", type=int, default=2**17, help="tokens of the model's context")
    options = parser.parse_args()
    num_bodies = 10 if options.quick else 100
    under = conditions(seed=options.seed, num_bodies=num_bodies, mib=options.mib, context=options.context)
    rows = run(options.case or list(CASES), num_bodies=num_bodies, mib=options.mib, context=options.context)
    figures = {"longest_gap_s": max(row["longest_gap_s"] for row in rows), "conditions": under}
    report("huge requests beside a stream", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
