"""The built-in tasks by name, and environments by name or by path.

Importing ``skyrl_gym`` takes 1.3 s, so it is imported only when used.
"""

import random
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_async.chat import Tool
from skyrl_async.errors import ConfigError
from skyrl_async.registries import import_function
from skyrl_async.types import Message, Prompt

if TYPE_CHECKING:
    from skyrl_gym.envs.base_text_env import BaseTextEnv

_ENVIRONMENTS = {
    "calculator": "skyrl_async.environments.tools:CalculatorEnv",
    "code": "skyrl_async.environments.answers:CodeEnv",
    "code_multi_turn": "skyrl_async.environments.answers:MultiTurnCodeEnv",
    "gsm8k": "skyrl_async.environments.answers:Gsm8kEnv",
    "lagged_fibonacci": "skyrl_async.tasks.lagged_fibonacci:LaggedFibonacciEnv",
    "math": "skyrl_async.environments.answers:MathEnv",
    "math_verify": "skyrl_async.environments.answers:MathVerifyEnv",
    "python_tool": "skyrl_async.environments.tools:PythonToolEnv",
    "reasoning_gym": "skyrl_async.environments.reasoning_gym:ReasoningGymEnv",
    "relay": "skyrl_async.tasks.relay:RelayEnv",
    "trail": "skyrl_async.tasks.trail:TrailEnv",
}
_REPLACED = "skyrl_gym.envs.gsm8k.env:"
_TASKS = {
    "lagged_fibonacci": "skyrl_async.tasks.lagged_fibonacci:LaggedFibonacciTask",
    "relay": "skyrl_async.tasks.relay:RelayTask",
    "trail": "skyrl_async.tasks.trail:TrailTask",
}


class WarmStartTask(Protocol):
    """A task whose conversations a tiny policy imitates in its warm start.

    A task with function tools puts the same tools, in OpenAI form, into ``extras["tools"]`` of each prompt.
    """

    name: str

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """Return any prompt of the task, held out or not."""

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        """Return the prompt's messages continued by the assistant.

        By default its messages are flawless and leave no choice of words, so that greedy decoding can be compared with them token by
        token. With probability ``terse_share`` they are a guess instead; otherwise single steps are wrong at the rate ``slip_rate``.
        """


class BuiltInTask(WarmStartTask, Protocol):
    """A generated task: prompts for reinforcement, and conversations for the warm start before it."""

    def make_prompts(self, num_train: int, num_eval: int, seed: int) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Return training and held-out prompts, which are disjoint. The same arguments give the same prompts.

        Raises ``ConfigError`` if more are asked for than exist.
        """


def tools_of(prompt: Prompt) -> list[Tool]:
    """Return the function tools of ``prompt`` in OpenAI form; empty without tools."""
    return list(prompt.extras.get("tools") or ())


def get_task(name: str) -> BuiltInTask:
    """Return the built-in task called ``name``. Raises ``ConfigError`` if there is none."""
    if name not in _TASKS:
        raise ConfigError(f"task.name must be dataset or one of the built-in {', '.join(sorted(_TASKS))}, got {name!r}")
    task: BuiltInTask = import_function("task.name", _TASKS[name])()
    return task


def register_environments() -> None:
    """Register the built-in environments with ``skyrl_gym``. Idempotent. An environment registered before stays.

    Only ``skyrl_gym``'s own ``gsm8k`` is replaced: ours gives the same rewards, and also accepts ``$1,000.00`` for 1000.
    """
    from skyrl_gym.envs.registration import register, registry

    for name, entry_point in _ENVIRONMENTS.items():
        if name not in registry or str(registry[name].entry_point).startswith(_REPLACED):
            registry.pop(name, None)
            register(id=name, entry_point=entry_point)


def known_environments() -> tuple[str, ...]:
    """Return the names in the ``skyrl_gym`` registry, the built-in ones included."""
    from skyrl_gym.envs.registration import registry

    register_environments()
    return tuple(sorted(registry))


def make_environment(env_class: str, extras: dict[str, Any]) -> "BaseTextEnv":
    """Return a new environment made with ``extras``.

    Args:
        env_class: a name in the ``skyrl_gym`` registry, or ``module:Class`` of an environment that takes
            ``(env_config=None, extras={})``.
        extras: the row's columns beside the prompt.

    Raises:
        ConfigError: the name or path is unknown.
    """
    import skyrl_gym

    if ":" in env_class:
        environment: BaseTextEnv = import_function("env_class", env_class)(extras=extras)
        return environment
    if env_class not in known_environments():
        raise ConfigError(
            f"env_class must be module:Class or one of {', '.join(known_environments())}, got {env_class!r}; "
            "register your own with skyrl_gym.register, or give its path"
        )
    environment = skyrl_gym.make(env_class, extras=extras)
    return environment


def require_enough_prompts(task_name: str, num_train: int, num_eval: int, *, max_prompts: int) -> None:
    """Raise ``ConfigError`` if more than ``max_prompts`` are asked for."""
    if num_train + num_eval > max_prompts:
        raise ConfigError(
            f"task.num_train_prompts + task.num_eval_prompts must be <= {max_prompts} for task.name={task_name}, "
            f"got {num_train} + {num_eval}; ask for fewer"
        )


def distinct_prompts(
    task: BuiltInTask, num_train: int, num_eval: int, seed: int, *, max_prompts: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Draw training and held-out prompts of different uids. ``max_prompts`` must be far below the number that ``task`` can draw."""
    require_enough_prompts(task.name, num_train, num_eval, max_prompts=max_prompts)
    rng = random.Random(seed)
    prompts: dict[str, Prompt] = {}
    while len(prompts) < num_train + num_eval:
        prompt = task.draw_prompt(rng)
        prompts.setdefault(prompt.uid, prompt)
    chosen = tuple(prompts.values())
    return chosen[num_eval:], chosen[:num_eval]
