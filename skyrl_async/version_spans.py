"""Policy versions in JSON: one version per token as runs of equal versions, and back.

A run is ``{"version", "start", "end"}`` with ``end`` excluded.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby


def spans_of(versions: Sequence[int]) -> list[dict[str, int]]:
    """The runs of (T,) ``versions``; together they tile ``[0, T)`` in order."""
    spans: list[dict[str, int]] = []
    start = 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def versions_of(spans: Sequence[Mapping[str, int]], num_tokens: int) -> tuple[int, ...]:
    """(T,) one version per token. Raises ``ValueError`` unless ``spans`` tile ``[0, num_tokens)`` in order."""
    versions: list[int] = []
    for span in spans:
        match span:
            case {"version": int(version), "start": int(start), "end": int(end)} if start == len(versions) < end:
                versions.extend([version] * (end - start))
            case _:
                raise ValueError(f"policy_versions must be adjoining spans from 0, got {spans}")
    if len(versions) != num_tokens:
        raise ValueError(f"policy_versions cover {len(versions)} of {num_tokens} tokens")
    return tuple(versions)
