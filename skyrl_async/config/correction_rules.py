"""Rules about off-policy corrections and what else of the config they meet.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``; of what is allowed and hardly meant, sentences.
"""

from skyrl_async.config.algorithm import LossReduction
from skyrl_async.config.corrections import SequenceMaskMetric, TisRatioType
from skyrl_async.config.schema import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES

_PREFIX = "trainer.algorithm.off_policy_correction"
_LARGEST_GSPO_BOUND = 0.05
_WEIGHABLE = ("rollout_is", "decoupled_ppo", "cispo_old")


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


def advice(config: Config) -> list[str]:
    """A sentence for each setting that is allowed and hardly ever meant."""
    algorithm, sentences = config.trainer.algorithm, []
    loss = f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}"
    if algorithm.policy_loss_type == "gspo" and algorithm.eps_clip_high >= _LARGEST_GSPO_BOUND:
        sentences.append(
            f"{loss} bounds the mean over an answer, which moves little: eps_clip_low and eps_clip_high of some 1e-4 are usual, "
            f"{algorithm.eps_clip_low:g} and {algorithm.eps_clip_high:g} clip nothing"
        )
    if algorithm.policy_loss_type in ("gspo", "sapo") and algorithm.loss_reduction is not LossReduction.sequence_mean:
        reduction = algorithm.loss_reduction.name
        sentences.append(f"{loss} is meant for trainer.algorithm.loss_reduction=sequence_mean, got {reduction}")
    if algorithm.off_policy_correction.m2_threshold is not None and algorithm.policy_loss_type != "rollout_is":
        sentences.append(f"{_PREFIX}.m2_threshold takes the place of clipping: {loss} clips as well, set rollout_is")
    return sentences


def sequence_ratios_are_of_the_whole_vocabulary(config: Config) -> None:
    """Under truncated sampling every token is likelier to its sampler than to the policy, and their product falls with the length."""
    correction, sampling = config.trainer.algorithm.off_policy_correction, config.generator.sampling
    loss = config.trainer.algorithm.policy_loss_type
    asked = {
        f"{_PREFIX}.tis_ratio_type=sequence": correction.tis_ratio_type is TisRatioType.sequence,
        f"{_PREFIX}.opsm_delta={correction.opsm_delta}": correction.opsm_delta is not None,
        "trainer.algorithm.policy_loss_type=gspo": loss == "gspo",
    } | {
        f"{_PREFIX}.sequence_mask_metric={metric.name}": correction.sequence_mask_metric is metric
        for metric in SequenceMaskMetric
    }
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    for key in (key for key, is_cut in cuts.items() if is_cut):
        for setting in (setting for setting, is_asked in asked.items() if is_asked):
            raise ConfigError(
                f"generator.sampling.{key} must be left at its default with {setting}, got {getattr(sampling, key)}: the "
                "engine's probabilities are of the tokens it keeps and the policy's of all, so that a whole answer's ratio is far too small"
            )
