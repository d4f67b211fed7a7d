"""Rules that send an agent's requests to engines: tokens per second and cached prefixes, on recorded sessions.

The sessions are public ones of SWE-agent (``agent_sessions.json``): tokens of the first prompt, then of each reply and of what its command
printed, and seconds of commands. Samples of a group share their first prompt. As many sessions as ``per_engine`` says are open in every
engine, and when one ends the next begins. An update empties all caches.

``engines=2`` are real vLLM engines of a tiny policy, with half of the recorded tokens. More are modelled in virtual time, with one
scheduler each: 100 tokens per second of a call alone, half of that at 170 calls, 64 at most, prefills of 10,000
tokens per second that hold up all but for a token per 2,048, and room for 400,000 tokens. Rules other than ours:

- ``sticky``: a session's first engine had the fewest requests, and it stays there.
- ``least_loaded``: fewest requests.
- ``consistent_hash``: of the session (rendezvous hashing).
- ``prefix_aware``: that of SGLang's gateway with its defaults: the engine with the longest known prefix if that is 0.3 of the prompt, else
  the one with the fewest known; the emptiest where the fullest has 64 requests more and 1.5 times as many.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import arguments, conditions, kept_rows, report
from skyrl_async.columns import TokenIds, token_ids
from skyrl_async.composition.run import started_parts
from skyrl_async.config.load import from_overrides
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.placement import Placement
from skyrl_async.inference.prefix_index import Prefixes
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.engine import ModelledEngine
from skyrl_async.tasks.lagged_fibonacci import NAME
from skyrl_async.tasks.registry import get_task
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy, task_tokenizer
from skyrl_async.types import PauseMode, SamplingParams, WeightUpdate

_session: ContextVar[str] = ContextVar("session")
GROUP_SIZE = 8


class Sticky(Placement):
    def __init__(self) -> None:
        super().__init__()
        self._engines: dict[str, str] = {}

    def _cheapest(self, engines: Mapping[str, object], num_tokens: int, prefixes: Prefixes) -> str:
        name = _session.get()
        if name not in self._engines:
            self._engines[name] = min(engines, key=self.load)
        return self._engines[name]


class LeastLoaded(Placement):
    def _cheapest(self, engines: Mapping[str, object], num_tokens: int, prefixes: Prefixes) -> str:
        return min(engines, key=self.load)


class ConsistentHash(Placement):
    def _cheapest(self, engines: Mapping[str, object], num_tokens: int, prefixes: Prefixes) -> str:
        return max(engines, key=lambda name: zlib.crc32(f"{_session.get()} {name}".encode()))


class PrefixAware(Placement):
    def _cheapest(self, engines: Mapping[str, object], num_tokens: int, prefixes: Prefixes) -> str:
        emptiest, fullest = min(engines, key=self.load), max(engines, key=self.load)
        least, most = self.load(emptiest), self.load(fullest)
        if most - least > 64 and most > 1.5 * least:
            return emptiest
        num_cached, holders = self.caches.longest(prefixes)
        if num_cached > 0.3 * num_tokens:
            return next(name for name in holders if name in engines)
        return min(engines, key=self.caches.num_blocks)

    def weights_updated(self) -> None:
        """It is not told of them."""


RULES: dict[str, type[Placement]] = {
    "sticky": Sticky,
    "least_loaded": LeastLoaded,
    "consistent_hash": ConsistentHash,
    "prefix_aware": PrefixAware,
    "ours": Placement,
}


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded session."""

    prompt_tokens: int
    turns: Sequence[tuple[int, int]]
    """Tokens of each reply, and of what follows it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is played."""

    sessions: Sequence[Session]
    command_seconds: Sequence[float]

    @classmethod
    def read(cls, scale: float, max_tokens: int | None = None) -> "Recorded":
        """All sessions with their tokens times ``scale``, cut where they no longer fit."""
        written = json.loads(Path(__file__).with_name("agent_sessions.json").read_text())
        found = []
        for session in written["sessions"]:
            prompt, turns = max(1, round(scale * session["prompt_tokens"])), []
            total = prompt
            for reply, printed in session["turns"]:
                reply, printed = max(1, round(scale * reply)), round(scale * printed)
                total += reply + printed
                if max_tokens is not None and total > max_tokens:
                    break
                turns.append((reply, printed))
            found.append(Session(prompt, turns))
        return cls([one for one in found if one.turns], [seconds * scale for seconds in written["command_seconds"]])


