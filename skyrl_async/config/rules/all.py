"""All rules that involve several sections or this machine: each a function that raises. ``check`` runs them before anything starts.

A rule raises ``ConfigError`` (``PolicyError`` for a policy's directory) with the key, the value and what to change. Rules within one class
are in ``schema``.
"""

import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path

from skyrl_async.config.rules.algorithm import (
    adaptive_coefficient_stays_positive,
    advantages_can_be_computed,
    divergence_is_known_before_the_step,
    log_probs_are_recomputed_at_a_known_time,
    logprob_workers_have_work,
    penalties_leave_rewards_that_maxrl_divides_by,
    policy_loss_can_be_computed,
    ratios_are_of_the_whole_vocabulary,
    weights_have_a_place,
)
from skyrl_async.config.rules.deepspeed import deepspeed_can_train, deepspeed_settings_are_of_deepspeed
from skyrl_async.config.rules.devices import has_distribution
from skyrl_async.config.rules.placement import (
    cuda_is_there,
    gpus_suffice,
    groups_fit_the_devices,
    ranks_have_gpus_of_their_own,
    vllm_is_built_for_the_device,
)
from skyrl_async.config.rules.policy import (
    adapters_can_be_served,
    policy_directory_is_complete,
    reference_directory_is_complete,
    tiny_policy_has_something_to_learn,
    tiny_policy_has_whole_heads,
)
from skyrl_async.config.rules.transfer import transfer_reaches_the_engines
from skyrl_async.config.schema.run import (
    Config,
    Device,
    EngineBackend,
    GeneratorKind,
    ResumeMode,
)
from skyrl_async.config.schema.server import MAX_PORT
from skyrl_async.config.schema.task import BUILT_IN_TASKS, DATASET_TASK, REASONING_GYM_TASK
from skyrl_async.errors import ConfigError


def check(config: Config) -> None:
    """Run every rule, the cheap ones first."""
    for rule in _RULES:
        rule(config)


def task_is_known(config: Config) -> None:
    name = config.task.name
    known = (*BUILT_IN_TASKS, DATASET_TASK, REASONING_GYM_TASK)
    if name not in known:
        raise ConfigError(f"task.name must be one of {', '.join(known)}, got {name!r}")


def reasoning_gym_is_installed(config: Config) -> None:
    if config.task.name == REASONING_GYM_TASK and not has_distribution("reasoning-gym"):
        raise ConfigError(
            "task.name=reasoning_gym needs the package reasoning-gym, which is not installed: "
            "install skyrl-async[reasoning-gym] (uv run --extra reasoning-gym ...)"
        )


def mini_batch_fits_the_prompts(config: Config) -> None:
    size, prompts = config.trainer.policy_mini_batch_size, config.task.num_train_prompts
    if config.task.name != DATASET_TASK and size > prompts:
        raise ConfigError(f"trainer.policy_mini_batch_size must be <= task.num_train_prompts ({prompts}), got {size}")


def evaluation_alone_has_prompts(config: Config) -> None:
    if not config.trainer.eval_only:
        return
    if not config.evaluation.num_prompts:
        raise ConfigError(
            "evaluation.num_prompts must be >= 1 with trainer.eval_only=true, got 0: nothing would be evaluated"
        )
    if config.task.name == DATASET_TASK and not config.task.eval_files:
        raise ConfigError(
            "task.eval_files must name held-out prompts with trainer.eval_only=true, got []: nothing would be evaluated"
        )


def full_batches_need_groups(config: Config) -> None:
    if config.trainer.fully_async.sample_full_batch and config.generator.n_samples_per_prompt < 2:
        raise ConfigError(
            "generator.n_samples_per_prompt must be >= 2 with trainer.fully_async.sample_full_batch=true, got 1: "
            "rewards of one sample never differ, and every group would be filtered"
        )


def overlong_buffer_fits_the_answer(config: Config) -> None:
    """The penalty ends where a limit cuts the very answers whose length it is of."""
    length, generator = config.trainer.algorithm.overlong_buffer_len, config.generator
    if not length:
        return
    if generator.kind is GeneratorKind.agent:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len must be 0 with generator=agent, got {length}: no limit is of the length of an agent's "
            "episode (server.session_max_tokens counts what a session samples, over all its branches); penalise length by "
            "trainer.algorithm.reward_shaping"
        )
    if generator.max_trajectory_tokens is None and generator.max_turns > 1:
        raise ConfigError(
            f"generator.max_trajectory_tokens must be set with trainer.algorithm.overlong_buffer_len={length} and generator.max_turns="
            f"{generator.max_turns}, got null: generator.sampling.max_tokens bounds a turn, not an episode; where prompts are answered in "
            "one turn, set generator.max_turns=1"
        )
    if length > generator.longest_response:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len must be <= the longest response, {generator.longest_response} tokens "
            f"(generator.max_trajectory_tokens, or generator.sampling.max_tokens where that is null), got {length}"
        )


