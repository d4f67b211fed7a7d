"""Examines a run: which way of computing log-probs differs from the others, what explains it, and whether it matters.

Rows of versions that the run still has weights for are scored again by transformers, one row at a time in float32, which all else is
compared with.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.config.schema.run import Config
from skyrl_async.doctor.explanations import (
    Explanation,
    Ideas,
    Values,
    best_explanation,
    mean_ratio_change,
    scores,
    untruncated,
)
from skyrl_async.doctor.paths import PathGap, engine_paths, path_gap, trainer_paths
from skyrl_async.doctor.rows import Tokens, read_rows
from skyrl_async.doctor.scoring import Scorer
from skyrl_async.doctor.weights import RunWeights, read_config
from skyrl_async.record.files import read_tokenizer
from skyrl_async.types import ENVIRONMENT_VERSION, SamplingParams

FLOAT32_ROUNDING = 1e-4
"""Mean gap in nats up to which rounding of float32 explains it; 1e-6 is usual."""
_BFLOAT16_FACTOR = 4.0
"""A gap within this factor of bfloat16's own is of its size."""
UNEXPLAINED = "unexplained"
TRAINER_NOW = {
    "trainer, one row at a time": ("trainer", "the trainer's forward differs from transformers' on the same weights"),
    "trainer, packed": (
        "batch shape",
        "rows that are packed end to end change each other: set training.use_sample_packing=false",
    ),
    "trainer, padded": ("batch shape", "padding changes log-probs of the rows beside it"),
}
"""Way of computing -> kind and sentence of a finding if it differs and none before it does."""
ENGINE_NOW = {
    "engine, prefill, booted with the weights": (
        "engine",
        "the engine's forward differs from transformers' on the same weights",
    ),
    "engine, decode, booted with the weights": (
        "engine",
        "the engine's decode differs, and its prefill does not: attention, cache or sampler",
    ),
    "engine, prefill, after a publish": (
        "publish",
        "published weights differ from those that an engine boots with: names or dtypes of the update",
    ),
    "engine, decode, after a publish": (
        "publish",
        "published weights differ from those that an engine boots with: its decode has old ones",
    ),
}
NOW = TRAINER_NOW | ENGINE_NOW
_MAX_VERSIONS = 3
_ALL = "all engines"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that one should know."""

    kind: str
    where: str
    """Engine or trainer."""
    sentence: str
    mean_abs_gap: float
    """Nats."""
    explained: float
    """Share of the squared gap that the finding accounts for; 0 where nothing accounts for it."""
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class RatioSplit:
    """log(trained policy / behavior policy) = mismatch + staleness, exactly, over tokens that were trained."""

    num_tokens: int
    log_ratio: float
    """Mean absolute log ratio, in nats."""
    mismatch: float
    """Mean absolute difference between transformers and what was recorded, under the version that sampled."""
    staleness: float
    """Mean absolute difference between the version that was trained and the one that sampled."""
    mean_lag: float
    """Versions between the two."""
    ratio_change_by_mismatch: float
    """Mean of |exp(mismatch) - 1|."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    run: str
    num_rows: int
    num_tokens: int
    versions: tuple[int, ...]
    paths: tuple[PathGap, ...]
    findings: tuple[Finding, ...]
    split: RatioSplit | None
    """None if no examined token was trained."""

    @property
    def is_healthy(self) -> bool:
        """Whether no finding is a fault."""
        return not any(finding.is_fault for finding in self.findings)


