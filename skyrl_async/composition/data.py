"""What a run learns from and with: its prompts and their environments, and the files of its policy.

Knows neither engines nor training.
"""

import asyncio
import functools
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.rules.algorithm import needs_critic
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.task import BUILT_IN_TASKS, DATASET_TASK, HARBOR_TASK, REASONING_GYM_TASK
from skyrl_async.data.dataloader import EpochPlan, Rotation, weighted
from skyrl_async.data.dataset import filter_long_prompts, load_sources
from skyrl_async.data.sources import rows_of
from skyrl_async.errors import ConfigError, DatasetError, PolicyError
from skyrl_async.generators.gym.environment import EnvironmentFactory, max_turns_of
from skyrl_async.harbor.tasks import load_tasks
from skyrl_async.inference.policy_files import read_config, read_manifest, text_config
from skyrl_async.registries import import_function
from skyrl_async.tasks.imitation import ImitationTask
from skyrl_async.tasks.registry import WarmStartTask, get_task, make_environment
from skyrl_async.training.export.manifest import check_model, read_model
from skyrl_async.types import Prompt
from skyrl_async.weights.formats import TIED_HEAD

if TYPE_CHECKING:
    from skyrl_async.tasks.warm_start import WarmStartProgress

ProgressFn = Callable[[str], None]
"""Takes one line about the current phase."""
_DECLARED_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embeddings whose factor vLLM takes for part of the declared positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The data of a run."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    rotations: tuple[Rotation, ...] = ()
    """Prompts of ``train`` of which an epoch takes only a share; all other prompts are in every epoch."""


def prepare_prompts(config: Config) -> Prompts:
    """Make or load the prompts, and check them with their environments. Raises ``DatasetError`` and ``ConfigError``."""
    task = config.task
    environment_factory(config)
    if task.name == REASONING_GYM_TASK:
        from skyrl_async.environments.reasoning_gym import make_prompts

        source, num_train, num_eval = task.reasoning_gym, task.num_train_prompts, task.num_eval_prompts
        train, held_out = make_prompts(str(source.dataset), source.config, num_train, num_eval, task.seed)
        return Prompts(train=train, held_out=held_out)
    if task.name == HARBOR_TASK:
        train, held_out = (
            () if path is None else load_tasks(Path(path).expanduser(), f"task.harbor.{key}")
            for key, path in (("path", task.harbor.path), ("eval_path", task.harbor.eval_path))
        )
        return Prompts(train=train, held_out=held_out)
    if task.name != DATASET_TASK:
        train, held_out = get_task(task.name).make_prompts(task.num_train_prompts, task.num_eval_prompts, task.seed)
        return Prompts(train=train, held_out=held_out)
    # Rows need no environment where a function judges agents' episodes or all answers.
    needs_environment = config.generator.reward is None and task.reward is None
    load = functools.partial(
        load_sources,
        default_env_class=task.env_class,
        needs_environment=needs_environment,
        check=_check_environment if needs_environment else lambda row: None,
    )
    sources = load([Path(name).expanduser() for name in task.train_files])
    held_out_sources = load([Path(name).expanduser() for name in task.eval_files]) if task.eval_files else ()
    mixed = [weighted(*pair) for pair in zip(sources, task.train_weights or [1.0] * len(sources), strict=True)]
    train = tuple(prompt for prompts, _ in mixed for prompt in prompts)
    _refuse_shared_uids(train)
    return Prompts(
        train=train,
        held_out=tuple(prompt for prompts in held_out_sources for prompt in prompts),
        rotations=tuple(rotation for _, rotation in mixed if rotation is not None),
    )


def environment_factory(config: Config) -> EnvironmentFactory:
    """Return what makes environments. Raises ``ConfigError`` when ``task.reward`` cannot be imported."""
    if config.task.reward is None:
        return make_environment
    function = import_function("task.reward", config.task.reward)
    from skyrl_async.environments.answers import FunctionEnv

    return lambda env_class, extras: FunctionEnv(function, extras)


def epoch_plan(config: Config, prompts: Prompts) -> EpochPlan:
    """Return which of the training prompts each epoch has."""
    return EpochPlan([prompt.uid for prompt in prompts.train], prompts.rotations, seed=config.task.seed)


def _refuse_shared_uids(prompts: Sequence[Prompt]) -> None:
    """Raise ``DatasetError`` when the uid of a copy is also that of a row; loading has checked the rows."""
    (uid, count), *_ = Counter(prompt.uid for prompt in prompts).most_common(1)
    if count > 1:
        raise DatasetError(
            f"the uid {uid!r} of a row is also that of a copy which task.train_weights asks for; rename the row's uid"
        )


