"""The sampled tokens that are examined: those a run has recorded of policy versions whose weights it still has, or new ones."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import ConfigError
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY, read_samples
from skyrl_async.record.table import ROW_COLUMNS
from skyrl_async.types import ENVIRONMENT_VERSION, Trajectory

UNKNOWN_ENGINE = "several engines, or unknown ones"
MAX_TOKENS_PER_ROW = 1024
"""Only the first response tokens of a row are examined; later ones do not change their log-probs."""
_MOST_TRIED = 4
"""Rows that are read for one that is wanted: all tokens of a version may be masked."""
_CUT = ("response_token_ids", "loss_mask", "logprobs", "old_logprobs")
_COMPARED = ("prompt_token_ids", *_CUT)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row, or one new answer."""

    engine: str
    """The engine that sampled all of it, or ``UNKNOWN_ENGINE``."""
    trajectory: Trajectory
    ids: NDArray[np.int32]
    """(P + T,) prompt and response."""
    places: NDArray[np.int64]
    """(N,) of the sampled tokens, in ``ids``."""

    @classmethod
    def of(cls, engine: str, trajectory: Trajectory) -> "Row":
        """The row with the first ``MAX_TOKENS_PER_ROW`` response tokens of a trajectory."""
        end = MAX_TOKENS_PER_ROW
        kept = {name: values[:end] for name in _CUT if (values := getattr(trajectory, name)) is not None}
        first = replace(trajectory, versions=trajectory.versions[:end], **kept)
        ids = np.concatenate([first.prompt_token_ids, first.response_token_ids])
        return cls(engine, first, ids, np.flatnonzero(first.loss_mask) + len(first.prompt_token_ids))


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

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Tokens":
        """Those of rows."""
        rows = tuple(rows)

        def column(values_of: Callable[[Trajectory], Any], dtype: type[np.generic]) -> NDArray[Any]:
            """``values_of``: one value per response token of a trajectory, or one for all."""
            shaped = (
                np.broadcast_to(values_of(row.trajectory), row.trajectory.loss_mask.shape)[row.trajectory.loss_mask]
                for row in rows
            )
            return np.concatenate([np.empty(0, dtype), *shaped]).astype(dtype)

        return cls(
            rows=rows,
            row=np.repeat(np.arange(len(rows)), [len(row.places) for row in rows]),
            version=column(lambda row: row.versions, np.int32),
            recorded=column(lambda row: row.logprobs, np.float64),
            trainer=column(lambda row: np.nan if row.old_logprobs is None else row.old_logprobs, np.float64),
            trained=column(
                lambda row: -1 if row.old_logprobs is None or row.old_version is None else row.old_version, np.int32
            ),
        )

    @property
    def is_fresh(self) -> NDArray[np.bool_]:
        """(N,) whether the version that sampled a token also trained on it."""
        return (self.trained == self.version) & ~np.isnan(self.trainer)

    def by_row(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A column of tokens, split by row."""
        return np.split(values, np.cumsum(np.bincount(self.row, minlength=len(self.rows)))[:-1])

    @property
    def engine(self) -> NDArray[Any]:
        """(N,) names."""
        return np.array([row.engine for row in self.rows], object)[self.row]


def read_rows(run_dir: Path, versions: Collection[int], num_rows: int) -> list[Row]:
    """The newest rows with tokens of these versions, as many of each version and engine, stale or not, as there are.

    Held-out samples are left out: they may be sampled with other parameters.

    Raises ``ConfigError`` if there are none, ``CheckpointError`` for a damaged record.
    """
    names = ["row", "outcome", "engines", "policy_versions", "old_version", "num_sampled_tokens"]
    kept: dict[tuple[int, str, bool], list[int]] = {}
    seen: set[int] = set()
    for found in read_samples(run_dir, names).to_pylist():
        if found["outcome"] == Outcome.HELD_OUT or not found["num_sampled_tokens"]:
            continue
        spans = [span for span in found["policy_versions"] if span["start"] < MAX_TOKENS_PER_ROW]
        of_row = {span["version"] for span in spans if span["version"] != ENVIRONMENT_VERSION}
        seen |= of_row
        for version in of_row & set(versions):
            kind = version, _engine(found["engines"]), version == found["old_version"]
            kept.setdefault(kind, []).append(found["row"])

    def readable(version: int, numbers: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """From the newest on, those whose tokens have not been thinned out, some of this version trained; of so many that are tried."""
        for number in islice(reversed(numbers), _MOST_TRIED * num_rows):
            found = read_samples(run_dir, _WHOLE, begin=number, end=number + 1).to_pylist()[0]
            if found["response_token_ids"] is not None and version in Tokens.of([row := _row(found)]).version:
                yield number, row

    rows: dict[int, Row] = {}
    # One of each kind in turn.
    for number, row in filter(
        None, chain.from_iterable(zip_longest(*(readable(version, numbers) for (version, *_), numbers in kept.items())))
    ):
        rows[number] = row
        if len(rows) == num_rows:
            break
    if not rows:
        raise ConfigError(
            f"{run_dir / DIRECTORY} has no trained row of a policy version whose weights are there: it has tokens of "
            f"{_listed(seen)}, and weights of {_listed(versions)}; keep checkpoints with trainer.checkpoint_interval_steps, and texts "
            "with trainer.samples.keep; or have new answers examined with --prompts run"
        )
    return list(rows.values())


_WHOLE = ("engines", "policy_versions", "reward", "old_version", "num_response_tokens", *_COMPARED)


def _row(found: Mapping[str, Any]) -> Row:
    columns = {name: None if found[name] is None else np.array(found[name], ROW_COLUMNS[name]) for name in _COMPARED}
    trajectory = Trajectory(
        **columns,  # type: ignore[arg-type]
        versions=VersionSpans.from_json(found["policy_versions"], found["num_response_tokens"]),
        reward=found["reward"],
        old_version=found["old_version"],
    )
    return Row.of(_engine(found["engines"]), trajectory)


def _engine(names: Sequence[str] | None) -> str:
    return names[0] if names is not None and len(names) == 1 else UNKNOWN_ENGINE


def _listed(versions: Collection[int]) -> str:
    ordered = sorted(versions)
    if not ordered:
        return "no version"
    shown = ", ".join(map(str, ordered[:6]))
    return f"version {shown}" if len(ordered) <= 6 else f"{len(ordered)} versions from {ordered[0]} to {ordered[-1]}"
