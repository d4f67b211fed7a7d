"""Rules about the algorithm: its names are known, its parts fit each other, the schedule, the sampling and the log-prob workers.

They import the functions that the configuration names, and compute nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from skyrl_async.config.schema.algorithm import KlControl, RefLogp, SequenceMaskMetric, TisRatioType
from skyrl_async.config.schema.run import Config
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

_PREFIX = "trainer.algorithm.off_policy_correction"
_WEIGHABLE = ("rollout_is", "decoupled_ppo", "cispo_old")
_WEIGHTED_ALONE = ("rollout_is", "cispo")
"""Losses whose ratio to the engine's log-probs is a weight, and bounds nothing by the sign of the advantage."""
_TOKEN_BOUNDS = tuple(
    f"{kind}_is_threshold_{end}" for kind in ("outlier_token", "token_mask") for end in ("low", "high")
)


def needs_critic(config: Config) -> bool:
    """Whether the estimator reads a critic's values, and trains something."""
    algorithm = config.trainer.algorithm
    return (
        ADVANTAGE_ESTIMATORS.entry(algorithm.advantage_estimator).needs_values and not algorithm.distillation.is_alone
    )


def _weighs_returns(config: Config) -> bool:
    """Whether returns of stale tokens are weighted."""
    algorithm = config.trainer.algorithm
    return needs_critic(config) and algorithm.vtrace_clip is not None and config.trainer.staleness_bound > 0


def _reads_log_ratios(config: Config) -> bool:
    """Whether the estimator reads recomputed log-probs, and trains something."""
    algorithm = config.trainer.algorithm
    entry = ADVANTAGE_ESTIMATORS.entry(algorithm.advantage_estimator)
    return entry.needs_old_logprobs and not algorithm.distillation.is_alone


def needs_old_logprobs(config: Config) -> bool:
    """Whether the log-probs of finished rows are recomputed under the policy."""
    loss = POLICY_LOSSES.entry(config.trainer.algorithm.policy_loss_type)
    return loss.needs_old_logprobs or _reads_log_ratios(config) or _weighs_returns(config)


def estimator_rules(config: Config) -> Iterator[str]:
    """The estimator is known, has enough samples, rewards that it can take, and all groups at once where it needs them."""
    algorithm, num_samples = config.trainer.algorithm, config.generator.n_samples_per_prompt
    reason = f"with trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}"
    entry = ADVANTAGE_ESTIMATORS.entry(algorithm.advantage_estimator)
    reads_rewards, warmup_steps = not algorithm.distillation.is_alone, config.trainer.critic.warmup_steps
    if entry.needs_groups and num_samples < 2 and reads_rewards:
        yield f"generator.n_samples_per_prompt must be >= 2 {reason}, got {num_samples}: a group of one has no advantage"
    if entry.needs_mini_batch and reads_rewards and config.trainer.stream_mini_batch:
        yield (
            f"trainer.stream_mini_batch must be false or null {reason}, got true: its advantages "
            "depend on all groups of a step; choose rloo or grpo to train groups as they finish"
        )
    if algorithm.advantage_batch_normalize and config.trainer.stream_mini_batch:
        yield (
            "trainer.stream_mini_batch must be false or null with trainer.algorithm.advantage_batch_normalize=true, got true: it takes the "
            "mean over all groups of a step"
        )
    reads = {
        "values are computed by the critic": needs_critic(config),
        "log-probs are computed by the policy": _reads_log_ratios(config),
    }
    for what in (what for what, is_read in reads.items() if is_read):
        if config.trainer.deterministic and config.trainer.staleness_bound:
            yield (
                f"trainer.max_staleness_steps must be 0 with trainer.deterministic=true and {reason.removeprefix('with ')}, got "
                f"{config.trainer.staleness_bound}: {what} that is there when a group is finished, which depends on how long training takes"
            )
    if needs_critic(config) and config.trainer.num_steps is not None and warmup_steps >= config.trainer.num_steps:
        yield (
            f"trainer.critic.warmup_steps must be < trainer.num_steps ({config.trainer.num_steps}), got {warmup_steps}: the policy would "
            "never be trained"
        )
    if algorithm.advantage_estimator != "maxrl":
        return
    why, length = "it divides by a mean of rewards that are never negative", algorithm.overlong_buffer_len
    if algorithm.use_kl_in_reward:
        yield f"trainer.algorithm.use_kl_in_reward must be false {reason}, got true: {why}; set use_kl_loss=true"
    if length and algorithm.overlong_buffer_penalty_factor:
        yield (
            f"trainer.algorithm.overlong_buffer_len must be 0 {reason}, got {length}: {why}; set "
            "generator.apply_overlong_filtering=true, or choose another estimator"
        )


