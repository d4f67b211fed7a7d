"""Exports: their other files, and one to a disk that is full."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from skyrl_async.errors import WeightsWriteError
from skyrl_async.training.export.hf_export import export_hf_directory
from skyrl_async.weights.formats import weight_files
from tests.cpu.tiny_policies import write_tokenizer


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may have more than 600 kB: a write past that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_for_which_there_is_no_room_takes_the_others_with_it(tmp_path: Path, small_files: None) -> None:
    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for i, size in enumerate((100_000, 100_000, 200_000, 100_000)):
            yield f"p{i}", torch.zeros(size)

    (tmp_path / "source").mkdir()
    exported = tmp_path / "exported"
    with pytest.raises(WeightsWriteError, match=r"cannot write 800000 bytes of weights to .*model-00003.*make room"):
        export_hf_directory(
            parameters(),
            source=tmp_path / "source",
            directory=exported,
            dtype=torch.float32,
            shard_bytes=400_000,
        )
    assert list(exported.iterdir()) == []


def test_an_export_has_every_chat_template_of_the_policy(tmp_path: Path) -> None:
    source, exported = tmp_path / "source", tmp_path / "exported"
    write_tokenizer(source)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(source)
    (source / "config.json").write_text("{}")
    for _ in range(2):
        export_hf_directory([("p", torch.zeros(1))], source=source, directory=exported, dtype=torch.float32)
    assert PreTrainedTokenizerFast.from_pretrained(exported).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("sizes", [(100, 1000), (1000, 100), (100, 200)])
def test_an_export_leaves_no_weights_of_one_before_in_another_number_of_files(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """vLLM follows an index that is there, transformers a single file."""
    source, exported = tmp_path / "source", tmp_path / "exported"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for version, shard_bytes in enumerate(sizes, 1):
        parameters = [(f"p{i}", torch.full((25,), float(version))) for i in range(4)]
        export_hf_directory(parameters, source=source, directory=exported, dtype=torch.float32, shard_bytes=shard_bytes)
    files = weight_files(exported)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert sorted(found) == ["p0", "p1", "p2", "p3"] and all((tensor == 2.0).all() for tensor in found.values())
    assert sorted(files) == sorted(exported.glob("*.safetensors")) and len(files) == 400 // min(400, sizes[1])
    assert (exported / "model.safetensors.index.json").exists() == (len(files) > 1)
