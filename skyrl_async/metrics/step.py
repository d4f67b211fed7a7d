"""Gathers the figures of one optimizer step, and the totals of a run, from groups and timings.

Flows in: groups as they are trained, sums that the policy returns, seconds. Flows out: values under the names of
``metrics.names``. Does not know where they are written.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import median

from skyrl_async.metrics.bound_cost import BoundCost, needed_bound
from skyrl_async.metrics.sample_sizes import effective_shares
from skyrl_async.samples import Sample, live_samples_of, rewarded_samples_of, samples_of
from skyrl_async.types import Group

_MAX_PAUSES = 1000
_FILTERED = "filtered/"
_OF_LAG = re.compile(r"(lag\d+)_(?!tokens_sum$)")
"""Sums over the tokens that were sampled so many versions before; their number itself is a share of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWait:
    """One wait that the staleness bound caused."""

    uid: str
    """Of the group whose arrival ended it."""
    seconds: float
    staleness: int
    """At which that group was trained."""
    held_seconds: float
    """Waited for the bound in the step until then, this wait included."""


@dataclass(slots=True)
class StepFigures:
    """One optimizer step being put together."""

    version: int
    """Policy version trained at."""
    max_staleness_steps: int
    groups: list[Group] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    began_at: float = 0.0
    """When the step before ended, checkpoints added: this one lasts from there. Seconds of the loop."""
    staleness_wait_seconds: float = 0.0
    """Waited although a group was there, for older ones that would pass the bound."""
    waits: list[BoundWait] = field(default_factory=list)
    """What that time was waited for."""
    num_masked_tokens: int = 0
    """Sampled tokens that were masked from the loss because of their age."""
    denominator: float = 0.0
    """What the groups add to it; see ``algorithms.aggregation``."""

    def add_wait(self, group: Group, seconds: float) -> None:
        """The trainer was held back from other groups for so long until it could take this one."""
        self.staleness_wait_seconds += seconds
        wait = BoundWait(
            uid=group.uid,
            seconds=seconds,
            staleness=self.version - group.scheduled_version,
            held_seconds=self.staleness_wait_seconds,
        )
        self.waits.append(wait)

    def add_group(
        self, group: Group, policy_figures: dict[str, float], num_masked_tokens: int = 0, denominator: float = 0.0
    ) -> None:
        """Count a group as it was trained, and what the policy said of it (sums, and maxima under ``*_max``)."""
        self.groups.append(group)
        self.denominator += denominator
        self.num_masked_tokens += num_masked_tokens
        for name, value in policy_figures.items():
            if name.endswith("_max"):
                self.sums[name] = max(self.sums.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to the time spent in one part of the step."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def staleness(self) -> list[int]:
        """Of each group."""
        return [self.version - group.scheduled_version for group in self.groups]

    @property
    def num_tokens(self) -> int:
        """Trained tokens in the mini-batch."""
        return sum(group.num_sampled_tokens for group in self.groups)

    @property
    def loss_denominator(self) -> float:
        """What sums of losses and gradients are divided by.

        Where every token is masked, for its age or its sample's length, 1: the gradient is 0, and the step only counts a version.
        """
        is_masked = self.num_masked_tokens or any(row.is_overlong for g in self.groups for row in g.trajectories)
        return self.denominator if self.denominator or not is_masked else 1.0

    @property
    def is_all_masked(self) -> bool:
        """Whether off-policy corrections left no token a policy loss: its gradient is 0, and the step only counts a version."""
        return 0 < self.num_tokens <= self.sums.get("correction_masked_sum", 0.0)

    @property
    def trains_nothing(self) -> bool:
        """Whether age and length limits left no token at all."""
        return bool(self.groups) and not self.denominator

    @property
    def token_lags(self) -> Counter[int]:
        """Policy versions between sampling and training -> trained tokens."""
        rows = (t for group in self.groups for t in group.trajectories)
        of_version: Counter[int] = Counter()
        for row in rows:
            of_version.update(compress(row.versions, row.loss_mask))
        return Counter({self.version - version: num for version, num in of_version.items()})

    def values(self) -> dict[str, float]:
        """Everything about the step, by metric name."""
        rows = [t for group in self.groups for t in group.trajectories]
        rewarded = [sample for group in self.groups for sample in rewarded_samples_of(group.trajectories)]
        live = [sample for sample in rewarded if not sample.is_overlong]
        num_samples = sum(len(samples_of(group.trajectories)) for group in self.groups)
        lags, staleness = self.token_lags, self.staleness
        over = sum(s > self.max_staleness_steps for s in staleness)
        values = {
            "reward/mean": sum(s.reward for s in rewarded) / max(1, len(rewarded)),
            "reward/shaped_mean": sum(s.shaped_reward for s in live) / max(1, len(live)),
            "reward/zero_variance_share": sum(_is_uniform(g) for g in self.groups) / len(self.groups),
            "async/staleness_mean": sum(staleness) / len(staleness),
            "async/staleness_max": float(max(staleness)),
            "async/over_bound_share": over / len(staleness),
            "async/staleness_wait_seconds": self.staleness_wait_seconds,
            "async/masked_share": self.num_masked_tokens / max(1, self.num_tokens + self.num_masked_tokens),
            "async/token_lag_mean": sum(lag * num for lag, num in lags.items()) / max(1, lags.total()),
            "async/token_lag_max": float(max(lags, default=0)),
            "async/num_aborts": float(sum(t.num_aborts for t in rows)),
            "generate/response_tokens_mean": sum(s.num_sampled_tokens for s in live) / max(1, len(live)),
            "generate/response_tokens_max": float(max((s.num_sampled_tokens for s in live), default=0)),
            "generate/truncated_share": sum(s.is_truncated for s in rewarded) / max(1, len(rewarded)),
            "generate/overlong_share": sum(s.is_overlong for s in rewarded) / max(1, len(rewarded)),
            "generate/turns_mean": sum(s.num_turns for s in live) / max(1, len(live)),
            "generate/abandoned_share": 1 - len(rewarded) / num_samples,
            "generate/rows_mean": len(rows) / num_samples,
            "generate/group_seconds_max": max(g.generation_seconds for g in self.groups),
            "policy/num_tokens": float(self.num_tokens),
        }
        values |= _own_figures([sample for group in self.groups for sample in samples_of(group.trajectories)])
        for name, value in self.sums.items():
            if name == "loss_sum":
                values["policy/loss"] = value / (self.loss_denominator or 1.0)
            elif name.endswith("_sum"):
                values[f"policy/{name.removesuffix('_sum')}"] = value / self._num_tokens_of(name)
            elif name.endswith("_max"):
                values[f"policy/{name}"] = value
        values |= effective_shares(self.sums)
        return values | {f"timing/{name}": seconds for name, seconds in self.seconds.items()}

    def _num_tokens_of(self, name: str) -> float:
        """Tokens that a sum of the policy's is over: those of its lag, or all."""
        of_lag = _OF_LAG.match(name)
        return max(1, self.num_tokens) if of_lag is None else self.sums[f"{of_lag[1]}_tokens_sum"]


@dataclass(slots=True)
class RunTotals:
    """What the summary needs of all steps; goes through checkpoints."""

    steps: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    trained_trajectories: int = 0
    generated_tokens: int = 0
    """Sampled for training, in finished groups, trained or not."""
    generated_trajectories: int = 0
    """In finished groups."""
    wasted_tokens: int = 0
    """Sampled and thrown away: of finished groups never trained, of finished samples of failed groups, and of cut off or restarted
    generations where it is known."""
    failed_groups: int = 0
    failed_samples: int = 0
    """That their groups were trained without."""
    retries: int = 0
    """Times a group was tried again, for all of its samples or for some."""
    resumed_trajectories: int = 0
    """Running ones of a checkpoint that went on where they stood."""
    restarted_trajectories: int = 0
    """Running ones of a checkpoint that began anew."""
    evaluation_tokens: int = 0
    side_tokens: int = 0
    """Of agents' side requests, which are not among the generated ones that lengths are means of."""
    cut_short_samples: int = 0
    """Whose harness failed of a cap or a cut answer."""
    staleness_sum: int = 0
    staleness_max: int = 0
    groups_over_bound: int = 0
    staleness_wait_seconds: float = 0.0
    max_staleness_steps: int = 0
    """Of the last step."""
    bound_cost: BoundCost = field(default_factory=BoundCost)
    masked_tokens: int = 0
    all_masked_steps: int = 0
    """Steps without a token that off-policy corrections left a policy loss."""
    requeued_groups: int = 0
    filtered_groups: int = 0
    """Finished and not trained: their rewards did not differ."""
    filtered_by: dict[str, int] = field(default_factory=dict)
    """Of these, by what they had instead: see ``rollout.finished_group_filter``; keys are metrics' names."""
    idle_seconds: float = 0.0
    train_seconds: float = 0.0
    training_seconds: float = 0.0
    """Wall time from the first step's beginning until the last one's weights are copied, checkpoints left out."""
    pauses: list[float] = field(default_factory=list)
    """Seconds of the last publishes' pauses, a thousand of them: a checkpoint does not grow with the run."""
    reward_before: float | None = None
    evaluated_version: int = 0
    """Newest policy version whose evaluation is through."""

    def __post_init__(self) -> None:
        if isinstance(self.bound_cost, dict):  # from a checkpoint
            self.bound_cost = BoundCost(**self.bound_cost)

    def add_step(self, figures: StepFigures) -> None:
        """Add a finished step."""
        self.steps += 1
        self.trained_groups += len(figures.groups)
        self.trained_tokens += figures.num_tokens
        self.trained_trajectories += sum(len(live_samples_of(g.trajectories)) for g in figures.groups)
        self.staleness_sum += sum(figures.staleness)
        self.staleness_max = max(self.staleness_max, *figures.staleness)
        self.groups_over_bound += sum(s > figures.max_staleness_steps for s in figures.staleness)
        self.staleness_wait_seconds += figures.staleness_wait_seconds
        self.training_seconds += figures.seconds["step"]
        del self.pauses[:-_MAX_PAUSES]
        self.masked_tokens += figures.num_masked_tokens
        self.all_masked_steps += figures.is_all_masked or figures.trains_nothing
        self.max_staleness_steps = figures.max_staleness_steps
        free_step_seconds = (self.training_seconds - self.staleness_wait_seconds) / self.steps
        for wait in figures.waits:
            needed = needed_bound(wait.staleness, wait.held_seconds, free_step_seconds)
            self.bound_cost.add(wait.uid, seconds=wait.seconds, needed_bound=needed)
        self.idle_seconds += figures.seconds.get("wait_for_groups", 0.0)
        self.train_seconds += sum(figures.seconds.get(n, 0.0) for n in ("forward_backward", "optimizer_step"))

    def add_generation(self, new: Mapping[str, int]) -> None:
        """Add what the generation workers counted since the last call."""
        self.generated_tokens += new["tokens"]
        self.generated_trajectories += new["trajectories"]
        self.failed_groups += new["failed_groups"]
        self.failed_samples += new["failed_samples"]
        self.side_tokens += new["side_tokens"]
        self.cut_short_samples += new["cut_short_samples"]
        self.retries += new["retries"]
        self.wasted_tokens += new["abandoned_tokens"] + new["lost_tokens"] + new["filtered_tokens"]
        self.requeued_groups += new["requeued_groups"]
        self.filtered_groups += new["filtered_groups"]
        for name in (name for name in new if name.startswith(_FILTERED)):
            metric = name.replace("/", "_")
            self.filtered_by[metric] = self.filtered_by.get(metric, 0) + new[name]
        self.resumed_trajectories += new["resumed_trajectories"]
        self.restarted_trajectories += new["restarted_trajectories"]

    @property
    def length_ratio(self) -> float:
        """Mean length trained over mean length generated; 1 before anything was."""
        if not self.trained_tokens or not self.generated_tokens:
            return 1.0
        trained = self.trained_tokens / self.trained_trajectories
        return trained / (self.generated_tokens / self.generated_trajectories)

    def values(self) -> dict[str, float]:
        """What is logged with every step, by metric name."""
        return {
            "async/length_ratio": self.length_ratio,
            "async/wasted_tokens": float(self.wasted_tokens),
            "async/requeued_groups": float(self.requeued_groups),
            "policy/all_masked_steps": float(self.all_masked_steps),
            "generate/failed_groups": float(self.failed_groups),
            "generate/failed_samples": float(self.failed_samples),
            "generate/retries": float(self.retries),
            "generate/filtered_groups": float(self.filtered_groups),
            **{f"generate/{name}": float(num) for name, num in self.filtered_by.items()},
        }

    def summary(self) -> dict[str, float | str | None]:
        """The figures of ``summary.json`` that come from the steps."""
        return {
            "tokens_generated": self.generated_tokens + self.evaluation_tokens + self.side_tokens,
            "tokens_trained": self.trained_tokens,
            "trained_groups": self.trained_groups,
            "staleness_mean": self.staleness_sum / max(1, self.trained_groups),
            "staleness_max": self.staleness_max,
            "groups_over_bound": self.groups_over_bound,
            "over_bound_share": self.groups_over_bound / max(1, self.trained_groups),
            "staleness_wait_seconds": self.staleness_wait_seconds,
            "staleness_bound": self._bound_in_words(),
            "masked_share": self.masked_tokens / max(1, self.trained_tokens + self.masked_tokens),
            "requeued_groups": self.requeued_groups,
            "filtered_groups": self.filtered_groups,
            "all_masked_steps": self.all_masked_steps,
            "wasted_tokens": self.wasted_tokens,
            "length_ratio": self.length_ratio,
            "failed_groups": self.failed_groups,
            "failed_samples": self.failed_samples,
            "cut_short_samples": self.cut_short_samples,
            "side_tokens": self.side_tokens,
            "retries": self.retries,
            "resumed_trajectories": self.resumed_trajectories,
            "restarted_trajectories": self.restarted_trajectories,
            "pause_seconds_median": median(self.pauses) if self.pauses else None,
            "training_seconds": self.training_seconds,
            "train_seconds": self.train_seconds,
            "trainer_idle_share": self.idle_seconds / self.training_seconds if self.training_seconds else None,
        }

    def _bound_in_words(self) -> str:
        """What holding the staleness bound cost, or what not holding it let through."""
        cost = self.bound_cost.sentence(self.max_staleness_steps, self.training_seconds)
        if self.groups_over_bound:
            share = self.groups_over_bound / self.trained_groups
            cost += (
                f"; {share:.0%} of the groups passed it, the oldest by {self.staleness_max - self.max_staleness_steps}"
            )
        if self.masked_tokens:
            cost += f"; {self.masked_tokens / (self.trained_tokens + self.masked_tokens):.1%} of the tokens were masked"
        if self.requeued_groups:
            cost += f"; {self.requeued_groups} groups were drawn again"
        return cost


def _own_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """What environments and harnesses say of samples, each figure averaged over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.rows[0].metrics.items():
            found.setdefault(name if name.startswith("agent/") else f"env/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _is_uniform(group: Group) -> bool:
    return len({sample.reward for sample in live_samples_of(group.trajectories)}) <= 1
