"""The part of a Dockerfile that can be done where no image can be had: files, settings, and commands without a network."""

import contextlib
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_async.harbor.runner.sandbox import ENVIRONMENT

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_EMPTY_MOUNT = re.compile(r"[=,]type=(cache|tmpfs)\b")
_HERE_DOCUMENT = re.compile(r"(?<!\S)\d*<<-?(['\"]?)([A-Za-z_]\w*)\1(?!\w)")
_SCRIPT = re.compile(r"<<-?(['\"]?)(\w+)\1\n(.*?)\n?\t*\2", re.DOTALL)
"""A ``RUN`` that is nothing but a here document."""
_IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "SYNTAX")


class CannotBuildError(Exception):
    """An image needs what this machine has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A ``COPY``: files of the build context, and where they go."""

    sources: tuple[Path, ...]
    target: str
    """Ends with a slash if it must be a directory."""
    mode: int | None = None
    """Of ``--chmod``, for all that is copied; None: as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A ``RUN``."""

    argv: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Step:
    """One action of a build, with the state that the lines before it left."""

    action: Copy | Run | None
    """None after the last line: the state of the finished image."""
    workdir: str
    env: dict[str, str] = field(default_factory=dict)
    line: str = ""


def steps(dockerfile: Path) -> Iterator[Step]:
    """Yield the actions of the file's only stage, then the state of the image.

    Variables that the file does not set are the sandbox's. ``FROM`` is not looked at: the caller provides the root file system, whatever
    the image is called. ``USER`` is not either.

    Raises:
        CannotBuildError: a line needs another stage, an archive of the internet, or cannot be read; it is named.
    """
    workdir, env, arguments, num_stages = "/", {}, {}, 0  # type: str, dict[str, str], dict[str, str], int
    shell = ["/bin/sh", "-c"]
    for line in _lines(dockerfile.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        rest, known = rest.strip(), {**ENVIRONMENT, **arguments, **env}
        action: Copy | Run | None = None
        try:
            match word.upper():
                case "FROM":
                    num_stages += 1
                    if num_stages > 1:
                        raise CannotBuildError(f"{line!r} begins a second stage")
                case "WORKDIR":
                    workdir = str(Path(workdir, _filled(rest.strip("\"'"), known)))
                case "ENV" | "ARG":
                    pairs = _pairs(rest, known)
                    (env if word.upper() == "ENV" else arguments).update(pairs)
                case "SHELL":
                    shell = list(json.loads(rest))
                case "COPY" | "ADD":
                    action = _copy(line, _filled(rest, known), dockerfile.parent, workdir)
                case "RUN":
                    action = _run(line, rest, shell)
                case "USER" | "VOLUME":
                    pass
                case ignored if ignored in _IGNORED:
                    pass
                case _:
                    raise CannotBuildError(f"{line!r} cannot be read")
        except (TypeError, ValueError) as error:
            raise CannotBuildError(f"{line!r} cannot be read: {error}") from error
        if action is not None:
            yield Step(action=action, workdir=workdir, env={**arguments, **env}, line=line)
    yield Step(action=None, workdir=workdir, env=dict(env))


def _lines(text: str) -> Iterator[str]:
    """Whole instructions: continued lines joined, comments and empty lines left out, a ``RUN`` with its here documents."""
    parts: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("#") or not line.strip():
            continue
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            whole = " ".join(part.strip() for part in parts).strip()
            yield "\n".join([whole, *_here_documents(whole, lines)])
            parts = []
    if parts:
        yield " ".join(part.strip() for part in parts).strip()


def _here_documents(instruction: str, lines: Iterator[str]) -> Iterator[str]:
    """The next of ``lines`` up to the ends of the here documents that a ``RUN`` begins."""
    names = _HERE_DOCUMENT.findall(instruction) if instruction[:4].upper() == "RUN " else []
    for _, name in names:
        for line in lines:
            yield line
            if line.lstrip("\t") == name:
                break


def _pairs(rest: str, known: dict[str, str]) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME value
        return {words[0]: _filled(rest.partition(" ")[2].strip(), known)} if len(words) > 1 else {}
    return {name: _filled(value, known) for name, _, value in (word.partition("=") for word in words)}


def _filled(text: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[3], found[2] or ""), text)


def _run(line: str, rest: str, shell: list[str]) -> Run:
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        rest = rest.lstrip()
        if flag.startswith("--mount") and not _EMPTY_MOUNT.search(flag):
            raise CannotBuildError(f"{line!r} needs a mount of files")
    if script := _SCRIPT.fullmatch(rest):
        if script[3].startswith("#!"):
            raise CannotBuildError(f"{line!r} names an interpreter")
        return Run(argv=(*shell, script[3]))
    with contextlib.suppress(ValueError):  # not a list, but a test of the shell's: [ -f x ]
        if rest.startswith("["):
            return Run(argv=tuple(json.loads(rest)))
    return Run(argv=(*shell, rest))


def _copy(line: str, rest: str, context: Path, workdir: str) -> Copy:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    flags = [word for word in words if word.startswith("--")]
    *sources, target = [word for word in words if not word.startswith("--")] or [""]
    if not sources:
        raise CannotBuildError(f"{line!r} must name files and where they go")
    if any(flag.startswith("--from") for flag in flags) or any("://" in source for source in sources):
        raise CannotBuildError(f"{line!r} needs another image or a network")
    if any(source.startswith("<<") for source in sources):
        raise CannotBuildError(f"{line!r} has a file in a here document: put it into {context.name}/")
    patterns = [os.path.normpath(source.lstrip("/")) for source in sources]
    found = [path for name in patterns for path in ([context] if name == "." else sorted(context.glob(name)))]
    inside = [path for path in found if path.resolve().is_relative_to(context.resolve())]
    if not inside:
        raise CannotBuildError(f"{line!r} names files that are not in {context.name}/")
    if line[:4].upper() == "ADD " and any(path.is_file() and tarfile.is_tarfile(path) for path in inside):
        raise CannotBuildError(f"{line!r} unpacks an archive: unpack it in {context.name}/")
    is_directory = target.endswith("/") or target in (".", "..") or len(inside) > 1 or inside[0].is_dir()
    mode = next((int(flag.partition("=")[2], 8) for flag in flags if flag.startswith("--chmod=")), None)
    return Copy(sources=tuple(inside), target=str(Path(workdir, target)) + ("/" if is_directory else ""), mode=mode)
