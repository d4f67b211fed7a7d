"""Examines a run: which way of computing log-probs differs from the others, what explains it, and whether it matters.

Rows of versions that the run still has weights for, or new answers, are scored again by transformers, one row at a time in float32, which
all else is compared with.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.doctor.explanations import CLEAR, Ideas, untruncated
from skyrl_async.doctor.findings import (
    Finding,
    explained_finding,
    other_weights_finding,
    path_findings,
    same_of_all,
    seen_now,
    structural_findings,
)
from skyrl_async.doctor.paths import (
    FLOAT32_ROUNDING,
    EngineWays,
    PathGap,
    Rounding,
    booted_engine,
    path_gap,
    trainer_paths,
)
from skyrl_async.doctor.rows import MAX_TOKENS_PER_ROW, Row, Tokens, read_rows
from skyrl_async.doctor.run_files import RunFiles
from skyrl_async.doctor.scoring import Scorer, Values, on_one_thread, scores
from skyrl_async.errors import ConfigError

_MAX_VERSIONS = 3
_NEW_ANSWERS = 16
"""To recorded prompts."""


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
    is_recorded: bool
    """Whether the rows are the run's; they are new answers to prompts otherwise."""
    num_rows: int
    num_tokens: int
    versions: tuple[int, ...]
    paths: tuple[PathGap, ...]
    findings: tuple[Finding, ...]
    split: RatioSplit | None
    """None if no examined token was trained."""
    is_cut: bool
    """Whether rows may be longer than what is examined of them."""

    @property
    def is_healthy(self) -> bool:
        """Whether no finding is a fault."""
        return not any(finding.is_fault for finding in self.findings)


