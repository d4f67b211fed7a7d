"""What a key or value that is not ours may have meant: another system's, or a slip of the finger.

Flows in: what was written. Flows out: words that end an error. A guess is made where little else can be meant.
"""

import difflib
from typing import Any

from skyrl_async.config.coming_from import Foreign, ending_elsewhere, known_elsewhere
from skyrl_async.config.help import all_keys, value_text

_CLOSE, _CLOSE_IN_ITS_SECTION = 0.85, 0.75
"""Of ``difflib``, over the last parts of keys: over whole keys with equal sections any two are close (``use_tis`` and ``use_kl_loss``)."""


def hint_for(key: str) -> str:
    """For a key that there is not; begins with a semicolon, or is empty."""
    if elsewhere := known_elsewhere(key):
        return _told(elsewhere)
    last = key.rpartition(".")[2]
    same_name = [name for name in all_keys() if name.rpartition(".")[2] == last]
    if same_name:
        depth = min(name.count(".") for name in same_name)
        return f"; did you mean {' or '.join(name for name in same_name if name.count('.') == depth)}?"
    if elsewhere := ending_elsewhere(last):
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
        for row in known_elsewhere(key)
        if row.ours == (key,) and (ours := row.values.get(value_text(value)))
    }
    return "".join(f"; {system}'s {value_text(value)} is {ours} here" for system, ours in meant.items())


def _told(rows: list[Foreign]) -> str:
    """What a key is elsewhere, and what to do instead; systems that agree in one breath."""
    systems: dict[str, list[str]] = {}
    for row in rows:
        without = "needs no setting here" if "*" in row.values else "without a counterpart"
        meaning = f"here {row.answer}" if row.has_counterpart else f"{without}: {row.answer}"
        systems.setdefault(meaning, []).append(f"{row.system}'s")
    return "".join(f"; {' and '.join(names)}, {meaning}" for meaning, names in systems.items())
