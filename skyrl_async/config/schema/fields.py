"""What every configuration class is written with: fields that carry their text, checks that name the key, shared choices."""

from dataclasses import field
from enum import Enum
from typing import Any

from skyrl_async.errors import ConfigError


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def doc(default: Any, text: str) -> Any:
    """A dataclass field with its documentation; a callable default is a factory."""
    metadata = {"doc": text}
    if callable(default) and not isinstance(default, Enum):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(is_fine: bool, key: str, expected: str, found: object) -> None:
    """Raise ``ConfigError`` naming the key, what it must be and what it is."""
    if not is_fine:
        raise ConfigError(f"{key} must be {expected}, got {found!r}")
