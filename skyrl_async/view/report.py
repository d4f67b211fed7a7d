"""Writes runs into one HTML file that needs no network: the page, with the answers that it would ask for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.view.run import MAX_ROWS, ViewedRun
from skyrl_async.view.server import PAGE, overview

_ROWS_BYTES = 16_000_000
"""Limit for texts and tokens of a run; the newest samples keep theirs."""
_FEWEST_ROWS, _MOST_ROWS = 4, 256
"""Read at once; few at first, since a row of 32,000 tokens takes 5 MB of memory while it is read."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script src="([^"]+)"></script>')


def write_report(runs: Sequence[ViewedRun], path: Path) -> tuple[int, list[str]]:
    """Write the file, and return its size in bytes, and what is wrong with runs: the report leaves out what cannot be read.

    Raises ``ConfigError`` if it cannot be written, or no run can be read.
    """
    kept: list[ViewedRun] = []
    glances: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    problems: list[str] = []
    for run, of_run in zip(runs, overview(runs)["runs"], strict=True):
        if of_run["error"] is not None:
            problems.append(of_run["error"])
        try:
            if of_run["error"] is None or of_run["num_lines"] or of_run["end"]:
                answers.append(_answers(run, of_run, problems))
                kept.append(run)
                glances.append(of_run)
        except (SkyRLAsyncError, OSError) as error:
            problems.append(str(error))
    if not kept:
        raise ConfigError("\n".join(problems))
    recorded = {"overview": overview(kept) | {"runs": glances}, "runs": answers}
    # As text of a script, JSON must not contain the end of a script.
    data = msgspec.json.encode(recorded).decode().replace("<", "\\u003c")
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    page = _STYLE.sub(lambda found: f"<style>\n{_file(found[1])}</style>", page)
    page = _SCRIPT.sub(lambda found: f"<script>\n{_file(found[1])}</script>", page)
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">', 1)
    page = page.replace("<script>", f'<script id="recorded" type="application/json">{data}</script>\n<script>', 1)
    try:
        return path.write_bytes(page.encode()), problems
    except OSError as error:
        raise ConfigError(
            f"--export {path} cannot be written: {error.strerror}; name a file in a directory that exists"
        ) from None


def _file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _answers(run: ViewedRun, of_run: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """What the page would ask for; without samples if they cannot be read, which is added to ``problems``."""
    found = {
        "series": run.series(of_run["metrics"]),
        "spans": run.spans(None, None),
        "samples": {"row": []},
        "rows": {},
    }
    try:
        samples = run.samples(max(0, of_run["end"] - MAX_ROWS))
        return found | {"samples": samples, "rows": _newest_rows(run, of_run["end"])}
    except SkyRLAsyncError as error:
        if not of_run["metrics"]:
            raise
        problems.append(str(error))
        return found


def _newest_rows(run: ViewedRun, end: int) -> dict[int, Any]:
    """The newest rows that have a text, as many as there is room for."""
    rows: dict[int, Any] = {}
    size, first, num = 0, max(0, end - MAX_ROWS), _FEWEST_ROWS
    while end > first:
        begin = max(first, end - num)
        for row in reversed(run.whole_samples(begin, end)):
            if row["turns"] is not None:
                size += len(msgspec.json.encode(row))
                if size > _ROWS_BYTES:
                    return rows
                rows[row["row"]] = row
        end, num = begin, min(2 * num, _MOST_ROWS)
    return rows
