"""Who judges a run's answers, and what becomes of rewards before advantages are computed of them.

Flows in: the configuration. Flows out: what makes an environment, each prompt's or one function of the user's for all; shapes of rewards,
in the order in which they apply. Knows neither prompts, generators nor groups.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

from skyrl_async.algorithms.overlong import Shape, penalise_overlong
from skyrl_async.algorithms.trial import try_shape
from skyrl_async.config.schema.run import Config
from skyrl_async.generators.gym.environment import Environment, EnvironmentFactory
from skyrl_async.registries import import_function
from skyrl_async.tasks.registry import make_environment


def environment_factory(config: Config) -> EnvironmentFactory:
    """Return what makes environments. Raises ``ConfigError`` where ``task.reward`` cannot be imported."""
    if config.task.reward is None:
        return make_environment
    return functools.partial(_rewarded_by, import_function("task.reward", config.task.reward))


def _rewarded_by(function: Callable[..., Any], env_class: str, extras: dict[str, Any]) -> Environment:
    from skyrl_async.environments.answers import FunctionEnv

    return FunctionEnv(function, extras)


def check_reward_shaping(config: Config) -> None:
    """Try one's own shape on a few numbers. Raises ``ConfigError`` for a function that is not there, or does not shape rewards."""
    name = config.trainer.algorithm.reward_shaping
    if name is not None:
        try_shape(name, reward_shapes(config)[0])


def reward_shapes(config: Config) -> list[Shape]:
    """One's own first, then the length penalty. Raises ``ConfigError`` for a function that is not there."""
    algorithm, shapes = config.trainer.algorithm, []
    if algorithm.reward_shaping is not None:
        shapes.append(cast(Shape, import_function("trainer.algorithm.reward_shaping", algorithm.reward_shaping)))
    if algorithm.overlong_buffer_len:
        shapes.append(
            penalise_overlong(
                max_tokens=config.generator.longest_response,
                buffer_len=algorithm.overlong_buffer_len,
                factor=algorithm.overlong_buffer_penalty_factor,
            )
        )
    return shapes
