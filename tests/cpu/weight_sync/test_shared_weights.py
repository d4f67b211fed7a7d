"""Weights that engines load where policy workers hold them: here in host memory, which stands in for that of a GPU.

What CUDA does otherwise, the handle of a tensor, is in tests/gpu/test_shared_weights_gpu.py.
"""

import asyncio
import base64
import inspect
import logging
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from skyrl_async.errors import NoEngineError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.export import staging
from skyrl_async.training.export.staging import DeviceCopies
from skyrl_async.training.protocol import SharedWeights
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.broadcast import from_devices
from skyrl_async.weight_sync.publisher import WeightPublisher
from skyrl_async.weights import shared_tensor
from skyrl_async.weights.shared_tensor import SharedTensor, opened
from tests.cpu.tiny_policies import write_policy
from tests.transfer_checks import mixed_tensors

CPU = torch.device("cpu")


def _opened_elsewhere(handles: dict[str, Any]) -> dict[str, Tensor]:
    return {name: opened(handle, CPU).clone() for name, handle in handles.items()}


@pytest.fixture
def copies() -> Iterator[DeviceCopies]:
    copies = DeviceCopies(CPU)
    yield copies
    copies.close()


def copied(copies: DeviceCopies, version: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is handed on."""
    return dict(copies.copying(version, tensors.items()))


def read(shared: SharedWeights) -> dict[str, Tensor]:
    return {name: opened(handle, CPU) for name, handle in shared["cpu"].items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_another_process_opens_the_very_values_in_the_dtypes_they_had() -> None:
    tensors = mixed_tensors()
    shared = {name: SharedTensor(tensor, device=CPU) for name, tensor in tensors.items()}
    handles = {name: tensor.handle() for name, tensor in shared.items()}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert_same(pool.apply(_opened_elsewhere, (handles,)), tensors)
    for tensor in shared.values():
        tensor.close()


def test_a_copy_stays_when_the_tensor_changes(copies: DeviceCopies) -> None:
    weight, mask = torch.full((3, 2), 1 / 3), torch.tensor([True, False])
    for _ in copies.copying(1, [("weight", weight), ("mask", mask)]):
        pass
    weight.zero_()
    assert_same(read(copies.share(1)), {"weight": torch.full((3, 2), 1 / 3), "mask": mask})


def test_what_is_shared_stays_until_it_is_unshared_whatever_is_gathered_meanwhile(copies: DeviceCopies) -> None:
    versions = [mixed_tensors(seed) for seed in range(4)]
    copied(copies, 0, versions[0])
    handles = copies.share(0)
    copied(copies, 1, versions[1])
    copied(copies, 2, versions[2])
    assert_same(read(handles), versions[0])
    copies.unshare()
    with pytest.raises(FileNotFoundError):
        read(handles)
    assert copies.share(0) == copies.share(1) == {}, "neither is there any more"
    assert_same(read(copies.share(2)), versions[2])
    assert copies.share(2) == {}, "it is read by one load alone"


def test_without_room_on_the_device_nothing_is_kept_and_everything_is_handed_on(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(SharedTensor):
        def __init__(self, tensor: Tensor, **arguments: Any) -> None:
            if tensor.dtype == torch.float64:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(tensor, **arguments)

    tensors = mixed_tensors()
    monkeypatch.setattr(staging, "SharedTensor", Full)
    with caplog.at_level(logging.WARNING):
        assert_same(copied(copies, 1, tensors), tensors)
    assert copies.share(1) == {}
    assert "version 1 is not shared on the device" in caplog.text and "engine.gpu_memory_utilization" in caplog.text


def test_memory_that_has_no_handle_is_not_shared(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(tensor: SharedTensor) -> dict[str, Any]:
        raise RuntimeError("expandable segments have no handle")

    copied(copies, 1, mixed_tensors())
    monkeypatch.setattr(SharedTensor, "handle", refuse)
    with caplog.at_level(logging.WARNING):
        assert copies.share(1) == {}
    assert "version 1 cannot be shared: expandable segments have no handle" in caplog.text


def test_a_handle_on_cuda_has_neither_a_counter_nor_an_event_and_the_owner_counts_down_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own functions, of which a CPU build has but the names, are called as torch itself calls them."""
    parameters = list(inspect.signature(rebuild_cuda_tensor).parameters)
    released: list[tuple[bytes, int]] = []

    def reduced(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        counter = {"ref_counter_handle": b"/torch_1_2", "ref_counter_offset": 7, "event_sync_required": True}
        return rebuild_cuda_tensor, tuple(counter.get(name, name) for name in parameters)

    monkeypatch.setattr(shared_tensor, "reduce_tensor", reduced)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *of: released.append(of))
    copy = SharedTensor(torch.ones(3), device=CPU)
    handles = [copy._ipc_handle() for _ in range(2)]
    for handle in handles:
        arguments = dict(zip(parameters, pickle.loads(base64.b64decode(handle)), strict=True))
        assert arguments == {name: name for name in parameters} | {
            "ref_counter_handle": b"",
            "ref_counter_offset": 0,
            "event_sync_required": False,
        }
    assert parameters[shared_tensor._DEVICE_ARGUMENT] == "storage_device" and released == []
    copy.close()
    assert released == 2 * [(b"/torch_1_2", 7)]


def test_a_gathering_that_breaks_off_leaves_nothing_to_share(copies: DeviceCopies) -> None:
    parameters = copies.copying(1, mixed_tensors().items())
    next(parameters)
    parameters.close()
    assert copies.share(1) == {}


def test_a_rank_shares_what_it_writes_and_goes_on_training(tmp_path: Path) -> None:
    policy_dir = write_policy(tmp_path / "policy", is_tied=True)
    rank = PolicyRank(TrainingSettings(policy_path=str(policy_dir), shares_weights=True))
    rank.start()
    try:
        rank.gather_weights(3)
        update = rank.send_weights(3, tmp_path / "sent", 1 << 20)
        shared = rank.share_weights(3)
        with torch.no_grad():
            for _, parameter in rank._backend.iter_full_params():
                parameter.add_(1.0)
        assert list(shared) == ["cpu"]
        assert_same(read(shared), load_file(update.path))
        rank.unshare_weights()
        assert rank.share_weights(3) == {}
    finally:
        rank.close()


class Sharer(ModelledPolicy):
    """A policy that says which version it holds to be shared, and which it shares; ``None``: none."""

    def __init__(self) -> None:
        super().__init__(gather_seconds=0.1, send_seconds=0.5)
        self.held: int | None = None
        self.shared: int | None = None

    async def gather_weights(self, version: int) -> int:
        self.held = version
        return await super().gather_weights(version)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        update = await super().send_weights(version, directory, bucket_bytes)
        return WeightUpdate(version=update.version, path=str(version), manifest={}, num_bytes=0)

    async def share_weights(self, version: int) -> SharedWeights:
        assert self.shared is None, "one load after the other"
        if self.held != version:
            return {}
        self.shared, self.held = version, None
        return {"gpu": {"weight": {"version": version}}}

    async def unshare_weights(self) -> None:
        self.shared = None

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> Any:
        raise AssertionError("there is no broadcast")

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        raise AssertionError("there is no broadcast")


class Neighbour(ModelledEngine):
    """An engine on the policy's device: reads what is shared for as long as it loads, where anything is. Refuses or dies as planned."""

    def __init__(self, name: str, policy: Sharer) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 8, load_seconds=1.0)
        self._policy = policy
        self.plan: list[str] = []
        self.loads: list[str] = []

    @property
    def is_paused(self) -> bool:
        return self._cut_off.reason is None and self._shared.is_paused

    async def load_weights(self, update: WeightUpdate) -> None:
        self.loads.append("shared" if update.shared else "file")
        if update.shared:
            assert update.shared["gpu"]["weight"]["version"] == update.version == self._policy.shared
        await super().load_weights(update)
        assert not update.shared or self._policy.shared == update.version, "it was given back while it was read"
        event = self.plan.pop(0) if self.plan else "fine"
        if event == "refuse":
            raise PublishError(f"{self.name} refuses")
        if event == "die":
            self.kill()
            self._cut_off.check()


