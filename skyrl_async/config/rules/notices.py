"""Notices at the start of a run, a sentence each: settings that nothing reads, and settings that are allowed and hardly ever meant.

They would show nowhere else. Settings that contradict each other are refused by the rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import psutil
from omegaconf import OmegaConf

from skyrl_async.config.rules.algorithm import local_teachers, needs_critic, needs_old_logprobs, sequence_settings
from skyrl_async.config.rules.devices import engine_device, has_fast_bfloat16, training_device
from skyrl_async.config.rules.placement import sharing_stages
from skyrl_async.config.schema.algorithm import (
    ESTIMATORS_THAT_READ,
    LOSSES_THAT_READ,
    AlgorithmConfig,
    Divergence,
    KlControl,
    KlEstimator,
    LossReduction,
    SequenceMaskMetric,
    TisRatioType,
)
from skyrl_async.config.schema.engine import Autoscale, EngineBackend
from skyrl_async.config.schema.fields import Device, DType, value_text
from skyrl_async.config.schema.generator import GeneratorKind
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.task import DATASET_TASK, HARBOR_TASK, REASONING_GYM_TASK
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.config.schema.training import LrSchedule
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, Unit

_ALGORITHM = "trainer.algorithm"
_REWARDS = f"{_ALGORITHM}.distillation.use_rewards=true"
_POLICY_LOSS = f"{_REWARDS} or top_k=null"
_REFERENCE = f"{_ALGORITHM}.use_kl_loss=true or use_kl_in_reward=true"
_Needs = tuple[str, tuple[str, ...], bool, str]
"""The path of a section, names of keys in it (none: all of them), whether they are read, and what would have them read."""
_LARGEST_GSPO_BOUND = 0.05
_BYTES_PER_TOKEN = 9
"""A row takes these in the trainer's process, and 4 for each kind of log-probs beside the engine's (``benchmarks.driver``) and for values;
of a teacher's likeliest tokens 8 each, and 4 for the rest."""
_IN_THE_REWARD = {
    KlEstimator.k2: "has next to no force near the reference, and may push away from it",
    KlEstimator.k3: "pulls as KL(policy, reference) does and pushes as KL(reference, policy) would pull, which near the reference cancel",
    KlEstimator.abs: "has a force of either sign, towards the reference or away from it",
}


def idle_settings(config: Config) -> list[str]:
    """A sentence for each setting that nothing reads; those at their default, or at what a group sets, are left out."""
    algorithm = config.trainer.algorithm
    of_names = (*_of_estimators(algorithm), *_of_losses(algorithm))
    of_algorithm = (*_of_algorithm(config), *of_names, *_of_corrections(algorithm))
    needs = (*of_algorithm, *_of_policy(config), *_of_processes(config))
    idle = [sentence for each in needs for sentence in _unread(config, *each)]
    if algorithm.policy_loss_type == "decoupled_ppo" and config.trainer.staleness_bound == 0:
        idle.append(
            "trainer.algorithm.policy_loss_type=decoupled_ppo never clips with trainer.max_staleness_steps=0, where groups are "
            "recomputed under the weights that are trained: it is rollout_is then, which costs one forward less"
        )
    return idle


