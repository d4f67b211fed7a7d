"""Lists the shipped harnesses, installs one, or checks one.

uv run -m skyrl_async.harnesses                     name, version, route, and whether it is installed
uv run -m skyrl_async.harnesses install NAME        into an environment of its own in the cache
uv run -m skyrl_async.harnesses check NAME          installs it, and plays one task with a scripted policy

Exit codes: 0 done, 1 the check failed, 2 it could not be installed.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from skyrl_async.config.schema.run import Config
from skyrl_async.errors import SkyRLAsyncError
from skyrl_async.harnesses.install import is_installed
from skyrl_async.harnesses.registry import HARNESSES, shipped
from skyrl_async.harnesses.shipped import ShippedHarness, install


def table(cache_dir: Path) -> str:
    """A line for each harness."""
    rows = [("NAME", "VERSION", "ROUTE", "INSTALLED")]
    rows += [
        (
            one.name,
            one.version,
            one.wire,
            "yes" if is_installed(one.environment or one.name, one.packages, cache_dir) else "no",
        )
        for one in HARNESSES.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def check(harness: ShippedHarness, bin_dir: Path) -> bool:
    """Play one task, and print how it went."""
    from skyrl_async.harnesses.check import play  # loads the endpoint, which takes seconds

    started = time.monotonic()
    played = asyncio.run(play(harness, bin_dir))
    sys.stdout.write(f"{harness.name} {harness.version}: {played.words()} in {time.monotonic() - started:.1f} s\n")
    return played.is_sound


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.harnesses", description="Shipped harnesses.")
    parser.add_argument("action", nargs="?", choices=("list", "install", "check"), default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a harness; all of them where it is left out")
    given = parser.parse_args(arguments)
    cache_dir = Path(Config().cache_dir)
    if given.action == "list":
        sys.stdout.write(f"{table(cache_dir)}\n")
        return 0
    try:
        chosen = list(HARNESSES.values()) if given.name is None else [shipped(given.name)]
        places = [(harness, install(harness, cache_dir, _say)) for harness in chosen]
        if given.action == "install":
            return 0
        return 0 if all([check(*place) for place in places]) else 1
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