def loss_rules(config: Config) -> Iterator[str]:
    """The loss is known, by its name or as a function that can be imported and called, and has what it needs when it needs it."""
    trainer, correction = config.trainer, config.trainer.algorithm.off_policy_correction
    name = trainer.algorithm.policy_loss_type
    setting, entry = f"trainer.algorithm.policy_loss_type={name}", POLICY_LOSSES.entry(name)
    if entry.marker is not None and trainer.stream_mini_batch:
        yield (
            f"trainer.stream_mini_batch must be false or null with {setting}, got true: it chooses tokens "
            "among all of a step; choose ppo_clip or dppo to train groups as they finish"
        )
    if trainer.deterministic and trainer.staleness_bound and entry.needs_old_logprobs:
        yield (
            f"trainer.max_staleness_steps must be 0 with trainer.deterministic=true and {setting}, got "
            f"{trainer.staleness_bound}: it recomputes log-probs under the weights that are there when a group is finished, which depends "
            "on how long training takes; a loss around the engine's log-probs, such as ppo_clip or rollout_is, goes with every bound"
        )
    weight = correction.tis_ratio_type
    if weight is not None and POLICY_LOSSES.portable(name) not in _WEIGHABLE and not entry.needs_old_logprobs:
        yield (
            f"{_PREFIX}.tis_ratio_type must be null with {setting}, got {weight.name}: the ratio of "
            f"{name} is to the engine's log-probs already, and a weight would count it twice; set policy_loss_type=decoupled_ppo or "
            "cispo_old, which bound around recomputed log-probs, or rollout_is, which does not; masks go with every loss"
        )


def divergence_rules(config: Config) -> Iterator[str]:
    """What is taken from a reward is known before it is trained, with a coefficient that stays positive.

    A step of n samples multiplies an adaptive coefficient by ``1 + e n / horizon`` with e >= -0.2; see ``algorithms.kl``.
    """
    algorithm, control = config.trainer.algorithm, config.trainer.algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and algorithm.ref_logp is RefLogp.inline:
        yield (
            "trainer.algorithm.ref_logp must be stage with trainer.algorithm.use_kl_in_reward=true, got inline: rewards are known before "
            "the training step"
        )
    num_groups, num_samples = config.trainer.batch_size, config.generator.n_samples_per_prompt
    of_step = num_groups * num_samples
    key = "policy_mini_batch_size" if config.trainer.train_batch_size is None else "train_batch_size"
    if control.type is KlControl.adaptive and control.horizon < of_step:
        yield (
            f"trainer.algorithm.kl_ctrl.horizon must be >= trainer.{key} * generator.n_samples_per_prompt "
            f"({num_groups} * {num_samples} = {of_step}) with kl_ctrl.type=adaptive, got {control.horizon}: it counts "
            "samples, not steps, and one step would move the coefficient by more than a fifth, at five times the horizon below 0"
        )


def distillation_rules(config: Config) -> Iterator[str]:
    """Teachers judge every sampled token, whatever it earned, at the sampling temperature."""
    algorithm, sampling = config.trainer.algorithm, config.generator.sampling
    distillation = algorithm.distillation
    teachers, top_k = distillation.teachers, distillation.top_k
    key = "trainer.algorithm.distillation.teachers"
    for name, place in teachers.items():
        if not place:
            yield f"{key}.{name} must be a directory or the address of a server, got nothing"
        if is_url(place) and not _has_host(place):
            yield f"{key}.{name} must be an address such as http://host:8000/v1, got {place}"
        if is_url(place) and top_k is not None:
            yield (
                f"{key}.{name} must be a local directory with trainer.algorithm.distillation.top_k={top_k}, got {place}: servers give no "
                "more than the sampled token's log-prob here; set top_k=null, or give the teacher's directory"
            )
    if any(map(is_url, teachers.values())) and sampling.temperature != 1:
        yield (
            f"generator.sampling.temperature must be 1 with a server among {key}, got {sampling.temperature:g}: servers give prompt "
            "log-probs at temperature 1; a local directory is asked at any"
        )
    if teachers and algorithm.advantage_batch_normalize:
        yield f"trainer.algorithm.advantage_batch_normalize must be false with {key}, got true: it would change what coef weighs"
    if distillation.is_alone and algorithm.use_kl_in_reward:
        yield (
            f"trainer.algorithm.use_kl_in_reward must be false with {key} and use_rewards=false, got true: rewards train nothing there; "
            "set use_kl_loss=true"
        )
    if distillation.is_alone and config.trainer.fully_async.sample_full_batch:
        yield (
            f"trainer.fully_async.sample_full_batch must be false with {key} and use_rewards=false, got true: it leaves out groups of "
            "equal rewards, which teachers judge as they do others"
        )