def _of_algorithm(config: Config) -> tuple[_Needs, ...]:
    algorithm, filters = config.trainer.algorithm, config.trainer.fully_async.sample_full_batch
    is_normed = algorithm.loss_reduction is LossReduction.seq_mean_token_sum_norm
    is_adaptive = algorithm.kl_ctrl.type is KlControl.adaptive
    distillation = algorithm.distillation
    critic = _REWARDS if distillation.is_alone else "advantage_estimator=gae or turn_gae"
    has_teachers, directory = bool(distillation.teachers), f"a directory in {_ALGORITHM}.distillation.teachers"
    clips_ratio = has_teachers and distillation.divergence is Divergence.forward_kl and distillation.top_k is None
    is_gae = needs_critic(config) and ADVANTAGE_ESTIMATORS.is_builtin(algorithm.advantage_estimator)
    weighs_nothing = is_gae and config.trainer.staleness_bound == 0
    of_kl, filtering = ("kl_loss_coef", "kl_estimator_type", "ref_logp"), "trainer.fully_async.sample_full_batch=true"
    return (
        (_ALGORITHM, ("max_seq_len",), is_normed, "loss_reduction=seq_mean_token_sum_norm"),
        (_ALGORITHM, of_kl, algorithm.uses_reference, _REFERENCE),
        ("trainer.ref", ("path",), algorithm.uses_reference, _REFERENCE),
        (
            f"{_ALGORITHM}.distillation",
            ("teacher_key", "coef", "divergence", "top_k", "use_rewards", "api_key", "timeout_s"),
            has_teachers,
            "teachers",
        ),
        (f"{_ALGORITHM}.distillation", ("ratio_clip",), clips_ratio, "teachers, divergence=forward_kl and top_k=null"),
        ("training", ("num_teacher_workers",), bool(local_teachers(config)), directory),
        (_ALGORITHM, ("advantage_estimator",), not distillation.is_alone, _REWARDS),
        ("trainer.critic", (), needs_critic(config), critic),
        ("training", ("num_critic_workers",), needs_critic(config), critic),
        (_ALGORITHM, ("vtrace_clip",), not weighs_nothing, "trainer.max_staleness_steps >= 1"),
        (f"{_ALGORITHM}.kl_ctrl", ("kl_target", "horizon"), is_adaptive, "type=adaptive"),
        (_ALGORITHM, ("entropy_loss_coef",), algorithm.use_entropy_loss, "use_entropy_loss=true"),
        (_ALGORITHM, ("overlong_buffer_penalty_factor",), algorithm.overlong_buffer_len > 0, "overlong_buffer_len"),
        (_ALGORITHM, ("zero_variance_filter_tol",), filters, filtering),
        ("trainer.fully_async", ("max_filtered_in_a_row",), filters, filtering),
    )


def _of_losses(algorithm: AlgorithmConfig) -> Iterator[_Needs]:
    """Constants of another loss, or where no loss gets advantages of any; a user's own may read any."""
    if algorithm.distillation.replaces_policy_loss:
        for path in ("policy_loss_type", *LOSSES_THAT_READ):
            section, _, key = f"{_ALGORITHM}.{path}".rpartition(".")
            yield section, (key,), False, _POLICY_LOSS
    elif any(algorithm.policy_loss_type in losses for losses in LOSSES_THAT_READ.values()):
        yield from _of_readers(LOSSES_THAT_READ, "policy_loss_type", algorithm.policy_loss_type)


def _of_estimators(algorithm: AlgorithmConfig) -> Iterator[_Needs]:
    """Constants of another estimator, or with teachers alone of any; a user's own may read any."""
    if algorithm.distillation.is_alone:
        for path in ESTIMATORS_THAT_READ:
            section, _, key = f"{_ALGORITHM}.{path}".rpartition(".")
            yield section, (key,), False, _REWARDS
    elif ADVANTAGE_ESTIMATORS.is_builtin(algorithm.advantage_estimator):
        yield from _of_readers(ESTIMATORS_THAT_READ, "advantage_estimator", algorithm.advantage_estimator)


def _of_readers(readers: Mapping[str, tuple[str, ...]], setting: str, name: str) -> Iterator[_Needs]:
    for path, names in readers.items():
        section, _, key = f"{_ALGORITHM}.{path}".rpartition(".")
        yield section, (key,), name in names, f"{setting}={' or '.join(names)}"