def setting(num_engines: int, max_retries: int = 0) -> tuple[Sharer, list[Neighbour], WeightPublisher]:
    class Letters:
        def decode(self, token_ids: list[int], **_: object) -> str:
            return ""

    policy = Sharer()
    engines = [Neighbour(f"engine-{i}", policy) for i in range(num_engines)]
    clock = asyncio.get_running_loop().time
    publisher = WeightPublisher(
        client=InferenceEngineClient(engines, tokenizer=Letters(), max_model_len=100, engine_wait_s=0.0),
        policy=policy,
        directory=Path("unused"),
        bucket_bytes=1,
        max_retries=max_retries,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, clock),
        share=from_devices(policy),
        clock=clock,
    )
    return policy, engines, publisher


@given(
    plans=st.lists(st.lists(st.sampled_from(["fine", "fine", "die", "refuse"]), max_size=4), min_size=1, max_size=3),
    max_retries=st.integers(0, 1),
)
def test_contract_5_whatever_happens_to_engines_nothing_is_given_back_while_it_is_read_and_all_serve_one_version(
    plans: list[list[str]], max_retries: int
) -> None:
    async def main() -> None:
        policy, engines, publisher = setting(len(plans), max_retries)
        await publisher.publish(0)
        for engine, plan in zip(engines, plans, strict=True):
            engine.plan = plan
        served = 0
        for version in range(1, 8):
            try:
                await publisher.publish(version)
                served = version
            except PublishError:
                pass
            except NoEngineError:
                return
            finally:
                assert policy.shared is None
            alive = [engine for engine in engines if engine._cut_off.reason is None]
            if not alive:
                return
            assert {await engine.version() for engine in alive} == {served}
            assert not any(engine.is_paused for engine in alive)

    run_in_virtual_time(main())


def test_a_load_that_is_tried_again_and_an_engine_that_joins_take_the_file() -> None:
    async def main() -> None:
        policy, (engine,), publisher = setting(1, max_retries=1)
        await publisher.publish(0)
        engine.plan = ["refuse"]
        await publisher.publish(1)
        assert engine.loads == ["shared", "shared", "file", "file"], "load, refused load, the way back, load again"
        joining = Neighbour("engine-9", policy)
        await publisher.client.add_engine(joining)
        assert joining.loads == ["file"] and await joining.version() == 1

    run_in_virtual_time(main())


def test_a_copy_that_was_lost_with_its_workers_is_no_failure() -> None:
    async def main() -> None:
        policy, (engine,), publisher = setting(1)
        await publisher.gather(0)
        await publisher.send(0)
        policy.held = None
        await publisher.load()
        assert engine.loads == ["file"] and await engine.version() == 0

    run_in_virtual_time(main())


def test_a_publish_that_is_cancelled_gives_back_what_it_shared() -> None:
    async def main() -> None:
        policy, (engine,), publisher = setting(1)
        await publisher.publish(0)
        await publisher.gather(1)
        await publisher.send(1)
        loading = asyncio.ensure_future(publisher.load())
        await asyncio.sleep(0.5)
        assert policy.shared == 1
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert policy.shared is None and await engine.version() == 0

    run_in_virtual_time(main())
