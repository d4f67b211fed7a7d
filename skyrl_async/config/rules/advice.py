"""What is allowed and hardly ever meant, a sentence each: said aloud when a run starts.

Flows in: a built ``Config``. Flows out: sentences. What does nothing at all is named by ``idle_rules``, what contradicts another key is
refused by the rules.
"""

from collections.abc import Iterator

from skyrl_async.config.rules.correction import sequence_settings
from skyrl_async.config.schema.algorithm import KlEstimator, LossReduction
from skyrl_async.config.schema.run import Config, GeneratorKind
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.config.schema.training import LrSchedule

_ALGORITHM = "trainer.algorithm"
_LARGEST_GSPO_BOUND = 0.05
_IN_THE_REWARD = {
    KlEstimator.k2: "has next to no force near the reference, and may push away from it",
    KlEstimator.k3: "pulls as KL(policy, reference) does and pushes as KL(reference, policy) would pull, which near the reference cancel",
    KlEstimator.abs: "has a force of either sign, towards the reference or away from it",
}


def advice(config: Config) -> list[str]:
    """A sentence for each setting that is allowed and hardly ever meant."""
    return [*_of_losses(config), *_of_divergence(config), *_of_sequences(config), *_of_schedule(config)]


def _of_losses(config: Config) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    loss = f"{_ALGORITHM}.policy_loss_type={algorithm.policy_loss_type}"
    if algorithm.policy_loss_type == "gspo" and algorithm.eps_clip_high >= _LARGEST_GSPO_BOUND:
        yield (
            f"{loss} bounds the mean over an answer, which moves little: eps_clip_low and eps_clip_high of some 1e-4 are usual, "
            f"{algorithm.eps_clip_low:g} and {algorithm.eps_clip_high:g} clip nothing"
        )
    if algorithm.policy_loss_type in ("gspo", "sapo") and algorithm.loss_reduction is not LossReduction.sequence_mean:
        reduction = algorithm.loss_reduction.name
        yield f"{loss} is meant for {_ALGORITHM}.loss_reduction=sequence_mean, got {reduction}"
    if algorithm.off_policy_correction.m2_threshold is not None and algorithm.policy_loss_type != "rollout_is":
        yield f"{_ALGORITHM}.off_policy_correction.m2_threshold takes the place of clipping: {loss} clips as well, set rollout_is"


def _of_divergence(config: Config) -> Iterator[str]:
    """A reward acts by the score alone, a loss by the gradient of the estimate; see ``algorithms.kl``."""
    algorithm = config.trainer.algorithm
    setting = f"{_ALGORITHM}.kl_estimator_type={algorithm.kl_estimator.name}"
    if algorithm.kl_loss_coef == 0:
        return
    if algorithm.use_kl_in_reward and (force := _IN_THE_REWARD.get(algorithm.kl_estimator)):
        yield f"{setting} {force}, with use_kl_in_reward=true; k1 pulls as KL(policy, reference) does there"
    if algorithm.use_kl_loss and algorithm.kl_estimator is KlEstimator.k1:
        yield f"{setting} does nothing in the mean with use_kl_loss=true; k2 pulls as KL(policy, reference) does there"


def _of_sequences(config: Config) -> Iterator[str]:
    """Ratios of rows that are not of a whole answer."""
    for setting in sequence_settings(config):
        if config.trainer.staleness_policy is StalenessPolicy.mask:
            yield (
                f"trainer.staleness_policy=mask leaves an answer's tokens that are past the bound out of the ratio that {setting} takes of "
                "it, those that are furthest off; set wait or resample for ratios of whole answers"
            )
        if config.generator.kind is GeneratorKind.agent:
            yield (
                f"generator=agent trains a session whose history was rewritten as several rows: the ratio that {setting} takes of a row is "
                "without the turns before it that another row trains"
            )


def _of_schedule(config: Config) -> Iterator[str]:
    trainer, schedule = config.trainer, config.training.lr_schedule
    if trainer.num_steps is None and schedule is not LrSchedule.constant and trainer.fully_async.sample_full_batch:
        yield (
            f"training.lr_schedule={schedule.name} is laid over all steps that trainer.num_epochs={trainer.num_epochs} hold, and "
            "trainer.fully_async.sample_full_batch=true filters groups, so that there will be fewer: the learning rate does not come down "
            "to 0; set trainer.num_steps, or training.lr_schedule=constant"
        )
