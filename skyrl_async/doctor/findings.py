"""What is wrong with a run, from ways of computing log-probs that differ, and from what explains the gap of recorded ones.

Computes no log-probs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skyrl_async.doctor.explanations import Explanation
from skyrl_async.doctor.paths import BFLOAT16_FACTOR, PathGap, Rounding
from skyrl_async.doctor.rows import Tokens
from skyrl_async.doctor.scoring import Values
from skyrl_async.types import ENVIRONMENT_VERSION

RULES = {
    "trainer, one row at a time": ("trainer", "the trainer's forward differs from transformers' on the same weights"),
    "trainer, packed": (
        "batch shape",
        "rows packed end to end change each other: set training.use_sample_packing=false",
    ),
    "trainer, padded": ("batch shape", "padding changes log-probs of the rows beside it"),
    "engine, prefill, as booted": ("engine", "the engine's forward differs from transformers' on the same weights"),
    "engine, decode, as booted": ("engine", "its decode differs and its prefill does not: attention, cache or sampler"),
    "engine, prefill, after a publish": ("publish", "an engine computes with other weights than were published to it"),
    "engine, decode, after a publish": ("publish", "after a publish its decode differs and its prefill does not"),
}
"""Way of computing -> kind and sentence of a finding if it differs and none of trainer or engine before it does."""


OTHER_WEIGHTS = "other weights"
"""Kind of a finding about weights that are not the run's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that one should know."""

    kind: str
    where: str
    """Engine, trainer or version."""
    sentence: str
    mean_abs_gap: float
    """Nats."""
    explained: float = 0.0
    """Share of the squared gap that the finding accounts for; 0 where nothing accounts for it."""
    is_fault: bool = True


def path_findings(paths: Iterable[PathGap], limit: float) -> list[Finding]:
    """What ``RULES`` say of ways of computing that are farther than ``limit`` from transformers, or not a number."""
    differing = {path.name: path for path in paths if path.num_tokens and not path.mean_abs <= limit}
    found: dict[str, Finding] = {}
    for name, (kind, sentence) in RULES.items():
        if (path := differing.get(name)) is not None:
            told = f"{sentence}; {path.begins}" if path.begins else sentence
            found.setdefault(name.split(",")[0], Finding(kind, name, told, path.mean_abs))
    return list(found.values())


def structural_findings(tokens: Tokens) -> list[Finding]:
    """Faults of the record itself."""
    if not (nobody := tokens.version == ENVIRONMENT_VERSION).any():
        return []
    sentence = (
        f"{int(nobody.sum())} tokens count as sampled that no policy version wrote: the loss mask is shifted against the tokens, or covers "
        "an observation"
    )
    return [Finding("shifted mask", "the record", sentence, float("nan"), 1.0)]


def seen_now(found: Sequence[Finding]) -> str:
    """What findings about an engine that is booted now say of a gap in recorded log-probs."""
    if (engine := next((finding.where for finding in found if finding.where.startswith("engine")), None)) is not None:
        return f"; it is there now as well: {engine}"
    return (
        "; an engine that is booted now with the same weights agrees, so it is not its arithmetic: look at what it was given, its tokens, "
        "sampling parameters and weights"
    )


def other_weights_finding(version: int, source: Path, num_tokens: int, agreed: float, off: float) -> Finding:
    """Say that the weights in ``source`` are not the run's: a fault unless they are those of version 0, which the run does not keep.

    Args:
        version: whose weights they should be.
        source: directory.
        num_tokens: tokens that this version sampled and trained.
        agreed: mean gap in nats between engine and trainer, as recorded on them.
        off: mean gap between the engine and these weights.
    """
    sentence = (
        f"{source} does not hold the weights that the run had: on {num_tokens:,} tokens that version {version} sampled and trained, engine "
        f"and trainer agree, as recorded, within {agreed:.2g} nats, and neither agrees with these weights. Tokens of version {version} are "
        "judged no further; "
    )
    sentence += (
        "resume from another checkpoint"
        if version
        else "for that, run the doctor on the machine and the code of the run, name the run's own weights with policy.path=DIRECTORY, or "
        "keep those of later versions with trainer.checkpoint_interval_steps or trainer.export_hf"
    )
    return Finding(OTHER_WEIGHTS, f"version {version}", sentence, off, is_fault=version > 0)


def explained_finding(
    engine: str, gap: Values, best: Explanation | None, rounding: Rounding, now: str
) -> Finding | None:
    """What the gap of an engine, or of the trainer, comes from; None if it is rounding.

    Args:
        engine: its name.
        gap: (N,) its recorded log-probs minus transformers'.
        best: the explanation that was found.
        rounding: what rounding explains.
        now: what an engine that is booted now says about a gap that nothing explains.
    """
    size, noise = float(np.abs(gap).mean()), rounding.bfloat16
    if best is not None:
        return Finding(best.kind, engine, best.sentence, size, best.explained)
    if noise / BFLOAT16_FACTOR <= size <= noise * BFLOAT16_FACTOR and abs(float(gap.mean())) <= size / 2:
        is_known = rounding.uses_bfloat16
        told = "as configured" if is_known else "and policy.dtype is float32 and training.mixed_precision off"
        sentence = f"the gap has the size that computing in bfloat16 makes, {noise:.2g} nats, {told}"
        return Finding("bfloat16", engine, sentence, size, is_fault=not is_known)
    if rounding.uses_bfloat16 and size <= noise:
        return None
    return Finding("unexplained", engine, f"nothing that was tried explains the gap{now}", size)


def same_of_all(findings: Sequence[Finding], num_engines: int) -> list[Finding]:
    """Findings of engines, or one if all engines have the same."""
    if len(findings) == num_engines > 1 and len({(f.kind, f.sentence) for f in findings}) == 1:
        gap = float(np.mean([finding.mean_abs_gap for finding in findings]))
        return [replace(min(findings, key=lambda f: f.explained), where="all engines", mean_abs_gap=gap)]
    return list(findings)
