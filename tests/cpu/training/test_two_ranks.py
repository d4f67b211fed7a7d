"""Two ranks over gloo, in their own processes and without Ray, compared with one rank in this process."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_async.algorithms.losses import merge_figures
from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import split_work
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import Trajectory
from tests.cpu.tiny_policies import VOCABULARY, assert_close, write_policy

MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "activations recomputed": {"activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
    "padded": {"use_sample_packing": False},
    "logits in chunks": {"logprobs_chunk_size": 5},
    "all at once": {"activation_checkpointing": True, "cpu_offload": True, "logprobs_chunk_size": 5},
}
"""Ways to save memory, none of which may change a number."""
LOSS: dict[str, Any] = {
    "lr": 1e-3,
    "entropy_coef": 0.01,
    "kl_estimator": "k3",
    "kl_coef": 0.01,
    "has_reference": True,
    "micro_batch_tokens": 40,
}


def rows() -> list[Trajectory]:
    """Five, so that a rank idles while the other computes its last micro-batch."""
    generator = torch.Generator().manual_seed(0)

    def row(length: int) -> Trajectory:
        ids = tuple(torch.randint(0, VOCABULARY, (length + 4,), generator=generator).tolist())
        return Trajectory(
            prompt_token_ids=ids[:4],
            response_token_ids=ids[4:],
            loss_mask=(1,) * length,
            logprobs=tuple((-3.0 - torch.rand(length, generator=generator)).tolist()),
            versions=(0,) * length,
            reward=0.0,
        )

    return [row(length) for length in (3, 30, 11, 24, 7)]


def train(settings: TrainingSettings, rank: int, num_ranks: int, checkpoint: Path | None, save: Path) -> Any:
    """Figures of this rank, gradients and, after the step, the weights of all; from ``checkpoint``, and saved to ``save``."""
    policy = PolicyRank(settings, rank=rank, num_ranks=num_ranks)
    policy.start()
    if checkpoint is not None:
        policy.load(checkpoint)
    values = [0.7, -1.2, 0.4, 2.0, -0.3]
    work = split_work(rows(), values, 0, settings=settings, num_ranks=num_ranks)[rank]
    figures = policy.forward_backward(work)
    parameters: dict[str, Any] = policy._backend._parameters  # type: ignore[attr-defined]
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in parameters.items()}
    step = policy.step(75)
    policy.save(save)
    weights = {name: tensor.clone() for name, tensor in policy._backend.iter_full_params()}
    policy.close()
    return figures, gradients, step, weights


def run_rank(rank: int, directory: Path, jobs: dict[str, tuple[TrainingSettings, Path | None]]) -> None:
    """All jobs, on one of two ranks."""
    store = dist.FileStore(str(directory / "store"), 2)
    rank_process.join(rank=rank, num_ranks=2, store=store, device=torch.device("cpu"), timeout_s=300)
    found = {name: train(s, rank, 2, start, directory / name) for name, (s, start) in jobs.items()}
    torch.save(found, directory / f"rank_{rank}.pt")
    rank_process.leave()


def on_two_ranks(directory: Path, jobs: dict[str, tuple[TrainingSettings, Path | None]]) -> list[dict[str, Any]]:
    """What each rank found in each job."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["skyrl_async.training.workers.rank"])
    directory.mkdir()
    ranks = [context.Process(target=run_rank, args=(rank, directory, jobs)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(directory / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainingSettings:
    directory = write_policy(tmp_path_factory.mktemp("policy"), is_tied=True)
    return TrainingSettings(policy_path=str(directory), **LOSS)


@pytest.fixture(scope="module")
def one_rank(settings: TrainingSettings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What a single rank finds that saves no memory, and its checkpoint."""
    checkpoint = tmp_path_factory.mktemp("one") / "checkpoint"
    plain = replace(settings, use_sample_packing=False, logprobs_chunk_size=1024)
    return train(plain, 0, 1, None, checkpoint), checkpoint


@pytest.fixture(scope="module")
def two_ranks(
    settings: TrainingSettings, one_rank: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """What two ranks find in each way, and after the single rank's checkpoint; and where their checkpoints are."""
    directory = tmp_path_factory.mktemp("two") / "ranks"
    jobs: dict[str, tuple[TrainingSettings, Path | None]] = {
        name: (replace(settings, **changes), None) for name, changes in MEMORY.items()
    }
    jobs["mixed precision"] = (replace(settings, mixed_precision=True), None)
    jobs["resumed"] = (replace(settings, cpu_offload=True), one_rank[1])
    return on_two_ranks(directory, jobs), directory


def assert_same(found: list[Any], expected: Any) -> None:
    """Figures, gradients and weights after a step, to 1e-5 in float32."""
    expected_figures, expected_gradients, expected_step, expected_weights = expected
    figures = merge_figures([own for own, *_ in found])
    assert figures == pytest.approx(expected_figures, rel=1e-5, abs=1e-5)
    scale = max(1.0, *(gradient.abs().max().item() for gradient in expected_gradients.values()))
    for _, gradients, step, weights in found:
        assert_close(gradients, expected_gradients, atol=1e-6 * scale)
        assert step == pytest.approx(expected_step, rel=1e-5)
        assert_close(weights, expected_weights, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", MEMORY)
def test_two_ranks_find_what_one_does_whatever_saves_memory(
    two_ranks: tuple[list[dict[str, Any]], Path], one_rank: tuple[Any, Path], way: str
) -> None:
    found, _ = two_ranks
    assert_same([rank[way] for rank in found], one_rank[0])


@pytest.mark.slow
def test_recomputing_and_offloading_change_no_bit(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    for rank in two_ranks[0]:
        for way in ("activations recomputed", "offloaded"):
            _, gradients, step, weights = rank[way]
            _, plain_gradients, plain_step, plain_weights = rank["plain"]
            assert step == plain_step
            assert_close(gradients, plain_gradients, atol=0.0)
            assert_close(weights, plain_weights, atol=0.0)


@pytest.mark.slow
def test_in_mixed_precision_two_ranks_pull_where_one_in_float32_does_and_keep_float32_weights(
    two_ranks: tuple[list[dict[str, Any]], Path], one_rank: tuple[Any, Path]
) -> None:
    def flat(gradients: dict[str, Tensor]) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in gradients.values()])

    (_, expected, _, _), _ = one_rank
    for rank in two_ranks[0]:
        _, gradients, _, weights = rank["mixed precision"]
        assert torch.cosine_similarity(flat(gradients), flat(expected), dim=0) > 0.98
        assert {tensor.dtype for tensor in [*gradients.values(), *weights.values()]} == {torch.float32}


@pytest.mark.slow
def test_checkpoints_go_on_from_two_ranks_to_one_and_back_offloaded_or_not(
    settings: TrainingSettings,
    two_ranks: tuple[list[dict[str, Any]], Path],
    one_rank: tuple[Any, Path],
    tmp_path: Path,
) -> None:
    found, directory = two_ranks
    from_one = train(settings, 0, 1, one_rank[1], tmp_path / "from_one")
    from_two = train(settings, 0, 1, directory / "offloaded", tmp_path / "from_two")
    assert_same([from_two], from_one)
    assert_same([rank["resumed"] for rank in found], from_one)


@pytest.mark.parametrize("way", MEMORY)
def test_one_rank_finds_the_same_whatever_saves_memory(
    settings: TrainingSettings, one_rank: tuple[Any, Path], tmp_path: Path, way: str
) -> None:
    assert_same([train(replace(settings, **MEMORY[way]), 0, 1, None, tmp_path)], one_rank[0])