def _of_corrections(algorithm: AlgorithmConfig) -> tuple[_Needs, ...]:
    path, correction = f"{_ALGORITHM}.off_policy_correction", algorithm.off_policy_correction
    if algorithm.distillation.replaces_policy_loss:
        return ((path, (), False, _POLICY_LOSS),)
    kind, metric = correction.tis_ratio_type, correction.sequence_mask_metric
    is_product, is_geometric = metric is SequenceMaskMetric.product, metric is SequenceMaskMetric.geometric
    product, geometric = ("product_mask_low", "product_mask_high"), ("geo_mask_low", "geo_mask_high")
    has_no_weight = kind is None or algorithm.policy_loss_type not in LOSSES_THAT_READ["tis_cap"]
    return (
        (path, ("token_tis_ratio_clip_high",), kind is TisRatioType.token, "tis_ratio_type=token"),
        (path, ("sequence_tis_ratio_clip_high",), kind is TisRatioType.sequence, "tis_ratio_type=sequence"),
        (path, product, is_product, "sequence_mask_metric=product"),
        (path, geometric, is_geometric, "sequence_mask_metric=geometric"),
        (_ALGORITHM, ("tis_cap",), has_no_weight, f"{path}.tis_ratio_type=null, whose clip_high takes its place"),
    )


def _of_policy(config: Config) -> tuple[_Needs, ...]:
    task, policy = config.task, config.policy
    is_dataset, is_on_cpu = task.name == DATASET_TASK, training_device(config.training) is Device.cpu
    tiny = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "tie_word_embeddings")
    warm_start = (
        "target_accuracy",
        "min_tokens",
        "max_tokens",
        "mixture_tokens",
        "batch_tokens",
        "terse_share",
        "slip_rate",
    )
    is_warmed_up = policy.path is None and policy.warm_start.enabled
    evaluates = config.evaluation.num_prompts_while_training > 0
    lora = ("alpha", "dropout", "target_modules", "exclude_modules", "init_method")
    files = ("train_files", "train_weights", "eval_files", "env_class")
    made = ("num_train_prompts", "num_eval_prompts")
    return (
        ("policy", tiny, policy.path is None, "policy=tiny"),
        ("policy.warm_start", warm_start, is_warmed_up, "policy=tiny and policy.warm_start.enabled=true"),
        ("policy.lora", lora, policy.lora.is_on, "rank >= 1"),
        ("training", ("cpu_offload",), not is_on_cpu, "policy workers on GPUs (training.device)"),
        ("task", files, is_dataset, "task=dataset"),
        ("task", made, not is_dataset, "a task that makes its prompts"),
        ("trainer", ("eval_interval_steps",), evaluates, "evaluation.num_prompts_while_training >= 1"),
        ("task.reasoning_gym", (), task.name == REASONING_GYM_TASK, "task=reasoning_gym"),
        ("task.harbor", (), task.name == HARBOR_TASK, "task=harbor"),
        ("generator.harbor", (), task.name == HARBOR_TASK, "task=harbor"),
    )


def _of_processes(config: Config) -> tuple[_Needs, ...]:
    is_vllm, is_agent = config.engine.backend is EngineBackend.vllm, config.generator.kind is GeneratorKind.agent
    vllm = ("gpu_memory_utilization", "cpu_kv_cache_gb", "enforce_eager", "enable_prefix_caching", "extra_args")
    autoscale = ("min_engines", "max_engines", "autoscale_interval_s")
    shares = any("generate" in stages for stages in sharing_stages(config))
    logging, gym = config.logging, "generator=gym or gym_http; see server.session_max_tokens"
    passes_stops = not is_agent or config.generator.entrypoint is not None
    stops = "generator=gym or gym_http; an agent sends stop strings of its own"
    return (
        ("engine", vllm, is_vllm, "engine=vllm"),
        ("engine", autoscale, config.engine.autoscale is not Autoscale.none, "engine.autoscale=plan"),
        ("placement", ("min_generation_slice_s",), shares, "placement.groups with generate beside other stages"),
        ("generator", ("agent_timeout_s",), is_agent, "generator=agent"),
        ("generator", ("max_trajectory_tokens",), not is_agent, gym),
        ("generator.sampling", ("stop",), passes_stops, stops),
        ("evaluation.sampling", ("stop",), passes_stops, stops),
        ("server", (), config.serves_endpoint, "server.enabled=true"),
        ("logging", ("wandb_project",), logging.wandb, "logging.wandb=true"),
        ("logging", ("trace_max_gb",), logging.trace, "logging.trace=true"),
    )


