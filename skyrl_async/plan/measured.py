"""What a run's files say about where its time goes.

    samples/ ──when each call ran──┐
    trace/ ──what ran beside it────┼─> arrays, one entry per reply and one per trained group
    metrics.jsonl ──steps──────────┘

Times are seconds since the run's trace began.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml
from numpy.typing import NDArray

from skyrl_async.config.help import flat
from skyrl_async.config.load import built, changed, compose_config
from skyrl_async.config.rules.placement import on_policy_workers
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.metrics.trace_parts import Span, read_spans
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.plan.calls import WITHOUT_DEVICES, Calls, Floats, OverTime, Samples, groups_of, spans_over_time
from skyrl_async.plan.memory import Memory
from skyrl_async.record.ended import OTHERS_FAILED, Outcome
from skyrl_async.record.files import DIRECTORY, files_in, read_samples
from skyrl_async.simulator.models import KnownGroup
from skyrl_async.simulator.shared_machine import ENGINE_CORES, PUBLISH_CORES, TRAINING_CORES, slowdown
from skyrl_async.types import ENVIRONMENT_VERSION

Step: TypeAlias = dict[str, Any]
"""One line of ``metrics.jsonl``."""

MIN_STEPS = 8
"""Fewer say little about how much a figure varies."""
WARM_UP_STEPS = 2
"""Left out: the buffer fills, and caches are cold."""
_MOST_STEPS = 50
"""Newest steps that are read, after those of the warm-up."""
_MAX_ROWS = 20_000
"""Most samples of the steps that are read, but for ``MIN_STEPS``; fewer large steps are read than small ones."""
_COSTS_NO_TIME = (
    "trainer.num_steps",
    "trainer.num_epochs",
    "trainer.resume_",
    "trainer.output_dir",
    "cache_dir",
    "logging.",
)
"""Begins of keys that a run may be resumed with another value of, and take as long."""
_OUTCOMES = ("trained", "filtered", "masked", "abandoned", "failed")
_COLUMNS = (
    *("outcome", "reason", "uid", "scheduled_version", "admission_index", "sample", "branch", "step"),
    *("seconds", "num_turns", "num_prompt_tokens", "num_response_tokens", "num_sampled_tokens", "turns"),
    "policy_versions",
)
_STAGES = ("ref_logp", "logp", "teacher_logp", "values")
_SLOWED = {"optimizer_step", "gather", "send", "stage", "pause"}
"""Spans that take longer while others take the cores."""
_NEEDED = (
    *("scheduled_version", "admission_index", "num_prompt_tokens", "num_response_tokens", "num_sampled_tokens"),
    "policy_versions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Arrays of (M,), one entry per group that was trained, in each pass over its batch."""

    step: NDArray[np.int64]
    num_tokens: Floats
    """Tokens of its rows, prompts counted; the step's mean where the record does not say which group it was."""
    seconds: Floats
    """Forward and backward."""
    speed: Floats
    """Mean of how fast the trainer was meanwhile, 1 where nothing else took its cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, as far as a forecast needs it."""

    config: Config
    steps: tuple[Step, ...]
    """Without the first and the last ones."""
    calls: Calls
    gradients: Gradients
    groups: tuple[KnownGroup, ...]
    unsampled_tokens: float
    """Tokens of a row's prompt, and of what its environment answered, in the mean."""
    stages: Mapping[str, float]
    """Stages between the reward and training: name -> seconds per group."""

    shared_cores: int | None
    """Cores of the machine that trainer and engines share, this one; None where they have devices of their own."""
    idle_update: Mapping[str, float]
    """Seconds of ``stage`` and ``pause`` of the first update, before any group was generated; empty where the trace lacks it."""
    held_versions: frozenset[int]
    """Versions beside whose publish a validation ran, which may have held it up."""
    memory: Memory
    shares_alone: Mapping[str, float]
    """Part of a step or an update -> what it would take alone, of each second that it took: 1 where nothing else took its cores, and it did
    not wait for the policy's workers."""

    def mean(self, name: str) -> float:
        """Mean of a figure over the steps; one that is missing counts as 0."""
        return float(np.mean([step.get(name, 0.0) for step in self.steps]))


def samples_per_step(config: Config) -> int:
    """Samples of an optimizer step."""
    return config.trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt


