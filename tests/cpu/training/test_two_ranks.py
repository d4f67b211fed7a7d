"""Two ranks over gloo, in their own processes and without Ray, compared with one rank in this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.columns import Advantages
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.dispatch import split_work
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.types import Trajectory
from tests.cpu.tiny_policies import VOCABULARY, assert_close, full_copy, with_columns, write_policy
from tests.cpu.two_ranks import NUM_RANKS, OneOfTwo, RankPair

MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "activations recomputed": {"activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
    "padded": {"use_sample_packing": False},
    "logits in chunks": {"logprobs_chunk_size": 5},
    "in one micro-batch": {"micro_batch_tokens": 4096},
    "all at once": {"activation_checkpointing": True, "cpu_offload": True, "logprobs_chunk_size": 5},
}
"""Ways to lay out rows and to save memory, none of which may change a number."""
LOSS: dict[str, Any] = {
    "lr": 1e-3,
    "entropy_coef": 0.01,
    "kl_estimator": "k3",
    "kl_coef": 0.01,
    "has_reference": True,
    "teacher_coef": 0.01,
    "micro_batch_tokens": 40,
}


def rows() -> tuple[list[Trajectory], list[Advantages]]:
    """Five, so that a rank idles while the other computes its last micro-batch, and advantages. All columns differ from token to token."""
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

    return with_columns([row(length) for length in (3, 30, 11, 24, 7)], seed=0)


def train(policy: PolicyRank, num_ranks: int, index: int, checkpoint: Path | None, save: Path) -> Any:
    """Figures of this rank, gradients and, after the step, the weights of all; from ``checkpoint``, and saved to ``save``."""
    if checkpoint is not None:
        policy.load(checkpoint)
    work = split_work(*rows(), 0, settings=policy._settings, num_ranks=num_ranks)[index]
    figures = policy.forward_backward(work)
    parameters: dict[str, Any] = policy._backend._parameters  # type: ignore[attr-defined]
    gradients = {name: full_copy(parameter.grad) for name, parameter in parameters.items()}
    step = policy.step(75)
    policy.save(save)
    weights = {name: tensor.clone() for name, tensor in policy._backend.iter_full_params()}
    policy.close()
    return figures, gradients, step, weights


def train_alone(settings: TrainingSettings, checkpoint: Path | None, save: Path) -> Any:
    policy = PolicyRank(settings)
    policy.start()
    return train(policy, 1, 0, checkpoint, save)


async def on_two_ranks(make: Callable[[TrainingSettings], OneOfTwo], directory: Path) -> None:
    """Each rank leaves what it found in each way, and from the checkpoint ``one``."""
    plain = TrainingSettings(policy_path=str(directory / "policy"), **LOSS)
    jobs: dict[str, dict[str, Any]] = {
        **MEMORY,
        "mixed precision": {"mixed_precision": True},
        "resumed": {"cpu_offload": True},
    }
    found, index = {}, 0
    for name, changes in jobs.items():
        policy = make(replace(plain, **changes))
        index, checkpoint = policy.index, directory / "one" if name == "resumed" else None
        found[name] = train(policy.rank, NUM_RANKS, index, checkpoint, directory / name)
    torch.save(found, directory / f"rank_{index}.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the policy, the checkpoint ``one``, and all checkpoints of two ranks by their ways."""
    directory = tmp_path_factory.mktemp("two_ranks")
    write_policy(directory / "policy", is_tied=True)
    return directory


@pytest.fixture(scope="module")
def settings(directory: Path) -> TrainingSettings:
    return TrainingSettings(policy_path=str(directory / "policy"), **LOSS)


@pytest.fixture(scope="module")
def one_rank(settings: TrainingSettings, directory: Path) -> Any:
    """What a single rank finds that saves no memory; its checkpoint is ``one``."""
    return train_alone(replace(settings, use_sample_packing=False, logprobs_chunk_size=1024), None, directory / "one")


@pytest.fixture(scope="module")
def two_ranks(rank_pair: RankPair, one_rank: Any, directory: Path) -> list[dict[str, Any]]:
    """What each of two ranks finds in each way, and after the single rank's checkpoint."""
    rank_pair.run(on_two_ranks, directory)
    return [torch.load(directory / f"rank_{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


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
    two_ranks: list[dict[str, Any]], one_rank: Any, way: str
) -> None:
    assert_same([rank[way] for rank in two_ranks], one_rank)


@pytest.mark.slow
def test_recomputing_and_offloading_change_no_bit(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        for way in ("activations recomputed", "offloaded"):
            _, gradients, step, weights = rank[way]
            _, plain_gradients, plain_step, plain_weights = rank["plain"]
            assert step == plain_step
            assert_close(gradients, plain_gradients, atol=0.0)
            assert_close(weights, plain_weights, atol=0.0)


@pytest.mark.slow
def test_in_mixed_precision_two_ranks_pull_where_one_in_float32_does_and_keep_float32_weights(
    two_ranks: list[dict[str, Any]], one_rank: Any
) -> None:
    def flat(gradients: dict[str, Tensor]) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in gradients.values()])

    _, expected, _, _ = one_rank
    for rank in two_ranks:
        _, gradients, _, weights = rank["mixed precision"]
        assert torch.cosine_similarity(flat(gradients), flat(expected), dim=0) > 0.98
        assert {tensor.dtype for tensor in [*gradients.values(), *weights.values()]} == {torch.float32}


@pytest.mark.slow
def test_checkpoints_go_on_from_two_ranks_to_one_and_back_offloaded_or_not(
    settings: TrainingSettings, two_ranks: list[dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    from_one = train_alone(settings, directory / "one", tmp_path / "from_one")
    from_two = train_alone(settings, directory / "offloaded", tmp_path / "from_two")
    assert_same([from_two], from_one)
    assert_same([rank["resumed"] for rank in two_ranks], from_one)


@pytest.mark.slow
@pytest.mark.parametrize("way", MEMORY)
def test_one_rank_finds_the_same_whatever_saves_memory(
    settings: TrainingSettings, one_rank: Any, tmp_path: Path, way: str
) -> None:
    assert_same([train_alone(replace(settings, **MEMORY[way]), None, tmp_path)], one_rank)
