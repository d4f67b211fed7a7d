"""``policy.json`` of a checkpoint: what model it is of and which files make it whole.

Written last, so that a checkpoint without it is known to be incomplete. Knows nothing of what the files hold.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.errors import CheckpointError
from skyrl_async.training.export.bucket_writer import sync_file

MANIFEST_FILE = "policy.json"
FORMAT_VERSION = 1

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> full shape."""


def write_manifest(directory: Path, *, model_type: str, shapes: Shapes, num_ranks: int) -> None:
    """Sync every file under ``directory`` and list them in ``policy.json``."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    for path in files:
        sync_file(path)
    content = {
        "format_version": FORMAT_VERSION,
        "model_type": model_type,
        "num_ranks": num_ranks,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "files": {str(path.relative_to(directory)): path.stat().st_size for path in files},
    }
    path = directory / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    sync_file(path)
    for folder in {path.parent for path in files} | {directory}:
        sync_file(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedModel:
    """What a policy checkpoint says it is."""

    model_type: str
    shapes: Shapes
    files: Mapping[str, int]
    """Name -> bytes."""


def read_model(directory: Path) -> CheckpointedModel:
    """The contents of ``policy.json``. Raises ``CheckpointError`` when it is missing, damaged or of another format."""
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
        raise CheckpointError(f"{path} is damaged ({error!r}); resume from another checkpoint") from error


def check_manifest(directory: Path, *, model_type: str, shapes: Shapes) -> None:
    """Raise ``CheckpointError``, saying what differs, unless ``directory`` is a whole checkpoint of this model."""
    found = read_model(directory)
    check_model(directory, found, model_type=model_type, shapes=shapes)
    for name, num_bytes in found.files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} lacks the file {name}; resume from another checkpoint")
        if file.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes instead of {num_bytes}; resume from another checkpoint"
            )


def check_model(directory: Path, found: CheckpointedModel, *, model_type: str, shapes: Shapes) -> None:
    """Raise ``CheckpointError`` when the checkpoint in ``directory`` is of another model than this."""
    advice = "set policy.path to the policy it was made with, or trainer.resume_mode=none"
    if found.model_type != model_type:
        raise CheckpointError(
            f"checkpoint {directory} is of a {found.model_type} model, the policy is {model_type}; {advice}"
        )
    for name in sorted(shapes.keys() | found.shapes.keys()):
        here, there = shapes.get(name), found.shapes.get(name)
        if here != there:
            raise CheckpointError(
                f"checkpoint {directory} is of another model: {name} has shape {there} there and {here} in the policy "
                f"(None: it does not exist); {advice}"
            )
