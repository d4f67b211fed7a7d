"""A random policy of two layers, and rows that it did not quite sample: what tests of training backends train."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_async.training.protocol import Policy, export_weights
from skyrl_async.types import Trajectory

VOCABULARY = 48


def write_policy(directory: Path, *, seed: int = 0, is_tied: bool = False) -> Path:
    """Of a Qwen3 with random weights, without a tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def trajectories(num_rows: int, *, seed: int) -> list[Trajectory]:
    """Rows of different lengths, their log-probs a little off the policy's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        length = 3 + (7 * index + seed) % 23
        ids = torch.randint(0, VOCABULARY, (length + 4,), generator=generator).tolist()
        rows.append(
            Trajectory(
                prompt_token_ids=tuple(ids[:4]),
                response_token_ids=tuple(ids[4:]),
                loss_mask=(1,) * length,
                logprobs=tuple((-3.0 - torch.rand(length, generator=generator)).tolist()),
                versions=(0,) * length,
                reward=0.0,
            )
        )
    return rows


def advantages(num_rows: int, *, seed: int) -> list[float]:
    """One per row, of either sign."""
    return torch.randn(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()


def num_tokens(rows: Sequence[Trajectory]) -> int:
    return sum(row.num_sampled_tokens for row in rows)


async def train(policy: Policy, *, first_step: int, num_steps: int, num_rows: int = 5) -> list[dict[str, float]]:
    """Steps of two groups each, streamed; the second has one row, so that one of two ranks idles."""
    figures = []
    for step in range(first_step, first_step + num_steps):
        rows, values = trajectories(num_rows, seed=step), advantages(num_rows, seed=step)
        figures.append(await policy.forward_backward(rows[1:], values[1:], step))
        figures.append(await policy.forward_backward(rows[:1], values[:1], step))
        figures.append(await policy.step(num_tokens(rows)))
    return figures


async def weights(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """As the engines would get them."""
    update = await export_weights(policy, 0, directory, 1 << 30)
    return load_file(update.chunks[0]["path"])


def assert_close(here: dict[str, Tensor], there: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(tensor, there[name], atol=atol, rtol=0.0, msg=lambda m, name=name: f"{name}: {m}")
