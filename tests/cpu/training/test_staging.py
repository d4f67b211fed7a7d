"""Weights copied to staging, written in buckets and mapped by engines: no bit and no dtype changes."""

import resource
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from skyrl_async.errors import TrainingError, WeightsWriteError
from skyrl_async.inference.policy_files import read_manifest
from skyrl_async.inference.vllm.weight_receiver import mapped_buckets
from skyrl_async.training.export.staging import Staging, aligned_order

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return bits.bool()
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)


tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=9
).map(lambda kinds: {f"p{i}": some(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)})


@pytest.mark.slow
@given(weights=tensors, send_bytes=st.integers(1, 3000), load_bytes=st.integers(1, 3000))
def test_mixed_dtypes_arrive_as_they_were_whatever_the_buckets(
    weights: dict[str, torch.Tensor], send_bytes: int, load_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        staging = Staging()
        num_bytes = staging.copy(3, weights.items())
        update = staging.write(3, Path(directory), send_bytes)
        path = Path(update.path)
        assert update.num_bytes == num_bytes == sum(tensor.nbytes for tensor in weights.values())
        assert update.manifest == read_manifest(directory)
        assert update.crc32 == zlib.crc32(path.read_bytes())
        buckets = list(mapped_buckets(path, load_bytes))
        assert all(len(b) == 1 or sum(t.nbytes for _, t in b) <= load_bytes for b in buckets)
        found = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        for arrived in (found, load_file(path)):
            assert arrived.keys() == weights.keys()
            for name, tensor in weights.items():
                assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int8],
)
def test_every_dtype_of_safetensors_arrives_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.arange(12).view(3, 4) * 2).to(dtype)
    staging = Staging()
    staging.copy(1, [("w", tensor)])
    update = staging.write(1, tmp_path, 7)
    path = update.path
    assert update.manifest == read_manifest(str(tmp_path))
    ((_, mapped),) = next(mapped_buckets(path, 100))
    for arrived in (mapped, load_file(path)["w"]):
        assert arrived.dtype == dtype and torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_that_cannot_be_sent_is_refused_when_it_is_copied() -> None:
    with pytest.raises(TrainingError, match=r"rope.freqs cannot be published: .* got torch.complex64"):
        Staging().copy(1, [("rope.freqs", torch.zeros(2, dtype=torch.complex64))])


def test_a_copy_does_not_change_with_its_source_and_the_next_copy_reuses_its_memory(tmp_path: Path) -> None:
    weight, staging = torch.zeros(1000), Staging()
    staging.copy(1, [("w", weight)])
    weight += 1.0  # as an optimizer step does, in place
    first = load_file(staging.write(1, tmp_path, 100).path)
    memory = staging._tensors["w"].data_ptr()
    staging.copy(2, [("w", weight)])
    second = load_file(staging.write(2, tmp_path, 100).path)
    assert first["w"].sum() == 0.0 and second["w"].sum() == 1000.0
    assert staging._tensors["w"].data_ptr() == memory
    with pytest.raises(TrainingError, match="version 1 cannot be sent: what was gathered is version 2"):
        staging.write(1, tmp_path, 100)


def test_the_widest_dtypes_come_first_so_that_each_tensor_is_aligned() -> None:
    weights = {"a": torch.zeros(3).bfloat16(), "b": torch.zeros(1), "c": torch.zeros(1, dtype=torch.int64)}
    assert list(aligned_order(weights)) == ["c", "b", "a"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may have more than 600 kB: a write past that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_there_is_no_room_nothing_is_left_and_it_may_be_tried_again(tmp_path: Path, small_files: None) -> None:
    staging = Staging()
    staging.copy(7, [("w", torch.zeros(200_000))])
    with pytest.raises(WeightsWriteError, match=r"cannot write 800000 bytes of weights to .*v000007.*make room there"):
        staging.write(7, tmp_path, 100_000)
    assert list(tmp_path.iterdir()) == []
    staging.copy(8, [("w", torch.zeros(100_000))])
    assert staging.write(8, tmp_path, 100_000).num_bytes == 400_000
