"""The figures of ``staleness_policies`` and ``staleness_curves`` as the tutorials' tables: ``python -m benchmarks.staleness_tables FILE``.

Flows in: the JSON of either. Flows out: Markdown.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.staleness_policies import POLICIES

_SHOWN_SIGMA, _SHOWN_BOUNDS = 0.8, (1, 4, 8)

Row = dict[str, Any]


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Name -> Markdown, of what a benchmark wrote."""
    if "against_no_staleness" in figures:
        return {"learning": learning_table(figures["rows"], figures["against_no_staleness"])}
    return policy_tables(figures["rows"]) | rule_tables(figures["at_equal_bounds"])


def learning_table(rows: Sequence[Row], against: Sequence[Row]) -> str:
    """A line per correction, in each cell the rewards of its seeds."""
    bounds = sorted({row["staleness"] for row in rows})
    difference = {(row["correction"], row["staleness"]): row for row in against}

    def line(correction: str) -> Iterable[str]:
        yield f"`{correction}`"
        for bound in bounds:
            runs = [row for row in rows if (row["correction"], row["staleness"]) == (correction, bound)]
            yield " ".join(f"{row['reward_after']:.2f}" for row in sorted(runs, key=lambda row: row["seed"]))
        for bound in bounds[1:]:
            found = difference.get((correction, bound))
            yield f"{found['reward_difference']:+.3f} ± {found['standard_error']:.3f}" if found else ""

    names = ("correction", *(f"S = {bound}" for bound in bounds), *(f"S = {bound} less S = 0" for bound in bounds[1:]))
    return _table(names, (tuple(line(name)) for name in dict.fromkeys(row["correction"] for row in rows)))


def policy_tables(rows: Sequence[Row]) -> dict[str, str]:
    """``policies`` (one tail, streamed), ``limit`` and ``lost`` (all tails and bounds)."""
    found = {(row["policy"], row["streamed"], row["sigma"], row["staleness"]): row for row in rows}
    points = sorted({(row["sigma"], row["staleness"]) for row in rows if row["policy"] == "allow"})
    return {
        "policies": _table(
            ("S", "policy", "busy", "of the limit", "over the bound", "wasted", "masked", "length trained / sampled"),
            (
                _line(str(bound), f"`{policy}`", found[policy, True, _SHOWN_SIGMA, bound])
                for bound in _SHOWN_BOUNDS
                for policy in POLICIES
            ),
        ),
        "limit": _table(
            ("sigma", "S", *(f"`{policy}`" for policy in POLICIES)),
            (
                (f"{sigma}", f"{bound}", *(_both(found, policy, sigma, bound, _share) for policy in POLICIES))
                for sigma, bound in points
            ),
        ),
        "lost": _table(
            (
                "sigma",
                "S",
                "over: `allow`",
                "`areal`",
                "masked: `mask`",
                "wasted: `resample`",
                "`prime_rl`",
                "length: `mask`",
                "`resample`",
                "`prime_rl`",
            ),
            (
                (
                    f"{sigma}",
                    f"{bound}",
                    *(
                        _both(found, policy, sigma, bound, _percent(key))
                        for policy, key in (
                            ("allow", "over_share"),
                            ("areal", "over_share"),
                            ("mask", "masked_frac"),
                            ("resample", "wasted_share"),
                            ("prime_rl", "wasted_share"),
                        )
                    ),
                    *(_both(found, policy, sigma, bound, _length) for policy in ("mask", "resample", "prime_rl")),
                )
                for sigma, bound in points
            ),
        ),
    }


def rule_tables(points: Sequence[Row]) -> dict[str, str]:
    """How much faster our policies are than rules of the same promise: ``bounded`` (none wastes anything) and ``dropping``."""
    found = {(row["policy"], row["streamed"], row["sigma"], row["staleness"]): row for row in points}
    at = sorted({(row["sigma"], row["staleness"]) for row in points})

    def speeds(policy: str, sigma: float, bound: int) -> str:
        whole = found[policy, False, sigma, bound]
        streamed = found.get((policy, True, sigma, bound), whole)
        return f"{whole['speed_alike']:.2f} / {streamed['speed_streamed']:.2f}"

    def bounded(sigma: float, bound: int) -> Iterable[str]:
        yield from (f"{sigma}", f"{bound}")
        yield from (speeds(policy, sigma, bound) for policy in ("torchtitan_fifo", "verl_wait"))
        yield f"{found['verl_wait', False, sigma, bound]['over_share']:.1%}"
        yield f"{found['window', False, sigma, bound]['bound']}"
        yield from (speeds(policy, sigma, bound) for policy in ("torchtitan_window", "window"))

    def dropping(sigma: float, bound: int) -> Iterable[str]:
        yield from (f"{sigma}", f"{bound}", speeds("tinker", sigma, bound))
        yield from (_both(found, "tinker", sigma, bound, say) for say in (_percent("wasted_share"), _length))
        yield speeds("prime_rl", sigma, bound)

    of_bounded = ("`torchtitan_fifo`", "`verl_wait`", "over", "bound with a window", "`torchtitan_window`", "`window`")
    return {
        "bounded": _table(("sigma", "S", *of_bounded), (tuple(bounded(*point)) for point in at)),
        "dropping": _table(
            ("sigma", "S", "`tinker`", "wasted", "length", "`prime_rl`"), (tuple(dropping(*point)) for point in at)
        ),
    }


def _line(bound: str, policy: str, row: Row) -> tuple[str, ...]:
    shares = (_percent(key)(row) for key in ("over_share", "wasted_share", "masked_frac"))
    return (bound, policy, f"{row['utilisation']:.2f}", _share(row), *shares, _length(row))


def _both(
    found: dict[tuple[str, bool, float, int], Row], policy: str, sigma: float, bound: int, say: Callable[[Row], str]
) -> str:
    """Whole mini-batches, then streamed; once where they are the same."""
    whole, streamed = (say(found[policy, streamed, sigma, bound]) for streamed in (False, True))
    return whole if whole == streamed else f"{whole} / {streamed}"


def _share(row: Row) -> str:
    return f"{row['share_of_limit']:.2f}"


def _length(row: Row) -> str:
    return f"{row['length_ratio']:.2f}"


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.0%}"


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in (names, *lines))
    return "\n".join([head, "|" + "---|" * len(names), *body])


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, metavar="FILE", help="what either of them has written, of a full run")
    for name, table in tables(json.loads(parser.parse_args().json.read_text())).items():
        print(f"<!-- {name} -->\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
