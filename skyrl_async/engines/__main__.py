"""Lists the engines of a run that trains, adds some, or removes one.

uv run -m skyrl_async.engines outputs/RUN               a line for each engine
uv run -m skyrl_async.engines outputs/RUN add [N]       start N more (one); each serves once it has loaded the newest version
uv run -m skyrl_async.engines outputs/RUN remove NAME   its requests continue on the others, with their tokens so far

Only the user who runs it can, on the machine of the trainer. --json prints the engines as JSON.

Exit codes: 0 done, 1 the run refused or failed, 2 there is no such run.
"""

import argparse
import json
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from skyrl_async.composition.control import CONTROL_FILE
from skyrl_async.errors import ConfigError, InferenceError

_LIST_TIMEOUT_S = 60.0
_COLUMNS = ("name", "state", "serving", "restarts", "lag_steps", "tokens_per_call_second")


def ask(run_dir: Path, **request: Any) -> list[dict[str, Any]]:
    """Send one request; returns the engines after it.

    Raises:
        ConfigError: nobody answers for such a run on this machine.
        InferenceError: the run refused, or could not do it.
    """
    with _sent(run_dir, request) as connection:
        return _answer(run_dir, connection)


def _sent(run_dir: Path, request: dict[str, Any]) -> socket.socket:
    """A connection over which the request was sent. Raises ``ConfigError``, as ``ask``."""
    path = run_dir / CONTROL_FILE
    try:
        place = json.loads(path.read_text())
        host, pid, address = place["host"], int(place["pid"]), str(place["socket"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): it says where the trainer of {run_dir} listens") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): {run_dir} must be the directory of a run that trains now"
        ) from error
    if host != socket.gethostname():
        raise ConfigError(f"the trainer of {run_dir} is on {host}, this is {socket.gethostname()}: ask there")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        if request["action"] == "list":
            connection.settimeout(_LIST_TIMEOUT_S)  # others boot or empty an engine first
        connection.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        connection.close()
        why = f"its socket {address} cannot be reached" if psutil.pid_exists(pid) else "it was killed"
        raise ConfigError(
            f"the trainer of {run_dir}, process {pid}, does not answer ({error.strerror}): {why}"
        ) from error
    return connection


def _answer(run_dir: Path, connection: socket.socket) -> list[dict[str, Any]]:
    """The engines after a request. Raises ``InferenceError``, as ``ask``."""
    try:
        with connection.makefile() as answers:
            line = answers.readline()
    except TimeoutError as error:
        raise InferenceError(f"the trainer of {run_dir} does not answer: it may stand still, see run.log") from error
    except ConnectionError:
        line = ""
    if not line:
        raise InferenceError(f"{run_dir} ended before it answered")
    answer = json.loads(line)
    if "error" in answer:
        raise InferenceError(answer["error"])
    return list(answer["engines"])


def _add(run_dir: Path, num_engines: int) -> bool:
    """Add engines side by side, and say of each when it serves or why it does not. Returns whether all serve."""
    started, num_added = time.monotonic(), 0
    known = {engine["name"] for engine in ask(run_dir, action="list") if engine["serving"]}
    with ExitStack() as stack:
        for connection in [stack.enter_context(_sent(run_dir, {"action": "add"})) for _ in range(num_engines)]:
            try:
                engines = _answer(run_dir, connection)
            except InferenceError as error:
                sys.stderr.write(f"error: {error}\n")
                continue
            num_added += 1
            new = {engine["name"] for engine in engines if engine["serving"]} - known
            known |= new
            for name in sorted(new):
                sys.stderr.write(f"{name} serves, after {time.monotonic() - started:.0f} s\n")
    return num_added == num_engines


def table(engines: list[dict[str, Any]]) -> str:
    """A line for each engine."""
    heads = [column.replace("_", " ").upper() for column in _COLUMNS]
    rows = [heads, *([_cell(engine.get(column)) for column in _COLUMNS] for engine in engines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.engines", description="The engines of a run that trains.")
    parser.add_argument("run", type=Path, metavar="RUN", help="its directory")
    parser.add_argument("action", nargs="?", choices=("list", "add", "remove"), default="list")
    parser.add_argument("what", nargs="?", metavar="N|NAME", help="how many to add (1), or which one to remove")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if given.action == "remove" and given.what is None:
        parser.error("remove needs the NAME of an engine")
    if given.action == "list" and given.what is not None:
        parser.error(f"list takes no name, got {given.what!r}")
    if given.action == "add" and not ((given.what or "1").isdecimal() and int(given.what or 1)):
        parser.error(f"add takes a number of engines >= 1, got {given.what!r}")
    try:
        is_done = _add(given.run, int(given.what or 1)) if given.action == "add" else True
        engines = ask(given.run, action="remove" if given.action == "remove" else "list", name=given.what)
    except (ConfigError, InferenceError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(f"{json.dumps(engines, indent=1) if given.json else table(engines)}\n")
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
