"""The keys of SkyRL, verl and AReaL and ours for the same thing, and what an unknown key may have meant.

The table is ``coming_from.txt``, which says how it is written. A key is guessed only where little else can be meant: no guess is better
than a wrong one.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_async.config.help import all_keys
from skyrl_async.config.schema.fields import value_text

OUR_OLD_NAMES = "skyrl_async, before"
"""The system whose keys are those that we renamed."""
_CLOSE, _CLOSE_IN_ITS_SECTION = 0.85, 0.75
"""Cutoffs of ``difflib`` over the last parts of keys: any two whole keys of one section are close (``use_tis`` and ``use_kl_loss``)."""
_HEADING = re.compile(r"\[(.+)\] ?(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A key of another system."""

    system: str
    name: str
    """The key there; with ``.*`` at its end all keys below it."""
    default: str
    """As one would write it there; empty: none that says anything here."""
    ours: tuple[str, ...]
    """Our keys for it; empty: none."""
    values: dict[str, str]
    """Theirs -> ours where these differ; see the module."""
    note: str

    @property
    def answer(self) -> str:
        """What to do with it here, in a line."""
        meant = {
            theirs: ours
            for theirs, ours in self.values.items()
            if theirs != "*" and ours and not (self.ours and "=" in ours)
        }
        said = ", ".join(f"{ours} for {theirs}" for theirs, ours in meant.items())
        more = "; ".join(filter(None, (said, self.note)))
        return f"{' and '.join(self.ours)} ({more})" if self.ours and more else " and ".join(self.ours) or more

    def value_of(self, theirs: str) -> str | None:
        """What stands here for a value of theirs; empty: nothing needs setting; None: the table does not say."""
        return self.values.get(theirs, self.values.get("*"))


@cache
def _systems() -> dict[str, tuple[str, dict[str, Foreign]]]:
    """Name -> which state of it the table was made from, and its keys by each of their spellings, in the table's order."""
    systems: dict[str, tuple[str, dict[str, Foreign]]] = {}
    for line in resources.files(__package__).joinpath("coming_from.txt").read_text().replace("\n ", " ").splitlines():
        if heading := _HEADING.fullmatch(line):
            name, source = heading.groups()
            rows = systems.setdefault(name, (source, {}))[1]
        elif line and not line.startswith("#"):
            rows |= {row.name: row for row in _rows(name, line)}
    return systems


def sources() -> dict[str, str]:
    """The other trainers in the table, each with the state of it that the table was made from."""
    return {name: source for name, (source, _) in _systems().items() if name != OUR_OLD_NAMES}


def foreign_keys(system: str) -> dict[str, Foreign]:
    """Every key of ``system`` in the table, by each of its spellings, in its order."""
    return _systems()[system][1]


def yaml_value(written: str) -> Any:
    """A value as these systems read it: as omegaconf's yaml, in which 1e-6 is a number; text where it is no yaml."""
    try:
        value = OmegaConf.select(OmegaConf.from_dotlist([f"value={written}"]), "value")
    except (yaml.YAMLError, OmegaConfBaseException):
        return written
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def hint_for(key: str) -> str:
    """For a key that there is not; begins with a semicolon, or is empty."""
    if renamed := find(OUR_OLD_NAMES, key):
        return f"; it is {renamed.ours[0]} now"
    if elsewhere := _known_elsewhere(key):
        return _told(elsewhere)
    last = key.rpartition(".")[2]
    same_name = [name for name in all_keys() if name.rpartition(".")[2] == last]
    if same_name:
        depth = min(name.count(".") for name in same_name)
        return f"; did you mean {' or '.join(name for name in same_name if name.count('.') == depth)}?"
    if elsewhere := _ending_elsewhere(last):
        return _told(elsewhere)
    section = key.rpartition(".")[0]
    in_section = {name.rpartition(".")[2]: name for name in all_keys() if name.rpartition(".")[0] == section}
    by_last_part = {name.rpartition(".")[2]: name for name in all_keys()}
    for names, cutoff in ((in_section, _CLOSE_IN_ITS_SECTION), (by_last_part, _CLOSE)):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=cutoff):
            return f"; did you mean {names[close[0]]}?"
    return ""


def hint_for_value(key: str, value: Any) -> str:
    """For a value that our key cannot hold and that of the same name elsewhere can."""
    meant = {
        row.system: ours
        for row in _known_elsewhere(key)
        if row.ours == (key,) and (ours := row.values.get(value_text(value)))
    }
    return "".join(f"; {system}'s {value_text(value)} is {ours} here" for system, ours in meant.items())


def _told(rows: list[Foreign]) -> str:
    """What a key is elsewhere, and what to do instead; systems that agree in one breath."""
    systems: dict[str, list[str]] = {}
    for row in rows:
        without = "needs no setting here" if "*" in row.values else "without a counterpart"
        has_counterpart = row.ours or any("=" in ours for ours in row.values.values())
        meaning = f"here {row.answer}" if has_counterpart else f"{without}: {row.answer}"
        systems.setdefault(meaning, []).append(f"{row.system}'s")
    return "".join(f"; {' and '.join(names)}, {meaning}" for meaning, names in systems.items())


def _known_elsewhere(key: str) -> list[Foreign]:
    """What ``key`` is in each of the systems that have it."""
    return [row for system in sources() if (row := find(system, key))]


def _ending_elsewhere(word: str) -> list[Foreign]:
    """Keys that end in ``word``, one of each system; none where they mean different things."""
    found = [row for each in sources() for row in foreign_keys(each).values() if row.name.rpartition(".")[2] == word]
    same = {row.answer for row in found}
    return list({row.system: row for row in found}.values()) if len(same) == 1 else []


def find(system: str, key: str) -> Foreign | None:
    """The row of ``key`` itself, or of the closest section above it that has one."""
    rows, above = foreign_keys(system), key
    if key in rows:
        return rows[key]
    while above:
        if row := rows.get(f"{above}.*"):
            below = key.removeprefix(above)  # with its dot, or empty
            return replace(row, name=key, default="", ours=tuple(name.replace(".*", below) for name in row.ours))
        above = above.rpartition(".")[0]
    return None


def _rows(system: str, line: str) -> Iterator[Foreign]:
    names, default, ours, values, note = (" ".join(part.split()) for part in [*line.split("|"), "", "", "", ""][:5])
    pairs = (
        pair.partition(": ") if ": " in pair else pair.partition(":") for pair in values.split(";") if pair.strip()
    )
    of_values = {theirs.strip(): meant.strip() for theirs, _, meant in pairs}
    for name in map(str.strip, names.split(",")):
        keys = (name,) if ours == "=" else tuple(ours.split())
        yield Foreign(system=system, name=name, default=default, ours=keys, values=of_values, note=note)
