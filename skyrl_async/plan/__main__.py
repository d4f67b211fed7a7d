"""Says how fast a run would be with other engines, another staleness bound, another mini-batch: before they are rented.

uv run -m skyrl_async.plan outputs/RUN                              how well the model of a run reproduces it
uv run -m skyrl_async.plan outputs/RUN --engines 2,4,8 --staleness 0,1,4,8 --policy wait,allow
uv run -m skyrl_async.plan outputs/RUN --lengths x2 --mini-batch 32,64 --gpu-hour 2.5
uv run -m skyrl_async.plan outputs/RUN --budget 24 --staleness 1,4  the best split of 24 devices, with each bound
uv run -m skyrl_async.plan --describe cluster.yaml --engines 4,8    of a cluster that nobody has run on

It reads what the run wrote, fits a model of each part, and runs the real trainer over these models in virtual time. Every combination of
the values given is a row. Ten steps of a run are enough.

Exit codes: 0 done, 2 there is no such run, or what is asked cannot be.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from skyrl_async.config.rules.all import mistakes_anywhere
from skyrl_async.config.rules.devices import num_cores
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.errors import ConfigError, SkyRLAsyncError
from skyrl_async.plan.description import described
from skyrl_async.plan.findings import findings
from skyrl_async.plan.forecast import Planner, WhatIf, config_of, prepare_process
from skyrl_async.plan.measured import Measured, measured
from skyrl_async.plan.memory import check_devices
from skyrl_async.plan.model import Model
from skyrl_async.plan.report import Row, best_splits, devices_of, name_of, row_of, sentences, table

_KEYS = {
    "engines": ("engine.num_engines", int),
    "tensor_parallel": ("engine.tensor_parallel_size", int),
    "training_workers": ("training.num_workers", int),
    "staleness": ("trainer.max_staleness_steps", int),
    "policy": ("trainer.staleness_policy", str),
    "mini_batch": ("trainer.policy_mini_batch_size", int),
    "generation_workers": ("trainer.num_parallel_generation_workers", int),
}
"""Option -> key of the configuration, and its type."""
_SPLIT = ("engine.num_engines", "training.num_workers")
"""What ``--budget`` looks for."""
_MOST_SPLITS = 12
"""Splits that are printed, most tokens per second first; JSON has all of them."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="skyrl_async.plan", description="How fast a run would be with other resources."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("run", type=Path, nargs="?", metavar="RUN", help="directory of a run, such as outputs/RUN")
    source.add_argument("--describe", type=Path, metavar="FILE", help="a cluster in a YAML file, in place of a run")
    for option, (key, _) in _KEYS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", metavar="A,B", help=f"values of {key}")
    parser.add_argument("--lengths", metavar="x2,x4", help="factors of every reply's tokens")
    parser.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help="also find the best split of N devices into engines and training workers, with each of the other values given",
    )
    parser.add_argument("--gpu-hour", type=float, metavar="DOLLARS", help="price of a device for an hour")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the table")
    parser.add_argument("--processes", type=int, default=num_cores(), help="simulations at a time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        _plan(given)
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _plan(given: argparse.Namespace) -> None:
    if given.gpu_hour is not None and not 0 <= given.gpu_hour < float("inf"):
        raise ConfigError(f"--gpu-hour must be dollars >= 0, got {given.gpu_hour:g}")
    if (picture := given.picture) is not None and (
        picture.suffix != ".png" or not picture.absolute().parent.is_dir() or picture.is_dir()
    ):
        raise ConfigError(f"--picture must be a .png in a directory that exists, got {picture}")
    if given.processes < 1:
        raise ConfigError(f"--processes must be >= 1, got {given.processes}")
    known: Measured | Model = measured(given.run) if given.describe is None else described(given.describe)
    what_ifs = [WhatIf(), *(one for one in _asked(given) if one.keys or one.lengths != 1)]
    num_asked = len(what_ifs)
    for what_if in what_ifs:
        check(known, what_if)
    if given.budget is not None:
        what_ifs += _splits(known, _asked(given), given.budget)
    planner = Planner(known, num_processes=given.processes)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating")
        forecasts = planner.forecasts(what_ifs, lambda done, of: progress.update(task, completed=done, total=of))
    rows = [row_of(known.config, one, found, given.gpu_hour) for one, found in zip(what_ifs, forecasts, strict=True)]
    asked = rows[:num_asked]
    # Steps of different mini-batches are not the same work.
    splits = sorted(rows[num_asked:], key=lambda row: -row.forecast.tokens_per_second)
    notes = findings(known) if isinstance(known, Measured) else []
    if given.picture is not None:
        from skyrl_async.plan.picture import draw

        draw(
            [*asked, *splits[:_MOST_SPLITS]],
            None if planner.accuracy is None else planner.accuracy.measured_seconds,
            given.picture,
        )
    if given.json:
        sys.stdout.write(f"{json.dumps(_as_json(planner, asked, splits, notes), indent=1)}\n")
        return
    for line in _lines(given, planner, asked, splits, notes):
        sys.stdout.write(f"{line}\n")


def _lines(
    given: argparse.Namespace, planner: Planner, asked: Sequence[Row], splits: Sequence[Row], notes: Sequence[str]
) -> list[str]:
    """What is printed."""
    if planner.accuracy is None:
        lines = [f"{given.describe}: nothing was measured, so FROM and TO say only how much the lengths vary", ""]
    else:
        found = planner.accuracy
        lines = [
            f"{given.run}: a step took {found.measured_seconds:.3g} s, and takes {found.forecast.step_seconds:.3g} s in the model of it "
            f"({found.error:+.0%}). FROM and TO allow for that."
        ]
        lines += [*(f"  {note}" for note in notes), ""]
    lines += [table(asked), "", *sentences(asked, planner.config, planner.groups)]
    for best, rows in best_splits(splits, asked):
        shown = f", the fastest {_MOST_SPLITS} of {len(rows)}" if len(rows) > _MOST_SPLITS else ""
        lines += ["", f"{best}{shown}", table(rows[:_MOST_SPLITS])]
    if any(
        key in row.what_if.keys
        for row in (*asked, *splits)
        for key in ("training.num_workers", "engine.tensor_parallel_size")
    ):
        lines += [
            "",
            "assumed, because one number of them says nothing of others: training workers and tensor parallelism lose nothing",
        ]
    if any(row.what_if.lengths != 1 for row in (*asked, *splits)):
        lines += ["", "assumed: what cuts answers off (generator.sampling.max_tokens) grows with them"]
    return lines


def _as_json(planner: Planner, asked: Sequence[Row], splits: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    accuracy = planner.accuracy
    return {
        "measured_step_s": None if accuracy is None else accuracy.measured_seconds,
        "error": None if accuracy is None else accuracy.error,
        "findings": list(notes),
        "rows": [row.to_json() for row in asked],
        "splits": [row.to_json() for row in splits],
        "best_split": "\n".join(best for best, _ in best_splits(splits, asked)) or None,
        "sentences": sentences(asked, planner.config, planner.groups),
    }


def _asked(given: argparse.Namespace) -> list[WhatIf]:
    """Every combination of the values given. Raises ``ConfigError`` for one that is none."""
    keys = [key for option, (key, _) in _KEYS.items() if getattr(given, option) is not None]
    values = [
        list(dict.fromkeys(_value(option, kind, word) for word in getattr(given, option).split(",")))
        for option, (_, kind) in _KEYS.items()
        if getattr(given, option) is not None
    ]
    factors = [1.0] if given.lengths is None else list(dict.fromkeys(map(_factor, given.lengths.split(","))))
    return [
        WhatIf(keys=dict(zip(keys, chosen, strict=True)), lengths=factor)
        for factor in factors
        for chosen in itertools.product(*values)
    ]


def _value(option: str, kind: type, word: str) -> Any:
    name = f"--{option.replace('_', '-')}"
    if kind is str:
        if word not in StalenessPolicy.__members__:
            raise ConfigError(f"{name} must be of {', '.join(StalenessPolicy.__members__)}, got {word!r}")
        return StalenessPolicy[word]
    least = 0 if option == "staleness" else 1
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{name} must be whole numbers >= {least} such as 2,4,8, got {word!r}")
    return int(word)


def _factor(word: str) -> float:
    try:
        factor = float(word.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ConfigError(f"--lengths must be factors such as x2,x0.5, got {word!r}")
    return factor


def _splits(known: Measured | Model, asked: Sequence[WhatIf], num_devices: int) -> list[WhatIf]:
    """The splits of each what-if, whatever split it asks for. Raises ``ConfigError`` where none of them has one."""
    free = [replace(one, keys={key: value for key, value in one.keys.items() if key not in _SPLIT}) for one in asked]
    found: list[WhatIf] = []
    refused: ConfigError | None = None
    for number, one in enumerate(free):
        if one not in free[:number]:
            try:
                found += _splits_of(known, one, num_devices)
            except ConfigError as error:
                refused = error
    if refused is not None and not found:
        raise refused
    return found


def _splits_of(known: Measured | Model, what_if: WhatIf, num_devices: int) -> list[WhatIf]:
    """``what_if`` with each power of two of training workers, and engines on what other workers leave, three quarters and half of it, that
    hold the model."""
    config, asked = config_of(known.config, what_if), num_devices
    if config.placement.groups is not None:
        raise ConfigError(
            "--budget must be left out for a run with placement.groups: it splits devices among stages with devices of their own"
        )
    of_engine = config.engine.tensor_parallel_size
    others = devices_of(config) - config.engine.num_engines * of_engine - config.training.num_workers
    num_devices -= others
    if num_devices <= of_engine:
        besides = f", besides {others} of other workers" if others else ""
        raise ConfigError(
            f"--budget must be >= {of_engine + 1 + others}: an engine of {of_engine} and a training worker{besides}, got {asked}"
        )
    found: list[WhatIf] = []
    refused: ConfigError | None = None
    numbers = (2**power for power in range(num_devices.bit_length()) if num_devices - 2**power >= of_engine)
    for number, share in itertools.product(numbers, (4, 3, 2)):
        num_engines = max(1, (num_devices - number) // of_engine * share // 4)
        split = replace(what_if, keys={**dict(zip(_SPLIT, (num_engines, number), strict=True)), **what_if.keys})
        try:
            check(known, split)
            found += [split] * (split not in found)
        except ConfigError as error:
            refused = error
    if refused is not None and not found:
        raise ConfigError(f"--budget {asked}: no split of so many devices holds the model; {refused}")
    return found


def check(known: Measured | Model, what_if: WhatIf) -> None:
    """Raise ``ConfigError`` for a what-if that no run could be started with."""
    try:
        config = config_of(known.config, what_if)
        for section in (config.trainer, config.engine, config.training):
            section.__post_init__()
        if isinstance(known, Measured):
            _check_rules(known.config, config)
        check_devices(known.memory, config, what_if.lengths)
    except ConfigError as error:
        raise ConfigError(f"{name_of(what_if)}: {error}") from error


def _check_rules(run: Config, asked: Config) -> None:
    """Raise ``ConfigError`` for a mistake that ``run`` has not; what this machine lacks of it does not matter."""
    of_run = set(mistakes_anywhere(run))
    for mistake in mistakes_anywhere(asked):
        if mistake not in of_run:
            raise ConfigError(mistake)


if __name__ == "__main__":
    prepare_process()
    sys.exit(main())