def _tokens(rng: np.random.Generator, num: int, vocabulary: int) -> TokenIds:
    return token_ids(rng.integers(3, vocabulary, size=num, dtype=np.int32))


async def play(
    client: InferenceEngineClient, recorded: Recorded, num_sessions: int, num_open: int, seed: int, vocabulary: int
) -> int:
    """Sampled tokens of ``num_sessions``, of which ``num_open`` are played at a time."""
    left = iter(range(num_sessions))
    num_sampled = 0

    async def worker() -> None:
        nonlocal num_sampled
        for number in left:
            _session.set(f"s{seed}-{number}")
            group = f"{seed}-{number // GROUP_SIZE}"
            session = random.Random(group).choice(recorded.sessions)
            rng, chance = np.random.default_rng(zlib.crc32(group.encode())), random.Random(f"{seed}-{number}")
            prompt = _tokens(rng, session.prompt_tokens, vocabulary)
            rng = np.random.default_rng([seed, number])
            for reply, printed in session.turns:
                sampling = SamplingParams(max_tokens=reply, min_tokens=reply, ignore_eos=True)
                completion = await client.generate_tokens(prompt, sampling)
                num_sampled += len(completion.token_ids)
                await asyncio.sleep(chance.choice(recorded.command_seconds))
                prompt = np.concatenate([prompt, completion.token_ids, _tokens(rng, printed, vocabulary)])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_open):
            tasks.create_task(worker())
    return num_sampled


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    hit_frac: float


async def measure(
    client: InferenceEngineClient, engines: Sequence[InferenceEngine], played: Awaitable[int], update: Any
) -> Measured:
    """While sessions are played, with ``update`` beside them."""
    clock = asyncio.get_running_loop().time
    before, began = [await engine.ping() for engine in engines], clock()
    async with asyncio.TaskGroup() as tasks:
        updating = tasks.create_task(update())
        num_sampled = await played
        seconds = clock() - began
        updating.cancel()
    after = [await engine.ping() for engine in engines]

    def total(name: str) -> int:
        return sum(getattr(a, name) - getattr(b, name) for a, b in zip(after, before, strict=True))

    return Measured(num_sampled / seconds, total("num_cached_tokens") / total("num_prompt_tokens"))


def modelled(rule: type[Placement], num_engines: int, per_engine: int, update_s: float | None, seed: int) -> Measured:
    """In virtual time."""

    async def main() -> Measured:
        engines = [
            ModelledEngine(
                f"engine-{i}",
                num_tokens_of=lambda prompt, seed: sys.maxsize,
                max_num_seqs=64,
                prefill_tokens_per_second=10_000.0,
                prefill_chunk_tokens=2048,
                cache_tokens=400_000,
                block_tokens=1 << 20,
            )
            for i in range(num_engines)
        ]
        client = InferenceEngineClient(engines, max_model_len=1 << 20)
        client.pool._placement = rule()

        async def update() -> None:
            version = 0
            while update_s is not None:
                await asyncio.sleep(update_s)
                version += 1
                for engine in engines:
                    await engine.pause(PauseMode.KEEP)
                    await engine.load_weights(WeightUpdate(version=version, path="", manifest={}, num_bytes=0))
                client.pool.rearrange()
                for engine in engines:
                    await engine.resume()

        num_open = num_engines * per_engine
        return await measure(
            client, engines, play(client, Recorded.read(1.0), 3 * num_open, num_open, seed, 1000), update
        )

    return run_in_virtual_time(main())


LONG_CONTEXT = 16_384
REAL_SCALE = 0.5


def build_policy(directory: Path) -> int:
    """A tiny policy with room for whole sessions; returns the size of its vocabulary."""
    tokenizer = task_tokenizer(get_task(NAME))
    build_tiny_policy(directory, PolicySizes(), tokenizer, seed=0)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"max_position_embeddings": LONG_CONTEXT}))
    return len(tokenizer)


