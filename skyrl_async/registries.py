"""The functions that configuration keys name: built-in ones, registered ones, and any that can be imported.

Each name stands for a path ``package.module:function`` with the facts that must be known before anything starts. A path means the same in
every process; a registration holds in its own process only, so other processes get the path. Knows neither torch nor what the functions
compute.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from skyrl_async.errors import ConfigError, did_you_mean


class Unit(StrEnum):
    """What an advantage estimator gives advantages for."""

    SAMPLE = "sample"
    TURN = "turn"
    TOKEN = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEntry:
    """An advantage estimator before it is loaded."""

    path: str
    """``package.module:function``."""
    unit: Unit = Unit.SAMPLE
    needs_mini_batch: bool = False
    """A group's advantages depend on the other groups of its step: nothing of the step is trained before all are there."""
    needs_groups: bool = False
    """A sample alone of its prompt has no advantage."""
    needs_values: bool = False
    """It reads a critic's values of the tokens."""
    needs_baseline: bool = False
    """It reads the mean of what earlier samples of the prompt earned."""
    needs_old_logprobs: bool = False
    """It reads the log-probs of finished rows under the policy, recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossEntry:
    """A policy loss before it is loaded."""

    path: str
    """``package.module:function``."""
    needs_old_logprobs: bool = False
    """It asks for the log-probs of finished rows under the policy, recomputed."""
    marker: str | None = None
    """``package.module:function`` that marks tokens for it among all of a step (``algorithms.policy_losses``): nothing of the step is
    trained before all is there.
    """


E = TypeVar("E", AdvantageEntry, LossEntry)


@dataclass(eq=False)
class Registry(Generic[E]):
    """Names and paths that one configuration key may hold."""

    key: str
    """The configuration key, for messages."""
    kind: type[E]
    """Makes the entry of a function that nobody registered."""
    entries: dict[str, E]
    """Name -> entry; the built-in ones at first."""
    arguments: Callable[[E], tuple[str, ...]]
    """What the function is called with, for messages; their number is checked."""
    other_arguments: str = ""
    """Text that ends the error about a function with other arguments."""

    def __post_init__(self) -> None:
        self._builtin = frozenset(self.entries)

    def register(self, name: str, entry: E) -> None:
        """Add a name, or replace one. Raises ``ConfigError`` for a name that reads as a path."""
        if ":" in name or not name:
            raise ConfigError(f"{self.key} cannot be registered as {name!r}; give a name without a colon")
        self.entries[name] = entry
        self._builtin -= {name}

    def entry(self, name: str) -> E:
        """What is behind a name or path. Raises ``ConfigError``: unknown, not importable, or called otherwise than we would."""
        if name in self.entries:
            return self.entries[name]
        if ":" not in name:
            expected = f"one of {', '.join(sorted(self.entries))}, or package.module:function"
            raise ConfigError(f"{self.key} must be {expected}, got {name!r}{did_you_mean(name, self.entries)}")
        import_function(self.key, name)  # which may register it
        entry = next((entry for entry in self.entries.values() if entry.path == name), self.kind(path=name))
        self.load(entry)
        return entry

    def is_builtin(self, name: str) -> bool:
        """Whether it is a name of ours, and nobody has replaced it."""
        return name in self._builtin

    def portable(self, name: str) -> str:
        """What means the same in other processes. Raises ``ConfigError`` as ``entry``."""
        return name if self.is_builtin(name) else self.entry(name).path

    def load(self, entry: E) -> Callable[..., Any]:
        """The function itself. Raises ``ConfigError`` as ``entry``."""
        function = import_function(self.key, entry.path)
        arguments = self.arguments(entry)
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"{self.key}={entry.path!r} must be a function of ({', '.join(arguments)}), got "
                f"{getattr(function, '__name__', function)}{inspect.signature(function)}: {error}{self.other_arguments}"
            ) from error
        return function


def import_function(key: str, path: str) -> Callable[..., Any]:
    """What ``package.module:function`` names. Raises ``ConfigError`` with the configuration key that asked for it."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{key} must be package.module:function, got {path!r}")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything, and end as a program
        raise ConfigError(f"{key}={path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key}={path!r} must be a function, got {type(function).__name__}")
    return function


def path_of(function: Callable[..., Any]) -> str:
    """The path by which other processes find ``function``. Raises ``ConfigError`` where they could not."""
    path = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in function.__qualname__ or "." in function.__qualname__:
        raise ConfigError(
            f"{path} cannot be imported by other processes; define it at the top of a module, and import that"
        )
    return path


def _estimator(
    module: str, function: str, *, unit: Unit = Unit.SAMPLE, needs_groups: bool = True, **needs: bool
) -> AdvantageEntry:
    path = f"skyrl_async.algorithms.estimators.{module}:{function}"
    return AdvantageEntry(path=path, unit=unit, needs_groups=needs_groups, **needs)


def _estimator_arguments(entry: AdvantageEntry) -> tuple[str, ...]:
    if entry.unit is Unit.SAMPLE:
        rewards = ("rewards", "baseline") if entry.needs_baseline else ("rewards",)
        return ("groups",) if entry.needs_mini_batch else rewards
    return ("groups" if entry.needs_mini_batch else "samples", "constants")


ADVANTAGE_ESTIMATORS = Registry(
    "trainer.algorithm.advantage_estimator",
    AdvantageEntry,
    {
        **{name: _estimator("outcome", f"{name}_advantages") for name in ("grpo", "dr_grpo", "rloo", "maxrl")},
        "reinforce++": _estimator("reinforce_pp", "reinforce_pp_advantages", needs_mini_batch=True, needs_groups=False),
        "reinforce++_baseline": _estimator("reinforce_pp", "reinforce_pp_baseline_advantages", needs_mini_batch=True),
        "turn_rloo": _estimator("turn_rloo", "turn_rloo_advantages", unit=Unit.TOKEN),
        **{name: _estimator(name, f"{name}_advantages", unit=Unit.TURN) for name in ("gigpo", "turn_credit")},
        "running_mean": _estimator("running_mean", "running_mean_advantages", needs_groups=False, needs_baseline=True),
        "gae": _estimator("gae", "gae_advantages", unit=Unit.TOKEN, needs_groups=False, needs_values=True),
        "turn_gae": _estimator("gae", "turn_gae_advantages", unit=Unit.TURN, needs_groups=False, needs_values=True),
    },
    _estimator_arguments,
    "; @register_advantage_estimator(<name>, ...) says what a function takes: unit='turn' or 'token': (samples, constants), "
    "needs_mini_batch=True: groups in place of rewards or samples, needs_baseline=True: (rewards, baseline)",
)


def _path_of_loss(function: str) -> str:
    return f"skyrl_async.algorithms.policy_losses:{function}"


def _loss(function: str, *, needs_old_logprobs: bool = False, marker: str | None = None) -> LossEntry:
    return LossEntry(path=_path_of_loss(function), needs_old_logprobs=needs_old_logprobs, marker=marker)


POLICY_LOSSES = Registry(
    "trainer.algorithm.policy_loss_type",
    LossEntry,
    {
        **{name: _loss("ppo_clip") for name in ("ppo_clip", "regular", "clip_higher")},
        **{name: _loss(name) for name in ("dual_clip", "gspo", "dppo", "rollout_is", "cispo", "sapo")},
        **{name: _loss(name, needs_old_logprobs=True) for name in ("decoupled_ppo", "cispo_old")},
        **{name: _loss(name, marker=_path_of_loss(f"{name}_marks")) for name in ("clip_cov", "kl_cov")},
    },
    lambda entry: ("tokens", "constants"),
)
