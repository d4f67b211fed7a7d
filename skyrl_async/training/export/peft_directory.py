"""Adapters as a directory that peft, transformers and vLLM load: ``adapter_config.json`` beside the tensors.

Flows in: A and B under peft's names, or an update that holds them. Flows out: the directory; of an update the same update, its file where
those look for it. Knows neither backends nor engines.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from skyrl_async.errors import WeightsWriteError
from skyrl_async.training.export.bucket_writer import sync_file, write_buckets
from skyrl_async.types import Adapter, WeightUpdate
from skyrl_async.weights.adapters import CONFIG_FILE, WEIGHTS_FILE, adapted_layers, peft_config


def as_peft_directory(update: WeightUpdate, adapter: Adapter, *, base: str) -> WeightUpdate:
    """Make the directory of the update's one file an adapter over the weights in ``base``. Raises ``WeightsWriteError``."""
    written = Path(update.chunks[0]["path"])
    path, config_path = written.with_name(WEIGHTS_FILE), written.with_name(CONFIG_FILE)
    try:
        config_path.write_text(peft_config(adapter, adapted_layers(update.manifest), base=base))
        os.replace(written, path)
    except OSError as error:
        for left in (written, config_path):
            left.unlink(missing_ok=True)
        raise WeightsWriteError(
            f"cannot write {config_path}: {error}; make room there or choose another directory"
        ) from error
    return replace(update, chunks=({"path": str(path), "config_path": str(config_path)},), adapter=adapter)


def export_peft_directory(
    adapters: Iterable[tuple[str, Tensor]], adapter: Adapter, *, base: str, directory: Path
) -> None:
    """Write A and B in float32, as they train, synced to disk. Raises ``WeightsWriteError`` and ``OSError``."""
    written = write_buckets(
        adapters, dtype=torch.float32, directory=directory, prefix="adapter", bucket_bytes=1 << 62, is_synced=True
    )
    os.replace(written.paths[0], directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(peft_config(adapter, adapted_layers(written.manifest), base=base))
    sync_file(directory / CONFIG_FILE)
    sync_file(directory)
