"""Modelled policy and generator: they take (virtual) time and keep every promise of the seams, without a network.

For tests of the real loop, and for planning capacity; the modelled engine is in ``simulator.engine``.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from skyrl_async.columns import Advantages, TokenIds, token_ids
from skyrl_async.generators.gym.episode_state import EpisodeState
from skyrl_async.record.ended import CountsSamples, EndedGroup, Outcome
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.simulator.engine import ModelledEngine
from skyrl_async.types import FinishReason, Group, LogprobModel, RowLogprobs, Trajectory, WeightUpdate

__all__ = ["ModelledEngine", "ModelledGenerator", "ModelledPolicy"]


@dataclass(eq=False, kw_only=True)
class ModelledPolicy:
    """A ``Policy`` in virtual time; remembers what it was given."""

    seconds_per_token: float = 0.0
    """Forward and backward."""
    step_seconds: float = 0.0
    """The optimizer step."""
    gather_seconds: float = 0.0
    """The copy that a publish begins with; nothing is trained meanwhile."""
    send_seconds: float = 0.0
    """Sending that copy, beside training."""
    steps: list[list[tuple[Trajectory, ...]]] = field(default_factory=lambda: [[]], init=False)
    """Rows of each step, the one that is accumulated last."""
    num_restarts: int = field(default=0, init=False)

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> dict[str, float]:
        """Take time in proportion to the responses' tokens, also where they are masked: what follows them needs them."""
        num_tokens = sum(len(t.response_token_ids) for t in trajectories if t.num_sampled_tokens)
        await asyncio.sleep(num_tokens * self.seconds_per_token)
        self.steps[-1].append(tuple(trajectories))
        return {"num_tokens": float(sum(t.num_sampled_tokens for t in trajectories)), "loss_sum": 0.0}

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """Take the step's time."""
        await asyncio.sleep(self.step_seconds)
        self.steps.append([])
        return {"grad_norm": 1.0, "lr": 1.0}

    async def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """What a modelled engine says: -1 everywhere."""
        return [-1.0] * (len(token_ids) - 1)

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """The same, in a third of the time of forward and backward."""
        num_tokens = sum(len(t.response_token_ids) for t in trajectories if t.num_sampled_tokens)
        await asyncio.sleep(num_tokens * self.seconds_per_token / 3)
        values = tuple(-t.loss_mask.astype(np.float32) for t in trajectories)
        return RowLogprobs(values=values, version=0 if model is LogprobModel.REF else len(self.steps) - 1)

    async def gather_weights(self, version: int) -> int:
        """Take the gather's time; there are no tensors."""
        await asyncio.sleep(self.gather_seconds)
        return 0

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """An update without tensors."""
        await asyncio.sleep(self.send_seconds)
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


class ModelledGenerator:
    """A single-turn ``Generator`` over any sampler; the prompt's tokens are its uid's digits, rewards alternate.

    Args:
        sampler: usually the real ``InferenceEngineClient`` over modelled engines.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """One completion per sample, each with a seed of its own."""
        rng = random.Random(request.seed)
        seeds = [rng.getrandbits(31) for _ in range(request.num_samples)]
        return await run_samples(
            request,
            "sample",
            lambda index: self._one(request, index, seeds[index]),
            lambda row: (row,),
            lambda rows: rows[0],
        )

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        saved = request.sample_states.restore(index)
        state = EpisodeState(messages=[]) if saved is None else EpisodeState.from_json(saved.state or {})
        request.sample_states.track(index, state.sample_state)
        prompt = token_ids([ord(c) for c in request.prompt.uid])
        completion = await self._sampler.generate_tokens(
            prompt,
            replace(request.sampling, seed=seed),
            priority=request.priority,
            generation=None if request.is_evaluation else state.generation,
        )
        return Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
            logprobs=completion.logprobs,
            versions=completion.versions,
            reward=float(index % 2),
            is_truncated=completion.finish_reason is FinishReason.LENGTH,
            num_aborts=completion.num_aborts,
        )


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
