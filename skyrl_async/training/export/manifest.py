"""What a policy checkpoint says it is: ``policy.json`` names the model and the files, ``adapter.json`` the adapters and their base.

``policy.json`` is written last: a checkpoint without it is incomplete. ``adapter.json`` is there if adapters alone were trained. Knows
nothing of what the other files hold.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from skyrl_async.errors import CheckpointError
from skyrl_async.weights.formats import sync

MANIFEST_FILE = "policy.json"
FORMAT_VERSION = 1
ADAPTER_FILE = "adapter.json"

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> full shape."""


def write_manifest(directory: Path, *, model_type: str, shapes: Shapes, num_ranks: int) -> None:
    """Sync every file under ``directory`` and list them in ``policy.json``."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    for path in files:
        sync(path)
    content = {
        "format_version": FORMAT_VERSION,
        "model_type": model_type,
        "num_ranks": num_ranks,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "files": {str(path.relative_to(directory)): path.stat().st_size for path in files},
    }
    path = directory / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    sync(path)
    for folder in {path.parent for path in files} | {directory}:
        sync(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedModel:
    """The contents of ``policy.json``."""

    model_type: str
    shapes: Shapes
    files: Mapping[str, int]
    """File name -> bytes."""


def read_model(directory: Path) -> CheckpointedModel:
    """Read ``policy.json``. Raises ``CheckpointError`` when it is missing, damaged or of another format."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete policy checkpoint: it has no {MANIFEST_FILE}")
    try:
        content = json.loads(path.read_text())
        found_format = content["format_version"]
        if found_format != FORMAT_VERSION:
            raise CheckpointError(f"{path} has format {found_format}, this version reads {FORMAT_VERSION}")
        return CheckpointedModel(
            model_type=content["model_type"],
            shapes={name: tuple(shape) for name, shape in content["parameters"].items()},
            files=dict(content["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def check_manifest(directory: Path, *, model_type: str, shapes: Shapes, key: str = "policy.path") -> None:
    """Raise ``CheckpointError``, saying what differs, unless ``directory`` is a complete checkpoint of the model that ``key`` names."""
    found = read_model(directory)
    check_model(directory, found, model_type=model_type, shapes=shapes, key=key)
    for name, num_bytes in found.files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} lacks the file {name}; resume from another checkpoint")
        if file.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes instead of {num_bytes}; resume from another checkpoint"
            )


def check_model(
    directory: Path, found: CheckpointedModel, *, model_type: str, shapes: Shapes, key: str = "policy.path"
) -> None:
    """Raise ``CheckpointError`` when the checkpoint in ``directory`` is of another model than this, which ``key`` names."""
    advice = f"set {key} to the model it was made with, or trainer.resume_mode=none"
    if found.model_type != model_type:
        raise CheckpointError(
            f"checkpoint {directory} is of a {found.model_type} model, that of {key} is {model_type}; {advice}"
        )
    for name in sorted(shapes.keys() | found.shapes.keys()):
        here, there = shapes.get(name), found.shapes.get(name)
        if here != there:
            raise CheckpointError(
                f"checkpoint {directory} is of another model: {name} has shape {there} there and {here} in that of {key} "
                f"(None: it does not exist); {advice}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """The contents of ``adapter.json``. A checkpoint fits a run if all but ``base`` are equal."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Names of the adapted layers, in the model's order."""
    base: str
    """Directory that the base weights were loaded from. For people to read: it may have moved."""
    base_checksum: str
    """Checksum of the base weights."""

    def write(self, directory: Path) -> None:
        """Write ``adapter.json`` under ``directory``."""
        (directory / ADAPTER_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def check_adapter(directory: Path, here: AdapterDescription | None) -> None:
    """Raise ``CheckpointError``, saying what to change, unless ``directory`` holds what is trained ``here`` (None: all weights)."""
    path = directory / ADAPTER_FILE
    if here is None:
        if path.is_file():
            there = _read_adapter(path)
            raise CheckpointError(
                f"checkpoint {directory} holds adapters of rank {there.rank} over {there.base}, and policy.lora.rank is 0; set "
                f"policy.lora.rank={there.rank}, or trainer.resume_mode=none"
            )
        return
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint {directory} holds all weights and no adapters, and policy.lora.rank is {here.rank}; set policy.lora.rank=0, or "
            "train adapters over an export of it (policy.path) with trainer.resume_mode=none"
        )
    there = _read_adapter(path)
    for key in ("rank", "alpha"):
        if (found := getattr(there, key)) != (wanted := getattr(here, key)):
            raise CheckpointError(
                f"checkpoint {directory} holds adapters with {key} {found}, and policy.lora.{key} is {wanted}; set it to {found}, or "
                "trainer.resume_mode=none"
            )
    if difference := sorted(set(there.modules) ^ set(here.modules)):
        raise CheckpointError(
            f"checkpoint {directory} has adapters on other layers ({len(difference)} differ, such as {difference[0]}); set "
            "policy.lora.target_modules and exclude_modules as they were, or trainer.resume_mode=none"
        )
    if there.base_checksum != here.base_checksum:
        raise CheckpointError(
            f"checkpoint {directory} holds adapters over {there.base}, and the weights of {here.base} are others; set policy.path to the "
            "policy they were trained over, or trainer.resume_mode=none"
        )


def _read_adapter(path: Path) -> AdapterDescription:
    try:
        content = json.loads(path.read_text())
        return AdapterDescription(**content | {"modules": tuple(content["modules"])})
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({error!r}); resume from another checkpoint")