def _unread(config: Config, path: str, names: tuple[str, ...], is_read: bool, without: str) -> Iterator[str]:
    if is_read:
        return
    section: Any = attrgetter(path)(config)
    defaults = type(section)()
    for name in names or [field.name for field in fields(section)]:
        value = getattr(section, name)
        if is_dataclass(value):
            yield from _unread(config, f"{path}.{name}", (), is_read, without)
        elif value != getattr(defaults, name) and value not in _values_of_groups(f"{path}.{name}"):
            shown = "..." if name == "api_key" else value_text(value)
            yield f"{path}.{name}={shown} does nothing without {without}"


def _values_of_groups(key: str) -> list[Any]:
    trees = (OmegaConf.create(option.values) for options in GROUPS.values() for option in options.values())
    return [value for tree in trees if (value := OmegaConf.select(tree, key)) is not None]


def advice(config: Config) -> list[str]:
    """A sentence for each setting that is allowed and hardly ever meant."""
    of_algorithm = (_advice_on_losses, _advice_on_divergence, _advice_on_sequences)
    of_run = (_advice_on_baselines, _advice_on_filtering, _advice_on_schedule, _advice_on_warmup)
    of_machine = (_advice_on_memory, _advice_on_dtype)
    return [sentence for give in (*of_algorithm, *of_run, *of_machine) for sentence in give(config)]


def _advice_on_losses(config: Config) -> Iterator[str]:
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


def _advice_on_divergence(config: Config) -> Iterator[str]:
    """A reward acts by the score alone, a loss by the gradient of the estimate; see ``algorithms.kl`` and ``kl_penalty``."""
    algorithm = config.trainer.algorithm
    setting = f"{_ALGORITHM}.kl_estimator_type={algorithm.kl_estimator.name}"
    if algorithm.kl_loss_coef == 0:
        return
    if algorithm.use_kl_in_reward and (force := _IN_THE_REWARD.get(algorithm.kl_estimator)):
        yield f"{setting} {force}, with use_kl_in_reward=true; k1 pulls as KL(policy, reference) does there"
    if algorithm.use_kl_loss and algorithm.kl_estimator is KlEstimator.k1:
        yield f"{setting} does nothing in the mean with use_kl_loss=true; k2 pulls as KL(policy, reference) does there"


def _advice_on_sequences(config: Config) -> Iterator[str]:
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


def _advice_on_baselines(config: Config) -> Iterator[str]:
    """Baselines of what earlier visits to a prompt earned, without a second visit."""
    trainer, task = config.trainer, config.task
    estimator = trainer.algorithm.advantage_estimator
    if not ADVANTAGE_ESTIMATORS.entry(estimator).needs_baseline or trainer.algorithm.distillation.is_alone:
        return
    setting = (
        f"{_ALGORITHM}.advantage_estimator={estimator} compares a prompt with its earlier visits, and none comes twice"
    )
    fallback = "the baseline is the mean of all prompts"
    if trainer.num_epochs == 1:
        yield f"{setting} with trainer.num_epochs=1: {fallback}; set more epochs"
    elif trainer.num_steps is not None and task.name not in (DATASET_TASK, HARBOR_TASK):
        num_groups = trainer.num_steps // trainer.steps_per_batch * trainer.batch_size
        if num_groups <= task.num_train_prompts:
            yield (
                f"{setting} in {num_groups:,} groups (trainer.num_steps={trainer.num_steps}) of task.num_train_prompts="
                f"{task.num_train_prompts}: {fallback}; set fewer prompts, or more steps"
            )


