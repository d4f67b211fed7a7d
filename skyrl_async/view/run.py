"""One run as the page shows it, read from the files of its directory, which may grow meanwhile."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import yaml

from skyrl_async.config.help import flat
from skyrl_async.config.schema.run import SECRETS
from skyrl_async.errors import CheckpointError, ConfigError
from skyrl_async.metrics.alarms import ABANDONED, FAILED, Alarm, alarms, is_read
from skyrl_async.record.ended import OTHERS_FAILED, Outcome
from skyrl_async.record.files import DIRECTORY, SamplesFile, files_in, find_samples, read_samples, read_tokenizer
from skyrl_async.view.metrics_file import MAX_POINTS, MetricsFile
from skyrl_async.view.spans import spans_between

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Tokenizer

_METRICS, _CONFIG = "metrics.jsonl", "config.yaml"
_ALARM_STEPS = 200
_FAILURE_ROWS = 2000
_CODED = ("outcome", "reason", "uid")
"""Columns of few different texts: sent as numbers into a list of them."""
_FIGURES = (
    *("row", "step", *_CODED, "epoch", "sample", "branch", "scheduled_version", "staleness", "reward"),
    *("shaped_reward", "advantage", "seconds", "is_truncated", "num_sampled_tokens", "num_turns", "num_aborts"),
)
MAX_ROWS = 50_000
"""Most rows in one answer."""
_MAX_FOUND = 10_000
EMPTY: dict[str, Any] = {
    **{
        "step": 0,
        "has_means": False,
        "num_lines": 0,
        "num_restarts": 0,
        "num_rows": 0,
        "end": 0,
        "metrics": [],
        "alarms": [],
    },
    **{"seconds_since": None, "error": None},
}
"""What ``ViewedRun.overview`` says of a run without anything in it."""


class ViewedRun:
    """Raises ``ConfigError`` if the directory is not that of a run."""

    def __init__(self, directory: Path) -> None:
        if not any((directory / name).exists() for name in (_METRICS, _CONFIG, DIRECTORY)):
            found = "is no directory" if not directory.is_dir() else f"has no {_METRICS}, {_CONFIG} or {DIRECTORY}/"
            raise ConfigError(f"{directory} must be the directory of a run, such as outputs/RUN: it {found}")
        self.directory = directory
        self.name = directory.resolve().name
        self._metrics = MetricsFile(directory / _METRICS)
        self._reading = Lock()
        self._alarms: list[Alarm] = []
        """Those of the answer before."""
        self._alarms_of = (0, 0)
        """Restarts and steps that it saw."""
        self._tokenizer: Tokenizer | None = None

    def overview(self) -> dict[str, Any]:
        """State and alarms."""
        files = files_in(self.directory / DIRECTORY)
        with self._reading:
            self._metrics.read()
            steps = self._metrics.steps
            num_restarts, num_steps = self._alarms_of
            if self._metrics.num_restarts != num_restarts:
                num_steps, self._alarms = 0, []
            self._alarms_of = self._metrics.num_restarts, len(steps)
            rows = self._metrics.rows(max(_ALARM_STEPS, len(steps) - num_steps), is_read)
            self._alarms = list(alarms(rows, self._failures, self._alarms))
            return EMPTY | {
                "directory": str(self.directory),
                "step": steps[-1] if steps else 0,
                "has_means": len(steps) > MAX_POINTS,
                "num_lines": self._metrics.num_lines,
                "num_restarts": self._metrics.num_restarts,
                "num_rows": sum(map(_num_rows, files)),
                "end": files[-1].end if files else 0,
                "seconds_since": self._seconds_since_written(),
                "metrics": self._metrics.names,
                "alarms": [asdict(alarm) for alarm in self._alarms],
                "error": self._metrics.problem,
            }

    def _seconds_since_written(self) -> float:
        files = [file for name in (_METRICS, _CONFIG, DIRECTORY) if (file := self.directory / name).exists()]
        return time.time() - max(file.stat().st_mtime for file in files or [self.directory])

    def _failures(self) -> dict[str, list[str]]:
        """Why the newest samples failed and were abandoned, by the metric of each."""
        files = files_in(self.directory / DIRECTORY)
        begin = max(0, files[-1].end - _FAILURE_ROWS) if files else 0
        try:
            rows = read_samples(self.directory, ["outcome", "reason", "branch"], begin=begin).to_pylist()
        except CheckpointError:  # the table of samples says so
            return {}
        told = [
            row for row in rows if not row["branch"] and row["reason"] not in (None, OTHERS_FAILED)
        ]  # samples, not rows
        return {
            metric: [row["reason"] for row in told if row["outcome"] == outcome]
            for metric, outcome in ((FAILED, Outcome.FAILED), (ABANDONED, Outcome.ABANDONED))
        }

    def settings(self) -> dict[str, Any]:
        """The values in force by key, without secrets; empty where they are not known."""
        with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
            found = dict(flat(yaml.safe_load((self.directory / _CONFIG).read_text(encoding="utf-8"))))
            return found | {key: "set" for key in SECRETS if found.get(key)}
        return {}

    def series(
        self, names: Sequence[str], by: str = "step", begin: float | None = None, end: float | None = None
    ) -> dict[str, Sequence[float]]:
        """The figures of these names by step; ``MetricsFile.series`` says what each holds. None: from the first or to the last."""
        with self._reading:
            self._metrics.read()
            return self._metrics.series(
                names, by, -math.inf if begin is None else begin, math.inf if end is None else end
            )

    def samples(self, begin: int) -> dict[str, Any]:
        """The figures of rows from ``begin`` on by column, at most ``MAX_ROWS``; where rows are gone, from the next file on."""
        begin = next(
            (max(begin, file.first) for file in files_in(self.directory / DIRECTORY) if file.end > begin), begin
        )
        columns_read = [*_FIGURES, "engines", "policy_versions"]
        table = read_samples(self.directory, columns_read, begin=begin, end=begin + MAX_ROWS)
        if not len(table):  # a resumed run has gone on behind more numbers than that
            table = read_samples(self.directory, columns_read, begin=begin)[:MAX_ROWS]
        columns: dict[str, Any] = {name: table[name].to_pylist() for name in _FIGURES if name not in _CODED}
        for name in _CODED:
            coded = table[name].combine_chunks().dictionary_encode()
            columns[name] = {"texts": coded.dictionary.to_pylist(), "codes": coded.indices.to_pylist()}
        columns["engines"] = [engines and ", ".join(engines) for engines in table["engines"].to_pylist()]
        columns |= _sampled(table["policy_versions"].combine_chunks())
        return columns

    def find(self, words: str, begin: int = 0) -> dict[str, Any]:
        """Rows from ``begin`` on with ``words`` in a text, from the newest on; cut after 10,000."""
        rows = find_samples(self.directory, words, _MAX_FOUND + 1, begin)
        return {"rows": rows[:_MAX_FOUND], "is_cut": len(rows) > _MAX_FOUND}

    def sample(self, row: int) -> dict[str, Any]:
        """Return a row as ``whole_samples`` does. Raises ``LookupError`` if there is no row of that number."""
        rows = self.whole_samples(row, row + 1)
        if not rows:
            raise LookupError(f"no row {row} in {self.directory / DIRECTORY}")
        return rows[0]

    def whole_samples(self, begin: int, end: int) -> list[dict[str, Any]]:
        """All that is known of rows; ``pieces`` are the texts of a row's tokens, None where they are not known."""
        rows: list[dict[str, Any]] = read_samples(self.directory, begin=begin, end=end).to_pylist()
        for row in rows:
            has_tokens = row["response_token_ids"] is not None
            row["pieces"] = self._pieces(row["prompt_token_ids"] + row["response_token_ids"]) if has_tokens else None
        return rows

    def spans(self, begin: float | None, end: float | None) -> dict[str, Any]:
        """The trace between two times, as ``spans_between`` gives it."""
        return spans_between(self.directory, begin, end)

    def _pieces(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text that each token adds; of a character in several tokens the last one has it."""
        from tokenizers.decoders import DecodeStream

        self._tokenizer = self._tokenizer or read_tokenizer(self.directory)
        if self._tokenizer is None:  # a run of other tokens shows texts alone
            return None
        stream, pieces = DecodeStream(skip_special_tokens=False), list[str]()
        for token in token_ids:
            try:
                pieces.append(stream.step(self._tokenizer, token) or "")
            except Exception:  # its only type of error: bytes that are no UTF-8 change a text that was given before
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append(stream.step(self._tokenizer, token) or "")
        return pieces


def _num_rows(file: SamplesFile) -> int:
    try:
        return _counted(file, file.path.stat().st_mtime_ns)
    except (CheckpointError, FileNotFoundError):  # the table of samples says so, or another file has its rows now
        return 0


@lru_cache(maxsize=10_000)
def _counted(file: SamplesFile, written_at: int) -> int:
    return file.num_rows


def _sampled(versions: "pa.Array") -> dict[str, list[int | None]]:
    """How many tokens of each row were sampled, trained or not, and by which policy versions; None for a row without."""
    import pyarrow as pa
    import pyarrow.compute as pc

    version, start, end = pc.list_flatten(versions).flatten()
    spans = pa.table(
        {"row": pc.list_parent_indices(versions), "version": version, "length": pc.subtract(end, start)}
    ).filter(pc.field("version") >= 0)
    ends = spans.group_by("row").aggregate([("version", "min"), ("version", "max"), ("length", "sum")])
    names = {"first_version": "version_min", "last_version": "version_max", "num_tokens": "length_sum"}
    found: dict[str, list[int | None]] = {name: [None] * len(versions) for name in names}
    for name, of_row in names.items():
        for row, value in zip(ends["row"].to_pylist(), ends[of_row].to_pylist(), strict=True):
            found[name][row] = value
    return found


def differences(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys whose values differ between runs, with the value of each; a run whose values are not known is not compared."""
    known = [of_run for of_run in settings if of_run]
    keys = sorted({key for of_run in known for key in of_run})
    differing = [key for key in keys if any(of_run.get(key) != known[0].get(key) for of_run in known)]
    return [{"key": key, "values": [of_run.get(key) for of_run in settings]} for key in differing]
