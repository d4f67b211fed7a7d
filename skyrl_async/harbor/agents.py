"""Harbor's agents that work inside a task's environment with a shipped harness's program: how each asks the policy, and nobody else.

Flows in: an agent's name, a sample's task. Flows out: fields of Harbor's ``AgentConfig``, and what a local sandbox sees of the programs.
"""

import json
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_async.config.schema.generator import HarborConfig
from skyrl_async.errors import ConfigError
from skyrl_async.generators.agent.command import session_variables
from skyrl_async.generators.agent.harness import AgentTask
from skyrl_async.harnesses.install import NpmPackages, Say
from skyrl_async.harnesses.registry import HARNESSES
from skyrl_async.harnesses.shipped import ShippedHarness, filled, install, limits_of

_LIBRARIES = ("lib", "lib64")
"""Directories beside an interpreter's own that it may need."""
_OWN_PLACES = ("$HOME", "$TMPDIR")
"""Harbor's agents choose where their programs keep files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """An agent of Harbor's."""

    harness: str
    """The shipped one with its program."""
    provider: str = "openai"
    """Before the model's name: Harbor takes the route and the address from it."""
    settings: str | None = None
    """Its keyword for the program's settings; None: variables are enough."""


_AGENTS = {
    "claude-code": _Agent(harness="claude-code", provider="anthropic"),
    "codex": _Agent(harness="codex", settings="config"),
    "mini-swe-agent": _Agent(harness="mini-swe-agent"),
    # With OpenAI's name it would take OpenAI's route of today, and a small model of OpenAI's for titles.
    "opencode": _Agent(harness="opencode", provider="policy", settings="opencode_config"),
    "qwen-coder": _Agent(harness="qwen-code", settings="config"),
}


def harbor_name(name: str) -> str:
    """Harbor's name of an agent, which may be given by the name of its shipped harness."""
    return next((harbor for harbor, agent in _AGENTS.items() if agent.harness == name), name)


def works_inside(name: str) -> bool:
    """Whether the agent's program runs in the task's environment, and asks the policy from there."""
    return name in _AGENTS


def agent_config(name: str, task: AgentTask) -> dict[str, Any]:
    """Fields of Harbor's ``AgentConfig`` for the agent of that name, or of a ``module:Class``, with the task's session."""
    kind = {"import_path": name} if ":" in name else {"name": name}
    session = session_variables(task)
    if (agent := _AGENTS.get(name)) is None:
        return {**kind, "model_name": f"openai/{task.model}", "base_url": task.base_url, "env": session, "kwargs": {}}
    harness, values = HARNESSES[agent.harness], session | limits_of(task)
    variables = {
        key: filled(text, values)
        for key, text in harness.variables.items()
        if not any(place in text for place in _OWN_PLACES)
    }
    is_anthropic = agent.provider == "anthropic"
    return {
        **kind,
        "model_name": f"{agent.provider}/{task.model}",
        "base_url": session["ANTHROPIC_BASE_URL"] if is_anthropic else task.base_url,
        "env": session | variables,
        "kwargs": {} if agent.settings is None else {agent.settings: _settings(harness, values)},
    }


def _settings(harness: ShippedHarness, values: dict[str, str]) -> dict[str, Any]:
    """The harness's only file, read."""
    ((path, text),) = harness.files.items()
    read = tomllib.loads if path.endswith(".toml") else json.loads
    settings: dict[str, Any] = read(filled(text, values))
    return settings


def install_programs(name: str, cache_dir: Path, say: Say) -> Path | None:
    """Return the directory of the agent's programs, which are installed where they are missing; None: Harbor installs them.

    Raises ``ConfigError``.
    """
    agent = _AGENTS.get(name)
    return None if agent is None else install(HARNESSES[agent.harness], cache_dir, say)


def with_programs(settings: HarborConfig, name: str, bin_dir: Path) -> HarborConfig:
    """The settings with the agent's programs in every local sandbox, at their own paths: Harbor would install them from the internet.

    Raises ``ConfigError`` if they cannot be shown to it without the home directory.
    """
    if isinstance(HARNESSES[_AGENTS[name].harness].packages, NpmPackages):
        environment, interpreter = bin_dir.parent.parent, _node(name)
    else:
        environment, interpreter = bin_dir.parent, (bin_dir / "python").resolve()
    libraries = [place for lib in _LIBRARIES if (place := interpreter.parent.parent / lib).is_dir()]
    places = [place for place in (environment, interpreter.parent, *libraries) if not place.is_relative_to("/usr")]
    for place in places:
        if Path.home().resolve().is_relative_to(place.resolve()):
            raise ConfigError(
                f"generator.harness={name} needs {interpreter}, but {place}, which would be seen in the sandbox, holds the home directory: "
                "install it elsewhere, such as in /usr/local"
            )
    kwargs = {
        "read_only": [(str(place), str(place)) for place in places],
        "path_prefix": f"{bin_dir}:{interpreter.parent}:",
    }
    return replace(
        settings,
        environment_kwargs=kwargs | settings.environment_kwargs,
        agent_kwargs={"skip_install": True} | settings.agent_kwargs,
    )


def _node(name: str) -> Path:
    node = shutil.which("node")
    if node is None:
        raise ConfigError(f"generator.harness={name} needs Node.js: see https://nodejs.org; node was not found")
    return Path(node).resolve()
