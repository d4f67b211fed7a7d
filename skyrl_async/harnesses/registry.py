"""The shipped harnesses by name."""

import logging
from difflib import get_close_matches
from pathlib import Path

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.errors import ConfigError
from skyrl_async.generators.agent.command import CommandHarness
from skyrl_async.harnesses import (
    claude_code,
    codex,
    mini_swe_agent,
    openai_agents,
    opencode,
    qwen_code,
    terminus_2,
    verifiers,
)
from skyrl_async.harnesses.install import Say
from skyrl_async.harnesses.shipped import ShippedHarness, install, shipped_harness

logger = logging.getLogger(__name__)

_MODULES = (codex, claude_code, opencode, qwen_code, mini_swe_agent, terminus_2, openai_agents, verifiers)
HARNESSES: dict[str, ShippedHarness] = {module.HARNESS.name: module.HARNESS for module in _MODULES}


def check_harness(settings: GeneratorConfig, cache_dir: Path, say: Say) -> None:
    """Install the harness that ``settings`` name, where it is missing. Raises ``ConfigError``."""
    install(shipped(str(settings.harness)), cache_dir, say)


def named_harness(settings: GeneratorConfig, cache_dir: Path, run_dir: Path | None) -> CommandHarness:
    """Return the harness that ``settings`` name."""
    harness = shipped(str(settings.harness))
    bin_dir = install(harness, cache_dir, logger.info)
    return shipped_harness(harness, bin_dir, args=settings.harness_args, run_dir=run_dir)


def shipped(name: str) -> ShippedHarness:
    """Return the harness of that name. Raises ``ConfigError``."""
    if name not in HARNESSES:
        near = get_close_matches(name, HARNESSES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        expected = f"generator.harness must be one of {', '.join(HARNESSES)}"
        raise ConfigError(f"{expected} (other programs: generator.command), got {name!r}{hint}")
    return HARNESSES[name]
