"""The pages of documentation whose tables are made from the code.

``python -m tests.cpu.reference_pages`` writes the tables of docs/reference/config.md and docs/coming_from.md anew (``make reference``).
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from skyrl_async.config.coming_from import Foreign, foreign_keys, sources, yaml_value
from skyrl_async.config.help import all_keys, flat, keys_of, sections, toy_values
from skyrl_async.config.schema.fields import value_text
from skyrl_async.config.schema.groups import GROUPS, default_option

DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- below: make reference -->\n"
"""What is below it in a page is written from the code."""


def config_page(page: str) -> str:
    """docs/reference/config.md with what is below its mark written anew."""
    lines = ["", "## Groups", "", "| group | option | what it means | what it sets |", "|---|---|---|---|"]
    for group, options in GROUPS.items():
        for name, option in options.items():
            mark = " (default)" if name == default_option(group) else ""
            values = ", ".join(f"`{key}={value_text(value)}`" for key, value in flat(option.values))
            lines.append(f"| `{group}` | `{name}`{mark} | {option.text} | {values} |")
    for section in (*sections(), ""):
        about = sections().get(section, "")
        lines += ["", f"## {section or 'Other keys'}", "", *([about, ""] if about else [])]
        lines += ["| key | values | default | what it does |", "|---|---|---|---|"]
        for key in keys_of(section):
            toy = toy_values().get(key.name)
            default = f"`{key.default}`" + (f", `{toy}` with policy=tiny" if toy else "")
            lines.append(f"| `{key.name}` | {key.type_text} | {default} | {key.text.replace('|', chr(92) + '|')} |")
    return page.partition(MARK)[0] + MARK + "\n".join(lines) + "\n"


def coming_from_page(page: str) -> str:
    """docs/coming_from.md with its tables written anew."""
    lines = ["## Defaults that differ under one name", "", "Empty: no key with a default ends in this name.", ""]
    lines += _differing_defaults()
    for name, source in sources().items():
        lines += ["", f"## {name}'s keys", "", f"From {source}.", ""]
        lines += [f"| {name} | default | here | what differs |", "|---|---|---|---|", *_lines_of(name)]
    return page.partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def _differing_defaults() -> Iterator[str]:
    names = list(sources())
    yield f"| key | here | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for key, ours in all_keys().items():
        word, cells, differs = key.rpartition(".")[2], [], False
        for name in names:
            rows = (row for row in foreign_keys(name).values() if row.ours == (key,) and row.default)
            row = next((row for row in rows if row.name.rpartition(".")[2] == word), None)
            cells.append(f"`{row.default}`" if row else "")
            differs = differs or (row is not None and not _is_same(row, ours.default))
        if differs:
            yield f"| `{key}` | `{ours.default}` | {' | '.join(cells)} |"


def _is_same(row: Foreign, ours: str) -> bool:
    """Whether both defaults are the same value; no list is an empty list."""
    theirs, here = (yaml_value(text) for text in (row.value_of(row.default) or row.default, ours))
    return bool(theirs == here or [theirs] == here or (theirs is None and here == []))


def _lines_of(system: str) -> Iterator[str]:
    same = groupby(
        foreign_keys(system).values(), key=lambda row: (row.default, row.ours, tuple(row.values.items()), row.note)
    )
    for _, group in same:
        rows = list(group)
        row, names = rows[0], ", ".join(f"`{each.name}`" for each in rows)
        keys = ["the same" if row.ours == (row.name,) else " ".join(f"`{key}`" for key in row.ours)] if row.ours else []
        meant = [_meant(theirs, ours) for theirs, ours in row.values.items()]
        here = "; ".join([*keys, *filter(None, meant)]) or "none"
        default = f"`{row.default}`" if row.default else ""
        yield f"| {names} | {default} | {here} | {row.note} |"


def _meant(theirs: str, ours: str) -> str:
    if theirs == "*":
        return f"otherwise `{ours}`" if ours else "nothing to set"
    return f"`{theirs}`: `{ours}`" if ours else f"`{theirs}`: nothing to set"


PAGES = {DOCS / "reference/config.md": config_page, DOCS / "coming_from.md": coming_from_page}
"""Page -> what it is with its tables written anew."""


if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(written(path.read_text()))
