"""Gathers the figures of one optimizer step from its groups, from the policy's sums and from timings.

``docs/reference/metrics.md`` explains the names of the values.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from skyrl_async.samples import Sample, samples_of
from skyrl_async.types import Group, Trajectory

_OF_LAG = re.compile(r"(lag\d+)_(?!tokens_sum$)")
"""Sums over the tokens sampled at one lag; their mean is over these tokens. ``lag<k>_tokens_sum`` itself is a fraction of all tokens."""
_RATIOS = {"ratio": "is_ratio_mean", "ratio_max": "is_ratio_max"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWait:
    """A wait that the staleness bound caused."""

    uid: str
    """Uid of the group whose arrival ended the wait."""
    seconds: float
    staleness: int
    """Staleness at which that group was trained."""


@dataclass(slots=True)
class StepFigures:
    """The figures of one optimizer step, or of the steps of one batch, added while it is put together."""

    trained_version: int
    """Policy version as the step begins: completed optimizer steps."""
    max_staleness_steps: int
    num_steps: int = 1
    """Optimizer steps of the batch."""
    num_skipped_steps: int = 0
    """Of these the first ones, for which the end of the data left no groups."""
    window_steps: int = 0
    """By which ``trainer.staleness_policy=window`` raises the bound."""
    groups: list[Group] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    """The policy's sums and maxima over all passes."""
    step_sums: dict[str, float] = field(default_factory=dict)
    """The same since the last optimizer step."""
    seconds: dict[str, float] = field(default_factory=dict)
    began_at: float = 0.0
    """When the step began, seconds of the event loop: at the end of the step before, plus the time of checkpoints."""
    waits: list[BoundWait] = field(default_factory=list)
    """Waits, although a group was there, for older groups that would pass the bound."""
    num_masked_tokens: int = 0
    """Sampled tokens masked from the loss because of their staleness."""
    lr_scale: float = 1.0
    """Smallest factor on the learning rate among the optimizer steps taken; 0: one was refused."""
    num_refused_steps: int = 0
    """Optimizer steps that ``trainer.guard.min_ess`` refused."""
    num_untaken_steps: int = 0
    """Optimizer steps that the policy has not taken: refused, or while the critic alone is trained."""
    critic: dict[str, float] = field(default_factory=dict)
    """Figures of the critic's last step by metric name; empty without one."""
    denominator: float = 0.0
    """Sum of the groups' denominators (``algorithms.aggregation``) over all passes."""
    step_denominator: float = 0.0
    """The same since the last optimizer step."""
    _num_taken: int = field(default=0, init=False)
    """Optimizer steps taken."""
    num_passed_tokens: int = field(default=0, init=False)
    """Trained tokens over all passes."""
    num_tokens: int = field(default=0, init=False)
    """Trained tokens in the mini-batch."""
    num_live_samples: int = field(default=0, init=False)
    """Trained samples in the mini-batch."""
    _tokens_of_version: Counter[int] = field(default_factory=Counter, init=False)
    """Policy version sampled under -> trained tokens."""
    _counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """Sums over the groups' samples and rows, and the largest length; added up group by group, because a step has thousands of groups."""
    _own_figures: dict[str, list[float]] = field(default_factory=dict, init=False)
    """Metric of environments and harnesses -> its sum, and the number of samples that have it."""

    def add_wait(self, group: Group, seconds: float) -> None:
        """Count a wait: the trainer was held back from other groups until it could take this one."""
        staleness = self.last_version - group.scheduled_version
        self.waits.append(BoundWait(uid=group.uid, seconds=seconds, staleness=staleness))

    def add_group(
        self, group: Group, policy_figures: dict[str, float], num_masked_tokens: int = 0, denominator: float = 0.0
    ) -> None:
        """Count a trained group with the policy's figures of it (sums, and maxima under ``*_max``)."""
        self.groups.append(group)
        self.num_masked_tokens += num_masked_tokens
        self.add_pass(group, policy_figures, denominator)
        samples = samples_of(group.trajectories)
        self._counts["uniform_groups"] += _is_uniform(samples) and not any(column.any() for column in group.advantages)
        self._counts["samples"] += len(samples)
        for sample in samples:
            self._count_sample(sample)

    def add_pass(self, group: Group, policy_figures: dict[str, float], denominator: float) -> None:
        """Count a pass over a group, the first one or another, with the policy's figures of it."""
        self.denominator += denominator
        self.step_denominator += denominator
        self.num_passed_tokens += group.num_sampled_tokens
        for sums in (self.sums, self.step_sums):
            for name, value in policy_figures.items():
                if name.endswith("_max"):
                    sums[name] = max(sums.get(name, value), value)
                else:
                    sums[name] = sums.get(name, 0.0) + value

    def end_optimizer_step(self) -> None:
        """What is added from here on is of the next one."""
        self.step_sums, self.step_denominator = {}, 0.0
        self._num_taken += 1

    def _count_sample(self, sample: Sample) -> None:
        counts, num_tokens = self._counts, sample.num_sampled_tokens
        self.num_tokens += num_tokens
        counts["rows"] += len(sample.rows)
        for row in sample.rows:
            counts["aborts"] += row.num_aborts
            counts["overlong_rows"] += row.is_overlong
            self._count_versions(row)
        if sample.is_live:
            self.num_live_samples += 1
            counts["shaped_reward"] += sample.shaped_reward
            counts["live_tokens"] += num_tokens
            counts["longest"] = max(counts["longest"], num_tokens)
            counts["turns"] += sample.num_turns
        if not sample.is_abandoned:
            counts["rewarded"] += 1
            counts["reward"] += sample.reward
            counts["truncated"] += sample.is_truncated
            counts["overlong"] += sample.is_overlong
        for name, value in sample.rows[0].metrics.items():
            metric = name if name.startswith(("agent/", "timing/")) else f"env/{name}"
            of_metric = self._own_figures.setdefault(metric, [0.0, 0])
            of_metric[0] += value
            of_metric[1] += 1

    def _count_versions(self, row: Trajectory) -> None:
        spans = row.versions.spans
        if len(spans) == 1:
            self._tokens_of_version[spans[0][0]] += row.num_sampled_tokens
            return
        for (_, begin), (version, end) in pairwise(((0, 0), *spans)):
            self._tokens_of_version[version] += int(np.count_nonzero(row.loss_mask[begin:end]))

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to the time spent in one part of the step."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def staleness_wait_seconds(self) -> float:
        """Seconds of all waits that the staleness bound caused."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def staleness(self) -> list[int]:
        """Staleness of each group, at the last optimizer step of its batch."""
        return [self.last_version - group.scheduled_version for group in self.groups]

    @property
    def version(self) -> int:
        """Policy version after the step."""
        return self.trained_version + self.num_steps

    @property
    def current_version(self) -> int:
        """Policy version that is trained now."""
        return self.trained_version + self.num_skipped_steps + self._num_taken

    @property
    def last_version(self) -> int:
        """Policy version at the last optimizer step of the batch."""
        return self.version - 1

    @property
    def num_over_bound(self) -> int:
        """Groups staler than the bound."""
        return sum(s > self.max_staleness_steps + self.window_steps for s in self.staleness)

    @property
    def loss_denominator(self) -> float:
        """Denominator of the sums of losses and gradients since the last optimizer step.

        It is 1 if every token is masked for staleness or length: the gradient is 0, and only momentum and weight decay move weights.
        """
        is_masked = self.num_masked_tokens or self._counts["overlong_rows"]
        return self.step_denominator if self.step_denominator or not is_masked else 1.0

    @property
    def is_all_masked(self) -> bool:
        """Whether off-policy corrections masked every token: the gradient of the policy loss is 0."""
        return 0 < self.num_passed_tokens <= self.sums.get("correction_masked_sum", 0.0)

    @property
    def why_untaken(self) -> str | None:
        """Why the policy has taken none of the batch's optimizer steps; None if it has taken one."""
        if self.num_untaken_steps < max(1, self._num_taken):  # the data's end may leave fewer steps than a batch has
            return None
        if self.num_refused_steps:
            return "trainer.guard.min_ess refused the step"
        return "trainer.critic.warmup_steps: the critic alone was trained"

    @property
    def trains_nothing(self) -> bool:
        """Whether masks for staleness and length left no token."""
        return bool(self.groups) and not self.denominator

    @property
    def token_lags(self) -> Counter[int]:
        """Policy versions between sampling and the last optimizer step -> trained tokens."""
        of_version = self._tokens_of_version
        return Counter({self.last_version - version: num for version, num in of_version.items() if num})

    def values(self) -> dict[str, float]:
        """Return all figures of the step by metric name."""
        counts, lags, staleness = self._counts, self.token_lags, self.staleness
        num_live, num_rewarded = max(1, self.num_live_samples), max(1, counts["rewarded"])
        values = {
            "reward/mean": counts["reward"] / num_rewarded,
            "reward/shaped_mean": counts["shaped_reward"] / num_live,
            "reward/zero_variance_frac": counts["uniform_groups"] / len(self.groups),
            "async/staleness_mean": sum(staleness) / len(staleness),
            "async/staleness_max": float(max(staleness)),
            "async/over_bound_frac": self.num_over_bound / len(staleness),
            "timing/wait_for_staleness": self.staleness_wait_seconds,
            "async/masked_frac": self.num_masked_tokens / max(1, self.num_tokens + self.num_masked_tokens),
            "async/token_lag_mean": sum(lag * num for lag, num in lags.items()) / max(1, lags.total()),
            "async/token_lag_max": float(max(lags, default=0)),
            "async/num_aborts": float(counts["aborts"]),
            "generate/response_tokens_mean": counts["live_tokens"] / num_live,
            "generate/response_tokens_max": float(counts["longest"]),
            "generate/truncated_frac": counts["truncated"] / num_rewarded,
            "generate/overlong_frac": counts["overlong"] / num_rewarded,
            "generate/turns_mean": counts["turns"] / num_live,
            "generate/abandoned_frac": 1 - counts["rewarded"] / counts["samples"],
            "generate/rows_mean": counts["rows"] / counts["samples"],
            "timing/generate_group_max": max(g.generation_seconds for g in self.groups),
            "policy/num_tokens": float(self.num_tokens),
        }
        values |= {metric: total / number for metric, (total, number) in self._own_figures.items()}
        for name, value in self.sums.items():
            if name == "loss_sum":
                values["policy/loss"] = value / (self.denominator or 1.0)
            elif name.endswith("_sum"):
                values[_policy_metric(name.removesuffix("_sum"))] = value / self._num_tokens_of(name)
            elif name.endswith("_max"):
                values[_policy_metric(name)] = value
        values |= effective_shares(self.sums) | self.critic
        return values | {f"timing/{name}": seconds for name, seconds in self.seconds.items()}

    def _num_tokens_of(self, name: str) -> float:
        """Number of tokens that the policy's sum ``name`` is over: those of its lag, or all."""
        of_lag = _OF_LAG.match(name)
        return max(1, self.num_passed_tokens) if of_lag is None else self.sums[f"{of_lag[1]}_tokens_sum"]


def _policy_metric(name: str) -> str:
    """The metric of a sum, without its suffix, or of a largest value that the policy workers report."""
    return "policy/" + _RATIOS.get(name, name).replace("clipped", "clip_frac")


def _is_uniform(samples: Sequence[Sample]) -> bool:
    """Whether the rewards of a group's trained samples are equal."""
    return len({sample.reward for sample in samples if sample.is_live}) <= 1


def effective_shares(sums: Mapping[str, float]) -> dict[str, float]:
    """``policy/<prefix>ess``: ``(sum w)^2 / (n sum w^2)``, in (0, 1], for every set of weights in ``sums``.

    ``algorithms.off_policy.sample_size_figures`` says which sums those are. It is ``1 / n``, its least, if every weight is too small for
    them.
    """
    shares = {}
    for of in [name.removesuffix("ess_count") for name in sums if name.endswith("ess_count")]:
        weights, squares = sums[f"{of}ess_weights"], sums[f"{of}ess_squares"]
        shares[f"policy/{of}ess"] = (weights**2 / squares if squares else 1.0) / sums[f"{of}ess_count"]
    return shares
