"""Who may import whom: the layers of the packages, and the few files that may touch each heavy dependency."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = {
    "skyrl_async.types": 0,
    "skyrl_async.weights.adapters": 1,
    "skyrl_async.runtime.progress": 0,
    "skyrl_async.rollout.sample_state": 0,
    "skyrl_async.errors": 0,
    "skyrl_async.samples": 0,
    "skyrl_async.weights.crc32": 0,
    "skyrl_async.registries": 0,
    "skyrl_async.weights.safetensors_dtypes": 0,
    "skyrl_async.version_spans": 0,
    "skyrl_async.runtime.tasks": 0,
    "skyrl_async.runtime.heartbeat": 0,
    "skyrl_async.runtime.device_leases": 0,
    "skyrl_async.runtime.shutdown": 0,
    "skyrl_async.runtime.stages": 0,
    "skyrl_async.runtime.stage_board": 0,
    "skyrl_async.config": 0,
    "skyrl_async.metrics": 0,
    "skyrl_async.weights.memory_file": 0,
    "skyrl_async.weights.shared_tensor": 1,
    "skyrl_async.weights.transfer_group": 1,
    "skyrl_async.chat": 1,
    "skyrl_async.rollout": 1,
    "skyrl_async.algorithms": 1,
    "skyrl_async.rewards": 1,
    "skyrl_async.environments": 1,
    "skyrl_async.tasks": 1,
    "skyrl_async.inference": 2,
    "skyrl_async.training": 2,
    "skyrl_async.data": 2,
    "skyrl_async.trainer.evaluator": 3,
    "skyrl_async.checkpoint.checkpointer": 3,
    "skyrl_async.checkpoint.files": 3,
    "skyrl_async.weight_sync": 3,
    "skyrl_async.rollout.finished_group_filter": 3,
    "skyrl_async.rollout.worker": 3,
    "skyrl_async.checkpoint.run_lock": 4,
    "skyrl_async.checkpoint.run_state": 4,
    "skyrl_async.trainer.validation": 4,
    "skyrl_async.trainer.mini_batches": 4,
    "skyrl_async.trainer.weight_update_stage": 4,
    "skyrl_async.trainer.settings": 4,
    "skyrl_async.trainer.train_stage": 4,
    "skyrl_async.trainer.fully_async": 4,
    "skyrl_async.composition": 5,
    "skyrl_async.main": 5,
    "skyrl_async.simulator": 5,
    "skyrl_async.dashboard": 5,
    "skyrl_async": 5,
}
"""Room -> layer; the longest name that a module begins with counts. The package itself may re-export anything."""

STRANGERS = {"skyrl_async.inference", "skyrl_async.training", "skyrl_async.data"}
"""Rooms of layer 2, which never import each other."""

LAST_LAYER_FOR_ENVIRONMENTS = 1
"""What ``skyrl_gym_http`` may see of ``skyrl_async``."""

ALLOWED = {
    "vllm": ("skyrl_async/inference/vllm_*.py", "skyrl_async/inference/core_process.py"),
    "ray": (
        "skyrl_async/composition/own_ray.py",
        "skyrl_async/composition/processes.py",
        "skyrl_async/composition/placement_group.py",
        "skyrl_async/inference/ray_*.py",
        "skyrl_async/endpoint/server/front_ends.py",
        "skyrl_async/training/workers/policy_workers.py",
        "skyrl_async/training/workers/rank_actor.py",
    ),
    "deepspeed": ("skyrl_async/training/deepspeed*.py",),
    "peft": ("skyrl_async/training/backends/lora.py",),
    "torch": (
        "skyrl_async/config/rules/devices.py",
        "skyrl_async/algorithms/*.py",
        "skyrl_async/tasks/*.py",
        "skyrl_async/training/*.py",
        "skyrl_async/inference/*.py",
        "skyrl_async/weights/memory_file.py",
        "skyrl_async/weights/shared_tensor.py",
        "skyrl_async/weights/transfer_group.py",
    ),
    "fastapi": ("skyrl_async/inference/server/*.py",),
    "uvicorn": ("skyrl_async/inference/server/*.py",),
    "openai": ("skyrl_gym_http/*.py",),
    "hydra": ("skyrl_async/config/load.py",),
    "rich": ("skyrl_async/metrics/console.py", "skyrl_async/metrics/summary.py"),
    "matplotlib": ("skyrl_async/metrics/curves.py", "skyrl_async/metrics/stage_picture.py"),
    "tensorboard": ("skyrl_async/metrics/tensorboard.py",),
    "reasoning_gym": ("skyrl_async/environments/reasoning_gym.py",),
    "wandb": ("skyrl_async/metrics/wandb.py",),
}
"""Dependency -> the files that are about it."""


class Import(NamedTuple):
    """One import statement's target, as a dotted name."""

    file: Path
    line: int
    module: str
    target: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.target}"


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports() -> Iterator[Import]:
    """Every import of both packages, inside functions and for type checking too."""
    for package in ("skyrl_async", "skyrl_gym_http"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                for target in targets(node):
                    yield Import(file, node.lineno, module_of(file), target)  # type: ignore[attr-defined]


def targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"line {node.lineno}: imports are absolute"
    module = node.module or ""
    below = [f"{module}.{alias.name}" for alias in node.names]
    return [name if is_module(name) else module for name in below]


def room_of(module: str) -> str:
    rooms = [room for room in LAYERS if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len)


IMPORTS = list(imports())
INTERNAL = [one for one in IMPORTS if one.module.startswith("skyrl_async") and one.target.startswith("skyrl_async")]


def test_every_module_has_a_layer() -> None:
    homeless = {one.module for one in INTERNAL if room_of(one.module) == "skyrl_async" and one.module != "skyrl_async"}
    assert homeless == set(), "give it a line in LAYERS, and in the design"


def test_imports_go_downwards_only() -> None:
    upwards = [str(one) for one in INTERNAL if LAYERS[room_of(one.target)] > LAYERS[room_of(one.module)]]
    assert upwards == []


def test_inference_training_and_data_never_import_each_other() -> None:
    rooms = [(one, room_of(one.module), room_of(one.target)) for one in INTERNAL]
    assert [str(one) for one, here, there in rooms if {here, there} <= STRANGERS and here != there] == []


def test_environments_over_http_see_the_lowest_layers_only_and_nobody_sees_them() -> None:
    seen = [one for one in IMPORTS if one.module.startswith("skyrl_gym_http") and one.target.startswith("skyrl_async")]
    assert [str(one) for one in seen if LAYERS[room_of(one.target)] > LAST_LAYER_FOR_ENVIRONMENTS] == []
    backwards = [one for one in IMPORTS if one.module.startswith("skyrl_async") and "skyrl_gym_http" in one.target]
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
        "import skyrl_async.config.load",
        "import skyrl_async.metrics.tracker, skyrl_async.metrics.trace, skyrl_async.metrics.console",
        "import skyrl_async.rollout.staleness, skyrl_async.rollout.buffer, skyrl_async.data.dataloader",
    ],
)
def test_light_modules_load_neither_torch_nor_ray_nor_vllm(statement: str) -> None:
    code = f"import sys\n{statement}\nsys.exit(', '.join(sorted({{'torch', 'ray', 'vllm'}} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
