"""What an engine reads of a policy's files: stop tokens, and the headers of safetensors files, by which it checks weight updates.

Of weights only headers are read, and their bytes if a checksum is to be compared. Neither torch nor vLLM is imported.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_async.errors import PolicyError, PublishError
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.formats import (
    CONFIG_FILE,
    TIED_HEAD,
    TORCH_NAMES,
    adapted_layers,
    crc32_of_file,
    tensor_names,
    weight_files,
)

Manifest = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face parameter name -> (dtype name such as ``float32``, shape)."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Each of them can hold a tokenizer's vocabulary."""


def read_config(policy_dir: str, key: str = "policy.path") -> dict[str, Any]:
    """``config.json`` of the model directory that ``key`` names. Raises ``PolicyError``."""
    path = Path(policy_dir) / "config.json"
    config = _read_json(path, f"{key} must be a Hugging Face directory")
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
    found = _read_json(path, "export the policy again, or delete the file") if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _read_json(path: Path, advice: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read ({error}); {advice}") from error


def read_manifest(policy_dir: str) -> Manifest:
    """Names, dtypes and shapes in the directory's safetensors files; empty if it has none. Raises ``PolicyError``."""
    manifest: Manifest = {}
    for path in weight_files(Path(policy_dir)):
        try:
            manifest.update(_read_header(path))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PolicyError(
                f"{path} cannot be read ({error}); download it whole (a clone without git lfs has pointers in place of weights)"
            ) from error
    return manifest


def num_weight_bytes(policy_dir: str) -> int:
    """Size of the directory's safetensors files; 0 if it has none."""
    return sum(path.stat().st_size for path in weight_files(Path(policy_dir)))


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
    """Checks that a weight update can be the policy's, before anything is changed.

    Args:
        policy_dir: the policy's directory; without safetensors there any names are taken.
        adapter_rank: rank of the adapters in updates; 0: updates hold all weights.
    """

    def __init__(self, policy_dir: str, adapter_rank: int = 0) -> None:
        self._policy_dir = policy_dir
        self._shapes = _shapes(read_manifest(policy_dir))
        self._is_tied = not adapter_rank and bool(text_config(read_config(policy_dir)).get("tie_word_embeddings"))
        self._adapter_rank = adapter_rank
        self._dtypes: dict[str, str] | None = None

    def check(self, update: WeightUpdate) -> None:
        """Raise ``PublishError`` unless names and shapes are the policy's, and the file contains what the manifest says."""
        self._require_kind(update)
        version, shapes = update.version, _shapes(update.manifest)
        expected = self._adapter_shapes(update) if self._adapter_rank else self._shapes or shapes
        if self._is_tied:
            shapes, expected = _without_head(shapes), _without_head(expected)
        require_same(f"the manifest, against {self._policy_dir},", shapes, expected, version)
        dtypes = _dtypes(update.manifest)
        unknown = sorted(set(dtypes.values()) - set(TORCH_NAMES.values()))
        if unknown:
            raise PublishError(
                f"weight update {version} has dtype {unknown[0]!r}; expected one of {sorted(TORCH_NAMES.values())}"
            )
        require_same("the manifest, against the first update,", dtypes, self._dtypes or dtypes, version)
        with _reading(update.path, version):
            sent = _read_header(Path(update.path))
        require_same("the file", sent, update.manifest, version)
        if update.adapter is not None:
            path = Path(update.path).with_name(CONFIG_FILE)
            with _reading(path, version):
                described = json.loads(path.read_text())
            rank_and_alpha = {"r": update.adapter.rank, "lora_alpha": update.adapter.alpha}
            require_same(str(path), {key: described.get(key) for key in rank_and_alpha}, rank_and_alpha, version)

    def accept(self, update: WeightUpdate) -> None:
        """Require the names and dtypes of this update of later ones."""
        self._dtypes = _dtypes(update.manifest)

    def _require_kind(self, update: WeightUpdate) -> None:
        if self._adapter_rank and update.adapter is None:
            raise PublishError(
                f"weight update {update.version} holds all weights, and this engine takes adapters of rank {self._adapter_rank} beside "
                "those it booted with"
            )
        if update.adapter is not None and not self._adapter_rank:
            raise PublishError(
                f"weight update {update.version} holds an adapter alone, and this engine takes all weights"
            )

    def _adapter_shapes(self, update: WeightUpdate) -> dict[str, tuple[int, ...]]:
        """Shapes of A and B for the layers of an update."""
        try:
            layers = adapted_layers(update.manifest)
        except ValueError as error:
            raise PublishError(f"weight update {update.version}: {error}") from error
        expected: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            a, b = tensor_names(layer)
            if self._shapes:
                shape = self._shapes.get(f"{layer}.weight", ())
            else:
                (_, of_a), (_, of_b) = (update.manifest.get(name, ("", (0,))) for name in (a, b))
                shape = of_b[0], of_a[-1]
            if len(shape) != 2:
                raise PublishError(
                    f"weight update {update.version} adapts {layer}, which is no matrix of {self._policy_dir}"
                )
            expected |= {a: (self._adapter_rank, shape[1]), b: (shape[0], self._adapter_rank)}
        return expected


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in manifest.items()}


def _dtypes(manifest: Manifest) -> dict[str, str]:
    return {name: dtype for name, (dtype, _) in manifest.items()}


def _without_head(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name != TIED_HEAD}


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
    """Raise ``PublishError`` if the file's checksum is to be compared and is not the one sent."""
    if not update.is_compared or update.crc32 is None:
        return
    with _reading(update.path, update.version):
        found = crc32_of_file(Path(update.path))
    if found != update.crc32:
        raise PublishError(
            f"weight update {update.version}: {update.path} has the checksum {found:08x}, and {update.crc32:08x} was sent"
        )


@contextmanager
def _reading(path: object, version: int) -> Iterator[None]:
    """Raise ``PublishError`` for an update's file that is missing, incomplete or of another format."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishError(f"weight update {version}: {path} cannot be read: {error}") from error
