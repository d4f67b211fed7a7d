"""Forecasts as a table and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from skyrl_async.config.rules.placement import sharing_stages, stage_sizes
from skyrl_async.config.schema.run import Config
from skyrl_async.plan.forecast import Forecast, WhatIf, config_of, simplified
from skyrl_async.simulator.models import KnownGroup

_SAME_SPEED = 0.05
"""Difference in speed that is said to be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One what-if and its forecast."""

    what_if: WhatIf
    forecast: Forecast
    num_devices: int
    dollars: float | None
    """For 1,000 steps; None without a price."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = Forecast.__dataclass_fields__
        return {
            "keys": dict(self.what_if.keys),
            "lengths": self.what_if.lengths,
            **{name: getattr(self.forecast, name) for name in names},
            "num_devices": self.num_devices,
            "dollars_per_1000_steps": self.dollars,
        }


def devices_of(config: Config) -> int:
    """Devices of engines and of all workers that train or score; of stages that share devices, those of the largest. Parts of a GPU
    (``placement.num_gpus_per_worker``) count as whole ones."""
    devices = {stage: size.num_actors * size.devices_per_actor for stage, size in stage_sizes(config).items()}
    devices["generate"] = config.engine.num_engines * config.engine.tensor_parallel_size
    shared = [[devices.pop(stage) for stage in devices.keys() & group] for group in config.placement.groups or ()]
    return sum(devices.values()) + sum(max(found, default=0) for found in shared)


def row_of(config: Config, what_if: WhatIf, forecast: Forecast, gpu_hour: float | None) -> Row:
    """A row of the table. ``gpu_hour``: dollars per device and hour."""
    devices = devices_of(config_of(config, what_if))
    dollars = None if gpu_hour is None else 1000 * forecast.step_seconds / 3600 * devices * gpu_hour
    return Row(what_if=what_if, forecast=forecast, num_devices=devices, dollars=dollars)


SHORT = {
    "engine.num_engines": "engines",
    "engine.tensor_parallel_size": "tensor parallel",
    "training.num_workers": "training workers",
    "trainer.max_staleness_steps": "S",
    "trainer.staleness_policy": "policy",
    "trainer.policy_mini_batch_size": "mini-batch",
    "trainer.num_parallel_generation_workers": "generation workers",
}
_POLICY = "trainer.staleness_policy"
_COMPARED = [key for key in SHORT if key != "trainer.max_staleness_steps"]


def name_of(what_if: WhatIf) -> str:
    """Such as ``engines 4, S 2``."""
    parts = [f"{SHORT.get(key, key)} {getattr(value, 'name', value)}" for key, value in what_if.keys.items()]
    return ", ".join(parts + ([f"lengths x{what_if.lengths:g}"] if what_if.lengths != 1 else [])) or "as it is"


