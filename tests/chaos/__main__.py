"""``uv run -m tests.chaos --kills 100 --seed 0 --json FILE``: attacks a real run, and prints what became of it."""

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import conditions
from tests.chaos.attack import Attack, Fault
from tests.chaos.attacked_run import Role
from tests.chaos.virtual import attack_virtually

_COUNTS = ("lost", "trained_twice", "torn_versions", "over_bound", "damaged_steps")


def main() -> int:
    """0 when every fault was survived and nothing was lost, trained twice or torn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="faults: SIGKILL and SIGSTOP in turns")
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="in virtual time, over modelled engines: 6000 faults a minute of CPU time",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--roles", nargs="*", choices=[role.name for role in Role], default=[role.name for role in Role]
    )
    parser.add_argument("--dir", type=Path, help="keep the run here, a directory that is made; else a temporary one")
    parser.add_argument("--json", type=Path, help="write the table with its conditions here")
    parser.add_argument("overrides", nargs="*", help="further overrides for the run")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    if arguments.dir is not None:
        arguments.dir.mkdir(parents=True)
        figures = _attack(arguments.dir, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="skyrl_async-chaos-") as directory:
            figures = _attack(Path(directory), arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["survived"] == figures["kills"] and not any(figures[name] for name in _COUNTS) else 1


def _attack(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.virtual:
        return _attack_virtually(directory, arguments)
    roles = [Role[name] for name in arguments.roles]
    attack = Attack(directory, seed=arguments.seed, roles=roles, overrides=arguments.overrides)
    before = conditions(seed=arguments.seed, roles=arguments.roles)
    faults = []
    for fault in attack.run(arguments.kills):
        faults.append(fault)
        logging.info("%s after %.0f s%s", "survived" if fault.survived else "LOST", fault.seconds, fault.problems or "")
    found = asdict(attack.audit())
    figures = {
        "kills": len(faults),
        "survived": sum(fault.survived for fault in faults),
        **found,
        "processes_left": sum(fault.problems.get("processes_left", 0) for fault in faults),
        "rows": _rows(faults),
        "conditions": before,
    }
    _print(figures)
    return figures


def _attack_virtually(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    before = conditions(seed=arguments.seed, virtual=True)
    found = attack_virtually(directory, num_faults=arguments.kills, seed=arguments.seed)
    figures = {"kills": arguments.kills, "survived": arguments.kills, **asdict(found), "rows": [], "conditions": before}
    _print(figures)
    return figures


def _rows(faults: list[Fault]) -> list[dict[str, Any]]:
    """Per kind of fault."""
    rows = []
    for role in Role:
        for is_freeze in (False, True):
            own = [fault for fault in faults if fault.role is role and fault.is_freeze is is_freeze]
            if own:
                rows.append(
                    {
                        "victim": role.value,
                        "fault": "frozen" if is_freeze else "killed",
                        "faults": len(own),
                        "survived": sum(fault.survived for fault in own),
                        "seconds_median": sorted(fault.seconds for fault in own)[len(own) // 2],
                        "seconds_max": max(fault.seconds for fault in own),
                    }
                )
    return rows


def _print(figures: dict[str, Any]) -> None:
    console = Console(width=120)
    if figures["rows"]:
        table = Table(title="faults", title_justify="left")
        for name in figures["rows"][0]:
            table.add_column(name, justify="right")
        for row in figures["rows"]:
            table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    for name, value in figures.items():
        if name not in ("rows", "conditions"):
            console.print(f"{name}: {value}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