def local_teachers(config: Config) -> dict[str, str]:
    """Name -> directory of the teachers with workers of their own."""
    teachers = config.trainer.algorithm.distillation.teachers
    return {name: str(Path(place).expanduser()) for name, place in teachers.items() if not is_url(place)}


def is_url(teacher: str) -> bool:
    """Whether a teacher is a server."""
    return teacher.startswith(("http://", "https://"))


def _has_host(url: str) -> bool:
    """Whether it names a host, and a port that is a number or none."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def worker_rules(config: Config) -> Iterator[str]:
    """Workers that compute log-probs have log-probs to compute."""
    algorithm, training = config.trainer.algorithm, config.training
    loss, num_ref, num_logp = algorithm.policy_loss_type, training.num_ref_workers, training.num_logp_workers
    if num_ref and not algorithm.uses_reference:
        yield (
            "training.num_ref_workers must be 0 with trainer.algorithm.use_kl_loss=false and use_kl_in_reward=false, got "
            f"{num_ref}: nothing asks for the reference's log-probs"
        )
    if num_ref and algorithm.ref_logp is RefLogp.inline:
        yield (
            f"training.num_ref_workers must be 0 with trainer.algorithm.ref_logp=inline, got {num_ref}: inline is on "
            "the policy workers; set trainer.algorithm.ref_logp=stage"
        )
    if num_logp and not needs_old_logprobs(config):
        yield (
            f"training.num_logp_workers must be 0 with trainer.algorithm.policy_loss_type={loss}, got "
            f"{num_logp}: decoupled_ppo asks for recomputed log-probs, and cispo_old, what says needs_old_logprobs, and gae with "
            "vtrace_clip and staleness; it does not"
        )


def sampling_rules(config: Config) -> Iterator[str]:
    """The trainer's log-probs are of all tokens: only weights compare them with those of an engine that leaves tokens out."""
    sampling = config.generator.sampling
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    for key in (key for key, is_cut in cuts.items() if is_cut):
        for setting, consequence in whole_vocabulary_settings(config).items():
            yield (
                f"generator.sampling.{key} must be left at its default with {setting}, got {getattr(sampling, key)}: the "
                f"engine's probabilities are of the tokens it keeps, the trainer's of all, so that {consequence}"
            )


def sequence_settings(config: Config) -> list[str]:
    """What is set that takes one ratio of a whole row, as ``key=value``."""
    algorithm = config.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, POLICY_LOSSES.portable(algorithm.policy_loss_type)
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
    guard = config.trainer.guard
    for setting, is_asked in {
        "trainer.guard.scale_lr_by_ess=true": guard.scale_lr_by_ess,
        f"trainer.guard.min_ess={guard.min_ess:g}": guard.min_ess > 0,
    }.items():
        if is_asked:
            wrong[setting] = "policy/sequence_ess takes steps of fresh answers for stale ones; leave the guard off"
    if _reads_log_ratios(config):
        wrong[f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}"] = (
            "the log_ratios that it reads are too small for stale tokens"
        )
    if _weighs_returns(config):
        wrong[f"trainer.algorithm.vtrace_clip={algorithm.vtrace_clip:g}"] = (
            "what follows a stale token counts too little; set vtrace_clip=null"
        )
    distillation = algorithm.distillation
    if distillation.teachers and distillation.top_k is None and not needs_old_logprobs(config):
        wrong["trainer.algorithm.distillation.teachers and top_k=null"] = (
            "a student that says what its teacher says counts as surer than that; set top_k, or policy_loss_type=decoupled_ppo or "
            "cispo_old, for which the student's log-probs are recomputed"
        )
    if algorithm.use_kl_in_reward:
        wrong["trainer.algorithm.use_kl_in_reward=true"] = (
            "every token of an answer adds to its divergence from the reference; set use_kl_loss=true, which has the policy's log-probs"
        )
    if (
        not distillation.replaces_policy_loss
        and POLICY_LOSSES.portable(loss) not in ("gspo", *_WEIGHTED_ALONE)
        and not POLICY_LOSSES.entry(loss).needs_old_logprobs
    ):
        wrong[f"trainer.algorithm.policy_loss_type={loss}"] = (
            "tokens to be lowered are out of bounds before any step; set policy_loss_type=decoupled_ppo or cispo_old, bounded around "
            "recomputed log-probs, or rollout_is or cispo, which weigh every token"
        )
    return wrong


RULES = (estimator_rules, loss_rules, divergence_rules, distillation_rules, worker_rules, sampling_rules)
