"""One group being generated, and what a checkpoint keeps of it.

Flows in: an admission with its prompt, or a group of a checkpoint. Flows out: that group as it stands, for a checkpoint. Does not
know who generates it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Self

from skyrl_async.rollout.group_state import RunningGroup, admission_of, sampling_to_json
from skyrl_async.rollout.sample_state import ResumeCounts, SampleStates
from skyrl_async.rollout.staleness import Admission
from skyrl_async.rollout.token_usage import TokenUsage
from skyrl_async.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """A group from its admission to its end."""

    admission: Admission
    epoch: int
    """In which its prompt was drawn."""
    prompt: Prompt
    started: float
    """Seconds on the loop's clock."""
    account: TokenUsage = field(default_factory=TokenUsage)
    """Of what its members were delivered."""
    saved: SampleStates = field(default_factory=SampleStates)
    """Where its samples stand."""

    @property
    def key(self) -> tuple[int, str]:
        """(epoch, uid)."""
        return self.epoch, self.prompt.uid

    @property
    def name(self) -> str:
        """Of its task."""
        return f"group-{self.admission.index}-{self.prompt.uid}"

    @classmethod
    def of_checkpoint(
        cls, group: RunningGroup, prompt: Prompt, num_samples: int, sampling: SamplingParams, counts: ResumeCounts
    ) -> Self:
        """A group that goes on, asked for with ``num_samples`` and ``sampling``; ``counts`` are told what becomes of its samples."""
        return cls(
            admission=admission_of(group),
            epoch=group.epoch,
            prompt=prompt,
            started=asyncio.get_running_loop().time() - group.generation_seconds,
            saved=group.saved_samples(num_samples, sampling, counts),
        )

    def for_checkpoint(self, num_samples: int, sampling: SamplingParams) -> RunningGroup:
        """The group as it stands now, asked for with ``num_samples`` and ``sampling``."""
        return RunningGroup(
            epoch=self.epoch,
            uid=self.prompt.uid,
            admission_index=self.admission.index,
            scheduled_version=self.admission.scheduled_version,
            generation_seconds=asyncio.get_running_loop().time() - self.started,
            num_samples=num_samples,
            sampling=sampling_to_json(sampling),
            samples=self.saved.samples(),
        )
