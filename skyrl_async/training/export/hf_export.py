"""Full parameters and the source policy directory in, a Hugging Face directory out that vLLM and transformers load.

Everything but the weights is copied from the source, so that tokenizer, chat template and generation settings stay
what the policy was trained with.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from skyrl_async.training.export.bucket_writer import WrittenBuckets, sync_file, write_buckets

SHARD_BYTES = 5 * 10**9
"""Largest safetensors file, as transformers writes them."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def export_hf_directory(
    parameters: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``parameters`` in ``dtype`` with the other files of ``source`` under ``directory``, synced to disk."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    written = write_buckets(
        parameters, dtype=dtype, directory=directory, prefix="model", bucket_bytes=shard_bytes, is_synced=True
    )
    _rename_shards(written, directory)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in directory.iterdir():
        sync_file(path)
    sync_file(directory)


def _rename_shards(written: WrittenBuckets, directory: Path) -> None:
    """Give the files transformers' names, with an index when there are several."""
    num_files = len(written.paths)
    if num_files == 1:
        os.replace(written.paths[0], directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, (path, names) in enumerate(zip(written.paths, written.names, strict=True), start=1):
        file_name = f"model-{index:05d}-of-{num_files:05d}.safetensors"
        os.replace(path, directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index_json = {"metadata": {"total_size": written.num_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
