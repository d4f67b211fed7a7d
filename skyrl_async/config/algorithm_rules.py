"""Rules about the algorithm's parts: names that are known, and parts that fit each other and the schedule.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``. Imports what the configuration names by its path; computes nothing.
"""

from skyrl_async.config.algorithm import RefLogp
from skyrl_async.config.schema import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


def policy_loss_is_known(config: Config) -> None:
    """By its name, or as a function that can be imported and called."""
    POLICY_LOSSES.entry(config.trainer.algorithm.policy_loss_type)


def advantages_can_be_computed(config: Config) -> None:
    """The estimator is known, has enough samples, and all groups at once where it needs them."""
    name = config.trainer.algorithm.advantage_estimator
    entry = ADVANTAGE_ESTIMATORS.entry(name)
    if entry.needs_groups and config.generator.n_samples_per_prompt < 2:
        raise ConfigError(
            f"generator.n_samples_per_prompt must be >= 2 with trainer.algorithm.advantage_estimator={name}, got 1: "
            "a group of one has no advantage"
        )
    if entry.needs_mini_batch and config.trainer.stream_mini_batch:
        raise ConfigError(
            f"trainer.stream_mini_batch must be false or null with trainer.algorithm.advantage_estimator={name}, got true: its advantages "
            "depend on all groups of a step; choose rloo or grpo to train groups as they finish"
        )


def divergence_fits_the_reward(config: Config) -> None:
    """What is taken from a reward is known before it is trained, and leaves one that the estimator understands."""
    algorithm = config.trainer.algorithm
    if not algorithm.use_kl_in_reward:
        return
    if algorithm.ref_logp is RefLogp.inline:
        raise ConfigError(
            "trainer.algorithm.ref_logp must be stage with trainer.algorithm.use_kl_in_reward=true, got inline: rewards are known before "
            "the training step"
        )
    if algorithm.advantage_estimator == "maxrl":
        raise ConfigError(
            "trainer.algorithm.use_kl_in_reward must be false with trainer.algorithm.advantage_estimator=maxrl, got true: it divides by a "
            "mean of rewards that are never negative; set use_kl_loss=true"
        )