def stages_on_policy_workers(config: Config) -> frozenset[str]:
    """Stages that the policy's workers compute, between gradients."""
    return frozenset({"ref": "ref_logp"}.get(stage, stage) for stage in on_policy_workers(config))


def measured(run_dir: Path) -> Measured:
    """Read a run, which may go on; of one that has ended, without its last steps, if there are enough: nothing is left to generate in them.

    Raises ``ConfigError`` for a directory that is none, or that has too few steps or no samples.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(f"{run_dir} must be the directory of a run, such as outputs/RUN: it has no config.yaml")
    try:
        config = built(compose_config([], config_file))
    except ConfigError as error:
        raise ConfigError(f"{config_file} is not of this version: {error}") from error
    resumed_at = _resumed_with_other_settings(run_dir)
    steps = [step for step in _steps(run_dir / "metrics.jsonl") if step["step"] > resumed_at]
    num_engines = int(steps[-1].get("engines/serving", 0) if steps else 0) or config.engine.num_engines
    newest = list(itertools.takewhile(lambda s: s.get("engines/serving", num_engines) == num_engines, reversed(steps)))
    least = MIN_STEPS + WARM_UP_STEPS
    if len(newest) < least:
        since = f" since it was resumed with other settings after step {resumed_at}" if resumed_at else ""
        since = since if len(newest) == len(steps) else f" since it has {num_engines} engines"
        raise ConfigError(
            f"{run_dir} has {len(newest)} steps{since}, and a forecast needs {least}, the first {WARM_UP_STEPS} of which are left "
            "out: let it run on, or resume it with a larger trainer.num_steps"
        )
    # Engines may have been added and removed by hand, past the bounds of the rule that does it.
    config = changed(
        config, {"engine.num_engines": num_engines, "engine.min_engines": None, "engine.max_engines": None}
    )
    if newest[0]["step"] == config.trainer.num_steps or (run_dir / "summary.json").exists():
        newest = newest[min(config.trainer.staleness_bound, len(newest) - least) :]
    most = max(MIN_STEPS, min(_MOST_STEPS, _MAX_ROWS // samples_per_step(config)))
    steps = newest[: most + WARM_UP_STEPS][::-1][WARM_UP_STEPS:]
    as_traced, between_gradients = list(read_spans(run_dir)), stages_on_policy_workers(config)
    spans = _from_their_turn(as_traced, between_gradients) if between_gradients else as_traced
    first_step = steps[0]["step"]
    rows, failed = _rows(run_dir, first_step)
    begins = {(s.args.get("uid"), s.args.get("version")): s.begin for s in spans if s.track == "generation"}
    rows = [row for row in rows if (row["uid"], row["scheduled_version"]) in begins]
    if not rows:
        raise ConfigError(
            f"{run_dir} says of no sample when it was generated: {DIRECTORY}/ and trace/ must be those of the run, with logging.trace on"
        )
    begin = np.array([begins[row["uid"], row["scheduled_version"]] for row in rows])
    samples = Samples(rows, begin, spans, config)
    if (cores := steps[-1].get("engines/shared_cores")) is None:
        raise ConfigError(f"{run_dir}/metrics.jsonl must have engines/shared_cores: was it written by another version?")
    shared_cores = int(cores) or None
    speed = _speed(samples.open, spans, config, shared_cores, between_gradients)
    calls = samples.calls(first_step, spans, speed)
    if not len(calls.step):
        raise ConfigError(
            f"{run_dir} has no reply without a validation beside it in its newest {len(steps)} steps, and a forecast needs such: "
            "let it run on with a larger trainer.eval_interval_steps, or with 0"
        )
    began = max(
        (s.begin for s in spans if s.track == "training" and s.args.get("step") == first_step), default=-math.inf
    )
    newest_spans, newest_traced = ([span for span in found if span.end > began] for found in (spans, as_traced))
    newest_rows, newest_failed = ([row for row in found if row["step"] >= first_step] for found in (rows, failed))
    return Measured(
        config=config,
        steps=tuple(steps),
        calls=calls,
        gradients=_gradients(rows, spans, speed, first_step, config.trainer.update_epochs_per_batch),
        groups=groups_of(newest_rows, newest_failed),
        unsampled_tokens=float(
            np.mean([r["num_prompt_tokens"] + r["num_response_tokens"] - r["num_sampled_tokens"] for r in newest_rows])
        ),
        stages=_stages(newest_spans, speed, between_gradients),
        shared_cores=shared_cores,
        idle_update=_idle_update(spans),
        held_versions=_held_versions(newest_spans),
        memory=Memory(
            parameters=steps[-1].get("policy/num_parameters", 0.0),
            device_gb=steps[-1].get("policy/device_memory_gb", 0.0),
            is_one_machine=shared_cores is not None,
        ),
        shares_alone={
            # Of these metrics, that of the optimizer step alone leaves out its waits: ``timing/wait_for_devices`` has them.
            name: _share_alone(name, newest_spans, newest_spans if name == "optimizer_step" else newest_traced, speed)
            for name in {s.name for s in newest_spans} & _SLOWED
        },
    )


def _speed(
    requests: OverTime, spans: Sequence[Span], config: Config, num_cores: int | None, between_gradients: Collection[str]
) -> OverTime:
    """1 over the slowdown of all that computes on a shared machine, see ``simulator.shared_machine``; 1 on devices."""
    if num_cores is None:
        return OverTime(np.zeros(1), np.ones(1))

    loading = spans_over_time(span for span in spans if span.name == "pause")
    standing = spans_over_time(span for span in spans if span.track == WITHOUT_DEVICES)
    training = spans_over_time(span for span in spans if _is_on_policy_workers(span, between_gradients))
    publishing = spans_over_time(span for span in spans if span.name in ("send", "stage"))
    times = np.unique(np.concatenate([one.times for one in (requests, loading, standing, training, publishing)]))

    def share(*parts: OverTime) -> Floats:
        return np.minimum(1.0, sum(one.since(times) for one in parts))

    engines = share(requests, loading) * (1 - share(standing))  # they load as they sample
    wanted = config.engine.num_engines * ENGINE_CORES * engines
    wanted += TRAINING_CORES * share(training) + PUBLISH_CORES * share(publishing)
    return OverTime(times, np.diff([0.0, *(1 / slowdown(cores, num_cores) for cores in np.asarray(wanted))]))


def _share_alone(name: str, spans: Iterable[Span], counted: Iterable[Span], speed: OverTime) -> float:
    """What the spans of this name would have taken alone, of the seconds that their metric counts."""
    begin, end = np.array([(span.begin, span.end) for span in spans if span.name == name], float).T
    alone = float(((end - begin) * speed.mean(begin, end)).sum())
    return alone / (sum(span.end - span.begin for span in counted if span.name == name) or 1.0)


def _from_their_turn(spans: Iterable[Span], between_gradients: Collection[str]) -> list[Span]:
    """The spans; those of the policy's workers, which serve one call after another, begin where their turn came."""
    found, free = list[Span](), -math.inf
    for span in sorted(spans, key=lambda span: span.end):
        if _is_on_policy_workers(span, between_gradients):
            begin, free = max(span.begin, free), span.end
            span = replace(span, begin=begin)
        found.append(span)
    return found


