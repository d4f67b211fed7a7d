"""What a configuration does to rewards before advantages are computed of them.

Flows in: the configuration. Flows out: shapes, in the order in which they apply. Does not know groups.
"""

from typing import cast

from skyrl_async.composition.imports import imported
from skyrl_async.config.schema import Config
from skyrl_async.rollout.overlong import Shape, penalise_overlong


def reward_shapes(config: Config) -> list[Shape]:
    """One's own first, then the length penalty. Raises ``ConfigError`` for a function that is not there."""
    algorithm, shapes = config.trainer.algorithm, []
    if algorithm.reward_shaping is not None:
        shapes.append(cast(Shape, imported("trainer.algorithm.reward_shaping", algorithm.reward_shaping)))
    if algorithm.overlong_buffer_len:
        shapes.append(
            penalise_overlong(
                max_tokens=config.generator.longest_response,
                buffer_len=algorithm.overlong_buffer_len,
                factor=algorithm.overlong_buffer_penalty_factor,
            )
        )
    return shapes
