"""Rules about off-policy corrections and what else of the config they meet.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``.
"""

from skyrl_async.config.schema.corrections import SequenceMaskMetric, TisRatioType
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES

_PREFIX = "trainer.algorithm.off_policy_correction"
_WEIGHABLE = ("rollout_is", "decoupled_ppo", "cispo_old")
_WEIGHTED_ALONE = ("rollout_is", "cispo")
"""Losses whose ratio to the engine's log-probs is a weight, and bounds nothing by the sign of the advantage."""
_TOKEN_BOUNDS = tuple(
    f"{kind}_is_threshold_{end}" for kind in ("outlier_token", "token_mask") for end in ("low", "high")
)


def weights_have_a_place(config: Config) -> None:
    """An importance weight beside a ratio that is pi / mu already would count it twice."""
    algorithm = config.trainer.algorithm
    kind, loss = algorithm.off_policy_correction.tis_ratio_type, algorithm.policy_loss_type
    has_place = loss in _WEIGHABLE or POLICY_LOSSES.entry(loss).needs_old_logprobs
    if kind is not None and not has_place:
        raise ConfigError(
            f"{_PREFIX}.tis_ratio_type must be null with trainer.algorithm.policy_loss_type={loss}, got {kind.name}: the ratio of "
            f"{loss} is to the engine's log-probs already, and a weight would count it twice; set policy_loss_type=decoupled_ppo or "
            "cispo_old, which bound around recomputed log-probs, or rollout_is, which does not; masks go with every loss"
        )


def sequence_settings(config: Config) -> list[str]:
    """What is set that takes one ratio of a whole row, as ``key=value``."""
    algorithm = config.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    asked = {
        f"{_PREFIX}.tis_ratio_type=sequence": correction.tis_ratio_type is TisRatioType.sequence,
        f"{_PREFIX}.opsm_delta={correction.opsm_delta}": correction.opsm_delta is not None,
        "trainer.algorithm.policy_loss_type=gspo": loss == "gspo",
    } | {
        f"{_PREFIX}.sequence_mask_metric={metric.name}": correction.sequence_mask_metric is metric
        for metric in SequenceMaskMetric
    }
    return [setting for setting, is_asked in asked.items() if is_asked]


def whole_vocabulary_settings(config: Config) -> dict[str, str]:
    """What is set that takes the engine's log-probs for those of all tokens, as ``key=value``, with what becomes of it where they are not.

    Under truncated sampling, and under a grammar, every token is likelier to its sampler than to the policy. A weight makes up for that:
    it is the probability of the tokens that were left. A bound takes it for a step of training: of the policy's own tokens it leaves out
    those to be lowered, and a product over a whole answer falls with the length.
    """
    algorithm = config.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    wrong = {setting: "a whole answer's ratio is far too small" for setting in sequence_settings(config)}
    for key in (*_TOKEN_BOUNDS, "m2_threshold"):
        if (value := getattr(correction, key)) is not None:
            wrong[f"{_PREFIX}.{key}={value:g}"] = "tokens of the policy itself count as far off; leave it null"
    if algorithm.use_kl_in_reward:
        wrong["trainer.algorithm.use_kl_in_reward=true"] = (
            "every token of an answer adds to its divergence from the reference; set use_kl_loss=true, which has the policy's log-probs"
        )
    if loss not in ("gspo", *_WEIGHTED_ALONE) and not POLICY_LOSSES.entry(loss).needs_old_logprobs:
        wrong[f"trainer.algorithm.policy_loss_type={loss}"] = (
            "tokens to be lowered are out of bounds before any step; set policy_loss_type=decoupled_ppo or cispo_old, bounded around "
            "recomputed log-probs, or rollout_is or cispo, which weigh every token"
        )
    return wrong


def ratios_are_of_the_whole_vocabulary(config: Config) -> None:
    """The trainer's log-probs are: what compares them with the engine's goes with weights alone where the engine leaves tokens out."""
    sampling = config.generator.sampling
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    for key in (key for key, is_cut in cuts.items() if is_cut):
        for setting, consequence in whole_vocabulary_settings(config).items():
            raise ConfigError(
                f"generator.sampling.{key} must be left at its default with {setting}, got {getattr(sampling, key)}: the "
                f"engine's probabilities are of the tokens it keeps, the trainer's of all, so that {consequence}"
            )
