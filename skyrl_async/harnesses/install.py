"""Environments of harnesses: Python packages or npm packages, each harness in a directory of its own in the cache.

An environment is made once, under a lock, with the versions that its harness is known to work with. One that was not finished is made
again. Nothing of it is visible to the trainer's own Python.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.errors import ConfigError

_EXCLUDE_NEWER = "2026-11-20T00:00:00Z"
"""Newest release date of what the pinned packages bring along, so that an environment is the same whenever it is made."""
_DONE = "installed"
_TIMEOUT_S = 1800.0
_NUM_SHOWN_LINES = 15

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonPackages:
    """Packages of PyPI, pinned."""

    requirements: tuple[str, ...]
    minor: int = 11
    """Lowest Python 3 that they run with."""

    def fill(self, directory: Path) -> None:
        """Make a virtual environment in ``directory``. Raises ``ConfigError``."""
        uv = shutil.which("uv") or os.environ.get("UV")  # which uv sets for what it runs
        if uv is None:
            raise ConfigError("uv must be installed, which makes environments for harnesses: python -m pip install uv")
        own = "--no-config"  # not the settings of a project that the run is started in
        _run([uv, "venv", "-q", own, "--python", _python(uv, self.minor), str(directory)])
        into = ("--python", str(directory / "bin" / "python"), "--exclude-newer", _EXCLUDE_NEWER)
        _run([uv, "pip", "install", "-q", own, *into, *self.requirements])

    @property
    def bin_dir(self) -> str:
        """Where programs are, below the environment's directory."""
        return "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmPackages:
    """Packages of npm, pinned."""

    packages: tuple[str, ...]

    def fill(self, directory: Path) -> None:
        """Install into ``directory``. Raises ``ConfigError``."""
        npm = shutil.which("npm")
        if npm is None:
            raise ConfigError("npm must be installed, with Node.js, for this harness: see https://nodejs.org")
        directory.mkdir(parents=True)
        _run([npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory), *self.packages])

    @property
    def bin_dir(self) -> str:
        """Where programs are, below the environment's directory."""
        return "node_modules/.bin"


def environment_of(name: str, packages: PythonPackages | NpmPackages, *, cache_dir: Path, say: Say) -> Path:
    """Return the directory of programs of a harness's environment, which is made where it is missing.

    Args:
        name: of the harness.
        packages: of the environment.
        cache_dir: where environments are kept.
        say: told when one is made.

    Raises:
        ConfigError: a tool is missing, or the installation failed; with its last lines.
    """
    directory = _directory(name, packages, cache_dir)
    if not (directory / _DONE).exists():
        with _locked(directory.with_suffix(".lock")):
            if not (directory / _DONE).exists():
                say(f"installing {name} into {directory}")
                shutil.rmtree(directory, ignore_errors=True)
                packages.fill(directory)
                (directory / _DONE).touch()
    return directory / packages.bin_dir


def is_installed(name: str, packages: PythonPackages | NpmPackages, cache_dir: Path) -> bool:
    """Whether the environment is there."""
    return (_directory(name, packages, cache_dir) / _DONE).exists()


def _directory(name: str, packages: PythonPackages | NpmPackages, cache_dir: Path) -> Path:
    digest = hashlib.sha256(repr(packages).encode()).hexdigest()[:8]
    return cache_dir.expanduser().absolute() / "harnesses" / f"{name}-{digest}"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the file's lock, which other runs wait for."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"cache_dir must be a directory that can be written to: {error}") from error


def _python(uv: str, minor: int) -> str:
    """A Python of at least 3.``minor``: this one, one that uv finds, one of pyenv's, else the version that uv is to download."""
    if sys.version_info[:2] >= (3, minor):
        return sys.executable
    found = subprocess.run(
        [uv, "python", "find", "--no-config", f">=3.{minor}"], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if found.returncode == 0:
        return found.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    versions = (pyenv.glob(f"versions/3.{other}.*/bin/python") for other in range(minor, minor + 3))
    return next((str(path) for paths in versions for path in sorted(paths)), f"3.{minor}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)} failed: {error}") from error
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_NUM_SHOWN_LINES:])
        raise ConfigError(f"{' '.join(command)} ended with status {done.returncode}:\n{last}")
