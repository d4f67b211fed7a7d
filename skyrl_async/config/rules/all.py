"""Checks a whole configuration, also against this machine, before anything starts.

A rule yields a sentence for each mistake, with the key, the value and what to change. Rules within one class are in ``schema``.
"""

import importlib.util
import os
import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from skyrl_async.config.rules import algorithm, deepspeed, placement, policy
from skyrl_async.config.rules.devices import has_distribution
from skyrl_async.config.schema.engine import Autoscale, EngineBackend
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.generator import AgentAnswer, GeneratorKind
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.server import MAX_PORT
from skyrl_async.config.schema.task import BUILT_IN_TASKS, DATASET_TASK, HARBOR_TASK, REASONING_GYM_TASK
from skyrl_async.config.schema.trainer import ResumeMode
from skyrl_async.errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ENGINE_ARGUMENTS = {
    "model": "policy.path",
    "dtype": "policy.dtype",
    "trust_remote_code": "policy.trust_remote_code",
    "seed": "trainer.seed",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "enforce_eager": "engine.enforce_eager",
    "enable_prefix_caching": "engine.enable_prefix_caching",
    "distributed_executor_backend": None,
    "scheduling_policy": None,
    "skip_tokenizer_init": None,
    "generation_config": None,
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "disable_log_stats": None,
    "enable_logging_iteration_details": None,
}
"""vLLM's arguments that every engine gets from the run -> the key that sets them; None: none does."""


def check(config: Config) -> None:
    """Raise ``ConfigError`` for the first mistake, or ``PolicyError`` for a model's directory."""
    found = chain(mistakes_anywhere(config), *(rules(config) for rules in _RULES_OF_MACHINE))
    if (mistake := next(found, None)) is not None:
        raise ConfigError(mistake)
    policy.check_directories(config)


def mistakes_anywhere(config: Config) -> Iterator[str]:
    """What is wrong whatever machine the run is on."""
    return chain.from_iterable(rules(config) for rules in _RULES)


def task_rules(config: Config) -> Iterator[str]:
    """The task exists, and has prompts enough for what is asked of it."""
    task, trainer, generator = config.task, config.trainer, config.generator
    known, is_dataset = (*BUILT_IN_TASKS, DATASET_TASK, HARBOR_TASK, REASONING_GYM_TASK), task.name == DATASET_TASK
    if task.name not in known:
        yield f"task.name must be one of {', '.join(known)}, got {task.name!r}"
    if task.name == REASONING_GYM_TASK and not has_distribution("reasoning-gym"):
        yield (
            "task.name=reasoning_gym needs the package reasoning-gym, which is not installed: "
            "install skyrl-async[reasoning-gym] (uv run --extra reasoning-gym ...)"
        )
    yield from policy.tiny_policy_rules(config)
    size, prompts = trainer.batch_size, task.num_train_prompts
    makes_prompts = not is_dataset and task.name != HARBOR_TASK
    if makes_prompts and size > prompts:
        key = "policy_mini_batch_size" if trainer.train_batch_size is None else "train_batch_size"
        yield f"trainer.{key} must be <= task.num_train_prompts ({prompts}), got {size}"
    nothing = "nothing would be evaluated"
    if trainer.eval_only and not config.evaluation.num_prompts:
        yield f"evaluation.num_prompts must be >= 1 with trainer.eval_only=true, got 0: {nothing}"
    if trainer.eval_only and makes_prompts and not task.num_eval_prompts:
        yield f"task.num_eval_prompts must be >= 1 with trainer.eval_only=true, got 0: {nothing}"
    if trainer.eval_only and is_dataset and not task.eval_files:
        yield f"task.eval_files must name held-out prompts with trainer.eval_only=true, got []: {nothing}"
    if trainer.eval_only and task.name == HARBOR_TASK and task.harbor.eval_path is None:
        yield f"task.harbor.eval_path must name held-out tasks with trainer.eval_only=true, got null: {nothing}"
    if trainer.fully_async.sample_full_batch and generator.n_samples_per_prompt < 2:
        yield (
            "generator.n_samples_per_prompt must be >= 2 with trainer.fully_async.sample_full_batch=true, got 1: "
            "rewards of one sample never differ, and every group would be filtered"
        )


