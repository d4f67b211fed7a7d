"""``policy.json`` of a checkpoint: what model it is of and which files make it whole.

Written last, so that a checkpoint without it is known to be incomplete. Knows nothing of what the files hold.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from skyrl_async.errors import CheckpointError
from skyrl_async.training.bucket_writer import sync_file

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


def check_manifest(directory: Path, *, model_type: str, shapes: Shapes) -> None:
    """Raise ``CheckpointError``, saying what differs, unless ``directory`` is a whole checkpoint of this model."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete policy checkpoint: it has no {MANIFEST_FILE}")
    try:
        content = json.loads(path.read_text())
        found_format = content["format_version"]
        if found_format != FORMAT_VERSION:
            raise CheckpointError(f"{path} has format {found_format}, this version reads {FORMAT_VERSION}")
        found_type: str = content["model_type"]
        found_shapes = {name: tuple(shape) for name, shape in content["parameters"].items()}
        files: dict[str, int] = content["files"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); resume from another checkpoint") from error
    _check_model(directory, model_type, shapes, found_type, found_shapes)
    for name, num_bytes in files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {directory} lacks the file {name}; resume from another checkpoint")
        if file.stat().st_size != num_bytes:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes instead of {num_bytes}; resume from another checkpoint"
            )


def _check_model(directory: Path, model_type: str, shapes: Shapes, found_type: str, found_shapes: Shapes) -> None:
    advice = "set policy.path to the policy it was made with, or trainer.resume_mode=none"
    if found_type != model_type:
        raise CheckpointError(
            f"checkpoint {directory} is of a {found_type} model, the policy is {model_type}; {advice}"
        )
    for name in sorted(shapes.keys() | found_shapes.keys()):
        here, there = shapes.get(name), found_shapes.get(name)
        if here != there:
            raise CheckpointError(
                f"checkpoint {directory} is of another model: {name} has shape {there} there and {here} in the policy "
                f"(None: it does not exist); {advice}"
            )
