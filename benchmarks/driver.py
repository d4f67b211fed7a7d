"""What a trajectory costs the driver, by its length, by the groups in flight and by the number of engines.

The real trainer, client, sessions, buffer and checkpoints run over modelled engines, which send blocks of tokens in real time. Half of the
samples are one answer; the other half are sessions of turns of 4,096 tokens, whose prompts repeat what came before. CPU-seconds are of the
whole process, the models and the record of samples among them, and again of the record's thread alone. The longest stand-still is what a
probe sees that wants to wake every 5 ms. Each row is run without checkpoints and again with one per step.

``over_ray`` has tokens per second that one driver takes from engines without a model in Ray actors.
"""

import asyncio
import gc
import itertools
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.report import arguments, conditions, report
from skyrl_async.checkpoint.checkpointer import read_state
from skyrl_async.columns import token_ids
from skyrl_async.endpoint.sessions.rows import rows as rows_of_session
from skyrl_async.endpoint.sessions.settings import SessionOutcome, SessionSettings
from skyrl_async.endpoint.sessions.tree import TurnTree
from skyrl_async.inference.client import CARRIED_BLOCK_TOKENS, InferenceEngineClient
from skyrl_async.inference.engines.connection import listen
from skyrl_async.inference.engines.ray import RayEngine
from skyrl_async.inference.engines.ray_actor import EngineActor, StartedEngine
from skyrl_async.inference.generation import OpenCalls
from skyrl_async.record.ended import EndedGroup
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.runtime.garbage import collect_rarely
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings, lognormal_length
from skyrl_async.types import Group, Message, PauseMode, SamplingParams, Trajectory

GROUP_SIZE = 2
TURN_TOKENS = 4096
"""Of a session's turn; short answers are one turn."""
PROBE_S = 0.005
OBSERVATION_TOKENS = 16
"""Of a session's prompt and between its turns."""
TOKENS_PER_SECOND = 500_000
"""Of all engines together."""
MIN_TOKENS = 4_000_000
"""Sampled for a row; at least two rounds of all groups in flight."""
LENGTHS = tuple(1024 * n for n in (1, 8, 32, 128))
ROWS = (
    *((length, 32, 8) for length in LENGTHS),
    *((1024, num_groups, 64) for num_groups in (16, 256, 4096)),
    *((8192, num_groups, 64) for num_groups in (16, 512)),
    *((1024, 512, num_engines) for num_engines in (1, 8, 512)),
)
"""(tokens of an answer, groups in flight, engines)."""
QUICK = ((1024, 32, 8), (32 * 1024, 32, 8), (1024, 512, 64))
RAY_ROWS = ((8192, 2, 64), (8192, 2, 512), (32 * 1024, 2, 64))
"""(tokens of an answer, engines, requests at once)."""
RAY_OFFERED_TOKENS_PER_SECOND = 4_000_000
RAY_SECONDS = 12.0
HELD_FILES = ("groups.json", "running_groups.json", "columns.arrow")
MAX_CPU_S, MAX_STALL_MS, MAX_BYTES, MAX_RATIO = 0.5, 50.0, 16.0, 1.5


