"""Who may import whom: no circle between files or folders, folders of a size one can survey, few files per heavy dependency."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl_async import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("skyrl_async", "skyrl_gym_http")

MAX_FILES_AT_THE_ROOT = 8
MAX_FILES_PER_FOLDER = 22

SEEN_BY_ENVIRONMENTS = (
    "skyrl_async.chat",
    "skyrl_async.columns",
    "skyrl_async.errors",
    "skyrl_async.generators.gym",
    "skyrl_async.rollout",
    "skyrl_async.runtime",
    "skyrl_async.tasks",
    "skyrl_async.types",
)
"""What ``skyrl_gym_http`` may import of ``skyrl_async``."""

STRANGERS = ("skyrl_async.inference", "skyrl_async.training", "skyrl_async.data")
"""Engines, training and data never import each other."""

ALLOWED = {
    "vllm": ("skyrl_async/inference/vllm/*.py",),
    "ray": (
        "skyrl_async/composition/ray_cluster.py",
        "skyrl_async/composition/processes.py",
        "skyrl_async/inference/engines/ray*.py",
        "skyrl_async/endpoint/server/front_ends.py",
        "skyrl_async/training/workers/policy_workers.py",
        "skyrl_async/training/workers/rank_actor.py",
    ),
    "deepspeed": ("skyrl_async/training/backends/deepspeed*.py",),
    "peft": ("skyrl_async/training/backends/lora.py",),
    "torch": (
        "skyrl_async/algorithms/*.py",
        "skyrl_async/config/rules/devices.py",
        "skyrl_async/doctor/scoring.py",
        "skyrl_async/inference/*.py",
        "skyrl_async/tasks/*.py",
        "skyrl_async/training/*.py",
        "skyrl_async/weights/*.py",
    ),
    "starlette": ("skyrl_async/endpoint/*.py", "skyrl_async/view/server.py"),
    "uvicorn": ("skyrl_async/endpoint/server/*.py", "skyrl_async/view/server.py"),
    "openai": ("skyrl_gym_http/*.py",),
    "hydra": ("skyrl_async/config/load.py",),
    "rich": ("skyrl_async/metrics/console.py", "skyrl_async/metrics/summary.py", "skyrl_async/plan/__main__.py"),
    "matplotlib": (
        "skyrl_async/metrics/curves.py",
        "skyrl_async/metrics/stage_picture.py",
        "skyrl_async/plan/picture.py",
    ),
    "tensorboard": ("skyrl_async/metrics/sinks.py",),
    "reasoning_gym": ("skyrl_async/environments/reasoning_gym.py",),
    "wandb": ("skyrl_async/metrics/sinks.py",),
}
"""Dependency -> the files that are about it; ``*`` crosses folders."""


class Import(NamedTuple):
    """One import statement's target, as a dotted name."""

    file: Path
    line: int
    module: str
    target: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.target}"


FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imports() -> Iterator[Import]:
    """Every import of both packages, inside functions and for type checking too."""
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for target in targets(node):
                yield Import(file, node.lineno, module, target)  # type: ignore[attr-defined]


def targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"line {node.lineno}: imports are absolute"
    module = node.module or ""
    return [name if (name := f"{module}.{alias.name}") in MODULES else module for alias in node.names]


IMPORTS = list(imports())
INTERNAL = [one for one in IMPORTS if one.target in MODULES and one.target != one.module]


def circle(arrows: Iterator[tuple[str, str]]) -> list[str]:
    """A circle among the arrows; empty where there is none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for here, there in arrows:
        if here != there:
            graph[here].add(there)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def test_no_file_imports_itself_in_a_circle() -> None:
    assert circle((one.module, one.target) for one in INTERNAL) == []


def test_no_folder_imports_itself_in_a_circle() -> None:
    """A file at the root of a package counts as a folder of its own, and a folder does not count those inside it."""

    def folder_of(module: str) -> str:
        file = MODULES[module].relative_to(ROOT)
        return str(file if len(file.parts) == 2 else file.parent)

    assert circle((folder_of(one.module), folder_of(one.target)) for one in INTERNAL) == []


def test_folders_hold_few_files_side_by_side() -> None:
    sizes = Counter(str(file.parent.relative_to(ROOT)) for file in FILES)
    assert sizes["skyrl_async"] <= MAX_FILES_AT_THE_ROOT
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES_PER_FOLDER} == {}


def test_inference_training_and_data_never_import_each_other() -> None:
    def room_of(module: str) -> str:
        return next((room for room in STRANGERS if module.startswith(f"{room}.")), "")

    rooms = [(one, room_of(one.module), room_of(one.target)) for one in INTERNAL]
    assert [str(one) for one, here, there in rooms if here and there and here != there] == []


def test_environments_over_http_see_few_rooms_and_nobody_sees_them() -> None:
    seen = [one for one in INTERNAL if one.module.startswith("skyrl_gym_http") and one.target.startswith("skyrl_async")]
    assert [str(one) for one in seen if not one.target.startswith(SEEN_BY_ENVIRONMENTS)] == []
    backwards = [one for one in INTERNAL if one.module.startswith("skyrl_async") and "skyrl_gym_http" in one.target]
    assert [str(one) for one in backwards] == []


@pytest.mark.parametrize("dependency", sorted(ALLOWED))
def test_a_dependency_is_imported_only_by_the_files_about_it(dependency: str) -> None:
    users = [one for one in IMPORTS if one.target.partition(".")[0] == dependency]
    strays = [one for one in users if not any(fnmatch(str(one.file.relative_to(ROOT)), p) for p in ALLOWED[dependency])]
    assert [str(one) for one in strays] == []


@pytest.mark.parametrize(
    "statement",
    [
        "import skyrl_async",
        "import skyrl_async.config.command_line",
        "import skyrl_async.metrics.tracker, skyrl_async.metrics.trace, skyrl_async.metrics.console",
        "import skyrl_async.rollout.staleness, skyrl_async.rollout.buffer, skyrl_async.data.dataloader",
        "import skyrl_async.plan.__main__",
    ],
)
def test_light_modules_load_neither_torch_nor_ray_nor_vllm(statement: str) -> None:
    code = f"import sys\n{statement}\nsys.exit(', '.join(sorted({{'torch', 'ray', 'vllm'}} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tree_of_errors_has_every_error() -> None:
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception))
    assert {kind.__name__ for kind in kinds} <= set(re.findall(r"\w+", errors.__doc__ or ""))
