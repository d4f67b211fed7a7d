"""The policy versions whose weights a run still has: those it began with, and its checkpoints.

version 0     policy.path, or the tiny policy that its configuration makes
version N     checkpoints/global_step_N, or the export in policy/ after the last step
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skyrl_async.checkpoint.checkpointer import checkpoints_in
from skyrl_async.composition.data import PolicyFiles, prepare_prompts
from skyrl_async.composition.logprobs import training_settings
from skyrl_async.config.load import compose_config, load
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.training.workers.in_process import InProcessPolicy


def read_config(run_dir: Path) -> Config:
    """The configuration of a run, checked on this machine. Raises ``ConfigError``."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} must be the directory of a run, such as outputs/RUN: it has no config.yaml")
    return load(compose_config([], path))


class RunWeights:
    """Finds versions, and writes one as a Hugging Face directory in float32.

    Args:
        run_dir: directory of a run, which may go on.
        config: its configuration.
        work_dir: gets the directories.
    """

    def __init__(self, run_dir: Path, config: Config, work_dir: Path) -> None:
        self._config = config
        self._work_dir = work_dir
        checkpoints = {step: path / "policy" for step, path in checkpoints_in(run_dir / "checkpoints").items()}
        self._found = _exported(run_dir) | checkpoints
        self._initial: Path | None = None

    @property
    def versions(self) -> Sequence[int]:
        """All of them."""
        return sorted({0, *self._found})

    async def initial(self) -> Path:
        """The policy that training began with; makes the tiny policy where it is not cached."""
        if self._initial is None:
            prompts = prepare_prompts(self._config)
            self._initial = await PolicyFiles(self._config, prompts, say=lambda line: None).trained()
        return self._initial

    async def directory(self, version: int) -> Path:
        """A Hugging Face directory of this version. Raises ``CheckpointError`` or ``PolicyError``."""
        if version not in self._found:
            return await self.initial()
        found = self._found[version]
        if (found / "config.json").is_file():
            return found
        directory = self._work_dir / f"version_{version}"
        if not directory.exists():
            settings = training_settings(self._config, await self.initial(), num_steps=1)
            settings = replace(
                settings, deepspeed=None, serve_dtype="float32", has_reference=False, shares_weights=False
            )
            policy = InProcessPolicy(settings)
            try:
                await policy.load(found)
                await policy.export_hf(directory)
            finally:
                await policy.close()
        return directory


def _exported(run_dir: Path) -> dict[int, Path]:
    """``policy/``, if the run's summary says which version it is."""
    try:
        steps = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {int(steps): run_dir / "policy"} if (run_dir / "policy" / "config.json").is_file() else {}