class Answers(ModelledGenerator):
    """Even samples are one answer, odd ones a session."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        rng = np.random.default_rng(0)
        self._observations = itertools.cycle(rng.integers(0, 100, (4096, OBSERVATION_TOKENS), dtype=np.int32))

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        if index % 2 == 0:
            return await super()._one(request, index, seed)
        tree, messages = TurnTree(), list[Message]()
        sampling = replace(request.sampling, seed=seed, max_tokens=min(TURN_TOKENS, request.sampling.max_tokens))
        for number in range(-(-request.sampling.max_tokens // 2 // TURN_TOKENS)):
            messages.append({"role": "user", "content": f"{request.prompt.uid} {number}"})
            match = tree.match(messages)
            known = token_ids(()) if match.turn is None else match.turn.token_ids
            prompt = np.concatenate([known, next(self._observations)])
            completion = await self._sampler.generate_tokens(prompt, sampling, priority=request.priority)
            reply = {"role": "assistant", "content": f"{number}"}
            tree.commit(match, messages, reply, completion)
            messages.append(reply)
        (row,) = rows_of_session(tree, SessionOutcome(reward=float(index % 2)), SessionSettings())
        return row


@dataclass
class Probe:
    """Notes how long the loop stood still."""

    longest_s: float = field(default=0.0, init=False)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            asleep_from = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - asleep_from - PROBE_S)


def held_bytes(value: object) -> int:
    """Memory that only ``value`` keeps alive: every object below it once, and the whole of an array of which it has a part."""
    seen: dict[int, object] = {}
    left, total = [value], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen[id(one)] = one
        total += sys.getsizeof(one)
        left += [one.base] if isinstance(one, np.ndarray) else gc.get_referents(one)
    return total


def settings_of(
    length: int, num_groups: int, num_engines: int, *, num_steps: int, writes: bool, seed: int
) -> SimulationSettings:
    return SimulationSettings(
        mini_batch_size=num_groups // 2,
        max_staleness_steps=1,
        group_size=GROUP_SIZE,
        num_steps=num_steps,
        num_workers=num_groups,
        num_prompts=2 * num_groups,
        num_engines=num_engines,
        tokens_per_second=TOKENS_PER_SECOND / (num_groups * GROUP_SIZE),
        half_speed_requests=math.inf,
        block_tokens=CARRIED_BLOCK_TOKENS,
        carries_tokens=True,
        mean_tokens=float(length),
        sigma=0.3,
        longest_over_mean=2.0,
        checkpoint_interval_steps=int(writes),
        pause_mode=PauseMode.KEEP,
        seed=seed,
    )


def drawn_lengths(settings: SimulationSettings) -> Callable[[tuple[int, ...], int | None], int]:
    """Lengths as the simulation's, drawn beforehand: to seed a generator for each would take a twentieth of the processor's time."""
    length = lognormal_length(settings.mean_tokens, settings.sigma, settings.seed, settings.longest_over_mean)
    drawn = [length((), number) for number in range(1 << 12)]
    return lambda prompt, seed: drawn[hash((prompt, seed)) % len(drawn)]


class Record(SampleRecord):
    """The record of a run, which also keeps the groups of the last step, and knows its thread's CPU-seconds."""

    last: tuple[int, list[Group]] = (0, [])
    cpu_s = 0.0

    def add(self, ended: EndedGroup) -> None:
        super().add(ended)
        if ended.step != self.last[0]:
            self.last = (ended.step, [])
        self.last[1].append(ended.group)

    def _write(self, taken: list[Any]) -> None:
        begun = time.thread_time()
        super()._write(taken)
        self.cpu_s += time.thread_time() - begun


async def simulate(settings: SimulationSettings, checkpoint_dir: Path | None) -> dict[str, float]:
    """CPU-seconds (of all, and of the record's thread), tokens, longest stand-still, and bytes per token of the last step's groups."""
    with tempfile.TemporaryDirectory() as samples:
        record = Record(Path(samples))
        try:
            return await _simulate(settings, checkpoint_dir, record)
        finally:
            record.close()


async def _simulate(settings: SimulationSettings, checkpoint_dir: Path | None, record: Record) -> dict[str, float]:
    simulation = Simulation(
        settings,
        checkpoint_dir=checkpoint_dir,
        max_checkpoints_to_keep=0,
        generator_over=Answers,
        record=record,
    )
    length = drawn_lengths(settings)
    for engine in simulation.engines:
        engine.num_tokens_of = length
    probe = Probe()
    collect_rarely()
    async with probe.watching():
        begun = time.process_time()
        await simulation.run()
        await record.flush()
        cpu_s = time.process_time() - begun
    groups = record.last[1]
    return {
        "tokens": float(sum(engine.num_sampled_tokens for engine in simulation.engines)),
        "cpu_s": cpu_s,
        "record_cpu_s": record.cpu_s,
        "stall_s": probe.longest_s,
        "bytes_per_token": held_bytes(groups) / num_tokens_of(groups),
    }


class ModelledActor(EngineActor):
    """An engine's actor that answers without a model, each request at ``tokens_per_second``."""

    def __init__(self, tokens_per_second: float, block_tokens: int) -> None:
        self._calls = OpenCalls()
        self._engine = ModelledEngine(  # type: ignore[assignment]
            "modelled",
            num_tokens_of=lambda prompt, seed: 1 << 30,
            tokens_per_second=tokens_per_second,
            half_speed_requests=math.inf,
            block_tokens=block_tokens,
        )

    async def start(self) -> StartedEngine:
        """It has nothing to boot."""
        self._server, address = await listen(ray.util.get_node_ip_address(), self)
        return StartedEngine(
            max_model_len=1 << 30,
            node_id=ray.get_runtime_context().get_node_id(),
            address=address,
            call_timeout_s=60.0,
            checksum_timeout_s=60.0,
        )


