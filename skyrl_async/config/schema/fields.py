"""What configuration classes are written with: the text under each field, the bounds of its value, shared choices.

The text is the docstring under a field. ``--help`` and the configuration reference print it, so that it is written once.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from skyrl_async.errors import ConfigError

T = TypeVar("T")


DType = StrEnum("DType", ["float32", "bfloat16"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Which numbers a field holds, by pydantic's names; None: no bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    reason: str = ""
    """Why; may be empty."""

    def hold(self, value: float) -> bool:
        """Whether ``value`` is within them; NaN never is."""
        is_above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return is_above and (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)

    def __str__(self) -> str:
        low = f">= {self.ge:g}" if self.gt is None else f"> {self.gt:g}"
        if self.le is None and self.lt is None:
            return low
        begin = f"[{self.ge:g}" if self.gt is None else f"({self.gt:g}"
        return f"in {begin}, {f'{self.lt:g})' if self.le is None else f'{self.le:g}]'}"


def bounded(default: Any, **bounds: Any) -> Any:
    """A field of a number with ``Bounds``, one of them from below; null is allowed where it is the default."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


def check_bounds(section: Any, path: str = "") -> None:
    """Raise ``ConfigError`` for the first number in ``section``, or in one below it, that is out of its bounds."""
    for one in fields(section):
        key, value = f"{path}{one.name}", getattr(section, one.name)
        if is_dataclass(value):
            check_bounds(value, f"{key}.")
        elif (bounds := one.metadata.get("bounds")) is not None and value is not None:
            expected = f"{bounds}{' or null' if one.default is None else ''}"
            require(bounds.hold(value), key, f"{expected} ({bounds.reason})" if bounds.reason else expected, value)


def require(is_fine: bool, key: str, expected: str, found: object) -> None:
    """Raise ``ConfigError`` naming the key, what it must be and what it is."""
    if not is_fine:
        raise ConfigError(f"{key} must be {expected}, got {found!r}")


def check_heartbeat(section: str, interval_s: float, timeout_s: float) -> None:
    """Raise ``ConfigError`` where a heartbeat is asked for less often than it may be missing."""
    expected = f">= {section}.heartbeat_interval_s ({interval_s:g})"
    require(timeout_s >= interval_s, f"{section}.heartbeat_timeout_s", expected, timeout_s)


def value_text(value: Any) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    return str(value)


def text_of(section: type, name: str) -> str:
    """The docstring under a field of a configuration class."""
    return _texts(section.__module__)[section.__name__, name]


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """Class and field -> the docstring under it; Python keeps none at run time."""
    return dict(_texts_in(ast.parse(inspect.getsource(sys.modules[module]))))


def _texts_in(module: ast.Module) -> Iterator[tuple[tuple[str, str], str]]:
    for section in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for node, below in pairwise(section.body):
            match node, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield (section.name, name), " ".join(text.split())


def from_section(kind: type[T], *sections: object, **others: Any) -> T:
    """Make the dataclass ``kind`` from other ones, such as settings for another process from sections of the configuration.

    Fields that a section has by the same name get its values, a list as a tuple. ``others`` are the other fields.
    """
    names = {f.name for f in fields(kind) if f.init} - others.keys()  # type: ignore[arg-type]
    values = {name: getattr(section, name) for section in sections for name in names if hasattr(section, name)}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}, **others)