async def examine(run_dir: Path, *, num_rows: int, with_engine: bool, say: Callable[[str], None]) -> Examination:
    """Examine a run. Raises ``SkyRLAsyncError`` if its files cannot be used."""
    config = read_config(run_dir)
    with tempfile.TemporaryDirectory(prefix="doctor_") as name:
        weights = RunWeights(run_dir, config, Path(name))
        rows = read_rows(run_dir, weights.versions, num_rows)
        counts = {v: int((Tokens.of(rows, [v]).is_examined).sum()) for v in weights.versions}
        versions = sorted(sorted((v for v in counts if counts[v]), key=lambda v: -counts[v])[:_MAX_VERSIONS])
        main = max(versions, key=lambda v: counts[v])
        # A version without tokens may be the one that an engine still had.
        others = sorted((v for v in weights.versions if v not in versions), key=lambda v: abs(v - main))
        spare = others[: _MAX_VERSIONS - len(versions)]
        say(f"loading version {', '.join(map(str, sorted([*versions, *spare])))}")
        device = training_device(config.training).name
        trust = config.policy.trust_remote_code
        directories = {v: await weights.directory(v) for v in (*versions, *spare)}
        scorers = {v: Scorer(path, device=device, trust_remote_code=trust) for v, path in directories.items()}
        tokens = Tokens.of(rows, versions)
        sampling = _sampling(config)
        model = scores(tokens, scorers, [sampling])[0]
        model[~tokens.is_examined] = np.nan
        say(f"scored {int(tokens.is_examined.sum()):,} tokens of {len(rows)} rows")
        rounding = _bfloat16(tokens, directories[main], main, sampling, device, trust)
        paths = [
            path_gap("engine, decode, as recorded", tokens.recorded, model),
            path_gap(
                "trainer, as recorded, not stale", _unless(tokens.trained == tokens.version, tokens.trainer), model
            ),
            path_gap("transformers in bfloat16", rounding, model),
        ]
        noise = paths[-1].mean_abs
        has_adapter = config.policy.lora.is_on

        def ideas_about(own: Tokens, own_model: Values) -> Ideas:
            return Ideas(
                own, scorers, _configured(config), own_model, _texts(run_dir), starts_without_adapter=has_adapter
            )

        uses_bfloat16 = _uses_bfloat16(config)
        findings = [*_structural(tokens), *_findings(tokens, versions, model, ideas_about, noise, uses_bfloat16, say)]
        only = [row for row in rows if set(row.trajectory.versions.distinct) <= {main, ENVIRONMENT_VERSION}]
        if only:
            own = Tokens.of(only, [main])
            own_model = scores(own, {main: scorers[main]}, [sampling])[0]
            say("computing the trainer's log-probs again")
            paths += await trainer_paths(config, directories[main], only, own_model)
            if with_engine and config.engine.backend is EngineBackend.vllm:
                say("booting an engine")
                other = next((path for v, path in directories.items() if v != main), None) or await weights.initial()
                paths += await engine_paths(config, directories[main], other, only, scorers[main], Path(name))
        differing = _differing(paths, max(FLOAT32_ROUNDING, _BFLOAT16_FACTOR * noise if uses_bfloat16 else 0.0))
    findings = [_located(finding, paths, differing) for finding in findings] + path_findings(differing)
    return Examination(
        run=str(run_dir),
        num_rows=len(rows),
        num_tokens=int(tokens.is_examined.sum()),
        versions=tuple(versions),
        paths=tuple(path for path in paths if path.num_tokens),
        findings=tuple(findings),
        split=_split(tokens, model),
    )


def _configured(config: Config) -> SamplingParams:
    """Temperature and truncation as configured."""
    own = config.generator.sampling
    return SamplingParams(max_tokens=1, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k, min_p=own.min_p)


def _sampling(config: Config) -> SamplingParams:
    """As the trainer takes it: at the temperature, and not truncated."""
    return untruncated(_configured(config))


def _uses_bfloat16(config: Config) -> bool:
    return config.policy.dtype.name == "bfloat16" or config.training.mixed_precision


def _bfloat16(
    tokens: Tokens, directory: Path, version: int, sampling: SamplingParams, device: str, trust: bool
) -> Values:
    scorer = Scorer(directory, device=device, trust_remote_code=trust, is_bfloat16=True)
    return scores(tokens, {version: scorer}, [sampling])[0]


def _unless(is_kept: NDArray[np.bool_], values: Values) -> Values:
    return np.where(is_kept, values, np.nan)


def _structural(tokens: Tokens) -> list[Finding]:
    nobody = tokens.version == ENVIRONMENT_VERSION
    if not nobody.any():
        return []
    sentence = (
        f"{int(nobody.sum())} tokens count as sampled that no policy version wrote: the loss mask is shifted against the tokens, or covers "
        "an observation"
    )
    return [Finding("shifted mask", "the record", sentence, float("nan"), 1.0)]


