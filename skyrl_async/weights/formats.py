"""File formats of weights: dtypes of safetensors, checksums, syncing, and adapters as peft writes and vLLM and transformers read them.

torch is not imported.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from skyrl_async.types import Adapter

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
}
"""safetensors' name of a dtype -> torch's."""

TIED_HEAD = "lm_head.weight"
"""Files may hold it although it is the embedding."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""peft, transformers and vLLM read an adapter from a directory with both files."""
_PIECE_BYTES = 1 << 22
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def weight_files(directory: Path) -> list[Path]:
    """A model's safetensors files: those of its index, else ``model.safetensors``, else all.

    Some directories hold the same weights once more in a format of their own, such as ``consolidated.safetensors``.
    """
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        files = sorted({directory / name for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        files = [directory / "model.safetensors"]
    return [file for file in files if file.is_file()] or sorted(directory.glob("*.safetensors"))


def tensor_names(layer: str) -> tuple[str, str]:
    """Names of a layer's A (rank, in) and B (out, rank), by its Hugging Face name."""
    return f"{_PREFIX}{layer}{_A}", f"{_PREFIX}{layer}{_B}"


def adapted_layers(names: Iterable[str]) -> list[str]:
    """The tensors' layers, each once, in order. Raises ``ValueError`` for a name that is no adapter's tensor."""
    layers: dict[str, None] = {}
    for name in names:
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            raise ValueError(f"{name} is no tensor of an adapter, such as {_PREFIX}LAYER{_A}")
        layers[name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)] = None
    return list(layers)


def peft_config(adapter: Adapter, layers: list[str], *, base: str) -> str:
    """The text of ``adapter_config.json``."""
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(content, indent=1) + "\n"


def crc32_of_file(path: Path, *, check: Callable[[], None] = lambda: None) -> int:
    """CRC-32 of a file, which finds damage and mix-ups, not forgery, in a quarter to a half of SHA-256's time. Other threads run meanwhile.

    Args:
        path: the file.
        check: called between pieces; may raise to stop.
    """
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            check()
            value = zlib.crc32(piece, value)
    return value


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
