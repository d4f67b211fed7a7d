"""Random policies of two layers, and rows that they did not quite sample: what tests of training train."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyrl_async.columns import Advantages, TopTokens
from skyrl_async.training.protocol import Policy
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Trajectory, WeightUpdate

VOCABULARY = 48


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def write_policy(directory: Path, *, seed: int = 0, is_tied: bool = False, **changes: Any) -> Path:
    """Of a Qwen3 with random weights, without a tokenizer; ``changes`` are of its configuration."""
    torch.manual_seed(seed)
    config = Qwen3Config(**(SIZES | {"tie_word_embeddings": is_tied} | changes))
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path, *, word: str = "w") -> None:
    """Of the words w0, w1, ..., each a token; the first one is w0 whatever the ``word``."""
    words = Tokenizer(WordLevel({f"{word if i else 'w'}{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)


def trajectories(num_rows: int, *, seed: int, vocabulary: int = VOCABULARY) -> list[Trajectory]:
    """Rows of different lengths, their log-probs a little off the policy's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        length = 3 + (7 * index + seed) % 23
        ids = torch.randint(0, vocabulary, (length + 4,), generator=generator).tolist()
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


def varied_trajectories(num_rows: int, *, seed: int, is_multi_turn: bool = False) -> list[Trajectory]:
    """The same with prompts of different lengths and tokens of two versions; ``is_multi_turn``: with tokens of the environment."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).tolist())

    rows = []
    for index in range(num_rows):
        length = 3 + (7 * index + seed) % 23
        mask = [0 if is_multi_turn and 2 <= position < 4 else 1 for position in range(length)]
        rows.append(
            Trajectory(
                prompt_token_ids=tokens(4 + index % 3),
                response_token_ids=tokens(length),
                loss_mask=tuple(mask),
                logprobs=tuple((-3.0 - torch.rand(length, generator=generator)).mul(torch.tensor(mask)).tolist()),
                versions=tuple(index % 2 if is_sampled else -1 for is_sampled in mask),
                reward=0.0,
            )
        )
    return rows


def advantages(num_rows: int, *, seed: int) -> list[float]:
    """One per row, of either sign."""
    return torch.randn(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()


def with_columns(rows: Sequence[Trajectory], *, seed: int) -> tuple[list[Trajectory], list[Advantages]]:
    """The rows with weights, values and a teacher's log-probs that differ from token to token, and advantages that do, of either sign.

    For a critic these are what values are trained towards.
    """
    random = np.random.default_rng(seed)

    def with_its_own(row: Trajectory) -> Trajectory:
        num = len(row.response_token_ids)
        return replace(
            row,
            token_weights=random.uniform(0.0, 2.0, num).astype(np.float32),
            values=random.normal(size=num).astype(np.float32),
            teacher_logprobs=random.uniform(-4.0, -2.0, num).astype(np.float32),
            teacher_top=TopTokens(
                ids=np.array([random.choice(VOCABULARY, 4, replace=False) for _ in range(num)], np.int32),
                logprobs=np.log(random.dirichlet(np.ones(5), num)).astype(np.float32),
            ),
        )

    return [with_its_own(row) for row in rows], [
        random.normal(size=len(row.loss_mask)).astype(np.float32) for row in rows
    ]


def num_tokens(rows: Sequence[Trajectory]) -> int:
    return sum(row.num_sampled_tokens for row in rows)


async def train(
    policy: Policy,
    *,
    first_step: int,
    num_steps: int,
    num_rows: int = 5,
    has_idle_group: bool = False,
    has_columns: bool = False,
) -> list[dict[str, float]]:
    """Steps of two groups each, streamed; the second has one row, so that one of two ranks idles. The idle group has no advantages.
    ``has_columns``: all that can differ from token to token does, and rows count by thirds.
    """
    figures = []
    for step in range(first_step, first_step + num_steps):
        rows, values = trajectories(num_rows, seed=step), advantages(num_rows, seed=step)
        if has_columns:
            rows = [replace(row, weight=(1 + (index + 1) % 3) / 3) for index, row in enumerate(rows)]
            rows, values = with_columns(rows, seed=step)
        figures.append(await policy.forward_backward(rows[1:], values[1:], step))
        figures.append(await policy.forward_backward(rows[:1], values[:1], step))
        if has_idle_group:
            figures.append(await policy.forward_backward(rows, [0.0] * num_rows, step))
        figures.append(await policy.step((1 + has_idle_group) * num_tokens(rows)))
    return figures


async def export_weights(policy: Policy, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
    """Gather the current weights and write them under ``directory``."""
    await policy.gather_weights(version)
    return await policy.send_weights(version, directory, bucket_bytes)


async def weights(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """As the engines would get them."""
    update = await export_weights(policy, 0, directory, 1 << 30)
    return load_file(update.path)


def assert_close(here: dict[str, Tensor], there: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(tensor, there[name], atol=atol, rtol=0.0, msg=lambda m, name=name: f"{name}: {m}")


def full_copy(tensor: Tensor) -> Tensor:
    """A copy, of every rank's part where it is sharded; then collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(policy: InProcessPolicy) -> dict[str, Tensor]:
    """What was accumulated, full, by parameter."""
    backend: Any = policy._rank._backend
    parameters: dict[str, Any] = getattr(backend, "_inner", backend)._parameters
    return {name: full_copy(p.grad) for name, p in parameters.items() if p.grad is not None}