async def over_ray(length: int, num_engines: int, num_requests: int) -> dict[str, Any]:
    """Tokens per second that this process takes from engines in Ray actors, which offer more."""
    actor_class = ray.remote(num_cpus=0, max_concurrency=1000)(ModelledActor)
    rate = RAY_OFFERED_TOKENS_PER_SECOND / num_requests
    actors = [actor_class.remote(rate, CARRIED_BLOCK_TOKENS) for _ in range(num_engines)]
    engines = [RayEngine(f"engine-{i}", actor, await actor.start.remote()) for i, actor in enumerate(actors)]
    client = InferenceEngineClient(engines, max_model_len=1 << 30, carries_tokens=True)
    num_tokens = 0

    async def ask_on() -> None:
        nonlocal num_tokens
        while True:
            answer = await client.generate_tokens(token_ids([1]), SamplingParams(max_tokens=length))
            num_tokens += len(answer.token_ids)

    probe = Probe()
    collect_rarely()
    asking = [asyncio.create_task(ask_on()) for _ in range(num_requests)]
    await asyncio.sleep(RAY_SECONDS / 4)
    begun, cpu_begun, before = time.perf_counter(), time.process_time(), num_tokens
    async with probe.watching():
        await asyncio.sleep(RAY_SECONDS)
    seconds, cpu_s, received = time.perf_counter() - begun, time.process_time() - cpu_begun, num_tokens - before
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    for engine in engines:
        await engine.close()
    return {
        "response_tokens": length,
        "engines": num_engines,
        "requests": num_requests,
        "tokens_per_second": received / seconds,
        "cpu_s_per_million_tokens": cpu_s / received * 1e6,
        "longest_stall_ms": probe.longest_s * 1e3,
    }


def num_tokens_of(groups: Sequence[Group]) -> int:
    return sum(len(row.prompt_token_ids) + len(row.response_token_ids) for g in groups for row in g.trajectories)


def measure(length: int, num_groups: int, num_engines: int, *, seed: int) -> dict[str, Any]:
    """One row."""
    num_steps = max(4, MIN_TOKENS // (length * num_groups * GROUP_SIZE // 2))
    gc.collect()
    settings = settings_of(length, num_groups, num_engines, num_steps=num_steps, writes=False, seed=seed)
    plain = asyncio.run(simulate(settings, None))
    with tempfile.TemporaryDirectory() as directory:
        settings = settings_of(length, num_groups, num_engines, num_steps=4, writes=True, seed=seed)
        written = asyncio.run(simulate(settings, Path(directory)))
        num_bytes, num_held = 0, 0
        for checkpoint in Path(directory).glob("global_step_*"):
            state = read_state(checkpoint)
            num_bytes += sum((checkpoint / name).stat().st_size for name in HELD_FILES)
            num_held += num_tokens_of(state.groups) + sum(group.num_sampled_tokens for group in state.running)
    return {
        "response_tokens": length,
        "groups_in_flight": num_groups,
        "engines": num_engines,
        "million_tokens": plain["tokens"] / 1e6,
        "cpu_s_per_million_tokens": plain["cpu_s"] / plain["tokens"] * 1e6,
        "record_cpu_s_per_million_tokens": plain["record_cpu_s"] / plain["tokens"] * 1e6,
        "longest_stall_ms": plain["stall_s"] * 1e3,
        "bytes_per_buffered_token": plain["bytes_per_token"],
        "checkpoint_stall_ms": written["stall_s"] * 1e3,
        "checkpoint_bytes_per_token": num_bytes / num_held,
    }


def main() -> None:
    """Print a row per combination, and check the goals."""
    options = arguments(__doc__.splitlines()[0]).parse_args()
    figures: dict[str, Any] = {"conditions": conditions(seed=options.seed)}
    rows = [measure(*row, seed=options.seed) for row in (QUICK if options.quick else ROWS)]
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    over = [asyncio.run(over_ray(*row)) for row in (RAY_ROWS[:1] if options.quick else RAY_ROWS)]
    ray.shutdown()
    costs = [row["cpu_s_per_million_tokens"] for row in rows]
    stalls = [max(row["longest_stall_ms"], row["checkpoint_stall_ms"]) for row in rows]
    sizes = [max(row["bytes_per_buffered_token"], row["checkpoint_bytes_per_token"]) for row in rows]
    figures |= {
        "largest_cpu_s_per_million_tokens": max(costs),
        "largest_over_smallest": max(costs) / min(costs),
        "longest_stall_ms": max(stalls),
        "is_goal_met": max(costs) <= min(MAX_CPU_S, MAX_RATIO * min(costs))
        and max(stalls) <= MAX_STALL_MS
        and max(sizes) <= MAX_BYTES,
    }
    report("Engines without a model over Ray", {}, over, None)
    report("The driver over modelled engines", figures, rows, options.json, written={"over_ray": over})


if __name__ == "__main__":
    main()
