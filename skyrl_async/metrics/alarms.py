"""Rules that say what is wrong with a run, from the figures of its steps alone.

A rule looks at one figure. It gives an alarm when the figure has been bad in each of the last ``num_steps`` steps that have it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from skyrl_async.errors import printable

Row = Mapping[str, float]
"""Figures of a step by metric name."""

FAILED = "generate/failed_frac"
ABANDONED = "generate/abandoned_frac"
_SLOWEST = "engines/slowest_frac"
_TEACHER = "policy/teacher_kl"
"""There where a teacher trains tokens, whatever the rewards are."""
_NUMBER = re.compile(r"\d+")
_SPEED = re.compile(r"engine/(.+)/tokens_per_call_second")
_MAX_REASON = 200
_WARM_UP_STEPS = 2
"""Caches are cold, and groups of the first steps were begun together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that is wrong at the newest step."""

    name: str
    since_step: int
    says: str
    """What is wrong, with the figure."""
    metric: str
    """The figure that shows it."""
    advice: str
    """Which key of the configuration changes it, and how."""

    def __str__(self) -> str:
        return f"{self.says} (since step {self.since_step}; {self.metric}). {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a figure is bad, and what to say then."""

    name: str
    metric: str
    is_bad: Callable[[float, Row], bool]
    """Called with the figure and its row."""
    says: str
    """A format with ``value``."""
    advice: str
    num_steps: int = 5

    def alarm(self, rows: Sequence[Row], known: Alarm | None = None) -> Alarm | None:
        """The alarm at the newest step, if there is one; of one that is older than ``rows``, ``known`` says since when."""
        since = value = None
        num_bad = 0
        for row in reversed(rows):
            if self.metric not in row or row["step"] <= _WARM_UP_STEPS:
                continue
            if not self.is_bad(row[self.metric], row):
                break
            value = row[self.metric] if value is None else value
            since, num_bad = int(row["step"]), num_bad + 1
        else:
            if since is not None and known is not None:
                since = min(since, known.since_step)
        if since is None or num_bad < self.num_steps:
            return None
        says = self.says.format(value=value)
        return Alarm(name=self.name, since_step=since, says=says, metric=self.metric, advice=self.advice)


def _at_least(limit: float) -> Callable[[float, Row], bool]:
    return lambda value, _: value >= limit


def _is_costly(seconds: float, row: Row) -> bool:
    return seconds >= 0.1 * row.get("timing/step", float("inf"))


RULES = (
    Rule(
        name="failing samples",
        metric=FAILED,
        is_bad=_at_least(0.1),
        says="{value:.0%} of the samples fail",
        advice="Samples, outcome failed, has each with its reason; generator.max_retries tries more often.",
        num_steps=3,
    ),
    Rule(
        name="abandoned samples",
        metric=ABANDONED,
        is_bad=_at_least(0.2),
        says="Harnesses leave {value:.0%} of the samples without a reward",
        advice="Samples, outcome abandoned, has each with its reason; generator.agent_timeout_s gives a harness more time.",
        num_steps=3,
    ),
    Rule(
        name="slow engine",
        metric=_SLOWEST,
        is_bad=lambda share, _: share < 0.6,
        says="One engine samples {value:.0%} of the tokens per second of a call that the others do",
        advice="Look at what else runs on its device; uv run -m skyrl_async.engines RUN remove NAME takes it out.",
    ),
    Rule(
        name="engines hold other weights",
        metric="policy/lag0_behavior_kl",
        is_bad=_at_least(0.01),
        says="Engine and trainer disagree by {value:.3g} nats per token on tokens of the very version that is trained",
        advice="uv run -m skyrl_async.doctor on the run's directory says why: types of the weights (policy.dtype), an engine that serves "
        "another version, or other sampling parameters.",
        num_steps=3,
    ),
    Rule(
        name="engines differ from the trainer",
        metric="async/engine_logprob_gap",
        is_bad=_at_least(0.15),
        says="Asked for the same tokens, engines and trainer differ by up to {value:.2g} nats under the same version",
        advice="uv run -m skyrl_async.doctor on the run's directory says why; from trainer.max_engine_logprob_gap on the run ends.",
        num_steps=1,
    ),
    Rule(
        name="no signal, all wrong",
        metric="reward/zero_variance_frac",
        is_bad=lambda share, row: share >= 0.9 and row.get("reward/mean", 1.0) < 0.5 and _TEACHER not in row,
        says="In {value:.0%} of the groups all samples have the same, low reward: they train nothing",
        advice="Take easier prompts, raise generator.n_samples_per_prompt, or look at a sample whether its reward is right.",
    ),
    Rule(
        name="no signal, all right",
        metric="reward/zero_variance_frac",
        is_bad=lambda share, row: share >= 0.9 and row.get("reward/mean", 0.0) >= 0.5 and _TEACHER not in row,
        says="In {value:.0%} of the groups all samples have the same, high reward: they train nothing",
        advice="The prompts are solved: end the run, or take harder ones (task.train_files, task.name).",
    ),
    Rule(
        name="nothing passes the filter",
        metric="generate/filtered_frac",
        is_bad=_at_least(0.8),
        says="{value:.0%} of the finished groups are left out because their rewards do not differ",
        advice="Take prompts nearer to what the policy can do, or raise generator.n_samples_per_prompt.",
    ),
    Rule(
        name="effective sample size",
        metric="policy/ess",
        is_bad=lambda share, _: share < 0.5,
        says="Importance ratios leave an effective sample size of {value:.0%} of the tokens",
        advice="Lower trainer.max_staleness_steps or training.lr, or set trainer.guard.scale_lr_by_ess=true.",
        num_steps=3,
    ),
    Rule(
        name="all tokens masked",
        metric="policy/correction_masked",
        is_bad=_at_least(0.5),
        says="Off-policy corrections leave {value:.0%} of the tokens out of the loss",
        advice="Lower trainer.max_staleness_steps, or widen the bounds of trainer.algorithm.off_policy_correction.",
        num_steps=3,
    ),
    Rule(
        name="entropy",
        metric="policy/entropy",
        is_bad=lambda nats, row: nats < 0.01 and row.get("reward/mean", 1.0) < 0.9,
        says="The policy has an entropy of {value:.2g} nats left, and reward is not there yet: it explores nothing",
        advice="Raise trainer.algorithm.entropy_loss_coef or trainer.algorithm.eps_clip_high, or lower training.lr.",
    ),
    Rule(
        name="answers cut",
        metric="generate/truncated_frac",
        is_bad=_at_least(0.3),
        says="The token budget cuts {value:.0%} of the answers",
        advice="Raise generator.sampling.max_tokens, or set generator.apply_overlong_filtering=true.",
    ),
    Rule(
        name="gradient",
        metric="policy/grad_norm",
        is_bad=lambda norm, _: not norm < float("inf"),
        says="The norm of the gradient is {value}",
        advice="Lower training.lr, or look for a sample with a log-prob that is not finite.",
        num_steps=1,
    ),
    Rule(
        name="trainer idle",
        metric="trainer/idle_frac",
        is_bad=_at_least(0.5),
        says="The trainer waits for generation for {value:.0%} of the step",
        advice="Add engines (engine.num_engines), or raise trainer.max_staleness_steps.",
    ),
    Rule(
        name="generation idle",
        metric="stage/generate/waiting_for_output_frac",
        is_bad=_at_least(0.5),
        says="Generation waits for the trainer for {value:.0%} of the time",
        advice="Give training more workers (training.num_workers), or raise trainer.max_staleness_steps.",
    ),
    Rule(
        name="cost of the bound",
        metric="timing/wait_for_staleness",
        is_bad=_is_costly,
        says="The trainer waits {value:.3g} s of a step to hold the staleness bound",
        advice="Raise trainer.max_staleness_steps, or choose another trainer.staleness_policy.",
    ),
    Rule(
        name="lost lengths",
        metric="async/length_ratio",
        is_bad=lambda ratio, row: ratio < 0.8 and row["step"] > 10,
        says="Answers that are trained have {value:.0%} of the length of those generated: long ones are lost",
        advice="Raise trainer.max_staleness_steps, or choose trainer.staleness_policy=window.",
    ),
    Rule(
        name="checkpoints",
        metric="checkpoint/failures",
        is_bad=lambda failures, _: failures > 0,
        says="The disk did not take {value:.0f} checkpoints",
        advice="Make room where trainer.output_dir is.",
        num_steps=1,
    ),
)
"""The most serious first."""
_READ = {"step", "reward/mean", "timing/step", _TEACHER, *(rule.metric for rule in RULES)}


