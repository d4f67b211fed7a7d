"""Finds what a configuration names by a dotted path.

Flows in: a key and ``package.module:attribute``. Flows out: the object, or ``ConfigError`` naming the key. Does not know what it is for.
"""

import importlib
from collections.abc import Callable
from typing import Any

from skyrl_async.errors import ConfigError


def imported(key: str, path: str) -> Callable[..., Any]:
    """The function or class at ``module:attribute``. Raises ``ConfigError``."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path!r} cannot be imported: {error}") from error
    return found