def _findings(
    tokens: Tokens,
    versions: Sequence[int],
    model: Values,
    ideas_about: Callable[[Tokens, Values], Ideas],
    noise: float,
    uses_bfloat16: bool,
    say: Callable[[str], None],
) -> list[Finding]:
    """What explains the gap of each engine's tokens; the same of all engines once."""
    found: list[Finding | None] = []
    engines = sorted(set(tokens.engine[tokens.is_examined]))
    for engine in engines:
        own = Tokens.of([row for row in tokens.rows if row.engine == engine], versions)
        own_model = model[tokens.engine == engine]
        gap = (own.recorded - own_model)[own.is_examined]
        if float(np.abs(gap).mean()) <= FLOAT32_ROUNDING:
            found.append(None)
            continue
        say(f"looking for what explains the gap of {engine}")
        best = best_explanation(ideas_about(own, own_model).families(), own.recorded, own_model, own.is_examined)
        found.append(_explained(engine, gap, best, noise, uses_bfloat16))
    findings = [finding for finding in found if finding is not None]
    if len(findings) == len(engines) > 1 and len({(f.kind, f.sentence) for f in findings}) == 1:
        gap = float(np.mean([finding.mean_abs_gap for finding in findings]))
        return [replace(min(findings, key=lambda f: f.explained), where=_ALL, mean_abs_gap=gap)]
    return findings


def _explained(engine: str, gap: Values, best: Explanation | None, noise: float, uses_bfloat16: bool) -> Finding | None:
    """``gap``: of the engine's tokens; ``noise``: the mean gap that bfloat16 makes."""
    size = float(np.abs(gap).mean())
    if best is not None:
        return Finding(best.kind, engine, best.sentence, size, best.explained)
    if noise / _BFLOAT16_FACTOR <= size <= noise * _BFLOAT16_FACTOR and abs(float(gap.mean())) <= size / 2:
        told = "as configured" if uses_bfloat16 else "and policy.dtype is float32 and training.mixed_precision off"
        sentence = f"the gap has the size that computing in bfloat16 makes, {noise:.2g} nats, {told}"
        return Finding("bfloat16", engine, sentence, size, 0.0, is_fault=not uses_bfloat16)
    if uses_bfloat16 and size <= noise:
        return None
    return Finding(UNEXPLAINED, engine, "nothing that was tried explains the gap", size, 0.0)


def _differing(paths: Sequence[PathGap], limit: float) -> list[PathGap]:
    """Ways of computing, done now, that differ from transformers; those of the record are judged by token."""
    return [path for path in paths if path.num_tokens and path.mean_abs > limit and path.name in NOW]


def _located(finding: Finding, paths: Sequence[PathGap], differing: Sequence[PathGap]) -> Finding:
    """Says of an unexplained gap whether an engine that is booted now has it too."""
    if finding.kind != UNEXPLAINED or not any(path.name in ENGINE_NOW for path in paths):
        return finding
    too = next((path.name for path in differing if path.name in ENGINE_NOW), None)
    sentence = (
        "an engine that is booted now with the same weights agrees, so it is not its arithmetic: look at what it was given, its tokens, "
        "sampling parameters and weights"
        if too is None
        else f"it is there now as well: {too}"
    )
    return replace(finding, sentence=f"{finding.sentence}; {sentence}")


def path_findings(differing: Sequence[PathGap]) -> list[Finding]:
    """What the ways of computing that differ say together, the first of them that all later ones share."""
    by_name = {path.name: path for path in differing}
    findings = []
    for of_one in (TRAINER_NOW, ENGINE_NOW):
        for name, (kind, sentence) in of_one.items():
            if name in by_name:
                findings.append(Finding(kind, name, sentence, by_name[name].mean_abs, 0.0))
                break
    return findings


def _split(tokens: Tokens, model: Values) -> RatioSplit | None:
    is_trained = tokens.is_examined & ~np.isnan(tokens.trainer)
    if not is_trained.any():
        return None
    mismatch = (model - tokens.recorded)[is_trained]
    staleness = (tokens.trainer - model)[is_trained]
    return RatioSplit(
        num_tokens=int(is_trained.sum()),
        log_ratio=float(np.abs(mismatch + staleness).mean()),
        mismatch=float(np.abs(mismatch).mean()),
        staleness=float(np.abs(staleness).mean()),
        mean_lag=float((tokens.trained - tokens.version)[is_trained].mean()),
        ratio_change_by_mismatch=mean_ratio_change(-mismatch),
    )


def _texts(run_dir: Path) -> Callable[[int], str]:
    """The text of a token by the run's tokenizer; its number where there is none."""
    tokenizer = read_tokenizer(run_dir)
    if tokenizer is None:
        return lambda token: f"token {token}"
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