async def real(
    rules: Mapping[str, type[Placement]], per_engine: int, updates: Sequence[float | None], num_rounds: int, seed: int
) -> dict[tuple[str, float | None], list[Measured]]:
    """On two vLLM engines, the rules in turns."""
    found: dict[tuple[str, float | None], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as work:
        vocabulary = build_policy(Path(work) / "policy")
        config = from_overrides(
            "policy=hf",
            f"policy.path={work}/policy",
            "policy.dtype=float32",  # bfloat16 takes several times as long on CPUs without instructions for it
            "engine.num_engines=2",
            f"engine.max_model_len={LONG_CONTEXT}",
            "engine.heartbeat_interval_s=60",
        )
        recorded = Recorded.read(REAL_SCALE, LONG_CONTEXT // 2)
        async with started_parts(
            config, Path(work), trace=Trace(None, time.monotonic), say=lambda text: print(f"[{text}]")
        ) as parts:
            await parts.publisher.publish(0)
            version = 0

            async def update(every_s: float | None) -> None:
                nonlocal version
                while every_s is not None:
                    await asyncio.sleep(every_s)
                    version += 1
                    # A cancelled update would cost an engine.
                    await asyncio.shield(parts.publisher.publish(version))

            for number in range(num_rounds + 1):
                for name in list(rules)[:: 1 if number % 2 else -1]:
                    for every_s in updates:
                        parts.client.pool._placement = rules[name]()
                        version += 1
                        await parts.publisher.publish(version)  # nothing is cached from before
                        one = await measure(
                            parts.client,
                            parts.client.engines,
                            play(parts.client, recorded, 3 * 2 * per_engine, 2 * per_engine, seed + number, vocabulary),
                            lambda every_s=every_s: update(every_s),
                        )
                        if number:  # the first round warms up
                            found.setdefault((name, every_s), []).append(one)
                            print(name, every_s, one, flush=True)
    return found


POINTS = {
    f"{num_engines}x{per_engine}" + (f"@{update_s:g}" if update_s else ""): (num_engines, per_engine, update_s)
    for num_engines, per_engine, *updates in (
        (2, 12, None, 5.0),
        (8, 8, None, 60.0, 15.0),
        (8, 24, None, 60.0, 15.0),
        (64, 4, None, 60.0, 15.0),
        (64, 16, None, 60.0, 15.0),
        (16, 48, None, 60.0, 15.0),
    )
    for update_s in updates
}
"""Engines x sessions per engine @ seconds between updates."""


def rows_of(point: str, of_rules: Mapping[str, Sequence[Measured]], commit: str) -> list[dict[str, Any]]:
    """A row for each rule, of the medians of its rounds."""
    num_engines, per_engine, update_s = POINTS[point]
    speeds = {name: median(one.tokens_per_s for one in rounds) for name, rounds in of_rules.items()}
    best = max(speed for name, speed in speeds.items() if name != "ours")
    return [
        {
            "engines": num_engines,
            "sessions_per_engine": per_engine,
            "update_every_s": update_s,
            "rule": name,
            "tokens_per_s": speeds[name],
            "prefix_hit_frac": median(one.hit_frac for one in rounds),
            "over_best_other": speeds[name] / best,
            "tokens_per_s_by_round": [one.tokens_per_s for one in rounds],
            "commit": commit,
        }
        for name, rounds in of_rules.items()
    ]


def main() -> int:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=POINTS, help="measure these, and keep the other rows of --json")
    parser.add_argument("--rounds", type=int, default=3, help="of real engines")
    given = parser.parse_args()
    before = conditions(seed=given.seed, group_size=GROUP_SIZE, real_scale=REAL_SCALE)
    points = given.only or [name for name in POINTS if name.startswith("8x") == given.quick or name.startswith("2x")]
    places = [*POINTS.values()]

    def place(row: Mapping[str, Any]) -> int:
        return places.index((row["engines"], row["sessions_per_engine"], row["update_every_s"]))

    measured = {places.index(POINTS[name]) for name in points}
    rows = kept_rows(given.json, given.seed, lambda row: place(row) in measured) if given.only else []
    real_points = [name for name in points if POINTS[name][0] == 2]
    if real_points:
        updates = [POINTS[name][2] for name in real_points]
        found = asyncio.run(real(RULES, 12, updates, 1 if given.quick else given.rounds, given.seed))
        for name in real_points:
            rows += rows_of(name, {rule: found[rule, POINTS[name][2]] for rule in RULES}, before["commit"])
    for name in points:
        if name not in real_points:
            of_rules = {rule: [modelled(RULES[rule], *POINTS[name], given.seed)] for rule in RULES}
            rows += rows_of(name, of_rules, before["commit"])
            print(name, of_rules, flush=True)
    rows.sort(key=place)
    report("Rules that choose an engine", {"conditions": before}, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
