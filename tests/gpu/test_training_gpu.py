"""The training checks of tests/cpu on CUDA: NCCL, ZeRO, offloading, mixed precision, determinism, checkpoints that move between devices."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from skyrl_async.algorithms.settings import CorrectionSettings
from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.training.backends.packing import row_by_row
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import Policy
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.policy_workers import PolicyWorkers
from tests.cpu import tiny_policies
from tests.cpu.tiny_policies import assert_close, weights, write_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SIZES = {"vocab_size": 64, "hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "initializer_range": 0.02}
trajectories = partial(tiny_policies.trajectories, vocabulary=64)


async def train(policy: Policy, *, first_step: int, num_steps: int) -> list[dict[str, float]]:
    """Steps of two calls, of several micro-batches each; their figures, but for the device's."""
    figures = []
    for step in range(first_step, first_step + num_steps):
        num_tokens = 0
        for seed in (2 * step, 2 * step + 1):
            rows = trajectories(5, seed=seed)
            values = torch.randn(5, generator=torch.Generator().manual_seed(seed)).tolist()
            figures.append(await policy.forward_backward(rows, values, step))
            num_tokens += sum(row.num_sampled_tokens for row in rows)
        found = await policy.step(num_tokens)
        figures.append({name: value for name, value in found.items() if name != "device_memory_gb"})
    return figures


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainingSettings:
    """Of a random two-layer Qwen3 on CUDA."""
    directory = write_policy(tmp_path_factory.mktemp("policy"), **SIZES)
    return TrainingSettings(policy_path=str(directory), lr=1e-3, device="cuda", micro_batch_tokens=30)


