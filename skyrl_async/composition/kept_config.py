"""The configuration that a run keeps in its directory, for ``--config``; a run that is continued replaces it once it goes on.

Flows in: the checked configuration. Flows out: ``config.yaml``, and what it changes of a run that is continued.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from skyrl_async.composition.private_files import write_private
from skyrl_async.config.load import to_yaml
from skyrl_async.config.schema.run import Config

_UNSAID = {"trainer.resume_mode", "trainer.resume_path", "trainer.output_dir", "server.api_key"}
"""How a run is continued, not what it is; and a secret."""


class KeptConfig:
    """``config.yaml`` of a run directory.

    Args:
        run_dir: exists.
        config: checked.
        step: of the checkpoint that the run goes on from, None for a new run: its configuration is written at once.
    """

    def __init__(self, run_dir: Path, config: Config, step: int | None) -> None:
        self._path = run_dir / "config.yaml"
        # As a remark: a bound that nobody set must not stand against another schedule, which has its own.
        self._text = f"# the staleness bound is {config.trainer.staleness_bound}\n{to_yaml(config)}"
        self._is_of_the_run = not config.trainer.eval_only
        self._step = step
        if step is None or not self._path.exists():
            write_private(self._path, self._text)

    def changes(self) -> list[str]:
        """What differs from the run so far, as ``training.lr=0.0008 (was 0.0003)``; nothing where its configuration cannot be read."""
        try:
            before = dict(_values(yaml.safe_load(self._path.read_text())))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return []
        now = dict(_values(yaml.safe_load(self._text)))
        return [
            f"{key}={value} (was {before[key]})"
            for key, value in now.items()
            if key in before and value != before[key] and key not in _UNSAID
        ]

    def goes_on(self) -> None:
        """The run was taken up: from now on this is its configuration. The one before stays, named by the step up to which it held."""
        if self._step is None or not self._is_of_the_run:
            return
        if self.changes():
            write_private(self._path.with_name(f"config_to_step_{self._step}.yaml"), self._path.read_text())
        arriving = self._path.with_name("config.yaml.new")
        write_private(arriving, self._text)
        arriving.replace(self._path)  # at no moment there is none


def _values(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _values(value, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, tree
