"""What an engine reads of a policy's files: stop tokens, and the headers of safetensors files, by which it checks weight updates.

Of weights only headers are read, and their bytes if a checksum is to be compared. Neither torch nor vLLM is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_async.errors import PolicyError, PublishError
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.formats import TORCH_NAMES, crc32_of_file

Manifest = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face parameter name -> (dtype name such as ``float32``, shape)."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Each of them can hold a tokenizer's vocabulary."""
_TIED_HEAD = "lm_head.weight"


def read_config(policy_dir: str) -> dict[str, Any]:
    """``config.json`` of a policy directory. Raises ``PolicyError``."""
    path = Path(policy_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read ({error}); policy.path must be a Hugging Face directory") from error
    if not isinstance(config, dict):
        raise PolicyError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of ``config.json``; multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def eos_token_ids(policy_dir: str) -> tuple[int, ...]:
    """Tokens that end an answer: the generation config's (else the model config's) and the tokenizer's."""
    directory = Path(policy_dir)
    config = read_config(policy_dir)
    declared = _read_object(directory / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id", text_config(config).get("eos_token_id"))
    ids = set(declared) if isinstance(declared, list) else {declared}
    ids.add(_tokenizer_eos(directory))
    return tuple(sorted(token for token in ids if token is not None))


def has_tokenizer(policy_dir: str) -> bool:
    """Whether the directory has a tokenizer's vocabulary. Raises ``PolicyError`` for a broken ``tokenizer.json``."""
    _read_object(Path(policy_dir) / "tokenizer.json")
    return any((Path(policy_dir) / name).exists() for name in TOKENIZER_FILES)


def _tokenizer_eos(directory: Path) -> int | None:
    token = _read_object(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    for added in _read_object(directory / "tokenizer.json").get("added_tokens", []):
        if added["content"] == content:
            return int(added["id"])
    return None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read ({error}); export the policy again, or delete the file") from error
    return found if isinstance(found, dict) else {}


def read_manifest(policy_dir: str) -> Manifest:
    """Names, dtypes and shapes in the directory's safetensors files; empty if it has none."""
    manifest: Manifest = {}
    for path in sorted(Path(policy_dir).glob("*.safetensors")):
        manifest.update(_read_header(path))
    return manifest


def num_weight_bytes(policy_dir: str) -> int:
    """Size of the directory's safetensors files; 0 if it has none."""
    return sum(path.stat().st_size for path in Path(policy_dir).glob("*.safetensors"))


def _read_header(path: Path) -> Manifest:
    """Header of one complete safetensors file. Raises ``OSError`` or ``ValueError``."""
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        num_file_bytes = path.stat().st_size
        if not 2 <= num_header_bytes <= num_file_bytes - 8:
            raise ValueError(f"{num_file_bytes} bytes are no safetensors file")
        header: dict[str, Any] = json.loads(file.read(num_header_bytes))
    header.pop("__metadata__", None)
    num_weight_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if num_file_bytes != 8 + num_header_bytes + num_weight_bytes:
        raise ValueError(f"{num_file_bytes} bytes, its header says {8 + num_header_bytes + num_weight_bytes}")
    return {
        name: (TORCH_NAMES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
    }


class UpdateValidator:
    """Checks that a weight update can be the policy's, before anything is changed."""

    def __init__(self, policy_dir: str) -> None:
        self._policy_dir = policy_dir
        self._shapes = {name: shape for name, (_, shape) in read_manifest(policy_dir).items()}
        self._is_tied = bool(text_config(read_config(policy_dir)).get("tie_word_embeddings", False))
        self._dtypes: dict[str, str] | None = None

    def check(self, update: WeightUpdate) -> None:
        """Raise ``PublishError`` unless names and shapes are the policy's, and the chunks match the manifest."""
        if update.adapter is not None:
            raise PublishError(
                f"weight update {update.version} holds an adapter alone, and this engine takes all weights"
            )
        self._check_manifest(update)
        sent: Manifest = {}
        for chunk in update.chunks:
            sent.update(chunk_manifest(chunk, update.version))
        require_same("the chunks", sent, update.manifest, update.version)

    def accept(self, update: WeightUpdate) -> None:
        """Require the dtypes of this update of later ones."""
        self._dtypes = {name: dtype for name, (dtype, _) in update.manifest.items()}

    def _check_manifest(self, update: WeightUpdate) -> None:
        shapes = {name: shape for name, (_, shape) in update.manifest.items()}
        expected = self._shapes or shapes
        if self._is_tied:
            shapes, expected = _without_head(shapes), _without_head(expected)
        require_same(f"the manifest, against {self._policy_dir},", shapes, expected, update.version)
        dtypes = {name: dtype for name, (dtype, _) in update.manifest.items()}
        unknown = sorted(set(dtypes.values()) - set(TORCH_NAMES.values()))
        if unknown:
            raise PublishError(
                f"weight update {update.version} has dtype {unknown[0]!r}; "
                f"expected one of {sorted(TORCH_NAMES.values())}"
            )
        require_same("the manifest, against the first update,", dtypes, self._dtypes or dtypes, update.version)


def _without_head(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name != _TIED_HEAD}


def require_same(what: str, found: Mapping[str, object], expected: Mapping[str, object], version: int) -> None:
    """Raise ``PublishError`` with the first difference unless both are equal."""
    if missing := sorted(expected.keys() - found.keys()):
        raise PublishError(f"weight update {version}: {what} lacks {missing[0]} (and {len(missing) - 1} more names)")
    if unknown := sorted(found.keys() - expected.keys()):
        raise PublishError(
            f"weight update {version}: {what} has {unknown[0]} (and {len(unknown) - 1} more names) too many"
        )
    for name, value in expected.items():
        if found[name] != value:
            raise PublishError(f"weight update {version}: {what} has {name} as {found[name]}, expected {value}")


def require_as_sent(update: WeightUpdate) -> None:
    """Raise ``PublishError`` if the files' checksum is to be compared and is not the one sent."""
    if not update.is_compared or update.crc32 is None:
        return
    found, paths = 0, [Path(chunk["path"]) for chunk in update.chunks]
    try:
        for path in paths:
            found = crc32_of_file(path, found)
    except OSError as error:
        raise PublishError(f"weight update {update.version}: {error.filename} cannot be read: {error}") from error
    if found != update.crc32:
        raise PublishError(
            f"weight update {update.version}: {', '.join(map(str, paths))} has the checksum {found:08x}, and {update.crc32:08x} was sent"
        )


def chunk_manifest(chunk: dict[str, Any], version: int) -> Manifest:
    """Manifest of one chunk, a safetensors file (``path``). Raises ``PublishError`` if it is none, or incomplete."""
    if "path" not in chunk:
        raise PublishError(f"weight update {version}: a chunk with keys {sorted(chunk)} is no file (path)")
    try:
        return _read_header(Path(chunk["path"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishError(f"weight update {version}: {chunk['path']} cannot be read: {error}") from error