@pytest.fixture
def ray_with_gpus() -> Iterator[None]:
    """A local Ray that sees the GPUs."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


def test_attention_in_float32_keeps_no_weights_where_heads_share_keys() -> None:
    layer = torch.nn.Module()
    layer.num_key_value_groups, length = 4, 4096
    query, key, value = (torch.randn(1, n, length, 64, device="cuda", requires_grad=True) for n in (8, 2, 2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found, _ = row_by_row(layer, query, key, value, None, dropout=0.0, scaling=0.125)
    found.square().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * length**2 * 4 / 2, "half of the weights of 8 heads"
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.detach().double() for t in (query, key, value)), is_causal=True, scale=0.125, enable_gqa=True
    )
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


async def test_a_checkpoint_moves_between_cpu_and_cuda_and_both_train_alike(
    settings: TrainingSettings, tmp_path: Path
) -> None:
    on_cpu = InProcessPolicy(replace(settings, device="cpu"))
    here = await train(on_cpu, first_step=0, num_steps=2)
    await on_cpu.save(tmp_path / "checkpoint")
    expected = await weights(on_cpu, tmp_path / "cpu")
    await on_cpu.close()
    on_cuda = InProcessPolicy(settings)
    there = await train(on_cuda, first_step=0, num_steps=2)
    for a, b in zip(here, there, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)
    assert_close(await weights(on_cuda, tmp_path / "cuda"), expected, atol=1e-4)
    await on_cuda.load(tmp_path / "checkpoint")
    assert_close(await weights(on_cuda, tmp_path / "loaded"), expected, atol=0.0)
    await on_cuda.close()


async def test_mixed_precision_with_recomputed_activations_trains_float32_weights(
    settings: TrainingSettings, tmp_path: Path
) -> None:
    policy = InProcessPolicy(replace(settings, mixed_precision=True, activation_checkpointing=True))
    before = await weights(policy, tmp_path / "before")
    figures = await train(policy, first_step=0, num_steps=3)
    after = await weights(policy, tmp_path / "after")
    assert all(figure["grad_norm"] > 0 for figure in figures[2::3])
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    await policy.close()


async def test_parameters_kept_on_the_host_train_as_those_on_the_device_and_share_its_checkpoints(
    settings: TrainingSettings, tmp_path: Path
) -> None:
    on_device, on_host = InProcessPolicy(settings), InProcessPolicy(replace(settings, cpu_offload=True))
    here = await train(on_device, first_step=0, num_steps=2)
    there = await train(on_host, first_step=0, num_steps=2)
    for a, b in zip(here, there, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    assert_close(await weights(on_host, tmp_path / "host"), await weights(on_device, tmp_path / "device"), atol=1e-5)
    backend = on_host._rank._backend
    assert {p.device.type for p in backend._parameters.values()} == {"cpu"}
    await on_device.save(tmp_path / "checkpoint")
    await on_host.load(tmp_path / "checkpoint")
    assert_close(await weights(on_host, tmp_path / "l"), await weights(on_device, tmp_path / "d"), atol=0.0)
    await on_host.close()
    await on_device.close()


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    [
        (0, ()),
        (1, ()),
        (1, ("offload_optimizer",)),
        (2, ()),
        (2, ("offload_optimizer",)),
        (3, ()),
        (3, ("offload_optimizer",)),
        (3, ("offload_param",)),
        (3, ("offload_optimizer", "offload_param")),
    ],
)
async def test_zero_trains_as_fsdp_does_on_every_stage_offloaded_or_not_and_shares_its_checkpoints(
    settings: TrainingSettings, tmp_path: Path, stage: int, offloaded: tuple[str, ...]
) -> None:
    deepspeed = DeepSpeedConfig(zero_stage=stage, **dict.fromkeys(offloaded, True))
    zero, fsdp = InProcessPolicy(replace(settings, deepspeed=deepspeed)), InProcessPolicy(settings)
    here = await train(zero, first_step=0, num_steps=3)
    there = await train(fsdp, first_step=0, num_steps=3)
    for a, b in zip(here, there, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert_close(await weights(zero, tmp_path / "zero"), await weights(fsdp, tmp_path / "fsdp"), atol=1e-5)
    await zero.save(tmp_path / "checkpoint")
    await fsdp.load(tmp_path / "checkpoint")
    assert_close(await weights(fsdp, tmp_path / "there"), await weights(zero, tmp_path / "here"), atol=0.0)
    more = await train(zero, first_step=3, num_steps=2)
    await zero.load(tmp_path / "checkpoint")
    for a, b in zip(await train(zero, first_step=3, num_steps=2), more, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6), "but for the order in which CUDA adds up"
    await zero.close()
    await fsdp.close()


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        ("gspo", CorrectionSettings(opsm_delta=0.1)),
        ("rollout_is", CorrectionSettings(token_tis=math.inf, m2_threshold=0.04)),
    ],
)
async def test_deterministic_workers_repeat_themselves_to_the_last_bit(
    ray_with_gpus: None, settings: TrainingSettings, tmp_path: Path, loss: str, correction: CorrectionSettings
) -> None:
    asked = replace(settings, is_deterministic=True, policy_loss=loss, correction=correction, entropy_coef=0.01)
    found = []
    for run in ("first", "second"):
        workers = await PolicyWorkers.start(asked, num_workers=1, num_gpus_per_worker=1.0, call_timeout_s=300.0)
        figures = await train(workers, first_step=0, num_steps=3)
        found.append((figures, await weights(workers, tmp_path / run)))
        await workers.close()
    (figures, first), (again, second) = found
    assert figures == again
    assert_close(first, second, atol=0.0)


@needs_two_devices
async def test_two_ranks_over_nccl_give_the_figures_and_weights_of_one(
    ray_with_gpus: None, settings: TrainingSettings, tmp_path: Path
) -> None:
    one = InProcessPolicy(settings)
    two = await PolicyWorkers.start(settings, num_workers=2, num_gpus_per_worker=1.0, call_timeout_s=300.0)
    here = await train(one, first_step=0, num_steps=2)
    there = await train(two, first_step=0, num_steps=2)
    for a, b in zip(here, there, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)
    assert_close(await weights(two, tmp_path / "two"), await weights(one, tmp_path / "one"), atol=1e-4)
    await two.close()
    await one.close()
