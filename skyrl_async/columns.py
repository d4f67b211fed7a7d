"""What has one value per token: numpy columns, and policy versions as runs of equal versions. Nothing here is an object per token."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]
Logprobs: TypeAlias = NDArray[np.float32]
"""In nats."""
Advantages: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float32]
"""Factors of the losses of tokens, >= 0."""
Values: TypeAlias = NDArray[np.float32]
"""A critic's, or what they are trained towards; in units of the reward."""
Rewards: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]

_KINDS = {"i": "iu", "f": "fiu", "b": "biu"}
"""Kind of a column -> kinds of numpy arrays that it is made from; their values stay what they are."""


def column(values: Sequence[Any] | NDArray[Any], dtype: type[np.generic], name: str = "column") -> NDArray[Any]:
    """A read-only column of ``dtype``; an array that has it is not copied.

    Raises ``ValueError`` that begins with ``name`` for values of another kind, such as fractions for ``int32``.
    """
    found = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=None if len(values) else dtype)
    if found.dtype == dtype and found.ndim == 1 and not found.flags.writeable:
        return found
    kind = np.dtype(dtype).kind
    if found.ndim != 1 or (len(found) and found.dtype.kind not in _KINDS[kind]):
        raise ValueError(
            f"{name} must be a sequence of {np.dtype(dtype).name}, got {found.dtype} of shape {found.shape}"
        )
    made: NDArray[Any] = found.astype(dtype, copy=False)
    if kind == "i" and made is not found and not np.array_equal(made, found):
        raise ValueError(f"{name} must fit into {np.dtype(dtype).name}, got {found.min()} to {found.max()}")
    if made.flags.writeable:
        made = made.view()
        made.flags.writeable = False
    return made


def token_ids(values: Sequence[int] | TokenIds) -> TokenIds:
    """(T,) int32."""
    return column(values, np.int32, "token_ids")


def repeated(value: float, num_tokens: int) -> NDArray[np.float32]:
    """(num_tokens,) float32 of one value, in the memory of one."""
    # As np.broadcast_to, in a fifth of its time: every row has several.
    return np.ndarray((num_tokens,), np.float32, buffer=np.float32(value).tobytes(), strides=(0,))


def at_last(value: float, num_tokens: int) -> Rewards:
    """(num_tokens,) float32: zeros, and ``value`` for the last token."""
    found: Rewards = np.zeros(num_tokens, np.float32)
    found[-1:] = value
    return found


def is_repeated(values: NDArray[Any]) -> bool:
    """Whether ``repeated`` has made the column, and so surely one value fills it."""
    return values.strides == (0,)


NO_TOKENS: TokenIds = token_ids(())
NO_LOGPROBS: Logprobs = column((), np.float32)


def begins_with(whole: TokenIds, begin: TokenIds) -> bool:
    """Whether the first of ``whole`` are ``begin``."""
    return len(begin) <= len(whole) and bool((whole[: len(begin)] == begin).all())


def json_list(values: "NDArray[Any] | VersionSpans") -> list[Any]:
    """One value per token as JSON; a mask as zeros and ones. For ``default`` of ``json.dumps``."""
    found = np.asarray(values)
    return (found.view(np.int8) if found.dtype == np.bool_ else found).tolist()


def fields_of(value: object) -> dict[str, Any]:
    """The fields of a dataclass by name, not copied: ``dataclasses.asdict`` copies every token, which takes longer than writing them."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _field_names(kind)}


@cache
def _field_names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def have_equal_fields(one: Any, other: object) -> bool:
    """``==`` of two dataclasses some of whose fields are columns; fields with ``compare=False`` do not count."""
    if type(one) is not type(other):
        return False
    kind: Any = type(one)
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(kind) if field.compare]
    return all(a is b or (np.array_equal(a, b) if np.ndarray in (type(a), type(b)) else a == b) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """What a model says in the place of each of T tokens: its K likeliest, and all others together."""

    ids: NDArray[np.int32]
    """(T, K)."""
    logprobs: NDArray[np.float32]
    """(T, K + 1), nats: of these and, last, of the rest of the vocabulary. (T, K) without a rest where K is the vocabulary."""

    __eq__ = have_equal_fields

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class VersionSpans:
    """The policy version of each token, as runs of equal versions. ``np.asarray`` gives (T,) int32."""

    spans: tuple[tuple[int, int], ...] = ()
    """(version, end) of each run, ``end`` excluded; neighbours differ in their versions."""

    @classmethod
    def of(cls, versions: "Sequence[int] | NDArray[Any] | VersionSpans", name: str = "versions") -> Self:
        """From one version per token. Raises ``ValueError`` that begins with ``name`` for what is no integer."""
        if isinstance(versions, cls):
            return versions
        per_token = column(versions, np.int32, name)
        ends = [*(np.flatnonzero(np.diff(per_token)) + 1).tolist(), len(per_token)]
        return cls(tuple((int(per_token[end - 1]), end) for end in ends if end))

    @classmethod
    def constant(cls, version: int, num_tokens: int) -> Self:
        """One version for all tokens."""
        return cls(((version, num_tokens),) if num_tokens else ())

    @classmethod
    def joined(cls, parts: "Iterable[VersionSpans]") -> Self:
        """Those of consecutive tokens."""
        spans: list[tuple[int, int]] = []
        for part in parts:
            offset = spans[-1][1] if spans else 0
            moved = [(version, offset + end) for version, end in part.spans]
            if spans and moved and spans[-1][0] == moved[0][0]:
                spans.pop()
            spans += moved
        return cls(tuple(spans))

    @classmethod
    def from_json(cls, spans: Sequence[Mapping[str, int]], num_tokens: int) -> Self:
        """From what ``to_json`` returns. Raises ``ValueError`` unless ``spans`` tile ``[0, num_tokens)`` in order."""
        parts, num_covered = [], 0
        for span in spans:
            match span:
                case {"version": int(version), "start": int(start), "end": int(end)} if start == num_covered < end:
                    parts.append(cls.constant(version, end - start))
                    num_covered = end
                case _:
                    raise ValueError(f"policy_versions must be adjoining spans from 0, got {spans}")
        if num_covered != num_tokens:
            raise ValueError(f"policy_versions cover {num_covered} of {num_tokens} tokens")
        return cls.joined(parts)

    def to_json(self) -> list[dict[str, int]]:
        """Runs as ``{"version", "start", "end"}``; together they tile ``[0, T)`` in order."""
        starts = (0, *(end for _, end in self.spans))
        return [{"version": version, "start": start, "end": end} for start, (version, end) in zip(starts, self.spans)]  # noqa: B905

    @property
    def distinct(self) -> set[int]:
        """The versions that occur."""
        return {version for version, _ in self.spans}

    def __len__(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    def __getitem__(self, taken: slice) -> "VersionSpans":
        """A slice of consecutive tokens."""
        start, stop, _ = taken.indices(len(self))
        return VersionSpans(
            tuple(
                (version, min(end, stop) - start)
                for (_, before), (version, end) in pairwise(((0, 0), *self.spans))
                if max(before, start) < min(end, stop)
            )
        )

    def __iter__(self) -> Iterator[int]:
        """One version per token."""
        return iter(np.asarray(self).tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.int32]:
        versions, ends = np.array(self.spans, dtype=np.int64).reshape(-1, 2).T
        return versions.astype(dtype or np.int32).repeat(np.diff(ends, prepend=0))
