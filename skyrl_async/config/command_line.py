"""The command line: a run's configuration, or one of the texts that are printed instead of a run."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from skyrl_async.config.from_skyrl import command_for
from skyrl_async.config.help import all_keys, help_text
from skyrl_async.config.load import built, compose_config, load, quoted, to_yaml
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.run import SECRETS, Config
from skyrl_async.errors import ConfigError, SkyRLAsyncError

_USAGE_EXIT_CODE = 2
_END = "--"
"""Ends the settings; an agent's command follows."""
_SECRET = re.compile(
    rf"\b((?:{'|'.join({key.rpartition('.')[2] for key in SECRETS})})['\"]?\s*[=:]\s*)"
    r"(?:\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?|(?:\\.|[^,}\\])*)"
)
"""Name of a secret, and its value: in quotes, or up to the end or the next key of a dictionary."""
_HARNESSES = ("generator.command", "generator.entrypoint", "generator.harness")


def run_cli(task_function: Callable[[Config, list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Read the command line, and call ``task_function`` with the checked config and the overrides that made it.

    What follows ``--`` is an agent's command; the overrides hold it as ``generator.kind`` and ``generator.command``.

    Returns the exit code: the function's own, 0 after ``--help``, ``--cfg job`` and ``--from-skyrl``, 2 after one line on standard error
    when the command line is wrong (then nothing was started).
    """
    try:
        settings, agent = _split(sys.argv[1:] if argv is None else argv)
        arguments = _parse_arguments(settings)
        overrides: list[str] = arguments.overrides
        if arguments.help:
            sys.stdout.write(help_text())
            return 0
        if arguments.from_skyrl is not None:
            if overrides or agent is not None:
                found = repr(overrides[0]) if overrides else _END
                raise ConfigError(
                    f"--from-skyrl takes a script alone, got {found} too; give keys to the command it prints"
                )
            sys.stdout.write(command_for(arguments.from_skyrl, os.environ))
            return 0
        if agent is not None:
            overrides = [*overrides, *_overrides_of(agent, overrides)]
        composed = compose_config(overrides, arguments.config)
        if arguments.cfg:
            sys.stdout.write(to_yaml(built(composed)))
            return 0
        config = load(composed)
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_EXIT_CODE
    return task_function(config, overrides)


def masked(override: str) -> str:
    """The override as it may be logged: ``api_key=***`` in place of a secret, in a dictionary too."""
    return _SECRET.sub(r"\1***", override)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The settings, and the words of the agent's command after ``--``; None without it."""
    words = list(argv)
    at = words.index(_END) if _END in words else len(words)
    return words[:at], words[at + 1 :] if at < len(words) else None


def _overrides_of(agent: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The overrides that make ``agent``, a command's words, the harness of a run. Raises ``ConfigError`` beside other ``overrides``."""
    if not any(word.strip() for word in agent):
        raise ConfigError(f"{_END} must be followed by the agent's command, such as: {_END} python agent.py")
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key in _HARNESSES and value != "null":
            raise ConfigError(f"{key} must not be given beside a command after {_END}, got {text!r}; leave one out")
        if key in ("generator", "generator.kind") and value != "agent":
            raise ConfigError(f"{key} must be agent with a command after {_END}, got {value!r}; leave it out")
    for text in agent:
        key, _, value = text.partition("=")
        if "=" in text and (key in all_keys() or value in GROUPS.get(key, ())):
            raise ConfigError(
                f"{text} must stand before {_END}, after which all is the agent's command; if it is the agent's, write the "
                "command as generator.command=..."
            )
    return ["generator.kind=agent", f"generator.command={quoted(shlex.join(agent))}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows the usage")


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config", type=Path)
    parser.add_argument("--from-skyrl", type=Path)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(argv)
