"""``uv run -m tests.chaos --kills 100 --seed 0 --json FILE``: attacks a run, and prints what became of it.

With ``--virtual`` in virtual time, over modelled engines; with ``--machine`` so too, by histories that Hypothesis chooses.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import conditions
from tests.chaos.attack import GENERATORS, INTERRUPT_EVERY, Attack, Fault
from tests.chaos.attacked_run import Ending, Role
from tests.chaos.machine import Tally, run_machine
from tests.chaos.virtual_attack import attack_virtually

_COUNTS = ("lost", "trained_twice", "torn_versions", "over_bound", "damaged_steps")
_LEFT = ("wrong_exits", "processes_left", "shared_memory_left", "unsaved_steps")
"""By processes: of runs that were killed or interrupted."""
_EVENTS_PER_HISTORY = 50


def main() -> int:
    """0 when every fault was survived and nothing was lost, trained twice or torn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="faults: SIGKILL and SIGSTOP in turns")
    parser.add_argument("--seed", type=int, default=0)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--virtual", action="store_true", help="in virtual time, over modelled engines: some thousand faults a minute"
    )
    where.add_argument(
        "--machine", action="store_true", help="the same, faults and moments chosen by Hypothesis: a state machine"
    )
    parser.add_argument(
        "--examples", type=int, default=500, help=f"histories of the machine, of {_EVENTS_PER_HISTORY} events each"
    )
    parser.add_argument("--generator", choices=GENERATORS, help="of the real run; by default drawn by the seed")
    parser.add_argument(
        "--interrupt-every",
        type=int,
        default=INTERRUPT_EVERY,
        help="one of so many faults of the real run is followed by Ctrl-C, 0: none; the last fault always is",
    )
    parser.add_argument(
        "--roles", nargs="*", choices=[role.name for role in Role], default=[role.name for role in Role]
    )
    parser.add_argument(
        "--market", action="store_true", help="engines of the real run also leave with a warning, and others come"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="keep the run here, a directory that is made; else it is kept, and said where, when something was not survived",
    )
    parser.add_argument("--json", type=Path, help="write the table with its conditions here")
    parser.add_argument("overrides", nargs="*", help="further overrides for the run")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="skyrl_async-chaos-"))
    directory.mkdir(parents=True, exist_ok=arguments.dir is None)
    is_survived = False
    try:
        figures = _attack(directory, arguments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
        is_broken = any(figures.get(name) for name in (*_COUNTS, *_LEFT))
        is_survived = figures["survived"] == figures["kills"] and not is_broken
    finally:
        if not is_survived:
            sys.stderr.write(f"not everything was survived: see {directory}\n")
        elif arguments.dir is None:
            shutil.rmtree(directory)
    return 0 if is_survived else 1


def _attack(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.virtual:
        return _attack_virtually(directory, arguments)
    if arguments.machine:
        return _attack_by_machine(arguments)
    attack = Attack(
        directory,
        seed=arguments.seed,
        roles=[Role[name] for name in arguments.roles],
        generator=arguments.generator,
        interrupt_every=arguments.interrupt_every,
        has_market=arguments.market,
        overrides=arguments.overrides,
    )
    before = conditions(seed=arguments.seed, roles=arguments.roles)
    logging.info("generator: %s", attack.generator)
    faults = []
    for fault in attack.run(arguments.kills):
        faults.append(fault)
        logging.info("%s after %.0f s%s", "survived" if fault.survived else "LOST", fault.seconds, fault.problems or "")
    figures = {
        "generator": attack.generator,
        "kills": len(faults),
        "survived": sum(fault.survived for fault in faults),
        "interrupted": sum(fault.is_interrupted for fault in faults) + 1,
        "killed_coming_up": sum(fault.killed_coming_up is not None for fault in faults),
        **asdict(attack.audit()),
        **_left(faults, attack.ending),
        "unsaved_steps": attack.unsaved_steps,
        "rows": _rows(faults),
        "conditions": before,
    }
    _print(figures)
    return figures


def _attack_virtually(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.ERROR)  # what is critical is that the run has ended
    before = conditions(seed=arguments.seed, virtual=True)
    attack = attack_virtually(directory, num_faults=arguments.kills, seed=arguments.seed)
    counts = {"survived": attack.survived, "interrupted": attack.interrupted, "saved": attack.saved}
    figures = {"kills": arguments.kills, **counts, **asdict(attack.audit), "rows": [], "conditions": before}
    _print(figures)
    return figures


def _attack_by_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    before = conditions(seed=arguments.seed, examples=arguments.examples, events=_EVENTS_PER_HISTORY)
    tally, failed = Tally(), 0
    try:
        run_machine(tally, num_histories=arguments.examples, num_events=_EVENTS_PER_HISTORY, random_seed=arguments.seed)
    except Exception:
        traceback.print_exc()
        failed = 1
    counts = {"survived": tally.survived, "interrupted": tally.interrupted, "saved": tally.saved}
    figures = {"histories": tally.histories, "kills": tally.faults + failed, **counts, **tally.found}
    figures |= {"rows": [], "conditions": before}
    _print(figures)
    return figures


def _left(faults: list[Fault], ending: Ending | None) -> dict[str, int]:
    """What all endings have left."""
    problems = [*(fault.problems for fault in faults), ending.problems() if ending is not None else {}]
    return {name: sum(found.get(name, 0) for found in problems) for name in _LEFT if name != "unsaved_steps"}


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
                        "interrupted": sum(fault.is_interrupted for fault in own),
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