def _advice_on_filtering(config: Config) -> Iterator[str]:
    """Groups of equal rewards that would be trained otherwise."""
    if not config.trainer.fully_async.sample_full_batch:
        return
    algorithm = config.trainer.algorithm
    entry = ADVANTAGE_ESTIMATORS.entry(algorithm.advantage_estimator)
    looks_beyond = entry.unit is not Unit.SAMPLE or entry.needs_baseline or entry.needs_mini_batch
    trains_equal = {
        f"advantage_estimator={algorithm.advantage_estimator}": looks_beyond,
        "advantage_batch_normalize=true": algorithm.advantage_batch_normalize,
        "use_kl_in_reward=true": algorithm.use_kl_in_reward,
        "reward_shaping": algorithm.reward_shaping is not None,
        "distillation.teachers": bool(algorithm.distillation.teachers),
    }
    for setting, is_so in trains_equal.items():
        if is_so:
            yield (
                "trainer.fully_async.sample_full_batch=true leaves out groups whose samples earned the same in all, some of which "
                f"{_ALGORITHM}.{setting} would train; set sample_full_batch=false to train them"
            )


def _advice_on_schedule(config: Config) -> Iterator[str]:
    trainer, schedule = config.trainer, config.training.lr_schedule
    if trainer.num_steps is None and schedule is not LrSchedule.constant and trainer.fully_async.sample_full_batch:
        yield (
            f"training.lr_schedule={schedule.name} is laid over all steps that trainer.num_epochs={trainer.num_epochs} hold, and "
            "trainer.fully_async.sample_full_batch=true filters groups, so that there will be fewer: the learning rate does not come down "
            "to 0; set trainer.num_steps, or training.lr_schedule=constant"
        )


def _advice_on_warmup(config: Config) -> Iterator[str]:
    """The learning rate rises in steps that do not move the policy, too."""
    of_critic, of_lr = config.trainer.critic.warmup_steps, config.training.num_warmup_steps
    if needs_critic(config) and of_critic and of_lr:
        share = min(1.0, (of_critic + 1) / of_lr)
        yield (
            f"training.num_warmup_steps={of_lr} counts the steps of trainer.critic.warmup_steps={of_critic}, which train no policy: the "
            f"policy's first step takes {share:.0%} of training.lr; set more num_warmup_steps for a smaller one"
        )


def _advice_on_memory(config: Config) -> Iterator[str]:
    """All rows that the staleness bound lets be sampled and not trained, each as long as it may become."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    num_rows = trainer.most_open_groups * config.generator.n_samples_per_prompt
    longest = config.engine.max_model_len or config.generator.sampling.max_tokens
    distillation = algorithm.distillation
    of_teacher = 8 * distillation.top_k + 4 if distillation.teachers and distillation.top_k is not None else 0
    others = (algorithm.uses_reference, needs_old_logprobs(config), bool(distillation.teachers), needs_critic(config))
    num_bytes = num_rows * longest * (_BYTES_PER_TOKEN + 4 * sum(others) + of_teacher)
    if num_bytes > (there := psutil.virtual_memory().total):
        yield (
            f"trainer.policy_mini_batch_size={trainer.policy_mini_batch_size} x {trainer.staleness_bound + 1} "
            f"(trainer.max_staleness_steps + 1) x generator.n_samples_per_prompt={config.generator.n_samples_per_prompt} rows of up to "
            f"{longest:,} tokens may take {num_bytes / 1e9:,.0f} GB in this process, on a machine with {there / 1e9:,.0f} GB: lower "
            "one of them, or engine.max_model_len, unless answers are much shorter"
        )


def _advice_on_dtype(config: Config) -> Iterator[str]:
    """A CPU without instructions for bfloat16 computes in it through float32, value by value."""
    asked = {
        "policy.dtype=bfloat16": config.policy.dtype is DType.bfloat16 and engine_device(config.engine) is Device.cpu,
        "training.mixed_precision=true": config.training.mixed_precision
        and training_device(config.training) is Device.cpu,
    }
    settings = " and ".join(setting for setting, is_so in asked.items() if is_so)
    if settings and not has_fast_bfloat16():
        yield (
            f"{settings}: this CPU has no instructions for bfloat16 (AVX-512), and takes three to nine times as long as in float32; set "
            "policy.dtype=float32 and training.mixed_precision=false unless memory is short"
        )