def _is_on_policy_workers(span: Span, between_gradients: Collection[str]) -> bool:
    return span.name in ("forward_backward", "optimizer_step", "gather") or _stage_of(span) in between_gradients


def _stage_of(span: Span) -> str | None:
    """The stage between the reward and training that works in this span."""
    stage = span.track.removeprefix("stages/")
    return stage if stage in _STAGES and not span.name.startswith("waiting for") else None


def _idle_update(spans: Sequence[Span]) -> dict[str, float]:
    began = min(span.begin for span in spans if span.track == "generation")
    return {s.name: s.end - s.begin for s in spans if s.name in ("stage", "pause") and s.begin < began}


def _held_versions(spans: Sequence[Span]) -> frozenset[int]:
    validations = [span for span in spans if span.track == "evaluation"]
    moments: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.track.startswith("publish") and "version" in span.args:
            moments[span.args["version"]] += [span.begin, span.end]
    return frozenset(
        version
        for version, of_version in moments.items()
        if any(one.begin < max(of_version) and one.end > min(of_version) for one in validations)
    )


def _resumed_with_other_settings(run_dir: Path) -> int:
    """The newest step up to which the run had another configuration, 0 if it never had; see ``composition.run_directory``."""
    now = dict(flat(yaml.safe_load((run_dir / "config.yaml").read_text())))
    steps = [0]
    for path in run_dir.glob("config_to_step_*.yaml"):
        before = dict(flat(yaml.safe_load(path.read_text())))
        if any(now.get(key) != before.get(key) and not key.startswith(_COSTS_NO_TIME) for key in now | before):
            steps.append(int(path.stem.rpartition("_")[2]))
    return max(steps)


