"""Every key with its type, default and text: for ``--help``, for "did you mean", and for the configuration reference."""

import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from skyrl_async.config.schema.fields import text_of, value_text
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.run import Config

_EXAMPLES = (
    ("the default task and the tiny policy, at most 4 steps stale", "trainer.max_staleness_steps=4"),
    ("the multi-turn task", "task=relay"),
    ("synchronous training, for comparison", "trainer.max_staleness_steps=0"),
    ("environments played over /chat/completions", "generator.kind=gym_http"),
    ("your own agent, a program that asks an OpenAI endpoint", "generator=agent -- python agent.py --fast"),
    ("your own model and data", "policy=hf policy.path=DIR task=dataset 'task.train_files=[train.jsonl]'"),
    ("two GPUs: one samples, one trains", "policy=hf policy.path=DIR engine.device=cuda training.device=cuda"),
    ("continue a run", "--config outputs/RUN/config.yaml trainer.output_dir=outputs/RUN trainer.resume_mode=latest"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration."""

    name: str
    """Dotted, such as ``trainer.max_staleness_steps``."""
    type_text: str
    """Its values for people: ``int or null``, ``abort or keep``."""
    default: str
    """As one would write it on the command line."""
    owner: type
    """The class that the key is a field of."""
    is_open: bool
    """Takes further keys below it (a dictionary)."""

    @property
    def text(self) -> str:
        """What the key does."""
        return text_of(self.owner, self.name.rpartition(".")[2])


@cache
def all_keys() -> dict[str, Key]:
    """Every key that holds a value, by name, in the order of the schema."""
    return {key.name: key for key in _walk(Config, "")}


def sections() -> dict[str, str]:
    """Name of each section at the top of the configuration -> what it is about."""
    return {f.name: text_of(Config, f.name) for f in fields(Config) if is_dataclass(get_type_hints(Config)[f.name])}


def _walk(owner: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(owner)
    for one in fields(owner):
        name, hint = f"{prefix}{one.name}", hints[one.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint, f"{name}.")
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        is_open = get_origin(hint) is dict
        yield Key(name=name, type_text=type_text(hint), default=value_text(default), owner=owner, is_open=is_open)


def type_text(hint: Any) -> str:
    """A type for people."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_text(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_text(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "dictionary"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(member.name for member in hint)
    return {str: "text", bool: "true or false", int: "integer", float: "number"}.get(hint, str(hint))


def help_text(width: int = 100) -> str:
    """What ``--help`` prints."""
    command = "python -m skyrl_async.main"
    lines = [
        "skyrl_async: a fully asynchronous RL trainer for language-model agents.",
        "",
        f"usage: {command} [key=value ...] [group=option ...] [--config FILE] [--cfg job] [--help] [-- COMMAND]",
        "",
        "  --config FILE  start from a yaml file, such as a run's config.yaml, instead of the groups' defaults",
        "  --cfg job      print the whole configuration as yaml and stop",
        "  --from-skyrl SCRIPT  print our command for a launch script of SkyRL's and stop",
        "  --help         print this and stop",
        "  -- COMMAND     train through an agent: the rest of the line is its command (sets generator.kind and generator.command)",
        "",
        "examples:",
    ]
    for text, arguments in _EXAMPLES:
        lines += [f"  # {text}", f"  {command} {arguments}"]
    lines += ["", "groups (the first option is the default):"]
    for group, options in GROUPS.items():
        lines += [f"  {f'{group}={name}':<24}{option.text}" for name, option in options.items()]
    for section in (*sections(), ""):
        lines += ["", *_section_lines(section, width)]
    return "\n".join(lines) + "\n"


def _section_lines(section: str, width: int) -> list[str]:
    about = sections().get(section, "")
    lines = [f"{section or 'other keys'}{': ' + about if about else ''}"]
    for key in keys_of(section):
        toy = toy_values().get(key.name)
        lines.append(f"  {key.name}={key.default}  ({key.type_text}{f'; policy=tiny sets {toy}' if toy else ''})")
        lines += textwrap.wrap(key.text, width, initial_indent="      ", subsequent_indent="      ")
    return lines


def keys_of(section: str) -> list[Key]:
    """Keys of a section; of the empty one, those that are in none."""
    return [key for name, key in all_keys().items() if name.rpartition(".")[0].split(".")[0] == section]


@cache
def toy_values() -> dict[str, str]:
    """What the default policy sets to something else than the schema's default, as one would write it."""
    values = {key: value_text(value) for key, value in flat(GROUPS["policy"]["tiny"].values)}
    return {key: value for key, value in values.items() if value != all_keys()[key].default}


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value of nested dictionaries with its dotted key; an empty dictionary is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
