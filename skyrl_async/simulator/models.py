"""Modelled policy and generator: they take (virtual) time and keep every promise of the seams, without a network.

For tests of the real loop, and for planning capacity; the modelled engine is in ``simulator.engine``.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import numpy as np

from skyrl_async.columns import Advantages, TokenIds, VersionSpans, token_ids
from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.episode_state import EpisodeState
from skyrl_async.record.ended import CountsSamples, EndedGroup, Outcome
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.simulator.engine import ModelledEngine
from skyrl_async.simulator.shared_machine import PUBLISH_CORES, TRAINING_CORES, SharedMachine, computing
from skyrl_async.training.protocol import WAIT_SECONDS
from skyrl_async.types import (
    FinishReason,
    Group,
    LogprobModel,
    RowLogprobs,
    SamplingParams,
    Trajectory,
    WeightUpdate,
)

__all__ = ["ModelledEngine", "ModelledGenerator", "ModelledPolicy"]


@dataclass(eq=False, kw_only=True)
class ModelledPolicy:
    """A ``Policy`` in virtual time; remembers what it was given."""

    seconds_per_token: float = 0.0
    """Forward and backward."""
    seconds_per_group: float = 0.0
    """The same, whatever a group's length."""
    prompt_tokens: float = 0.0
    """Tokens of each row's prompt; they take as long as those of its response."""
    machine: SharedMachine | None = None
    """Where others compute too: those that do when a computation begins count for all of it. None: a machine of its own."""
    training_cores: float = TRAINING_CORES
    """Cores of that machine that training takes."""
    step_seconds: float = 0.0
    """The optimizer step."""
    gather_seconds: float = 0.0
    """The copy that a publish begins with; nothing is trained meanwhile."""
    send_seconds: float = 0.0
    """Sending that copy, beside training."""
    steps: list[list[tuple[Trajectory, ...]]] = field(default_factory=lambda: [[]], init=False)
    """Rows of each step, the one that is accumulated last."""
    num_restarts: int = field(default=0, init=False)
    _workers: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> dict[str, float]:
        """Take time in proportion to the rows' tokens, also where they are masked: what follows them needs them."""
        num_tokens = sum(self.prompt_tokens + len(t.response_token_ids) for t in trajectories if t.num_sampled_tokens)
        waited = await self.compute(self.seconds_per_group + num_tokens * self.seconds_per_token)
        self.steps[-1].append(tuple(trajectories))
        return {"num_tokens": float(sum(t.num_sampled_tokens for t in trajectories)), "loss_sum": 0.0} | _waited(waited)

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """Take the step's time."""
        waited = await self.compute(self.step_seconds)
        self.steps.append([])
        return {"grad_norm": 1.0, "lr": 1.0} | _waited(waited)

    async def compute(self, seconds: float) -> float:
        """Take the workers' time: one call after another, in the order in which they are asked. Returns the seconds of waiting."""
        asked = asyncio.get_running_loop().time()
        async with self._workers:
            waited = asyncio.get_running_loop().time() - asked
            with computing(self.machine, "training", self.training_cores) as slowdown:
                await asyncio.sleep(slowdown * seconds)
        return waited

    async def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """What a modelled engine says: -1 everywhere."""
        return [-1.0] * (len(token_ids) - 1)

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """The same, in a third of the time of forward and backward."""
        num_tokens = sum(len(t.response_token_ids) for t in trajectories if t.num_sampled_tokens)
        await self.compute(num_tokens * self.seconds_per_token / 3)
        values = tuple(-t.loss_mask.astype(np.float32) for t in trajectories)
        return RowLogprobs(values=values, version=0 if model is LogprobModel.REF else len(self.steps) - 1)

    async def gather_weights(self, version: int) -> int:
        """Take the gather's time; there are no tensors."""
        await self.compute(self.gather_seconds)
        return 0

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """An update without tensors."""
        with computing(self.machine, "sending", PUBLISH_CORES) as slowdown:
            await asyncio.sleep(slowdown * self.send_seconds)
        return WeightUpdate(version=version, path="", manifest={}, num_bytes=0)

    async def save(self, directory: Path) -> None:
        """Write an empty file, so that a checkpoint has something to lose."""
        _write_empty_file(directory / "model")

    def checkpoint_written(self, directory: Path) -> None:
        """Nothing to note: no worker of it dies."""

    async def load(self, directory: Path) -> None:
        """Nothing to restore."""

    async def export_hf(self, directory: Path) -> None:
        """Nothing to export."""

    async def close(self) -> None:
        """Nothing is held."""


def _waited(seconds: float) -> dict[str, float]:
    return {WAIT_SECONDS: seconds} if seconds else {}


_KNOWN_COLUMNS = tuple(np.broadcast_to(value, 1 << 40) for value in (np.int32(0), np.True_, np.float32(-1)))
"""Token ids, mask and log-probs of which those of all rows of known groups are parts. They take no memory."""

_ALIKE = 8
"""Groups next to each other in the order of their median lengths. A prompt whose group was dropped for one long answer seldom has another
one: of the default task's prompts, asked twice, medians agree, and the longest answers correlate by 0.7."""

