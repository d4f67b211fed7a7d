"""What a generator is asked for."""

from dataclasses import dataclass, field

from skyrl_async.rollout.sample_state import SampleStates
from skyrl_async.runtime.progress import GroupProgress
from skyrl_async.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What a generator is asked for: all samples of one prompt."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    """Per generation call; a multi-turn generator may stop earlier to respect its token budget."""
    seed: int = 0
    """Distinct per admission; used by engines that honour seeds."""
    priority: int = 0
    """Passed on to the engine: older admissions are smaller."""
    is_evaluation: bool = False
    sample_indices: tuple[int, ...] | None = None
    """The samples asked for; None: all of them. The others were finished by an earlier try."""
    progress: GroupProgress = field(default_factory=GroupProgress, repr=False, compare=False)
    """Where a generator may say what its samples do."""
    saved: SampleStates = field(default_factory=SampleStates, repr=False, compare=False)
    """Where its samples stand: what a generator goes on from, and what it leaves for the next try and for checkpoints."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples asked for, in [0, num_samples)."""
        return tuple(range(self.num_samples)) if self.sample_indices is None else self.sample_indices