def _check_environment(prompt: Prompt) -> None:
    max_turns_of(prompt.extras, 1)  # generators read it whatever the environment does
    make_environment(prompt.env_class, prompt.extras).close()


def _task_to_learn(config: Config, held_out: Sequence[Prompt]) -> WarmStartTask:
    """Return the task that the tiny policy and its tokenizer are made for. Raises ``DatasetError``."""
    if config.task.name in BUILT_IN_TASKS:
        return get_task(config.task.name)
    files = [Path(name).expanduser() for name in config.policy.warm_start.files]
    return ImitationTask((row for file in files for row in rows_of(file)), held_out)


class PolicyFiles:
    """Directories of the policy: one at once for engines to boot from, and one with trained weights for the policy workers."""

    def __init__(self, config: Config, prompts: Prompts, say: ProgressFn) -> None:
        self._config = config
        self._prompts = prompts
        self._say = say
        self._stopped = threading.Event()
        self._task = None if config.policy.path is not None else _task_to_learn(config, prompts.held_out)

    def initial(self) -> Path:
        """Return a directory with architecture and tokenizer; the first publish replaces its weights."""
        if self._config.policy.path is not None:
            return Path(self._config.policy.path).expanduser()
        from skyrl_async.tasks.tiny_policy import prepare_initial_policy

        with self._writing_to_the_cache():
            return prepare_initial_policy(**self._cache_arguments())

    async def served(self) -> Path:
        """Return the policy that engines boot from; its trained weights where only adapters are published, since no publish brings them."""
        return await self.trained() if self._config.policy.lora.served_rank else self.initial()

    async def trained(self) -> Path:
        """Return the policy that training begins with; makes it in a thread where it is not cached."""
        policy = self._config.policy
        if policy.path is not None or not policy.warm_start.enabled:
            return self.initial()
        from skyrl_async.tasks.tiny_policy import prepare_tiny_policy

        prepare = functools.partial(
            prepare_tiny_policy,
            **self._cache_arguments(),
            plan=policy.warm_start,
            held_out=frozenset(prompt.uid for prompt in self._prompts.held_out),
            should_stop=self._stopped.is_set,
            on_progress=self._report,
        )
        try:
            with self._writing_to_the_cache():
                return await asyncio.to_thread(prepare)
        finally:
            self._stopped.set()

    @contextmanager
    def _writing_to_the_cache(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            found = self._config.cache_dir
            raise ConfigError(
                f"cache_dir must be a directory that can be written to, got {found!r}: {error}"
            ) from error

    def _report(self, progress: "WarmStartProgress") -> None:
        goal = self._config.policy.warm_start.target_accuracy
        self._say(
            f"warm start: {progress.phase}, {progress.num_tokens / 1000:.0f}k tokens, accuracy {progress.accuracy:.2f} "
            f"(goal {goal:.2f})"
        )

    def _cache_arguments(self) -> dict[str, Any]:
        from skyrl_async.tasks.tiny_policy import PolicySizes

        config = self._config
        return {
            "cache_dir": Path(config.cache_dir).expanduser(),
            "task": self._task,
            "sizes": from_section(PolicySizes, config.policy),
            "seed": config.trainer.seed,
        }


def num_planned_steps(config: Config, prompts: Prompts) -> int:
    """Optimizer steps of the run: ``trainer.num_steps``, or fewer where the epochs end before (the last mini-batch may be partial)."""
    trainer = config.trainer
    num_prompts = trainer.num_epochs * len(epoch_plan(config, prompts))
    in_epochs = math.ceil(num_prompts / trainer.batch_size) * trainer.steps_per_batch
    return in_epochs if trainer.num_steps is None else min(trainer.num_steps, in_epochs)


def check_critic_warmup(config: Config, prompts: Prompts) -> None:
    """Raise ``ConfigError`` when the run ends before the policy is trained at all."""
    num_steps, warmup_steps = num_planned_steps(config, prompts), config.trainer.critic.warmup_steps
    if needs_critic(config) and 0 < num_steps <= warmup_steps:
        raise ConfigError(
            f"trainer.critic.warmup_steps must be < {num_steps}, the steps that trainer.num_epochs={config.trainer.num_epochs} of "
            f"{len(prompts.train):,} prompts hold, got {warmup_steps}: the policy would never be trained"
        )


def load_renderer(directory: Path, trust_remote_code: bool) -> ChatRenderer:
    """Load the Hugging Face tokenizer of a policy directory.

    Raises ``PolicyError`` when it cannot be read, ``ConfigError`` when it has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of any type, by what is wrong in which file
        raise PolicyError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); download files that are not whole again (a "
            "clone without git lfs has pointers in place of some)"
        ) from error
    return ChatRenderer(tokenizer)


def known_context(config: Config, policy_dir: Path) -> int:
    """Longest prompt plus answer according to the files; engines may allow less, which is known once they are up."""
    if config.engine.max_model_len is not None:
        return config.engine.max_model_len
    return declared_context(policy_dir)


def declared_context(directory: Path, key: str = "policy.path") -> int:
    """Longest prompt plus answer of the model directory that ``key`` names; ``sys.maxsize`` where its files declare none."""
    declared = text_config(read_config(str(directory), key)).get("max_position_embeddings")
    return sys.maxsize if declared is None else int(declared)


def check_positions(config: Config, policy_dir: Path) -> None:
    """Raise ``ConfigError`` if rows that are computed together would change each other's log-probs.

    Where the frequencies of rotary embeddings depend on the length, transformers takes those of the longest row in a micro-batch, and
    vLLM those of the longest context.
    """
    text = text_config(read_config(str(policy_dir)))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    names = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    limit = {**text, **rope}.get(names.get(str(kind), ""))
    context = known_context(config, policy_dir)
    if limit is not None and context > limit:
        raise ConfigError(
            f"engine.max_model_len must be at most {limit} for {policy_dir}, whose {kind} rotary embeddings have other frequencies beyond "
            f"that, got {context}{' (null: that of the model)' if config.engine.max_model_len is None else ''}"
        )


def check_context(config: Config, policy_dir: Path) -> None:
    """Raise ``ConfigError`` if vLLM would refuse the context because the model declares fewer positions, as far as its files say."""
    engine, text = config.engine, text_config(read_config(str(policy_dir)))
    context, positions = engine.max_model_len, text.get("model_max_length") or text.get("max_position_embeddings")
    is_allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")
    if engine.backend is not EngineBackend.vllm or "hf_overrides" in engine.extra_args or is_allowed:
        return
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    of_layers = [rope, *(of_type for of_type in rope.values() if isinstance(of_type, dict))]
    is_scaled = [of for of in of_layers if (of.get("rope_type") or of.get("type")) not in _DECLARED_SCALED]
    factor = max((of.get("factor") or 1.0 for of in is_scaled), default=1.0)
    if context is not None and positions is not None and context > positions * factor:
        raise ConfigError(
            f"engine.max_model_len must be at most {int(positions * factor)}, the positions that {policy_dir}/config.json declares, got "
            f"{context}: vLLM refuses more; if the model can do it, declare that there (max_position_embeddings, rope_parameters)"
        )


def check_overlong_penalty(config: Config, policy_dir: Path) -> None:
    """Raise ``ConfigError`` if no answer that fits the context, after a prompt, is long enough for the penalty."""
    length, context = config.trainer.algorithm.overlong_buffer_len, known_context(config, policy_dir)
    unpenalised = config.generator.longest_response - length
    if length and unpenalised >= context - 1:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len={length} penalises answers of more than {unpenalised} tokens, and none fits the "
            f"context of {context} tokens: set generator.max_trajectory_tokens, or with one turn generator.sampling.max_tokens, to the "
            "longest answer that does"
        )


def check_checkpoint_is_of(checkpoint: Path, policy_dir: Path) -> None:
    """Raise ``CheckpointError`` when file headers show that a checkpoint is of another model; loading it checks the rest."""
    there = read_model(checkpoint / "policy")
    model_type = str(read_config(str(policy_dir)).get("model_type", there.model_type))
    shapes = {name: shape for name, (_, shape) in read_manifest(str(policy_dir)).items()}
    if there.shapes.keys() - shapes.keys() == there.shapes.keys():
        shapes = dict(there.shapes)  # no safetensors, or files whose parameter names differ from the model's
    elif TIED_HEAD not in there.shapes:
        shapes.pop(TIED_HEAD, None)
    check_model(checkpoint / "policy", there, model_type=model_type, shapes=shapes)


def fitting_prompts(prompts: Prompts, renderer: ChatRenderer, max_model_len: int, say: ProgressFn) -> Prompts:
    """Leave out prompts that fill the context, and say which. Raises ``DatasetError`` when none is left, or one cannot be rendered."""

    def num_tokens(prompt: Prompt) -> int:
        try:
            return len(renderer.render(list(prompt.messages)))
        except ValueError as error:
            raise DatasetError(
                f"prompt {prompt.uid!r} cannot be used with policy.path: {error}; mend its row"
            ) from error

    train, dropped = filter_long_prompts(prompts.train, num_tokens, max_model_len - 1)
    held_out, dropped_held_out = filter_long_prompts(prompts.held_out, num_tokens, max_model_len - 1)
    if uids := dropped + dropped_held_out:
        say(f"left out {len(uids)} prompts longer than the context of {max_model_len} tokens: {', '.join(uids[:5])}")
    return replace(prompts, train=train, held_out=held_out)
