"""Modelled engines, policy and generator: they take (virtual) time and keep every promise of the seams, without a network.

For tests of the real loop, and for planning capacity. A modelled engine's requests each run at ``tokens_per_second / (1 + n / k)``
with n requests in the engine, as measured on real ones. What it samples is arbitrary; when, how many and under which version is not.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from skyrl_async.errors import EngineDeadError, PublishError
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    GroupRequest,
    PauseMode,
    Trajectory,
    WeightUpdate,
)

_BLOCK_TOKENS = 16


class ModelledEngine:
    """An ``InferenceEngine`` in virtual time: token i of a generation is ``i % 100``, of log-prob -1.

    Args:
        name: of the engine.
        num_tokens_of: prompt token ids -> tokens of the whole answer; the end of the prompt's first tokens identifies it.
        tokens_per_second: of a request alone in the engine.
        half_speed_requests: requests at which each runs at half of that.
        load_seconds: duration of ``load_weights``.
    """

    def __init__(
        self,
        name: str,
        *,
        num_tokens_of: Callable[[tuple[int, ...], int | None], int],
        tokens_per_second: float = 100.0,
        half_speed_requests: float = 170.0,
        load_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self.max_model_len = 1 << 30
        self._num_tokens_of = num_tokens_of
        self._tokens_per_second = tokens_per_second
        self._half_speed_requests = half_speed_requests
        self._load_seconds = load_seconds
        self._version = 0
        self._num_in_flight = 0
        self._generation = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._is_dead = False
        self.fails_next_load: type[Exception] | None = None

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Sample all, or up to an aborting pause."""
        blocks = [block async for block in self.stream(request)]
        return EngineOutput(
            token_ids=tuple(t for b in blocks for t in b.token_ids),
            logprobs=tuple(x for b in blocks for x in b.logprobs),
            versions=tuple(v for b in blocks for v in b.versions),
            finish_reason=blocks[-1].finish_reason,
        )

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Sample in blocks of 16 tokens."""
        generation = self._generation
        prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_sampled_tokens]
        num_left = self._num_tokens_of(prompt, request.sampling.seed) - request.num_sampled_tokens
        num_tokens, position = min(num_left, request.sampling.max_tokens), request.num_sampled_tokens
        end = FinishReason.STOP if num_left <= request.sampling.max_tokens else FinishReason.LENGTH
        self._num_in_flight += 1
        try:
            while True:
                if generation != self._generation:
                    yield self._block((), FinishReason.ABORT)
                    return
                await self._resumed.wait()
                self._check_alive()
                if generation != self._generation:
                    continue
                num_now = min(_BLOCK_TOKENS, num_tokens)
                version = self._version
                await asyncio.sleep(num_now * self._seconds_per_token())
                self._check_alive()
                if version != self._version or not self._resumed.is_set():
                    continue
                num_tokens -= num_now
                tokens = tuple(i % 100 for i in range(position, position + num_now))
                position += num_now
                yield self._block(tokens, end if num_tokens <= 0 else None)
                if num_tokens <= 0:
                    return
        finally:
            self._num_in_flight -= 1

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; in abort mode every request in flight ends."""
        self._check_alive()
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            self._generation += 1
            self._resumed.set()
            self._resumed = asyncio.Event()

    async def resume(self) -> None:
        """Sample again."""
        self._check_alive()
        self._resumed.set()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Serve ``update.version`` after the load time."""
        self._check_alive()
        failure, self.fails_next_load = self.fails_next_load, None
        if failure is PublishError or self._resumed.is_set():
            reason = "is not paused" if failure is None else "was told to refuse"
            raise PublishError(f"{self.name} {reason}")
        await asyncio.sleep(self._load_seconds)
        if failure is not None:
            self.kill()
        self._check_alive()
        self._version = update.version

    async def version(self) -> int:
        """Served now."""
        self._check_alive()
        return self._version

    async def checksum(self) -> str:
        """Of a model without weights: its version."""
        self._check_alive()
        return f"version-{self._version}"

    async def ping(self) -> None:
        """It is alive."""
        self._check_alive()

    async def evict(self) -> None:
        """Every request in flight ends, aborted."""
        self._check_alive()
        self._generation += 1
        if not self._resumed.is_set():
            self._resumed.set()
            self._resumed = asyncio.Event()

    async def close(self) -> None:
        """Nothing is held."""
        self._is_dead = True

    def kill(self) -> None:
        """From now on every call, and every request in flight, raises ``EngineDeadError``."""
        self._is_dead = True
        self._resumed.set()

    def _check_alive(self) -> None:
        if self._is_dead:
            raise EngineDeadError(f"{self.name} was killed")

    def _seconds_per_token(self) -> float:
        return (1 + self._num_in_flight / self._half_speed_requests) / self._tokens_per_second

    def _block(self, tokens: tuple[int, ...], finish_reason: FinishReason | None) -> EngineOutput:
        n = len(tokens)
        return EngineOutput(
            token_ids=tokens, logprobs=(-1.0,) * n, versions=(self._version,) * n, finish_reason=finish_reason
        )


class ModelledPolicy:
    """A ``Policy`` in virtual time; remembers what it was given.

    Args:
        seconds_per_token: of forward and backward.
        step_seconds: of the optimizer step.
        send_seconds: of gather and send.
    """

    def __init__(self, *, seconds_per_token: float = 0.0, step_seconds: float = 0.0, send_seconds: float = 0.0) -> None:
        self._seconds_per_token = seconds_per_token
        self._step_seconds = step_seconds
        self._send_seconds = send_seconds
        self.steps: list[list[tuple[Trajectory, ...]]] = [[]]

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """Take time in proportion to the tokens."""
        num_tokens = sum(t.num_sampled_tokens for t in trajectories)
        await asyncio.sleep(num_tokens * self._seconds_per_token)
        self.steps[-1].append(tuple(trajectories))
        return {"num_tokens": float(num_tokens), "loss_sum": 0.0}

    async def step(self, num_tokens: float) -> dict[str, float]:
        """Take the step's time."""
        await asyncio.sleep(self._step_seconds)
        self.steps.append([])
        return {"grad_norm": 1.0, "lr": 1.0}

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """What a modelled engine says: -1 everywhere."""
        return [-1.0] * (len(token_ids) - 1)

    async def export_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """An update without tensors."""
        await asyncio.sleep(self._send_seconds)
        return WeightUpdate(version=version, chunks=(), manifest={}, num_bytes=0)

    async def save(self, directory: Path) -> None:
        """Write an empty file, so that a checkpoint has something to lose."""
        _write_empty_file(directory / "model")

    async def load(self, directory: Path) -> None:
        """Nothing to restore."""

    async def export_hf(self, directory: Path) -> None:
        """Nothing to export."""

    async def close(self) -> None:
        """Nothing is held."""


class ModelledGenerator:
    """A single-turn ``Generator`` over any sampler; the prompt's tokens are its uid's digits, rewards alternate.

    Args:
        sampler: usually the real ``InferenceEngineClient`` over modelled engines.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """One completion per sample, each with a seed of its own."""
        rng = random.Random(request.seed)
        seeds = [rng.getrandbits(31) for _ in range(request.num_samples)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(request, index, seed)) for index, seed in enumerate(seeds)]
        return tuple(task.result() for task in running)

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        prompt = tuple(ord(c) for c in request.prompt.uid)
        sampling = replace(request.sampling, seed=seed)
        completion = await self._sampler.generate_tokens(prompt, sampling, priority=request.priority)
        return Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=completion.token_ids,
            loss_mask=(1,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            versions=completion.versions,
            reward=float(index % 2),
            is_truncated=completion.finish_reason is FinishReason.LENGTH,
            num_aborts=completion.num_aborts,
        )


def _write_empty_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("")
