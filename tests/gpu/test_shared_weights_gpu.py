"""Weights that engines load where policy workers hold them, on one GPU. In host memory: tests/cpu/weight_sync/test_shared_weights.py."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.weight_sync.broadcast import from_devices, from_files_alone
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_async.weights.shared_tensor import SharedTensor, opened
from tests.engine_checks import config_on_gpu, make_policy, make_update, publish
from tests.transfer_checks import mixed_tensors

pytestmark = pytest.mark.slow
GPU = torch.device("cuda", 0)


def _opened_elsewhere(handles: dict[str, Any]) -> dict[str, Tensor]:
    return {name: opened(handle, GPU).cpu() for name, handle in handles.items()}


def test_another_process_opens_the_very_values_as_often_as_they_are_shared() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for seed in range(3):
            tensors = mixed_tensors(seed)
            shared = {name: SharedTensor(tensor, device=GPU) for name, tensor in tensors.items()}
            torch.cuda.synchronize()
            handles = {name: tensor.handle() for name, tensor in shared.items()}
            found = pool.apply(_opened_elsewhere, (handles,))
            for name, tensor in tensors.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
            for copy in shared.values():
                copy.close()
            torch.cuda.ipc_collect()


def test_memory_is_given_back_whether_or_not_anybody_opened_it() -> None:
    tensors = {"weight": torch.randn(1 << 20), "bias": torch.randn(7)}
    torch.cuda.ipc_collect()
    before = torch.cuda.memory_allocated(GPU)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for is_opened in (False, True, False):
            shared = {name: SharedTensor(tensor, device=GPU) for name, tensor in tensors.items()}
            torch.cuda.synchronize()
            handles = {name: tensor.handle() for name, tensor in shared.items()}
            if is_opened:
                found = pool.apply(_opened_elsewhere, (handles,))
                assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
            assert torch.cuda.memory_allocated(GPU) > before
            for copy in shared.values():
                copy.close()
            assert torch.cuda.memory_allocated(GPU) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_that_are_shared_are_those_of_the_file_and_their_memory_is_given_back(
    tmp_path: Path, publisher_of: Callable[..., WeightPublisher], dtype: str
) -> None:
    import ray

    from skyrl_async.inference.engines.ray import start_ray_engines
    from skyrl_async.training.workers.policy_workers import PolicyWorkers

    old, new = (make_policy(tmp_path / str(seed), seed=seed, is_tied=False) for seed in (0, 1))
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    try:
        policy = await PolicyWorkers.start(
            TrainingSettings(policy_path=str(new), device="cuda", serve_dtype=dtype, shares_weights=True),
            num_workers=1,
            num_gpus_per_worker=0.5,
        )
        config = config_on_gpu("engine-0", old, dtype=dtype)
        (engine,) = await start_ray_engines([config], num_gpus=0.5, log_dir=tmp_path / "logs")
        checksums = []
        for version, share in ((1, from_files_alone), (3, from_devices(policy)), (5, from_devices(policy))):
            publisher = publisher_of(policy, engine, str(version), share=share)
            await publisher.publish(version)
            checksums.append(await publisher.verifier.verify_checksums(version))
            if share is not from_files_alone:
                assert await policy.share_weights(version) == {}, "what was shared is not kept"
            await publish(engine, make_update(old, tmp_path, version + 1))
        assert len(set(checksums)) == 1 and checksums[0] != await engine.checksum()
        await engine.close()
        await policy.close()
    finally:
        ray.shutdown()
