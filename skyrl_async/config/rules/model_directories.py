"""Whether the Hugging Face directories that a config names are whole, as far as file names tell.

Flows in: a built ``Config``. Flows out: nothing, or ``PolicyError`` naming the key, the directory and what it lacks.
"""

import json
import os
from pathlib import Path

from skyrl_async.config.schema.run import Config
from skyrl_async.errors import PolicyError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def policy_directory_is_complete(config: Config) -> None:
    """Model and tokenizer."""
    if config.policy.path is None:
        return
    path, found = Path(os.path.expanduser(config.policy.path)), f"policy.path={config.policy.path}"
    _check_model(path, found)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise PolicyError(f"{found} has no tokenizer (such as tokenizer.json); copy it beside its config.json")


def reference_directory_is_complete(config: Config) -> None:
    """The model; its tokens are the policy's."""
    if config.trainer.ref.path is not None:
        _check_model(Path(os.path.expanduser(config.trainer.ref.path)), f"trainer.ref.path={config.trainer.ref.path}")


def _check_model(path: Path, found: str) -> None:
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise PolicyError(
            f"{found} {what}; give a local Hugging Face directory (a model of the hub has to be downloaded first)"
        )
    if not (path / "config.json").is_file():
        raise PolicyError(f"{found} has no config.json; give the directory of a Hugging Face model")
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    if not weights:
        raise PolicyError(f"{found} has no weights (*.safetensors or *.bin); copy them beside its config.json")
    for index in path.glob("*.index.json"):
        _check_shards(index, found)


def _check_shards(index: Path, found: str) -> None:
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise PolicyError(f"{found} has a broken {index.name}; copy the directory again") from error
    missing = sorted(name for name in shards if not (index.parent / name).is_file())
    if missing:
        raise PolicyError(
            f"{found} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}; copy them"
        )