async def examine(
    run_dir: Path,
    *,
    num_rows: int = 64,
    prompts: str | None = None,
    with_engine: bool = True,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Examine a run.

    Args:
        run_dir: its directory.
        num_rows: rows, or prompts, to examine at most.
        prompts: a file, or ``OWN_PROMPTS``, to which new answers are examined; None: recorded rows.
        with_engine: whether an engine is booted.
        overrides: of the run's configuration.
        say: takes a line about what is done next.

    Raises ``SkyRLAsyncError`` if the run cannot be examined.
    """
    async with contextlib.AsyncExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor_")))
        run = RunFiles(run_dir, work_dir, overrides, say)
        config = run.config
        with_engine = with_engine and config.engine.backend is EngineBackend.vllm
        if prompts is not None and not with_engine:
            raise ConfigError(f"--prompts needs an engine that answers: engine.backend is {config.engine.backend.name}")
        engine, answers = None, []
        with on_one_thread():
            rows = read_rows(run_dir, run.versions, num_rows) if prompts is None else []
            asked = [row.trajectory.prompt_token_ids for row in rows[:_NEW_ANSWERS]]
            if prompts is not None:
                asked = run.prompts(prompts, await run.initial(), num_rows)
            versions = _chosen(run.versions, rows, needs_first=config.policy.lora.is_on)
            say(f"loading version {', '.join(map(str, sorted(versions)))}")
            device, trust = training_device(config.training).name, config.policy.trust_remote_code
            scorers = {v: Scorer(await run.directory(v), device=device, trust_remote_code=trust) for v in versions}
            if with_engine:
                say("booting an engine")
                booting = booted_engine(config, scorers[versions[0]].directory, asked, run.sampling, work_dir)
                engine = await stack.enter_async_context(booting)
        if engine is not None:
            answers = await engine.answers(versions[0])
        return await _examined(run, scorers, rows, engine, answers, say)


async def _examined(
    run: RunFiles,
    scorers: Mapping[int, Scorer],
    rows: Sequence[Row],
    engine: EngineWays | None,
    answers: Sequence[Row],
    say: Callable[[str], None],
) -> Examination:
    """Examine recorded rows, or an engine's answers where there are none. Ways of computing are compared under the first version."""
    tokens, ((_, main), *others) = Tokens.of(rows or answers), scorers.items()
    say(f"scoring {len(tokens.row):,} tokens of {len(tokens.rows)} rows")
    plain = untruncated(run.sampling)  # as the trainer computes
    model = scores(tokens, scorers, [plain])[0]
    of_main, rounded = (each.scores(tokens, plain) for each in (main, main.rounded()))
    paths = [*_recorded_paths(tokens, model)] if rows else []
    paths.append(path_gap("transformers in bfloat16", rounded, of_main))
    rounding = Rounding(rounded - of_main, run.uses_bfloat16)
    say("computing the trainer's log-probs again")
    paths += await trainer_paths(run.config, main.directory, tokens, of_main)
    if engine is not None:
        say("computing the engine's log-probs again")
        paths += await engine.measured("as booted", main, tokens.rows, answers, rounding)
        for version, other in others[:1]:
            await engine.publish(other.directory, version)
            answers = await engine.answers(version)
            paths += await engine.measured("after a publish", other, tokens.rows, answers, rounding)
    of_paths = path_findings(paths, rounding.limit)
    ideas = Ideas(
        tokens=tokens,
        model=model,
        scorers=scorers,
        configured=run.sampling,
        text_of=run.text_of,
        starts_without_adapter=run.config.policy.lora.is_on,
    )
    now = seen_now(of_paths) if rows and engine is not None else ""
    is_trainer_wrong = any(finding.where.startswith("trainer") for finding in of_paths)
    strange = {} if is_trainer_wrong else await _other_weights(run, ideas, rounding.limit, say)
    known = np.where(np.isin(tokens.version, [*strange]), np.nan, model)
    ideas = replace(ideas, model=known, scorers={v: own for v, own in scorers.items() if v not in strange})
    of_weights = [finding for findings in strange.values() for finding in findings]
    of_tokens = [*structural_findings(tokens), *of_weights, *_token_findings(ideas, rounding, now, say)]
    return Examination(
        run=str(run.run_dir),
        is_recorded=bool(rows),
        num_rows=len(tokens.rows),
        num_tokens=int(np.isfinite(model).sum()),
        versions=tuple(sorted(scorers.keys() & set(tokens.version.tolist()))),
        paths=tuple(path for path in paths if path.num_tokens),
        findings=(*of_tokens, *of_paths),
        split=_split(tokens, known),
        is_cut=any(len(row.trajectory.response_token_ids) == MAX_TOKENS_PER_ROW for row in tokens.rows),
    )


def _chosen(versions: Sequence[int], rows: Sequence[Row], *, needs_first: bool) -> list[int]:
    """Versions to load: the one with most tokens, or the newest, and then those with tokens, or the nearest; perhaps version 0 in any case.

    A version without tokens may be the one that an engine still had.
    """
    counts = Counter(Tokens.of(rows).version.tolist())
    main = max(versions, key=lambda version: (counts[version], version))
    in_order = sorted(versions, key=lambda version: (-counts[version], abs(version - main)))
    chosen, left = in_order[:_MAX_VERSIONS], in_order[_MAX_VERSIONS:]
    return [*chosen[:-1], 0] if needs_first and 0 in left else chosen


def _recorded_paths(tokens: Tokens, model: Values) -> Iterator[PathGap]:
    is_fresh = tokens.is_fresh
    yield path_gap("engine, decode, as recorded", tokens.recorded, model)
    yield path_gap("trainer, as recorded, not stale", tokens.trainer[is_fresh], model[is_fresh])


async def _other_weights(
    run: RunFiles, ideas: Ideas, limit: float, say: Callable[[str], None]
) -> dict[int, list[Finding]]:
    """Version -> what is said of it, for versions whose loaded weights are not the run's.

    On tokens that are not stale, engine and trainer agree, as recorded, and differ from these weights, and nothing else explains all of it.
    Other weights are no explanation of version 0. An engine that disagrees with the trainer is at fault whatever the weights are.
    """
    tokens, found = ideas.tokens, {}
    between, off = np.abs(tokens.recorded - tokens.trainer), np.abs(tokens.recorded - ideas.model)
    for version in ideas.scorers:
        is_fresh = tokens.is_fresh & (tokens.version == version)
        by_engine = {engine: is_fresh & (tokens.engine == engine) for engine in sorted(set(tokens.engine[is_fresh]))}
        agreeing = [is_own for is_own in by_engine.values() if between[is_own].mean() <= limit < off[is_own].mean()]
        if not agreeing:
            continue
        say(f"looking for what else than other weights explains the gap of version {version}")
        is_agreed = np.logical_or.reduce(agreeing)
        best = ideas.only(is_agreed).best(with_weights=version > 0)
        if best is None or best.explained < CLEAR:
            sizes = int(is_agreed.sum()), float(between[is_agreed].mean()), float(off[is_agreed].mean())
            told = "engine and trainer differ, as recorded, and the weights that could explain it are not there"
            found[version] = [other_weights_finding(version, await run.source(version), *sizes)] + [
                Finding("unexplained", engine, told, float(between[is_own].mean()))
                for engine, is_own in by_engine.items()
                if between[is_own].mean() > limit
            ]
    return found


def _token_findings(ideas: Ideas, rounding: Rounding, now: str, say: Callable[[str], None]) -> list[Finding]:
    """What explains the gap of each engine's tokens, the same of all engines once, and that of the trainer."""
    tokens = ideas.tokens
    engines = sorted(set(tokens.engine[np.isfinite(ideas.model)]))
    found = [_explained(ideas, engine, tokens.engine == engine, rounding, now, say) for engine in engines]
    trainer = replace(ideas, tokens=replace(tokens, recorded=tokens.trainer), who="the trainer")
    of_trainer = _explained(trainer, "trainer", tokens.is_fresh, rounding, "", say)
    of_engines = same_of_all([finding for finding in found if finding is not None], len(engines))
    return [*of_engines, *([] if of_trainer is None else [of_trainer])]


def _explained(
    ideas: Ideas, name: str, is_own: NDArray[np.bool_], rounding: Rounding, now: str, say: Callable[[str], None]
) -> Finding | None:
    """What explains the gap of (N,) chosen tokens; None if there is none but rounding."""
    is_known = is_own & np.isfinite(ideas.model)
    gap = (ideas.tokens.recorded - ideas.model)[is_known]
    if not len(gap) or not float(np.abs(gap).mean()) > FLOAT32_ROUNDING:
        return None
    say(f"looking for what explains the gap of {name}")
    of_bfloat16 = replace(rounding, gap=rounding.gap[is_known])
    return explained_finding(name, gap, ideas.only(is_own).best(), of_bfloat16, now)


def _split(tokens: Tokens, model: Values) -> RatioSplit | None:
    is_trained = np.isfinite(model) & np.isfinite(tokens.trainer)
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
        ratio_change_by_mismatch=float(np.abs(np.expm1(mismatch)).mean()),
    )