def reward_shaping_is_a_path(config: Config) -> None:
    path = config.trainer.algorithm.reward_shaping
    module, _, function = (path or "module:function").partition(":")
    if not module or not function:
        raise ConfigError(f"trainer.algorithm.reward_shaping must be module:function, got {path!r}")


def answers_fit_the_context(config: Config) -> None:
    context = config.engine.max_model_len
    if context is None:
        return
    lengths = {
        "generator.sampling.max_tokens": config.generator.sampling.max_tokens,
        "evaluation.sampling.max_tokens": config.evaluation.sampling.max_tokens,
        "generator.max_trajectory_tokens": config.generator.max_trajectory_tokens or 0,
    }
    for key, length in lengths.items():
        if length >= context:
            raise ConfigError(
                f"{key} must be < engine.max_model_len ({context}), which holds the prompt too, got {length}"
            )


def deterministic_engine_is_single(config: Config) -> None:
    engine = config.engine
    if engine.backend is not EngineBackend.deterministic:
        return
    if engine.device is Device.cuda:
        raise ConfigError("engine.device must be cpu with engine.backend=deterministic, got cuda")
    for key, value in (("num_engines", engine.num_engines), ("tensor_parallel_size", engine.tensor_parallel_size)):
        if value != 1:
            raise ConfigError(f"engine.{key} must be 1 with engine.backend=deterministic, got {value}")


def deterministic_engine_is_not_shared(config: Config) -> None:
    if config.engine.backend is not EngineBackend.deterministic or not config.serves_endpoint:
        return
    kind, needs_endpoint = config.generator.kind.name, config.generator.needs_endpoint
    asked, other = (
        (f"generator.kind={kind}", "generator=gym")
        if needs_endpoint
        else ("server.enabled=true", "server.enabled=false")
    )
    raise ConfigError(
        f"engine.backend must be vllm with {asked}, got deterministic: that engine is in the trainer's own process, and those of the "
        f"endpoint would sample from copies that no weight update reaches; set engine=vllm, or {other}"
    )


def generator_entrypoint_is_a_path(config: Config) -> None:
    entrypoint = config.generator.entrypoint
    module, _, function = (entrypoint or "module:function").partition(":")
    if not module or not function:
        raise ConfigError(f"generator.entrypoint must be module:function, got {entrypoint!r}")


def generator_over_http_needs_the_server(config: Config) -> None:
    if config.generator.needs_endpoint and not config.serves_endpoint:
        kind = config.generator.kind.name
        raise ConfigError(f"server.enabled must be true or null with generator.kind={kind}, got false")


def tools_need_an_agent(config: Config) -> None:
    kind = config.generator.kind
    if config.task.name == "trail" and kind is not GeneratorKind.agent and config.generator.entrypoint is None:
        raise ConfigError(f"generator must be agent with task=trail, whose tool the agent runs, got {kind.name}")


def one_function_rewards(config: Config) -> None:
    generator = config.generator
    own = "generator.reward" if generator.reward is not None else "generator.entrypoint"
    is_own_generator = generator.entrypoint is not None and generator.kind is not GeneratorKind.agent
    if config.task.reward is not None and (generator.reward is not None or is_own_generator):
        raise ConfigError(f"task.reward must be null with {own}, which rewards by itself, got {config.task.reward!r}")


def agent_settings_are_of_agents(config: Config) -> None:
    generator = config.generator
    if generator.kind is GeneratorKind.agent:
        if (generator.command is None) == (generator.entrypoint is None):
            found = "neither" if generator.command is None else "both"
            raise ConfigError(
                f"generator.command or generator.entrypoint must be set with generator=agent, one of them, got {found}"
            )
        if generator.rollout_timeout_s <= generator.agent_timeout_s:
            raise ConfigError(
                f"generator.rollout_timeout_s must be > generator.agent_timeout_s ({generator.agent_timeout_s:g}), got "
                f"{generator.rollout_timeout_s:g}: it is of a whole group, waiting for generator.max_concurrent_agents included"
            )
        return
    for key in ("command", "reward", "working_dir", "max_concurrent_agents"):
        if (value := getattr(generator, key)) is not None:
            raise ConfigError(f"generator.{key} needs generator=agent, got {value!r} with {generator.kind.name}")


