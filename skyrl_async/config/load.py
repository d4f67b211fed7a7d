"""From overrides to a checked ``Config``: the one place that knows hydra, of which it takes the grammar of overrides.

overrides, group choices, yaml file ──> compose_config ──> load ──> Config, or one ConfigError for all mistakes
"""

import copy
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from skyrl_async.config.coming_from import hint_for, hint_for_value
from skyrl_async.config.help import all_keys
from skyrl_async.config.rules import all as rules
from skyrl_async.config.schema.fields import check_bounds
from skyrl_async.config.schema.groups import GROUPS, default_option
from skyrl_async.config.schema.run import SECRETS, Config
from skyrl_async.errors import ConfigError, did_you_mean

_SEE_HELP = "--help lists every key"
_ESCAPING = "; ${...} stands for another key's value: write \\${...} for the text"


def load(cfg: DictConfig) -> Config:
    """Build the config object and check it against this machine. Raises ``ConfigError`` or ``PolicyError``."""
    config = built(cfg)
    rules.check(config)
    return config


def from_overrides(*overrides: str) -> Config:
    """The checked config that command-line overrides give: ``from_overrides("task=relay", "trainer.seed=3")``."""
    return load(compose_config(overrides))


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """A copy of the configuration with other values; ``keys`` are dotted."""
    copied = copy.deepcopy(config)
    for key, value in keys.items():
        *sections, name = key.split(".")
        section: Any = copied
        for one in sections:
            section = getattr(section, one)
        setattr(section, name, value)
    return copied


def to_yaml(config: Config) -> str:
    """Every key with its value, enums by name; ``--config`` reads it back."""
    return yaml.safe_dump(_without_interpolations(_plain(config)), sort_keys=False)


def without_secrets(config: Config) -> dict[str, Any]:
    """The configuration as plain values, for trackers that leave the machine: keys are left out, and the staleness bound is a number."""
    plain = _plain(config)
    for key in SECRETS:
        *sections, name = key.split(".")
        reduce(dict.__getitem__, sections, plain)[name] = None
    plain["trainer"]["max_staleness_steps"] = config.trainer.staleness_bound
    return plain


def _plain(config: Config) -> dict[str, Any]:
    """Plain values, enums by name. Not by omegaconf, which would look for other keys in a text with ``${``."""
    return asdict(config, dict_factory=lambda pairs: {k: v.name if isinstance(v, Enum) else v for k, v in pairs})


def compose_config(overrides: Sequence[str], file: Path | None = None) -> DictConfig:
    """Put groups or ``file`` together with overrides. Raises one ``ConfigError`` for all that is unknown or mistyped."""
    mistakes: list[str] = []
    parsed: list[Override] = []
    chosen: dict[str, str] = {}
    for text in overrides:
        with _noted(mistakes):
            override = _parse_override(text)
            if override.key_or_group in GROUPS and not isinstance(override.value(), dict):
                chosen[override.key_or_group] = _checked_choice(override, file)
            else:
                parsed.append(override)
    if file is None:
        choices = [GROUPS[group][chosen.get(group, default_option(group))] for group in GROUPS]
        tree = merged(*(choice.values for choice in choices))
    else:
        tree = merged()
        for section, below in _read_file(file).items():
            _set_leaves(tree, section, below, mistakes, f"{file}: ")
    for override in parsed:
        key = str(override.key_or_group)
        value = _with_text(key, override.value(), _as_written(str(override.input_line).partition("=")[2]))
        _set_leaves(tree, key, value, mistakes)
    given = {name for override in parsed for name, _ in _leaves(str(override.key_or_group), override.value())}
    if file is None and "trainer.num_steps" not in given:
        _round_steps(tree.trainer)
    if mistakes:
        lines = [f"{len(mistakes)} settings are wrong:", *mistakes]
        raise ConfigError(mistakes[0] if len(mistakes) == 1 else "\n  ".join(lines))
    for group, choice in chosen.items():
        for key in GROUPS[group][choice].required:
            if not tree[group][key]:
                raise ConfigError(f"{group}.{key} must be set with {group}={choice}: add {group}.{key}=...")
    return tree


def _round_steps(trainer: DictConfig) -> None:
    """Round a group's number of steps up to whole batches. What is wrong in a batch is said when the config is built."""
    with suppress(OmegaConfBaseException):
        num_steps, mini, size = trainer.num_steps, trainer.policy_mini_batch_size, trainer.train_batch_size
        of_batch = (size or mini) // max(mini, 1) * trainer.update_epochs_per_batch
        if num_steps is not None and of_batch > 0:
            trainer.num_steps = math.ceil(num_steps / of_batch) * of_batch


def merged(*values: dict[str, Any]) -> DictConfig:
    """The schema with values of groups."""
    tree = OmegaConf.merge(_schema(), *values)
    assert isinstance(tree, DictConfig)
    return tree


@contextmanager
def _noted(mistakes: list[str], prefix: str = "") -> Iterator[None]:
    """Add what is refused inside to ``mistakes``, so that the others are found too."""
    try:
        yield
    except ConfigError as error:
        mistakes.append(f"{prefix}{error}")


def _parse_override(text: str) -> Override:
    key, _, value = text.partition("=")
    if "=" not in text or not key:
        raise ConfigError(f"cannot read {text!r}; write key=value. {_SEE_HELP}")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if key not in GROUPS:
            _check_key(key.lstrip("+~"))
        raise ConfigError(f"cannot read {text!r}: {_first_line(error)}; {_quoting(key, value)}") from error
    if override.is_delete():
        raise ConfigError(f"{text!r}: keys cannot be removed; set {key.lstrip('~')} to another value")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} holds several values and a run takes one; {_quoting(key, value)}")
    return override


