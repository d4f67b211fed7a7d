"""The command line: a run's configuration, or one of the texts that are printed instead of a run."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from skyrl_async.config.from_skyrl import command_for
from skyrl_async.config.help import help_text
from skyrl_async.config.load import built, compose_config, load, to_yaml
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError, SkyRLAsyncError

_USAGE_EXIT_CODE = 2


def run_cli(task_function: Callable[[Config, list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Read the command line, and call ``task_function`` with the checked config and the overrides that made it.

    Returns the exit code: the function's own, 0 after ``--help``, ``--cfg job`` and ``--from-skyrl``, 2 after one line on standard error
    when the command line is wrong (then nothing was started).
    """
    try:
        arguments = _parse_arguments(sys.argv[1:] if argv is None else argv)
        overrides: list[str] = arguments.overrides
        if arguments.help:
            sys.stdout.write(help_text())
            return 0
        if arguments.from_skyrl is not None:
            if overrides:
                raise ConfigError(
                    f"--from-skyrl takes a script alone, got {overrides[0]!r} too; give keys to the command it prints"
                )
            sys.stdout.write(command_for(arguments.from_skyrl, os.environ))
            return 0
        composed = compose_config(overrides, arguments.config)
        if arguments.cfg:
            sys.stdout.write(to_yaml(built(composed)))
            return 0
        config = load(composed)
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_EXIT_CODE
    return task_function(config, overrides)


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