def length_rules(config: Config) -> Iterator[str]:
    """Answers fit the context, and the overlong penalty ends where a limit cuts the very answers whose length it is about."""
    context, generator = config.engine.max_model_len, config.generator
    length = config.trainer.algorithm.overlong_buffer_len
    lengths = {
        "generator.sampling.max_tokens": generator.sampling.max_tokens,
        "evaluation.sampling.max_tokens": config.evaluation.sampling.max_tokens,
        "generator.max_trajectory_tokens": generator.max_trajectory_tokens or 0,
    }
    for key, longest in lengths.items():
        if context is not None and longest >= context:
            yield f"{key} must be < engine.max_model_len ({context}), which holds the prompt too, got {longest}"
    if not length:
        return
    if generator.kind is GeneratorKind.agent:
        yield (
            f"trainer.algorithm.overlong_buffer_len must be 0 with generator=agent, got {length}: no limit is of the length of an agent's "
            "episode (server.session_max_tokens counts what a session samples, over all its branches); penalise length by "
            "trainer.algorithm.reward_shaping"
        )
    if generator.max_trajectory_tokens is None and generator.max_turns > 1:
        yield (
            f"generator.max_trajectory_tokens must be set with trainer.algorithm.overlong_buffer_len={length} and generator.max_turns="
            f"{generator.max_turns}, got null: generator.sampling.max_tokens bounds a turn, not an episode; where prompts are answered in "
            "one turn, set generator.max_turns=1"
        )
    if length > generator.longest_response:
        yield (
            f"trainer.algorithm.overlong_buffer_len must be <= the longest response, {generator.longest_response} tokens "
            f"(generator.max_trajectory_tokens, or generator.sampling.max_tokens where that is null), got {length}"
        )


def stop_rules(config: Config) -> Iterator[str]:
    """Stop strings are not empty: vLLM and the endpoint refuse such ones."""
    for section, sampling in (("generator", config.generator.sampling), ("evaluation", config.evaluation.sampling)):
        if "" in sampling.stop:
            yield f"{section}.sampling.stop must hold strings that are not empty, got {sampling.stop}"


def path_rules(config: Config) -> Iterator[str]:
    """What names a function has the form of a path."""
    paths = {
        "trainer.algorithm.reward_shaping": config.trainer.algorithm.reward_shaping,
        "generator.entrypoint": config.generator.entrypoint,
        "task.reward": config.task.reward,
    }
    for key, path in paths.items():
        module, _, function = (path or "module:function").partition(":")
        if not module or not function:
            yield f"{key} must be package.module:function, got {path!r}"


def deterministic_engine_rules(config: Config) -> Iterator[str]:
    """That engine is a single one on the CPU, in the trainer's own process."""
    engine, generator = config.engine, config.generator
    if engine.backend is not EngineBackend.deterministic:
        return
    if engine.device is Device.cuda:
        yield "engine.device must be cpu with engine.backend=deterministic, got cuda"
    for key, value in (("num_engines", engine.num_engines), ("tensor_parallel_size", engine.tensor_parallel_size)):
        if value != 1:
            yield f"engine.{key} must be 1 with engine.backend=deterministic, got {value}"
    if config.serves_endpoint:
        asked, other = "server.enabled=true", "server.enabled=false"
        if generator.needs_endpoint:
            asked, other = f"generator.kind={generator.kind.name}", "generator=gym"
        yield (
            f"engine.backend must be vllm with {asked}, got deterministic: that engine is in the trainer's own process, and those of the "
            f"endpoint would sample from copies that no weight update reaches; set engine=vllm, or {other}"
        )


def engine_argument_rules(config: Config) -> Iterator[str]:
    """``engine.extra_args`` are more than what the run gives to vLLM, and never other values of it."""
    for name in sorted(config.engine.extra_args.keys() & ENGINE_ARGUMENTS.keys()):
        key = ENGINE_ARGUMENTS[name]
        why = "weight updates and log-probs rely on what the run sets" if key is None else f"{key} sets it"
        yield f"engine.extra_args must not have {name}, got {config.engine.extra_args[name]!r}: {why}"


def generator_rules(config: Config) -> Iterator[str]:
    """The generator has its endpoint, its harness and one reward."""
    generator, task = config.generator, config.task
    kind, is_agent = generator.kind.name, generator.kind is GeneratorKind.agent
    if generator.needs_endpoint and not config.serves_endpoint:
        yield f"server.enabled must be true or null with generator.kind={kind}, got false"
    harnesses = ("harness", "command", "entrypoint")
    named = [f"generator.{key}" for key in harnesses if getattr(generator, key) is not None]
    if is_agent and len(named) != 1:
        expected = "one of generator.harness, generator.command and generator.entrypoint"
        hint = "" if named else "; a command may follow at the end, after --"
        yield f"{expected} must be set with generator=agent, got {' and '.join(named) or 'none of them'}{hint}"
    if task.name == HARBOR_TASK and (not is_agent or generator.harness is None):
        found = kind if not is_agent else ", ".join(named)
        yield f"generator.harness must name an agent with task=harbor (generator=agent generator.harness=terminus-2), got {found}"
    for key, reward in (("generator.reward", generator.reward), ("task.reward", task.reward)):
        if task.name == HARBOR_TASK and reward is not None:
            yield f"{key} must be null with task=harbor, whose tasks bring verifiers, got {reward!r}"
    is_shipped = generator.harness is not None and task.name != HARBOR_TASK
    if generator.harness_args and not is_shipped:
        where = "generator.harbor.agent_kwargs" if generator.harness is not None else "generator.command"
        yield f"generator.harness_args needs generator.harness and another task than harbor, got {generator.harness_args}; see {where}"
    if is_agent and generator.rollout_timeout_s <= generator.agent_timeout_s:
        yield (
            f"generator.rollout_timeout_s must be > generator.agent_timeout_s ({generator.agent_timeout_s:g}), got "
            f"{generator.rollout_timeout_s:g}: it is of a whole group, waiting for generator.max_concurrent_agents included"
        )
    for key in ("harness", "command", "reward", "working_dir", "max_concurrent_agents"):
        if not is_agent and (value := getattr(generator, key)) is not None:
            yield f"generator.{key} needs generator=agent, got {value!r} with {kind}"
    if generator.answer is AgentAnswer.stdout and generator.command is None:
        yield "generator.answer must be last_message without generator.command, which prints, got stdout"
    own = "generator.reward" if generator.reward is not None else "generator.entrypoint"
    is_own_generator = generator.entrypoint is not None and not is_agent
    if task.reward is not None and (generator.reward is not None or is_own_generator):
        yield f"task.reward must be null with {own}, which rewards by itself, got {task.reward!r}"
    if task.name == "trail" and not is_agent and generator.entrypoint is None:
        yield f"generator must be agent with task=trail, whose tool the agent runs, got {kind}"


