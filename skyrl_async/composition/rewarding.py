"""Who judges a run's answers: each prompt's environment, or one function of the user's for all.

Flows in: the configuration. Flows out: what makes an environment. Knows neither prompts nor generators.
"""

import functools
import importlib
from typing import Any

from skyrl_async.config.schema import Config
from skyrl_async.errors import ConfigError
from skyrl_async.rollout.environment import Environment, EnvironmentFactory
from skyrl_async.tasks.registry import make_environment


def environment_factory(config: Config) -> EnvironmentFactory:
    """Return what makes environments. Raises ``ConfigError`` where ``task.reward`` cannot be imported."""
    path = config.task.reward
    if path is None:
        return make_environment
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"task.reward={path!r} cannot be imported: {error}; give package.module:function") from error
    if not callable(function):
        raise ConfigError(f"task.reward={path!r} must name a function, got a {type(function).__name__}")
    return functools.partial(_rewarded_by, function)


def _rewarded_by(function: Any, env_class: str, extras: dict[str, Any]) -> Environment:
    from skyrl_async.environments.answers import FunctionEnv

    return FunctionEnv(function, extras)