def alarms(
    rows: Sequence[Row], failures: Callable[[], Mapping[str, Sequence[str]]] = dict, known: Iterable[Alarm] = ()
) -> Iterator[Alarm]:
    """Yield what is wrong at the newest step, the most serious first.

    Args:
        rows: figures of steps with ``step``, in order; the newest fifty are enough.
        failures: returns why the newest samples failed, for ``FAILED``, and were abandoned, for ``ABANDONED``; called if too many were.
        known: the alarms of the call before, so that one that lasts keeps the step since which it does.
    """
    known_by_name = {alarm.name: alarm for alarm in known}
    for rule in RULES:
        alarm = rule.alarm(rows, known_by_name.get(rule.name))
        if alarm is not None and alarm.metric in (FAILED, ABANDONED):
            alarm = replace(alarm, says=alarm.says + _commonest(failures().get(alarm.metric, ())))
        if alarm is not None and alarm.metric == _SLOWEST:
            alarm = replace(alarm, says=alarm.says + _slowest(rows))
        if alarm is not None:
            yield alarm


def engine_figures(engines: Mapping[str, Mapping[str, float]]) -> Row:
    """Figures by engine as those of a step."""
    return {f"engine/{engine}/{name}": value for engine, of in engines.items() for name, value in of.items()}


def is_read(metric: str) -> bool:
    """Whether a rule looks at the metric."""
    return metric in _READ or _SPEED.fullmatch(metric) is not None


def _slowest(rows: Sequence[Row]) -> str:
    """Which engine is the slowest in the newest step that tells; empty without one."""
    for row in reversed(rows):
        speeds = {found[1]: value for name, value in row.items() if (found := _SPEED.fullmatch(name))}
        if speeds and _SLOWEST in row:  # else the slowest may not have ended a call
            return f": {min(speeds, key=speeds.__getitem__)}"
    return ""


def _commonest(reasons: Sequence[str]) -> str:
    """The reason that most have, but for numbers, with its share; empty without reasons."""
    kinds = Counter(_NUMBER.sub("#", reason) for reason in reasons)
    if not kinds:
        return ""
    kind, num = kinds.most_common(1)[0]
    newest = next(reason for reason in reversed(reasons) if _NUMBER.sub("#", reason) == kind)
    said = " ".join(printable(newest).split())
    return f", {num / len(reasons):.0%} of them with {said if len(said) <= _MAX_REASON else f'{said[: _MAX_REASON - 4].rstrip()} ...'}"