def run_rules(config: Config) -> Iterator[str]:
    """What is resumed is there, and logs can be written."""
    trainer, mode = config.trainer, config.trainer.resume_mode
    if mode is ResumeMode.latest and trainer.output_dir is None:
        yield "trainer.output_dir must name the run to continue when trainer.resume_mode=latest, got null"
    if mode is ResumeMode.none and trainer.resume_path is not None:
        yield f"trainer.resume_mode must be from_path when trainer.resume_path is set, got {mode.name}"
    path = trainer.resume_path if mode is ResumeMode.from_path else None
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        yield f"trainer.resume_path must be a checkpoint directory, got {path!r}, which is none"
    yield from _directory_rules(config)
    if config.logging.level.upper() not in _LEVELS:
        yield f"logging.level must be one of {', '.join(_LEVELS)}, got {config.logging.level!r}"
    if config.engine.autoscale is not Autoscale.none and not config.logging.trace:
        yield "logging.trace must be true with engine.autoscale=plan, whose plans are made from it, got false"
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        yield "logging.wandb must be false while wandb is not installed, got true: install skyrl-async[wandb]"


def _directory_rules(config: Config) -> Iterator[str]:
    """As far as can be told without making them. ``os.path`` takes a name that is too long for one that does not exist."""
    directories = {
        "trainer.output_dir": config.trainer.output_dir,
        "cache_dir": config.cache_dir,
        "generator.working_dir": config.generator.working_dir,
    }
    for key, value in directories.items():
        if value == "":
            yield f"{key} must name a directory, got '': is a variable of the shell empty?"
        path = Path(os.path.expanduser(value or ".")).absolute()
        blocker = next((p for p in (path, *path.parents) if os.path.exists(p)), path)
        if not blocker.is_dir():
            yield f"{key} must be a directory, got {value!r}: {blocker} is a file"
        if value is not None and os.path.expanduser(value).startswith("~"):
            yield f"{key} must be a directory, got {value!r}: there is no user of that name"


def file_rules(config: Config) -> Iterator[str]:
    """Datasets exist."""
    files_of_key = {"policy.warm_start.files": config.policy.warm_start.files}
    if config.task.name == DATASET_TASK:
        files_of_key |= {"task.train_files": config.task.train_files, "task.eval_files": config.task.eval_files}
    for key, names in files_of_key.items():
        for name in names:
            path = Path(os.path.expanduser(name))
            # DIR/train stands for DIR/train-*.parquet; the loader says what is wrong with what is there.
            shards = (f"{path.name}-*", f"data/{path.name}-*")
            if not os.path.exists(path) and not any(any(path.parent.glob(pattern)) for pattern in shards):
                yield f"{key} must name files that exist, got {name!r} (in {Path.cwd()})"


def server_rules(config: Config) -> Iterator[str]:
    """The endpoint's host is of this machine, and its ports are free."""
    host, first, num_ports = config.server.host, config.server.port, config.server.num_front_ends
    if not config.serves_endpoint:
        return
    if first + num_ports - 1 > MAX_PORT:
        yield (
            f"server.port must be <= {MAX_PORT + 1 - num_ports} with {num_ports} front ends, each on a port of its own, "
            f"got {first}"
        )
    for port in range(first, first + num_ports) if first else (0,):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                why = error.strerror or error
                if port == 0:
                    yield f"server.host must be a name or address of this machine, got {host!r}: {why}"
                else:
                    yield f"server.port={port} cannot be bound on server.host={host}: {why}; choose another, or 0 for a free one"


_RULES = (
    task_rules,
    *algorithm.RULES,
    policy.adapter_rules,
    deepspeed.rules,
    length_rules,
    stop_rules,
    path_rules,
    deterministic_engine_rules,
    engine_argument_rules,
    generator_rules,
)
_RULES_OF_MACHINE = (run_rules, file_rules, server_rules, placement.rules)
"""Rules about directories, files, ports and devices."""
