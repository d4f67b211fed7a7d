"""Totals of a run over all its steps, which the summary reports; they go through checkpoints as plain dictionaries.

``BoundCost`` says what holding the staleness bound cost. A group that the trainer waited for was trained at staleness s, after the trainer
had been held back for w seconds in that step. With steps of t seconds (the mean of this run's steps without such waits) it would otherwise
have been trained ceil(w / t) versions later: it needed a bound of s + ceil(w / t). The bound that would have cost less is the smallest one
that 90 % of the waited seconds needed at most. It is an estimate: with a larger bound more groups would have been in flight, each a
little slower.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from skyrl_async.metrics.step import StepFigures

_MAX_PAUSES = 1000
_FILTERED = "filtered/"
_GENERATION_COUNTS = (
    *("failed_groups", "failed_samples", "cut_short_samples", "side_tokens", "retries"),
    *("resumed_trajectories", "restarted_trajectories", "requeued_groups", "filtered_groups"),
)
"""Counts of the generation workers that are totals under the same name."""
_IN_SUMMARY = (
    *("trained_groups", "staleness_max", "groups_over_bound", "staleness_wait_seconds", "all_masked_steps"),
    "refused_steps",
    *("wasted_tokens", "length_ratio", "training_seconds", "train_seconds", *_GENERATION_COUNTS),
)
"""Totals that the summary shows under the same name."""
_GENERATE_METRICS = ("failed_groups", "failed_samples", "retries", "filtered_groups")
"""Totals that are metrics under the same name."""
_COVERED_SHARE = 0.9
_NUM_UIDS_KEPT = 200
_NUM_UIDS_NAMED = 3


@dataclass(slots=True)
class BoundCost:
    """The waits that the staleness bound caused in a run."""

    seconds_by_uid: dict[str, float] = field(default_factory=dict)
    """Uid of the group whose arrival ended a wait -> seconds waited; the costliest groups alone."""
    seconds_by_bound: dict[str, float] = field(default_factory=dict)
    """Bound that the group needed, as text (a key of JSON) -> seconds waited."""

    def add(self, uid: str, *, seconds: float, needed_bound: int) -> None:
        """Count one wait."""
        self.seconds_by_uid[uid] = self.seconds_by_uid.get(uid, 0.0) + seconds
        if len(self.seconds_by_uid) > 2 * _NUM_UIDS_KEPT:
            self.seconds_by_uid = dict(self.costliest(_NUM_UIDS_KEPT))
        key = str(needed_bound)
        self.seconds_by_bound[key] = self.seconds_by_bound.get(key, 0.0) + seconds

    @property
    def seconds(self) -> float:
        """Seconds waited in all."""
        return math.fsum(self.seconds_by_bound.values())

    def costliest(self, num: int = _NUM_UIDS_NAMED) -> list[tuple[str, float]]:
        """(uid, seconds) of the groups waited for longest."""
        return sorted(self.seconds_by_uid.items(), key=lambda item: -item[1])[:num]

    def cheaper_bound(self) -> int | None:
        """The smallest bound that avoids 90 % of the waited seconds; None if nothing was waited for."""
        bounds = sorted(self.seconds_by_bound, key=int)
        waited = accumulate(self.seconds_by_bound[bound] for bound in bounds)
        covered = _COVERED_SHARE * self.seconds
        return next((int(bound) for bound, seconds in zip(bounds, waited, strict=True) if seconds >= covered), None)

    def sentence(self, max_staleness_steps: int, training_seconds: float, steps_per_batch: int = 1) -> str:
        """Return the cost of the bound as a sentence."""
        bound = self.cheaper_bound()
        if bound is None:
            return f"trainer.max_staleness_steps={max_staleness_steps} cost no waiting"
        share = self.seconds / training_seconds if training_seconds else 0.0
        named = ", ".join(f"{uid} ({seconds:.1f} s)" for uid, seconds in self.costliest())
        return (
            f"trainer.max_staleness_steps={max_staleness_steps} cost {self.seconds:.1f} s of waiting ({share:.0%} of training), "
            f"most for {named}; at {max(bound, max_staleness_steps + steps_per_batch)} about 90 % of it would not have been waited"
        )


def needed_bound(staleness: int, held_seconds: float, free_step_seconds: float, num_steps: int = 1) -> int:
    """Return the bound at which a group would not have been late (formula: module docstring).

    Args:
        staleness: the staleness at which it was trained.
        held_seconds: seconds that the trainer was held back in the step until the group came.
        free_step_seconds: mean duration of a step without such waiting, or of a batch.
        num_steps: optimizer steps in that time.
    """
    return staleness + num_steps * math.ceil(held_seconds / max(free_step_seconds, 1e-9))


@dataclass(slots=True)
class RunTotals:
    """Sums and extremes over all steps of a run."""

    steps: int = 0
    """Batches, most often of one optimizer step."""
    trained_groups: int = 0
    trained_tokens: int = 0
    trained_trajectories: int = 0
    generated_tokens: int = 0
    """Tokens sampled for training, in finished groups, trained or not."""
    generated_trajectories: int = 0
    """Trajectories of finished groups."""
    wasted_tokens: int = 0
    """Tokens sampled and thrown away: those of finished groups never trained, of all samples of failed groups, of failed and abandoned
    samples, and of generations cut off or restarted, where their number is known."""
    failed_groups: int = 0
    failed_samples: int = 0
    """Samples that their groups were trained without."""
    retries: int = 0
    """Times a group was tried again, for all of its samples or for some."""
    resumed_trajectories: int = 0
    """Running trajectories of a checkpoint that went on from its tokens."""
    restarted_trajectories: int = 0
    """Running trajectories of a checkpoint that began anew."""
    evaluation_tokens: int = 0
    side_tokens: int = 0
    """Tokens of agents' side requests; ``generated_tokens`` does not count them."""
    cut_short_samples: int = 0
    """Samples whose harness failed because of a cap or a cut answer."""
    staleness_sum: int = 0
    staleness_max: int = 0
    groups_over_bound: int = 0
    staleness_wait_seconds: float = 0.0
    max_staleness_steps: int = 0
    """The bound at the last step."""
    steps_per_batch: int = 1
    """Optimizer steps of the last batch: the bound is raised by so many."""
    bound_cost: BoundCost = field(default_factory=BoundCost)
    masked_tokens: int = 0
    all_masked_steps: int = 0
    """Steps in which masks left no token a policy loss."""
    refused_steps: int = 0
    """Optimizer steps that ``trainer.guard.min_ess`` refused."""
    requeued_groups: int = 0
    filtered_groups: int = 0
    """Groups finished and not trained, because their rewards did not differ."""
    filtered_by: dict[str, int] = field(default_factory=dict)
    """Filtered groups by reason (``rollout.finished_group_filter``); keys are metrics' names."""
    idle_seconds: float = 0.0
    train_seconds: float = 0.0
    training_seconds: float = 0.0
    """Wall time from the first step's beginning until the last one's weights are copied, checkpoints left out."""
    pauses: list[float] = field(default_factory=list)
    """Seconds of the last thousand publishes' pauses; the limit keeps checkpoints from growing with the run."""
    reward_before: float | None = None
    evaluated_version: int = 0
    """Newest policy version whose evaluation is done."""

    def __post_init__(self) -> None:
        if isinstance(self.bound_cost, dict):  # from a checkpoint
            self.bound_cost = BoundCost(**self.bound_cost)

    def add_step(self, figures: StepFigures) -> None:
        """Add a finished step."""
        self.steps += 1
        self.trained_groups += len(figures.groups)
        self.trained_tokens += figures.num_tokens
        self.trained_trajectories += figures.num_live_samples
        self.staleness_sum += sum(figures.staleness)
        self.staleness_max = max(self.staleness_max, *figures.staleness)
        self.groups_over_bound += figures.num_over_bound
        self.staleness_wait_seconds += figures.staleness_wait_seconds
        self.training_seconds += figures.seconds["step"]
        del self.pauses[:-_MAX_PAUSES]
        self.masked_tokens += figures.num_masked_tokens
        self.all_masked_steps += figures.is_all_masked or figures.trains_nothing
        self.refused_steps += figures.num_refused_steps
        self.max_staleness_steps, self.steps_per_batch = figures.max_staleness_steps, figures.num_steps
        free_step_seconds = (self.training_seconds - self.staleness_wait_seconds) / self.steps
        for wait, held_seconds in zip(figures.waits, accumulate(w.seconds for w in figures.waits), strict=True):
            needed = needed_bound(wait.staleness, held_seconds, free_step_seconds, figures.num_steps)
            self.bound_cost.add(wait.uid, seconds=wait.seconds, needed_bound=needed - figures.window_steps)
        self.idle_seconds += figures.seconds.get("wait_for_groups", 0.0)
        self.train_seconds += sum(figures.seconds.get(n, 0.0) for n in ("forward_backward", "optimizer_step"))

    def add_generation(self, new: Mapping[str, int]) -> None:
        """Add the counts of the generation workers since the last call."""
        for name in _GENERATION_COUNTS:
            setattr(self, name, getattr(self, name) + new[name])
        self.generated_tokens += new["tokens"]
        self.generated_trajectories += new["trajectories"]
        self.wasted_tokens += new["abandoned_tokens"] + new["lost_tokens"] + new["filtered_tokens"]
        for name in (name for name in new if name.startswith(_FILTERED)):
            metric = name.replace("/", "_")
            self.filtered_by[metric] = self.filtered_by.get(metric, 0) + new[name]

    @property
    def length_ratio(self) -> float:
        """Mean length trained over mean length generated; 1 before anything is trained."""
        if not self.trained_tokens or not self.generated_tokens:
            return 1.0
        trained = self.trained_tokens / self.trained_trajectories
        return trained / (self.generated_tokens / self.generated_trajectories)

    def values(self) -> dict[str, float]:
        """Return the totals that are logged with every step, by metric name."""
        return {
            "async/length_ratio": self.length_ratio,
            **{f"async/{name}": float(getattr(self, name)) for name in ("wasted_tokens", "requeued_groups")},
            **{f"policy/{name}": float(getattr(self, name)) for name in ("all_masked_steps", "refused_steps")},
            **{f"generate/{name}": float(getattr(self, name)) for name in _GENERATE_METRICS},
            **{f"generate/{name}": float(num) for name, num in self.filtered_by.items()},
        }

    def summary(self) -> dict[str, float | str | None]:
        """Return the figures of ``summary.json`` that come from the steps."""
        return {
            "tokens_generated": self.generated_tokens + self.evaluation_tokens + self.side_tokens,
            "tokens_trained": self.trained_tokens,
            "staleness_mean": self.staleness_sum / max(1, self.trained_groups),
            "over_bound_frac": self.groups_over_bound / max(1, self.trained_groups),
            "staleness_bound": self._bound_in_words(),
            "masked_frac": self.masked_tokens / max(1, self.trained_tokens + self.masked_tokens),
            "pause_seconds_median": median(self.pauses) if self.pauses else None,
            "trainer_idle_frac": self.idle_seconds / self.training_seconds if self.training_seconds else None,
            **{name: getattr(self, name) for name in _IN_SUMMARY},
        }

    def _bound_in_words(self) -> str:
        cost = self.bound_cost.sentence(self.max_staleness_steps, self.training_seconds, self.steps_per_batch)
        if self.groups_over_bound:
            share = self.groups_over_bound / self.trained_groups
            excess = self.staleness_max - self.max_staleness_steps
            cost += f"; {share:.0%} of the groups passed it"
            cost += f", the oldest by {excess}" if excess > 0 else ", which was smaller before the run was resumed"
        if self.masked_tokens:
            cost += f"; {self.masked_tokens / (self.trained_tokens + self.masked_tokens):.1%} of the tokens were masked"
        if self.requeued_groups:
            cost += f"; {self.requeued_groups} groups were requeued"
        return cost
