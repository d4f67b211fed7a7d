"""The recorded tokens that are examined: those sampled by policy versions whose weights the run still has."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import ConfigError
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY, read_samples
from skyrl_async.record.table import TOKEN_COLUMNS
from skyrl_async.types import ENVIRONMENT_VERSION, Trajectory

UNKNOWN_ENGINE = "several engines, or unknown ones"
MAX_TOKENS_PER_ROW = 1024
"""Only the first response tokens of a row are examined; later ones do not change their log-probs."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One recorded training row."""

    engine: str
    """The engine that sampled all of it, or ``UNKNOWN_ENGINE``."""
    trajectory: Trajectory
    """Its first ``MAX_TOKENS_PER_ROW`` response tokens."""
    ids: NDArray[np.int32]
    """(P + T,) prompt and response."""
    places: NDArray[np.int64]
    """(N,) of the sampled tokens, in ``ids``."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The sampled tokens of rows, one after the other: every column is (N,)."""

    rows: tuple[Row, ...]
    row: NDArray[np.int64]
    """Index in ``rows``."""
    version: NDArray[np.int32]
    """Policy version that sampled it; -1 for what no version wrote, which a loss mask must not hold."""
    recorded: NDArray[np.float64]
    """Behavior log-prob."""
    trainer: NDArray[np.float64]
    """Log-prob under the policy that trained on it; nan where it was not trained."""
    trained: NDArray[np.int32]
    """Version of ``trainer``; -1 where it was not trained."""
    is_examined: NDArray[np.bool_]
    """Whether the weights of its version are there."""

    @classmethod
    def of(cls, rows: Sequence[Row], versions: Collection[int]) -> "Tokens":
        """Those of rows; ``versions`` have weights."""

        def joined(parts: list[Any], dtype: type[np.generic]) -> NDArray[Any]:
            return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)

        masks = [row.trajectory.loss_mask for row in rows]
        pairs = list(zip(rows, masks, strict=True))
        counts = [int(mask.sum()) for mask in masks]
        version = joined([np.asarray(row.trajectory.versions)[mask] for row, mask in pairs], np.int32)
        old = [
            np.full(count, np.nan) if row.trajectory.old_logprobs is None else row.trajectory.old_logprobs[mask]
            for (row, mask), count in zip(pairs, counts, strict=True)
        ]
        trained = [
            -1
            if row.trajectory.old_logprobs is None or row.trajectory.old_version is None
            else row.trajectory.old_version
            for row in rows
        ]
        return cls(
            rows=tuple(rows),
            row=np.repeat(np.arange(len(rows)), counts),
            version=version,
            recorded=joined([row.trajectory.logprobs[mask] for row, mask in pairs], np.float64),
            trainer=joined(old, np.float64),
            trained=np.repeat(np.array(trained, np.int32), counts),
            is_examined=np.isin(version, list(versions)),
        )

    def by_row(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A column of tokens, split by row."""
        return np.split(values, np.cumsum(np.bincount(self.row, minlength=len(self.rows)))[:-1])

    @property
    def engine(self) -> NDArray[Any]:
        """(N,) names."""
        return np.array([row.engine for row in self.rows], object)[self.row]


def read_rows(run_dir: Path, versions: Collection[int], num_rows: int) -> list[Row]:
    """The newest rows with tokens of these versions, as many of each version and engine as there are.

    Held-out samples are left out: they may be sampled with other parameters.

    Raises ``ConfigError`` if there are none, ``CheckpointError`` for a damaged record.
    """
    names = ["row", "outcome", "engines", "policy_versions", "num_sampled_tokens", "num_response_tokens"]
    kept: dict[tuple[int, str], list[int]] = {}
    seen: set[int] = set()
    for found in read_samples(run_dir, names).to_pylist():
        if found["outcome"] == Outcome.HELD_OUT or not found["num_sampled_tokens"]:
            continue
        of_row = {span["version"] for span in found["policy_versions"] if span["version"] != ENVIRONMENT_VERSION}
        seen |= of_row
        for version in of_row & set(versions):
            kept.setdefault((version, _engine(found["engines"])), []).append(found["row"])
    # One of each kind in turn, from the newest on.
    in_turn = [
        n for turn in zip_longest(*(reversed(of_kind) for of_kind in kept.values())) for n in turn if n is not None
    ]
    rows: list[Row] = []
    for number in dict.fromkeys(in_turn):
        if len(rows) == num_rows:
            break
        found = read_samples(run_dir, _WHOLE, begin=number, end=number + 1).to_pylist()[0]
        if found["response_token_ids"] is not None:  # its tokens may have been thinned out
            rows.append(_row(found))
    if not rows:
        raise ConfigError(
            f"{run_dir / DIRECTORY} has no trained row of a policy version whose weights are there: it has tokens of "
            f"{_listed(seen)}, and weights of {_listed(versions)}; keep checkpoints with trainer.checkpoint_interval_steps, and texts "
            "with trainer.samples.keep"
        )
    return rows


_WHOLE = ("engines", "policy_versions", "reward", "old_version", "num_response_tokens", *TOKEN_COLUMNS)


def _row(found: Mapping[str, Any]) -> Row:
    columns = {
        name: None if found[name] is None else np.array(found[name], dtype) for name, dtype in TOKEN_COLUMNS.items()
    }
    trajectory = Trajectory(
        **columns,  # type: ignore[arg-type]
        versions=VersionSpans.from_json(found["policy_versions"], found["num_response_tokens"]),
        reward=found["reward"],
        old_version=found["old_version"],
    )
    kept = _first_tokens(trajectory)
    ids = np.concatenate([kept.prompt_token_ids, kept.response_token_ids])
    return Row(_engine(found["engines"]), kept, ids, np.flatnonzero(kept.loss_mask) + len(kept.prompt_token_ids))


def _first_tokens(row: Trajectory) -> Trajectory:
    num = MAX_TOKENS_PER_ROW
    names = [name for name in TOKEN_COLUMNS if name != "prompt_token_ids" and getattr(row, name) is not None]
    return replace(row, versions=row.versions[:num], **{name: getattr(row, name)[:num] for name in names})


def _engine(names: Sequence[str] | None) -> str:
    return names[0] if names is not None and len(names) == 1 else UNKNOWN_ENGINE


def _listed(versions: Collection[int]) -> str:
    ordered = sorted(versions)
    if not ordered:
        return "no version"
    shown = ", ".join(map(str, ordered[:6]))
    return f"version {shown}" if len(ordered) <= 6 else f"{len(ordered)} versions from {ordered[0]} to {ordered[-1]}"