def resume_says_what_to_continue(config: Config) -> None:
    trainer = config.trainer
    if trainer.resume_mode is ResumeMode.latest and trainer.output_dir is None:
        raise ConfigError("trainer.output_dir must name the run to continue when trainer.resume_mode=latest, got null")
    if trainer.resume_mode is ResumeMode.none and trainer.resume_path is not None:
        raise ConfigError(
            f"trainer.resume_mode must be from_path when trainer.resume_path is set, got {trainer.resume_mode.name}"
        )
    path = trainer.resume_path if trainer.resume_mode is ResumeMode.from_path else None
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise ConfigError(f"trainer.resume_path must be a checkpoint directory, got {path!r}, which is none")


def directories_can_be_made(config: Config) -> None:
    """As far as can be told without making them. By ``os.path``, to which a name that is too long is one of nothing."""
    directories = {
        "trainer.output_dir": config.trainer.output_dir,
        "cache_dir": config.cache_dir,
        "generator.working_dir": config.generator.working_dir,
    }
    for key, value in directories.items():
        path = Path(os.path.expanduser(value or ".")).absolute()
        blocker = next((p for p in (path, *path.parents) if os.path.exists(p)), path)
        if not blocker.is_dir():
            raise ConfigError(f"{key} must be a directory, got {value!r}: {blocker} is a file")
        if value is not None and os.path.expanduser(value).startswith("~"):
            raise ConfigError(f"{key} must be a directory, got {value!r}: there is no user of that name")


def logging_level_exists(config: Config) -> None:
    known = ("DEBUG", "INFO", "WARNING", "ERROR")
    if config.logging.level.upper() not in known:
        raise ConfigError(f"logging.level must be one of {', '.join(known)}, got {config.logging.level!r}")


def wandb_is_installed(config: Config) -> None:
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "logging.wandb must be false while wandb is not installed, got true: install skyrl-async[wandb]"
        )


def dataset_files_exist(config: Config) -> None:
    files_of_key = {"policy.warm_start.files": config.policy.warm_start.files}
    if config.task.name == DATASET_TASK:
        files_of_key |= {"task.train_files": config.task.train_files, "task.eval_files": config.task.eval_files}
    for key, names in files_of_key.items():
        for name in names:
            path = Path(os.path.expanduser(name))
            # DIR/train stands for DIR/train-*.parquet; the loader says what is wrong with what is there.
            shards = (f"{path.name}-*", f"data/{path.name}-*")
            if not os.path.exists(path) and not any(any(path.parent.glob(pattern)) for pattern in shards):
                raise ConfigError(f"{key} must name files that exist, got {name!r} (in {Path.cwd()})")


def server_port_is_free(config: Config) -> None:
    server = config.server
    if not config.serves_endpoint or server.port == 0:
        return
    last = server.port + server.num_front_ends - 1
    if last > MAX_PORT:
        raise ConfigError(
            f"server.port must be <= {MAX_PORT + 1 - server.num_front_ends} with {server.num_front_ends} front ends, "
            f"each on a port of its own, got {server.port}"
        )
    for port in range(server.port, last + 1):
        _require_free(server.host, port)


def _require_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"server.port={port} cannot be bound on server.host={host}: {error.strerror or error}; "
                "choose another, or 0 for a free one"
            ) from error


_RULES: tuple[Callable[[Config], None], ...] = (
    task_is_known,
    reasoning_gym_is_installed,
    tiny_policy_has_something_to_learn,
    tiny_policy_has_whole_heads,
    mini_batch_fits_the_prompts,
    evaluation_alone_has_prompts,
    full_batches_need_groups,
    advantages_can_be_computed,
    overlong_buffer_fits_the_answer,
    reward_shaping_is_a_path,
    policy_loss_can_be_computed,
    divergence_is_known_before_the_step,
    adaptive_coefficient_stays_positive,
    log_probs_are_recomputed_at_a_known_time,
    penalties_leave_rewards_that_maxrl_divides_by,
    logprob_workers_have_work,
    adapters_can_be_served,
    weights_have_a_place,
    ratios_are_of_the_whole_vocabulary,
    deepspeed_settings_are_of_deepspeed,
    deepspeed_can_train,
    answers_fit_the_context,
    deterministic_engine_is_single,
    deterministic_engine_is_not_shared,
    generator_entrypoint_is_a_path,
    generator_over_http_needs_the_server,
    agent_settings_are_of_agents,
    one_function_rewards,
    tools_need_an_agent,
    resume_says_what_to_continue,
    directories_can_be_made,
    logging_level_exists,
    wandb_is_installed,
    dataset_files_exist,
    policy_directory_is_complete,
    reference_directory_is_complete,
    server_port_is_free,
    cuda_is_there,
    vllm_is_built_for_the_device,
    gpus_suffice,
    groups_fit_the_devices,
    ranks_have_gpus_of_their_own,
    transfer_reaches_the_engines,
)
