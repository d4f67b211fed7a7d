"""Directories of Harbor tasks as prompts: ``task.toml``, ``instruction.md``, ``environment/``, ``tests/``, perhaps ``solution/``.

Reads files only. Whether an image can be built is known once a trial tries.
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_async.errors import DatasetError
from skyrl_async.types import Prompt

TASK_COLUMN = "harbor_task"
"""Extra that holds the task's directory."""
ENV_CLASS = "harbor"
"""Environment of the prompts, which no environment of this process judges."""
_MAX_SHOWN = 10


def load_tasks(directory: Path, key: str) -> tuple[Prompt, ...]:
    """Return a prompt per task, in order of their names.

    Args:
        directory: a task, or a directory of tasks; directories without ``task.toml`` are looked into, tasks are not.
        key: of the configuration, for errors.

    Raises:
        DatasetError: there is no task, or tasks lack something; up to ten are named.
    """
    if not directory.is_dir():
        raise DatasetError(f"{key} must be a directory of Harbor tasks, got '{directory}', which is none")
    places = sorted(_places(directory))
    if not places:
        raise DatasetError(f"{key} must hold Harbor tasks, but no task.toml is below '{directory}'")
    prompts: list[Prompt] = []
    faults: list[str] = []
    for place in places:
        found = _read(place, _uid(place, directory))
        if isinstance(found, Prompt):
            prompts.append(found)
        else:
            faults.append(found)
    if faults:
        more = f"\n... and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
        raise DatasetError(
            f"{len(faults)} of {len(places)} Harbor tasks of {key} cannot be used:\n"
            + "\n".join(faults[:_MAX_SHOWN])
            + more
        )
    return tuple(prompts)


def _places(directory: Path) -> Iterator[Path]:
    """The directories of tasks, those that links lead to among them; a link back to a directory around it is not followed."""
    for place, inside, files in os.walk(directory, followlinks=True):
        if "task.toml" in files:
            inside.clear()
            yield Path(place)
            continue
        around = {os.path.realpath(above) for above in (Path(place), *Path(place).absolute().parents)}
        inside[:] = [name for name in inside if os.path.realpath(os.path.join(place, name)) not in around]


def _uid(task: Path, directory: Path) -> str:
    return Path(os.path.abspath(task)).name if task == directory else str(task.relative_to(directory))


def _read(task: Path, uid: str) -> Prompt | str:
    """The prompt, or what is wrong."""
    try:
        config = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
        instruction = _instruction(task, config)
    except (OSError, ValueError) as error:
        return f"{uid}: {error}"
    if fault := next(_faults(task, config, instruction), None):
        return f"{uid}: {fault}"
    return Prompt(
        uid=uid,
        messages=({"role": "user", "content": instruction},),
        env_class=ENV_CLASS,
        extras={TASK_COLUMN: str(task.absolute())},
    )


def _instruction(task: Path, config: dict[str, Any]) -> str:
    """The task's instruction, or that of its first step."""
    steps = config.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) and "name" in step for step in steps):
        raise ValueError("steps of task.toml must be tables with a name: [[steps]]")
    path = task / "steps" / str(steps[0]["name"]) / "instruction.md" if steps else task / "instruction.md"
    return path.read_text(encoding="utf-8")


def _faults(task: Path, config: dict[str, Any], instruction: str) -> Iterator[str]:
    if not instruction.strip():
        yield "instruction.md is empty"
    has_verifier = (task / "tests").is_dir() and any((task / "tests").rglob("test.sh"))
    if not has_verifier and not config.get("steps"):
        yield "it has no verifier: tests/test.sh must write a reward to /logs/verifier/reward.txt"
    environment = config.get("environment", {})
    if not isinstance(environment, dict):
        yield "environment of task.toml must be a table: [environment]"
    elif not (task / "environment").is_dir() and not environment.get("docker_image"):
        yield "it has no environment: neither environment/ nor docker_image in task.toml"
