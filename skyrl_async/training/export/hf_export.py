"""The policy as directories that vLLM, transformers and peft load: all weights under Hugging Face names, or adapters alone.

Weights are written one safetensors file at a time, so that only one file's tensors are in memory. Each file is complete once its name
exists, and synced to disk. All other files are copied from the policy's directory, not its folders but that of named chat templates:
tokenizer, templates and generation settings stay what the policy was trained with.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import CHAT_TEMPLATE_DIR

from skyrl_async.errors import WeightsWriteError
from skyrl_async.training.export.staging import write_safetensors
from skyrl_async.types import Adapter, WeightUpdate
from skyrl_async.weights.formats import CONFIG_FILE, WEIGHTS_FILE, adapted_layers, peft_config, sync

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
    """Write ``parameters`` (consumed once) under ``directory``, with the other files of ``source`` and a config that says ``dtype``.

    Raises:
        WeightsWriteError: a file of weights cannot be written. None of them is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
        elif path.name == CHAT_TEMPLATE_DIR:
            shutil.copytree(path, directory / path.name, dirs_exist_ok=True)
    _write_shards(parameters, directory=directory, shard_bytes=shard_bytes)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in (*directory.rglob("*"), directory):
        sync(path)


def _write_shards(parameters: Iterable[tuple[str, Tensor]], *, directory: Path, shard_bytes: int) -> None:
    """Write files under transformers' names, with an index if there are several."""
    for left in directory.glob(".*.safetensors.tmp"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    names: dict[Path, list[str]] = {}
    num_bytes = 0
    try:
        for shard in _shards(parameters, shard_bytes=shard_bytes):
            path = directory / f"model-{len(names) + 1:05d}.safetensors"
            write_safetensors(shard, path, is_synced=True)
            names[path] = list(shard)
            num_bytes += sum(tensor.nbytes for tensor in shard.values())
    except WeightsWriteError:
        for path in names:
            path.unlink(missing_ok=True)
        raise
    weight_map: dict[str, str] = {}
    for path, in_file in names.items():
        file_name = "model.safetensors" if len(names) == 1 else f"{path.stem}-of-{len(names):05d}.safetensors"
        os.replace(path, directory / file_name)
        weight_map |= dict.fromkeys(in_file, file_name)
    for left in directory.glob("model*.safetensors*"):  # of an earlier export, in another number of files
        if left.name not in weight_map.values():
            left.unlink()
    if len(names) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(parameters: Iterable[tuple[str, Tensor]], *, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors into at most ``shard_bytes`` each; a larger one goes alone."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, parameter in parameters:
        tensor = parameter.cpu().contiguous()
        if shard and num_bytes + tensor.nbytes > shard_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def export_peft_directory(
    adapters: Iterable[tuple[str, Tensor]], adapter: Adapter, *, base: str, directory: Path
) -> None:
    """Write A and B in float32, as they train, synced to disk. Raises ``WeightsWriteError`` and ``OSError``."""
    tensors = {name: tensor.to(device="cpu", dtype=torch.float32).contiguous() for name, tensor in adapters}
    write_safetensors(tensors, directory / WEIGHTS_FILE, is_synced=True)
    (directory / CONFIG_FILE).write_text(peft_config(adapter, adapted_layers(tensors), base=base))
    sync(directory / CONFIG_FILE)
    sync(directory)


def as_peft_directory(update: WeightUpdate, adapter: Adapter, *, base: str) -> WeightUpdate:
    """Describe the update's file as an adapter over the weights in ``base``, in its directory. Raises ``WeightsWriteError``."""
    path = Path(update.path)
    config_path = path.with_name(CONFIG_FILE)
    try:
        config_path.write_text(peft_config(adapter, adapted_layers(update.manifest), base=base))
    except OSError as error:
        for left in (path, config_path):
            left.unlink(missing_ok=True)
        raise WeightsWriteError(
            f"cannot write {config_path}: {error}; make room there or choose another directory"
        ) from error
    return replace(update, adapter=adapter)
