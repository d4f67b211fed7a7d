"""The samples of one prompt as plain text.

Texts of samples are untrusted: characters that a terminal would obey are printed as escapes.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from skyrl_async.errors import ConfigError, printable
from skyrl_async.record.files import DIRECTORY, read_samples

_COLUMNS = (
    *("row", "step", "epoch", "scheduled_version", "sample", "branch", "outcome", "reason", "reward", "shaped_reward"),
    *("advantage", "staleness", "num_sampled_tokens", "num_aborts", "is_truncated", "policy_versions", "turns"),
)
_MAX_NAMED = 3


def group_text(run_dir: Path, uid: str) -> str:
    """Every sample of a prompt, oldest first, turn by turn. Raises ``ConfigError`` where there is none."""
    if not (run_dir / DIRECTORY).is_dir():
        raise ConfigError(f"{run_dir} must be the directory of a run, with {DIRECTORY}/ in it, and has none")
    rows = read_samples(run_dir, _COLUMNS, uid=uid).to_pylist()
    if not rows:
        known = sorted(set(read_samples(run_dir, ["uid"])["uid"].to_pylist()))
        named = ", ".join(get_close_matches(uid, known, _MAX_NAMED, cutoff=0) or known[:_MAX_NAMED])
        raise ConfigError(
            f"{run_dir} has no sample of {uid!r}; it has samples of {len(known)} prompts{f', such as {named}' if named else ''}"
        )
    return "".join(_lines(uid, rows))


def _lines(uid: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    of_group = itemgetter("epoch", "step", "scheduled_version")
    for _, group in groupby(rows, key=of_group):
        samples = list(group)
        first = samples[0]
        drawn = "held out" if first["epoch"] is None else f"epoch {first['epoch']}"
        yield f"{printable(uid)}: {drawn}, step {first['step']}, scheduled at version {first['scheduled_version']}\n"
        for row in samples:
            yield f"\n--- {_figures(row)}\n"
            if row["turns"] is None:
                yield "(text not kept)\n" if row["num_sampled_tokens"] is not None else ""
            for turn in row["turns"] or ():
                answered = [turn[name] for name in ("name", "tool_call_id") if turn[name]]
                earned = "" if turn["reward"] is None else f", reward {turn['reward']:.4g}"
                yield f"[{printable(' '.join([turn['role'], *answered]))}{earned}] {printable(turn['text']).rstrip()}\n"
                for call in turn["tool_calls"]:
                    name, given, call_id = (printable(call[part] or "") for part in ("name", "arguments", "id"))
                    yield f"  -> {name}({given}) {call_id}".rstrip() + "\n"
        yield "\n"


def _figures(row: Mapping[str, Any]) -> str:
    branch = f" branch {row['branch']}" if row["branch"] else ""
    parts = [f"sample {row['sample']}{branch}: {row['outcome']}"]
    if row["reason"] is not None:
        parts[0] += f" ({printable(row['reason'])})"
    parts += [f"{name} {row[name]:.4g}" for name in ("reward", "shaped_reward", "advantage") if row[name] is not None]
    if row["num_sampled_tokens"] is not None:
        spans = [span for span in row["policy_versions"] if span["version"] >= 0]
        versions = sorted({span["version"] for span in spans})
        span = f" of version {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}" if versions else ""
        parts.append(f"{sum(span['end'] - span['start'] for span in spans)} tokens{span}")
    parts += [f"staleness {row['staleness']}"] if row["staleness"] is not None else []
    parts += [f"{row['num_aborts']} aborts"] if row["num_aborts"] else []
    parts += ["truncated"] if row["is_truncated"] else []
    return ", ".join(parts)