def _quoting(key: str, value: str) -> str:
    """How to write ``value`` in a shell, so that hydra reads it as it is."""
    if key in all_keys() and "list" in all_keys()[key].type_text:
        texts = ",".join(quoted(text.strip(" '\"")) for text in value.strip("[]").split(","))
        return f"write each text in double quotes, in a list: {shlex.quote(f'{key}=[{texts}]')}"
    return f"write text with special characters in double quotes: {shlex.quote(f'{key}={quoted(value)}')}"


def quoted(text: str) -> str:
    """A text in the grammar of overrides."""
    return str(QuotedString(_without_interpolations(text), Quote.double).with_quotes())


def _without_interpolations(tree: Any) -> Any:
    """``tree`` with every text in it such that omegaconf takes its ``${...}`` for what they are."""
    if isinstance(tree, dict):
        return {name: _without_interpolations(below) for name, below in tree.items()}
    if isinstance(tree, list):
        return [_without_interpolations(below) for below in tree]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", tree) if isinstance(tree, str) else tree


def _checked_choice(override: Override, file: Path | None) -> str:
    group, name = str(override.key_or_group), str(override.value())
    if file is not None:
        raise ConfigError(f"{group}={name} cannot be chosen beside {file}, which sets every key of {group} itself")
    if name not in GROUPS[group]:
        raise ConfigError(
            f"{group} must be one of {', '.join(GROUPS[group])}, got {name!r}{did_you_mean(name, GROUPS[group])}"
        )
    return name


def _as_written(text: str) -> Any:
    """The values in a text, numbers and words like true too as the text that they are; None where it is no yaml."""
    try:
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        return None


def _with_text(key: str, value: Any, written: Any) -> Any:
    """``value``, but below keys that hold text as it is ``written``: 1e3 is not 1000.0, nor true True."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {name: _with_text(f"{key}.{name}", below, written.get(name)) for name, below in value.items()}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_with_text(key, below, text) for below, text in zip(value, written, strict=True)]
    is_text = key in all_keys() and "text" in all_keys()[key].type_text
    return written if is_text and isinstance(value, int | float) and isinstance(written, str) else value


def _set_leaves(tree: DictConfig, key: str, value: Any, mistakes: list[str], prefix: str = "") -> None:
    """Set what ``key=value`` says in ``tree``; what is wrong with it goes to ``mistakes``."""
    for name, leaf in _leaves(key, value):
        with _noted(mistakes, prefix):
            _check_key(name)
            set_value(tree, name, leaf)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every single key that ``key=value`` sets; a dictionary given to a section sets several."""
    if isinstance(value, dict) and key not in all_keys() and not _is_free(key):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value


def _is_free(key: str) -> bool:
    """Whether ``key`` is below one that holds a dictionary."""
    return any(known.is_open and key.startswith(f"{name}.") for name, known in all_keys().items())


def _check_key(key: str) -> None:
    if key in all_keys() or _is_free(key):
        return
    prefix = f"{key}."
    if known := [name.removeprefix(prefix) for name in all_keys() if name.startswith(prefix)]:
        raise ConfigError(f"{key} is a section; set one of its keys ({', '.join(known[:4])}, ...). {_SEE_HELP}")
    raise ConfigError(f"unknown key {key!r}{hint_for(key) or f' ({_SEE_HELP})'}")


@cache
def _schema() -> DictConfig:
    """The typed tree of every key, which takes a while to make."""
    return OmegaConf.structured(Config)


def set_value(tree: DictConfig, key: str, value: Any) -> None:
    """Set a key. Raises ``ConfigError`` for a value that it cannot hold."""
    try:
        # Keys of an open dictionary are not in the schema.
        OmegaConf.update(tree, key, value, merge=True, force_add=_is_free(key))
    except GrammarParseError as error:
        raise ConfigError(f"{key}: {_first_line(error)}{_ESCAPING}") from error
    except OmegaConfBaseException as error:
        known = all_keys()[key]
        words = known.type_text.split(" or ")
        hint = hint_for_value(key, value) or (did_you_mean(value, words) if isinstance(value, str) else "")
        hint = f"; write {key}={{name: {value}}}" if known.is_open else hint
        raise ConfigError(f"{key} must be {known.type_text}, got {value!r}{hint}") from error


def _read_file(file: Path) -> dict[str, Any]:
    """The sections of a yaml file."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
        written = _as_written(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a yaml file") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} is no yaml: {' '.join(str(error).split())}") from error
    # omegaconf takes a word for a key, and nothing for no keys.
    if not isinstance(tree, dict) or not isinstance(written, dict):
        found = type(written).__name__ if written else "nothing"
        raise ConfigError(f"{file} must hold a mapping of sections, got {found}")
    return {str(name): _with_text(str(name), below, written.get(name)) for name, below in tree.items()}


def built(cfg: DictConfig) -> Config:
    """The config object, each section checked by itself. Raises ``ConfigError``."""
    try:
        built = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        hint = _ESCAPING if isinstance(error, InterpolationResolutionError) else ""
        raise ConfigError(f"{key or 'configuration'}: {_first_line(error)}{hint}") from error
    assert isinstance(built, Config)
    check_bounds(built)
    return built


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
