"""Examines a run: which way of computing log-probs differs from the others, what explains it, and whether it matters.

Rows of versions that the run still has weights for are scored again by transformers, one row at a time in float32, which all else is
compared with.
"""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.config.schema.run import Config
from skyrl_async.doctor.explanations import Explanation, Ideas, Values, best_explanation, mean_ratio_change, scores
from skyrl_async.doctor.paths import PathGap, engine_paths, path_gap, trainer_paths
from skyrl_async.doctor.rows import Tokens, read_rows
from skyrl_async.doctor.scoring import Scorer
from skyrl_async.doctor.weights import RunWeights, read_config
from skyrl_async.record.files import TOKENIZER
from skyrl_async.types import ENVIRONMENT_VERSION, SamplingParams

FLOAT32_ROUNDING = 1e-4
"""Mean gap in nats up to which rounding of float32 explains it; 1e-6 is usual."""
_BFLOAT16_FACTOR = 4.0
"""A gap within this factor of bfloat16's own is of its size."""
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
        # A version without tokens may be the one that an engine still had.
        spare = [v for v in weights.versions if v not in versions][: _MAX_VERSIONS - len(versions)]
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
        main = max(versions, key=lambda v: counts[v])
        rounding = _bfloat16(tokens, directories[main], main, sampling, device, trust)
        paths = [
            path_gap("engine, decode, as recorded", tokens.recorded, model),
            path_gap(
                "trainer, as recorded, not stale", _unless(tokens.trained == tokens.version, tokens.trainer), model
            ),
            path_gap("transformers in bfloat16", rounding, model),
        ]
        noise = paths[-1].mean_abs
        ideas = Ideas(tokens, scorers, sampling, model, _texts(run_dir))
        findings = [*_structural(tokens), *_findings(config, tokens, ideas, model, noise, say)]
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
    findings += _path_findings(paths, noise, uses_bfloat16=_uses_bfloat16(config), known=findings)
    return Examination(
        run=str(run_dir),
        num_rows=len(rows),
        num_tokens=int(tokens.is_examined.sum()),
        versions=tuple(versions),
        paths=tuple(path for path in paths if path.num_tokens),
        findings=tuple(findings),
        split=_split(tokens, model),
    )


def _sampling(config: Config) -> SamplingParams:
    """As the trainer takes it: at the temperature, and not truncated; with the configured truncation known to the ideas."""
    return SamplingParams(max_tokens=1, temperature=config.generator.sampling.temperature)


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
    config: Config, tokens: Tokens, ideas: Ideas, model: Values, noise: float, say: Callable[[str], None]
) -> list[Finding]:
    """What explains the gap of each engine, and of the trainer to its own weights; the same of all engines once."""
    engines = sorted(set(tokens.engine[tokens.is_examined]))
    subsets = {name: (tokens.engine == name) & tokens.is_examined for name in engines}
    found = {
        name: _explained(config, tokens, ideas, tokens.recorded, model, taken, noise, say)
        for name, taken in subsets.items()
    }
    same = {None if finding is None else (finding.kind, finding.sentence) for finding in found.values()}
    findings = []
    if len(same) == 1 and len(found) > 1:
        whole = _explained(config, tokens, ideas, tokens.recorded, model, tokens.is_examined, noise, say)
        found = {_ALL: whole}
    for where, finding in found.items():
        if finding is not None:
            findings.append(
                Finding(
                    finding.kind, where, finding.sentence, finding.mean_abs_gap, finding.explained, finding.is_fault
                )
            )
    return findings


def _explained(
    config: Config,
    tokens: Tokens,
    ideas: Ideas,
    values: Values,
    model: Values,
    taken: NDArray[np.bool_],
    noise: float,
    say: Callable[[str], None],
) -> Finding | None:
    gap = (values - model)[taken]
    size = float(np.abs(gap).mean())
    if size <= FLOAT32_ROUNDING:
        return None
    say("looking for what explains the gap")
    best: Explanation | None = best_explanation(ideas.families(), values, model, taken)
    if best is not None:
        return Finding(best.kind, "", best.sentence, size, best.explained)
    expected = _uses_bfloat16(config)
    if noise / _BFLOAT16_FACTOR <= size <= noise * _BFLOAT16_FACTOR and abs(float(gap.mean())) <= size / 2:
        told = "as configured" if expected else "and policy.dtype is float32 and training.mixed_precision off"
        sentence = f"the gap has the size that computing in bfloat16 makes, {noise:.2g} nats, {told}"
        return Finding("bfloat16", "", sentence, size, 0.0, is_fault=not expected)
    if expected and size <= noise:
        return None
    sentence = "nothing that was tried explains the gap; see in which way of computing it begins"
    return Finding("unexplained", "", sentence, size, 0.0)


def _path_findings(paths: list[PathGap], noise: float, *, uses_bfloat16: bool, known: list[Finding]) -> list[Finding]:
    """Ways of computing that differ now, with the code and the machine at hand; those of the record are judged by token."""
    limit = max(FLOAT32_ROUNDING, _BFLOAT16_FACTOR * noise if uses_bfloat16 else 0.0)
    return [
        Finding("path", path.name, "differs from transformers on the same weights and tokens", path.mean_abs, 0.0)
        for path in paths
        if path.num_tokens
        and path.mean_abs > limit
        and "transformers" not in path.name
        and not (path.name.startswith("engine, decode, as recorded") and known)
    ]


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
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library's only type of error
        tokenizer = Tokenizer.from_file(str(run_dir / TOKENIZER))
        return lambda token: tokenizer.decode([token], skip_special_tokens=False)
    return lambda token: f"token {token}"
