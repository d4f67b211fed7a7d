"""Rules about the algorithm's parts: names that are known, and parts that fit each other and the schedule.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``. Imports what the configuration names by its path; computes nothing.
"""

from skyrl_async.config.schema.algorithm import RefLogp
from skyrl_async.config.schema.kl_control import KlControl
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


def policy_loss_can_be_computed(config: Config) -> None:
    """It is known by its name, or as a function that can be imported and called, and has all groups at once where it needs them."""
    name = config.trainer.algorithm.policy_loss_type
    entry = POLICY_LOSSES.entry(name)
    if entry.marker is not None and config.trainer.stream_mini_batch:
        raise ConfigError(
            f"trainer.stream_mini_batch must be false or null with trainer.algorithm.policy_loss_type={name}, got true: it chooses tokens "
            "among all of a step; choose ppo_clip or dppo to train groups as they finish"
        )


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


def divergence_is_known_before_the_step(config: Config) -> None:
    """What is taken from a reward is known before it is trained."""
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_in_reward and algorithm.ref_logp is RefLogp.inline:
        raise ConfigError(
            "trainer.algorithm.ref_logp must be stage with trainer.algorithm.use_kl_in_reward=true, got inline: rewards are known before "
            "the training step"
        )


def adaptive_coefficient_stays_positive(config: Config) -> None:
    """A step of n samples multiplies it by ``1 + e n / horizon`` with e >= -0.2; see ``algorithms.kl``."""
    control = config.trainer.algorithm.kl_ctrl
    num_groups, num_samples = config.trainer.policy_mini_batch_size, config.generator.n_samples_per_prompt
    of_step = num_groups * num_samples
    if control.type is KlControl.adaptive and control.horizon < of_step:
        raise ConfigError(
            "trainer.algorithm.kl_ctrl.horizon must be >= trainer.policy_mini_batch_size * generator.n_samples_per_prompt "
            f"({num_groups} * {num_samples} = {of_step}) with kl_ctrl.type=adaptive, got {control.horizon}: it counts "
            "samples, not steps, and one step would move the coefficient by more than a fifth, at five times the horizon below 0"
        )


def log_probs_are_recomputed_at_a_known_time(config: Config) -> None:
    """What is recomputed when a group is finished depends on how many steps are through by then."""
    trainer, name = config.trainer, config.trainer.algorithm.policy_loss_type
    if trainer.deterministic and trainer.staleness_bound and POLICY_LOSSES.entry(name).needs_old_logprobs:
        raise ConfigError(
            f"trainer.max_staleness_steps must be 0 with trainer.deterministic=true and trainer.algorithm.policy_loss_type={name}, got "
            f"{trainer.staleness_bound}: it recomputes log-probs under the weights that are there when a group is finished, which depends "
            "on how long training takes; a loss around the engine's log-probs, such as ppo_clip or rollout_is, goes with every bound"
        )


def penalties_leave_rewards_that_maxrl_divides_by(config: Config) -> None:
    """A penalty would make the reward of a wrong answer negative."""
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator != "maxrl":
        return
    reason = "with trainer.algorithm.advantage_estimator=maxrl"
    why = "it divides by a mean of rewards that are never negative"
    if algorithm.use_kl_in_reward:
        raise ConfigError(
            f"trainer.algorithm.use_kl_in_reward must be false {reason}, got true: {why}; set use_kl_loss=true"
        )
    if algorithm.overlong_buffer_len and algorithm.overlong_buffer_penalty_factor:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len must be 0 {reason}, got {algorithm.overlong_buffer_len}: {why}; set "
            "generator.apply_overlong_filtering=true, or choose another estimator"
        )