def _steps(path: Path) -> list[Step]:
    """One row per optimizer step, without figures that are null because they were not finite."""
    rows = read_rows(path) if path.exists() else ()
    known = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return list({row["step"]: row for row in known if "timing/step" in row}.values())


def _rows(run_dir: Path, first_step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row per sample of training that has tokens, at least from ``first_step`` on: of its branches the one with the most. Then a row
    per failed sample."""
    files = files_in(run_dir / DIRECTORY)
    end, num_rows = files[-1].end if files else 0, _MAX_ROWS
    while True:
        found = read_samples(run_dir, _COLUMNS, begin=max(0, end - num_rows)).to_pylist()
        found = [row for row in found if row["outcome"] in _OUTCOMES]
        if num_rows >= end or (found and found[0]["step"] < first_step):
            break
        num_rows *= 2
    finished = [row for row in found if not _has_failed(row)]
    failed = [row for row in found if _has_failed(row) and row["admission_index"] is not None]  # not held out
    missing = [name for name in _NEEDED if any(row[name] is None for row in finished)]
    if missing:
        raise ConfigError(
            f"{run_dir}/{DIRECTORY} must have {', '.join(missing)} of each sample: was it written by another version?"
        )
    longest: dict[tuple[int, int], dict[str, Any]] = {}
    for row in finished:
        # Those of the record are trained: a sample that a length limit cut has none.
        row["num_trained_tokens"] = row["num_sampled_tokens"]
        spans = (span for span in row["policy_versions"] if span["version"] != ENVIRONMENT_VERSION)
        row["num_sampled_tokens"] = sum(span["end"] - span["start"] for span in spans)
        if row["num_sampled_tokens"]:
            known = longest.get(key := (row["admission_index"], row["sample"]))
            if known is None or row["num_sampled_tokens"] > known["num_sampled_tokens"]:
                longest[key] = row
    return list(longest.values()), failed


def _has_failed(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == Outcome.FAILED and row["reason"] != OTHERS_FAILED


def _gradients(
    rows: Iterable[Mapping[str, Any]], spans: Iterable[Span], speed: OverTime, first_step: int, num_passes: int
) -> Gradients:
    """Groups are trained in the order of their rows, in each pass; where a step has more spans, because a resumed run, perhaps with other
    settings, did it again, the newest count, and each gets the mean of the groups' tokens."""
    tokens: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["outcome"] in ("trained", "masked"):
            num_tokens = row["num_prompt_tokens"] + row["num_response_tokens"]
            tokens[row["step"]][row["admission_index"]] += num_tokens if row["num_trained_tokens"] else 0
    trained: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.track == "training" and span.name == "forward_backward" and span.args.get("step", -1) >= first_step:
            trained[span.args["step"]].append(span)
    found: list[tuple[int, float, float, float]] = []
    for step, of_step in trained.items():
        of_groups = list(tokens[step].values()) * num_passes
        if len(of_groups) != len(of_step):
            of_step = of_step[-len(of_groups) :]
            of_groups = [sum(of_groups) / max(1, len(of_groups))] * len(of_step)
        begin, end = (np.array([getattr(span, name) for span in of_step]) for name in ("begin", "end"))
        found += zip([step] * len(of_step), of_groups, end - begin, speed.mean(begin, end), strict=True)
    columns = np.array(found, float).reshape(-1, 4).T
    return Gradients(step=columns[0].astype(np.int64), num_tokens=columns[1], seconds=columns[2], speed=columns[3])


def _stages(spans: Iterable[Span], speed: OverTime, between_gradients: Collection[str]) -> dict[str, float]:
    """Seconds per group of each stage that a run may have between the reward and training; alone, of those between gradients."""
    of_stages: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if (stage := _stage_of(span)) is not None:
            of_stages[stage].append((span.begin, span.end))
    found = {}
    for stage, times in of_stages.items():
        begin, end = np.array(times).T
        shares = speed.mean(begin, end) if stage in between_gradients else np.ones(len(begin))
        found[stage] = float(np.mean((end - begin) * shares))
    return found