_NOT_TRAINED = np.broadcast_to(np.False_, 1 << 40)
"""Their mask where nothing is trained."""
Turn = tuple[int, float]
"""Tokens of a reply, and the seconds that its environment takes after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """The samples of a prompt."""

    samples: tuple[tuple[Turn, ...], ...]
    """The turns of each."""
    num_masked: int = 0
    """How many of the samples, the first ones, are not trained: a length limit cut them, or their harness gave no reward."""
    num_failing: int = 0
    """How many of the samples, the last ones, fail at their end."""
    is_filtered: bool = False
    """Whether all have the same reward, so that dynamic sampling filters the group."""


class ModelledGenerator:
    """A ``Generator`` over any sampler; the prompt's tokens are its uid's digits, rewards alternate.

    Args:
        sampler: usually the real ``InferenceEngineClient`` over modelled engines.
        groups: a prompt gets one of ``_ALIKE`` of these whenever it is generated, since answers to one prompt are alike in the median, and
            its group each of its samples as often as the others. Engines must have more tokens than these. Empty: one turn as long as
            the engine makes it.
        call_seconds: what every call of an engine takes besides the engine.
    """

    def __init__(self, sampler: Sampler, groups: Sequence[KnownGroup] = (), call_seconds: float = 0.0) -> None:
        self._sampler = sampler
        self._groups = sorted(groups, key=lambda group: median(sum(n for n, _ in turns) for turns in group.samples))
        self._call_seconds = call_seconds

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """One row per sample."""
        rng = random.Random(request.seed)
        if self._groups:
            begin = random.Random(request.prompt.uid).randrange(len(self._groups)) // _ALIKE * _ALIKE
            known = rng.choice(self._groups[begin : begin + _ALIKE])
            play = partial(self._known, request, _prompt_of(request), known, rng.randrange(len(known.samples)))
            return await run_samples(request, "sample", play, lambda row: (row,), lambda rows: rows[0])
        seeds = [rng.getrandbits(31) for _ in range(request.num_samples)]
        return await run_samples(
            request,
            "sample",
            lambda index: self._one(request, index, seeds[index]),
            lambda row: (row,),
            lambda rows: rows[0],
        )

    async def _known(
        self, request: GroupRequest, prompt: TokenIds, known: KnownGroup, first: int, index: int
    ) -> Trajectory:
        completions, sample = [], (first + index) % len(known.samples)
        for num_tokens, environment_seconds in known.samples[sample]:
            sampling = _of_length(request.sampling, num_tokens)
            completions.append(await self._sampler.generate_tokens(prompt, sampling, priority=request.priority))
            if seconds := environment_seconds + self._call_seconds:
                await asyncio.sleep(seconds)
        if sample >= len(known.samples) - known.num_failing:
            raise GenerationError("it failed in the run, too")
        versions = VersionSpans.joined([one.versions for one in completions])
        tokens, mask, logprobs = (column[: len(versions)] for column in _KNOWN_COLUMNS)
        return Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=tokens,
            loss_mask=_NOT_TRAINED[: len(versions)] if sample < known.num_masked else mask,
            logprobs=logprobs,
            versions=versions,
            reward=0.0 if known.is_filtered else float(index % 2),
            num_aborts=sum(one.num_aborts for one in completions),
        )

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        """One completion with a seed of its own."""
        saved = request.sample_states.restore(index)
        state = EpisodeState(messages=[]) if saved is None else EpisodeState.from_json(saved.state or {})
        request.sample_states.track(index, state.sample_state)
        prompt = _prompt_of(request)
        completion = await self._sampler.generate_tokens(
            prompt,
            replace(request.sampling, seed=seed),
            priority=request.priority,
            generation=None if request.is_evaluation else state.generation,
        )
        if self._call_seconds:
            await asyncio.sleep(self._call_seconds)
        tokens = completion.token_ids.copy()
        return Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=tokens,
            loss_mask=np.ones(len(tokens), np.bool_),
            logprobs=completion.logprobs.copy(),
            versions=completion.versions,
            reward=float(index % 2),
            is_truncated=completion.finish_reason is FinishReason.LENGTH,
            num_aborts=completion.num_aborts,
        )


@cache
def _of_length(sampling: SamplingParams, num_tokens: int) -> SamplingParams:
    """The same for a reply of so many tokens; a simulation asks for few lengths, and often."""
    return replace(sampling, max_tokens=num_tokens)


def _prompt_of(request: GroupRequest) -> TokenIds:
    return token_ids([ord(c) for c in request.prompt.uid])


def _write_empty_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("")


class KeptGroups(CountsSamples):
    """Keeps every group that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[EndedGroup] = []

    def add(self, ended: EndedGroup) -> None:
        """Keep a group."""
        super().add(ended)
        self.ended.append(ended)

    @property
    def trained(self) -> list[tuple[int, Group]]:
        """(step, group) of each trained group, in order."""
        return [(ended.step, ended.group) for ended in self.ended if ended.outcome is Outcome.TRAINED]