def table(rows: Sequence[Row]) -> str:
    """One line per row."""
    heads = [
        "WHAT",
        "STEP S",
        "FROM",
        "TO",
        "TRAINER IDLE",
        "ENGINES IDLE",
        "REQUESTS",
        "STALENESS",
        "TOKENS/S",
        "DEVICES",
        "$/1000 STEPS",
    ]
    lines = [heads]
    for row in rows:
        found = row.forecast
        lines.append(
            [
                name_of(row.what_if),
                *(f"{seconds:.3g}" for seconds in (found.step_seconds, found.low_seconds, found.high_seconds)),
                *(f"{share:.0%}" for share in (found.trainer_idle_frac, found.engines_idle_frac)),
                f"{found.requests_per_engine:.0f}",
                f"{found.staleness_mean:.1f}",
                f"{found.tokens_per_second:,.0f}",
                str(row.num_devices),
                "-" if row.dollars is None else f"{row.dollars:,.2f}",
            ]
        )
    if all(row.dollars is None for row in rows):
        lines = [line[:-1] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def sentences(rows: Sequence[Row], config: Config, groups: Sequence[KnownGroup] = ()) -> list[str]:
    """What the table says: which side binds as it is, what more of something gains, which staleness is enough.

    Of what-ifs that change several things those are compared that are else as ``config`` is, where the table has such. ``groups`` are
    those that were simulated.
    """
    found = [_what_binds(rows[0].forecast, config, groups)]
    for key in _COMPARED:
        for rest, of_rest in _by_the_rest(rows, key, config):
            found += [_gain(key, rest, fewer, more) for fewer, more in pairwise(of_rest)]
    key = "trainer.max_staleness_steps"
    for rest, of_rest in _by_the_rest(rows, key, config):
        best = min(of_rest, key=lambda row: row.forecast.step_seconds)
        enough = next(
            row for row in of_rest if row.forecast.step_seconds * (1 - _SAME_SPEED) <= best.forecast.step_seconds
        )
        if enough is not of_rest[-1]:
            share = best.forecast.step_seconds / enough.forecast.step_seconds
            others = (
                "is the fastest of these"
                if enough is best
                else f"has {share:.0%} of S = {best.what_if.keys[key]}'s speed"
            )
            found.append(f"S = {enough.what_if.keys[key]}{_with(rest)} {others}")
    return found


def best_splits(splits: Sequence[Row], asked: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """What to say of the splits with each factor of the lengths, and these. Tokens of other lengths are other work."""
    found: dict[float, list[Row]] = {}
    for row in splits:
        found.setdefault(row.what_if.lengths, []).append(row)
    as_it_is = {row.what_if.lengths: row for row in asked if not row.what_if.keys}
    return [(_best_split(rows, as_it_is.get(factor)), rows) for factor, rows in sorted(found.items())]


def _best_split(splits: Sequence[Row], as_it_is: Row | None) -> str:
    """Which of them, sorted by tokens per second, is the fastest, which nearly as fast on fewer devices, and how ``as_it_is`` compares."""
    best = splits[0]

    def share(row: Row) -> float:
        return row.forecast.tokens_per_second / best.forecast.tokens_per_second

    fewest = min((row for row in splits if share(row) >= 1 - _SAME_SPEED), key=lambda row: row.num_devices)
    found = [f"most tokens per second: {name_of(best.what_if)}, on {best.num_devices} devices"]
    if fewest.num_devices < best.num_devices:
        found.append(f"{name_of(fewest.what_if)} has {share(fewest):.0%} of them on {fewest.num_devices}")
    if as_it_is is not None:
        found.append(
            f"{name_of(as_it_is.what_if)}, the run has {share(as_it_is):.0%} of them on {as_it_is.num_devices}"
        )
    return "; ".join(found)


def _what_binds(found: Forecast, config: Config, groups: Sequence[KnownGroup]) -> str:
    trainer, engines = (
        f"the trainer is idle for {found.trainer_idle_frac:.0%} of the time",
        f"engines for {found.engines_idle_frac:.0%}",
    )
    for stages in sharing_stages(config):
        if "policy" in stages:
            return f"{' and '.join(stages)} share devices: as it is, {trainer}, {engines}"
    if found.publish_wait_frac > max(_SAME_SPEED, found.trainer_idle_frac / 2):
        return (
            f"weight updates bind: as it is, the trainer waits for them for {found.publish_wait_frac:.0%} of the time, "
            f"engines are idle for {found.engines_idle_frac:.0%}"
        )
    if found.trainer_idle_frac <= _SAME_SPEED:
        return f"training binds: as it is, {trainer}, {engines}"
    if found.engines_idle_frac <= 4 * _SAME_SPEED:
        return f"generation binds: as it is, {trainer}, {engines}"
    slowest = [max(sum(seconds for _, seconds in turns) for turns in group.samples) for group in groups]
    environments = fmean(slowest or [0.0])
    of_them = (
        f", of which environments take {environments:.3g} s in the mean"
        if environments > _SAME_SPEED * found.step_seconds
        else ""
    )
    return f"the staleness bound binds, groups wait for their longest samples{of_them}: as it is, {trainer}, {engines}"


def _gain(key: str, rest: WhatIf, fewer: Row, more: Row) -> str:
    """What more of something gains and costs. Ratios of two forecasts are off by not much more than one forecast: by 8 to 14 % (root mean
    square over the pairs of ``benchmarks.plan_accuracy`` on several machines, from the calibration before each)."""
    gain = more.forecast.tokens_per_second / fewer.forecast.tokens_per_second - 1
    cost = more.num_devices / fewer.num_devices / (1 + gain) - 1
    margin = (more.forecast.high_seconds - more.forecast.low_seconds) / 2 / more.forecast.step_seconds
    before, after = (getattr(value := row.what_if.keys[key], "name", value) for row in (fewer, more))
    change = f"{before} -> {after} {SHORT[key]}{_with(rest)}"
    doubt = " (within the error)" if abs(gain) < margin else ""
    speed = "no faster" if abs(gain) < 0.005 else f"{gain:+.0%} speed"
    return f"{change}: {speed}{doubt}, and a token is {abs(cost):.0%} {'dearer' if cost > 0 else 'cheaper'}"


def _with(rest: WhatIf) -> str:
    return f" with {name_of(rest)}" if rest.keys or rest.lengths != 1 else ""


def _by_the_rest(rows: Sequence[Row], key: str, config: Config) -> list[tuple[WhatIf, list[Row]]]:
    """Rows that differ in ``key`` alone, in the order of its values (policies: as given), and what they have in common: ``config``'s, where
    there are such."""
    found: list[tuple[WhatIf, list[Row]]] = []
    for row in rows:
        if key in row.what_if.keys:
            others = {name: value for name, value in row.what_if.keys.items() if name != key}
            rest = replace(row.what_if, keys=others)
            same = next((some for one, some in found if one == rest), None)
            if same is None:
                found.append((rest, [row]))
            else:
                same.append(row)
    as_is = [(rest, some) for rest, some in found if simplified(config, rest) == WhatIf()]
    if key == _POLICY:
        return as_is or found
    return [(rest, sorted(some, key=lambda row: row.what_if.keys[key])) for rest, some in as_is or found]
