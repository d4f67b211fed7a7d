"""Rules about off-policy corrections and what else of the config they meet.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``; or a line for each setting that does nothing.
"""

from skyrl_async.config.algorithm import AlgorithmConfig
from skyrl_async.config.corrections import OffPolicyCorrectionConfig, SequenceMaskMetric, TisRatioType
from skyrl_async.config.schema import Config
from skyrl_async.errors import ConfigError

_PREFIX = "trainer.algorithm.off_policy_correction"
_WEIGHABLE = ("rollout_is", "decoupled_ppo", "cispo_old")


def weights_have_a_place(config: Config) -> None:
    """An importance weight beside a ratio that is pi / mu already would count it twice."""
    algorithm = config.trainer.algorithm
    kind, loss = algorithm.off_policy_correction.tis_ratio_type, algorithm.policy_loss_type
    if kind is not None and loss not in _WEIGHABLE:
        raise ConfigError(
            f"{_PREFIX}.tis_ratio_type must be null with trainer.algorithm.policy_loss_type={loss}, got {kind.name}: the ratio of "
            f"{loss} is to the engine's log-probs already, and a weight would count it twice; set policy_loss_type=decoupled_ppo or "
            "cispo_old, which bound around recomputed log-probs, or rollout_is, which does not; masks go with every loss"
        )


def sequence_ratios_are_of_the_whole_vocabulary(config: Config) -> None:
    """Under truncated sampling every token is likelier to its sampler than to the policy, and their product falls with the length."""
    correction, sampling = config.trainer.algorithm.off_policy_correction, config.generator.sampling
    asked = {"tis_ratio_type=sequence": correction.tis_ratio_type is TisRatioType.sequence} | {
        f"sequence_mask_metric={metric.name}": correction.sequence_mask_metric is metric
        for metric in SequenceMaskMetric
    }
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    for key in (key for key, is_cut in cuts.items() if is_cut):
        for setting in (setting for setting, is_asked in asked.items() if is_asked):
            raise ConfigError(
                f"generator.sampling.{key} must be left at its default with {_PREFIX}.{setting}, got {getattr(sampling, key)}: the "
                "engine's probabilities are of the tokens it keeps and the policy's of all, so that a whole answer's ratio is far too small"
            )


def idle_corrections(algorithm: AlgorithmConfig) -> list[str]:
    """What is set and does nothing, a sentence each."""
    correction = algorithm.off_policy_correction
    kind, metric = correction.tis_ratio_type, correction.sequence_mask_metric
    needs = {
        "token_tis_ratio_clip_high": ("tis_ratio_type=token", kind is TisRatioType.token),
        "sequence_tis_ratio_clip_high": ("tis_ratio_type=sequence", kind is TisRatioType.sequence),
    }
    for side in ("low", "high"):
        needs[f"geo_mask_{side}"] = ("sequence_mask_metric=geometric", metric is SequenceMaskMetric.geometric)
        needs[f"product_mask_{side}"] = ("sequence_mask_metric=product", metric is SequenceMaskMetric.product)
    idle = [
        f"{_PREFIX}.{key}={getattr(correction, key):g} does nothing without {setting}"
        for key, (setting, is_used) in needs.items()
        if not is_used and getattr(correction, key) != getattr(OffPolicyCorrectionConfig, key)
    ]
    if kind is not None and algorithm.tis_cap != AlgorithmConfig.tis_cap:
        idle.append(
            f"trainer.algorithm.tis_cap={algorithm.tis_cap:g} does nothing with {_PREFIX}.tis_ratio_type={kind.name}, whose clip_high it is"
        )
    return idle
