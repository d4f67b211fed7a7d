"""What a publish of changed blocks alone would spare: the share of blocks of the weights in which an optimizer step changes no bit.

The default task's policy takes AdamW steps on answers of random tokens; after each, what would be published is compared with what was
before. ``unchanged_min`` and ``unchanged_max`` are over the steps; a block of one value is a value. Nothing is timed.
"""

import asyncio
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.report import arguments, conditions, report
from skyrl_async.columns import VersionSpans
from skyrl_async.inference.policy_files import read_config
from skyrl_async.tasks.registry import get_task
from skyrl_async.tasks.tiny_policy import PolicySizes, prepare_initial_policy
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Trajectory

LEARNING_RATES = (5e-4, 1e-5, 1e-6)
BLOCK_BYTES = (0, 64 << 10, 256 << 10, 1 << 20)
"""0: single values."""
NUM_ROWS, NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS = 64, 8, 32


def rows(vocabulary: int, generator: torch.Generator) -> list[Trajectory]:
    """Answers of random tokens."""
    drawn = torch.randint(0, vocabulary, (NUM_ROWS, NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS), generator=generator)
    return [
        Trajectory(
            prompt_token_ids=ids[:NUM_PROMPT_TOKENS],
            response_token_ids=ids[NUM_PROMPT_TOKENS:],
            loss_mask=(1,) * NUM_ANSWER_TOKENS,
            logprobs=(-4.0,) * NUM_ANSWER_TOKENS,
            versions=VersionSpans.constant(0, NUM_ANSWER_TOKENS),
            reward=0.0,
        )
        for ids in drawn.numpy()
    ]


async def published(policy: InProcessPolicy, version: int, directory: Path) -> Tensor:
    """All weights of a version as they would be sent: bytes, shape (num_bytes,)."""
    await policy.gather_weights(version)
    update = await policy.send_weights(version, directory / str(version), 64 << 20)
    return taken_bytes(Path(update.path))


def taken_bytes(path: Path) -> Tensor:
    """Of all tensors in a file, which is deleted."""
    with safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name).flatten().view(torch.uint8) for name in sorted(file.keys())]
    path.unlink()
    return torch.cat(tensors)


async def versions(settings: TrainingSettings, *, num_steps: int, seed: int) -> list[Tensor]:
    """What is published before the first step and after each."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(read_config(settings.policy_path)["vocab_size"])
    policy = InProcessPolicy(settings)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for version in range(num_steps + 1):
            found.append(await published(policy, version, Path(directory)))
            advantages = torch.randn(NUM_ROWS, generator=generator).tolist()
            await policy.forward_backward(rows(vocabulary, generator), advantages, version)
            await policy.step(float(NUM_ROWS * NUM_ANSWER_TOKENS))
    await policy.close()
    return found


def share_unchanged(before: Tensor, after: Tensor, block_bytes: int) -> float:
    """Share of blocks without a changed bit; the last one may be shorter."""
    changed = pad(before != after, (0, -len(before) % block_bytes)).view(-1, block_bytes).any(dim=1)
    return 1.0 - changed.float().mean().item()


async def measure(settings: TrainingSettings, *, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """A row per size of blocks."""
    found = await versions(settings, num_steps=num_steps, seed=seed)
    width = torch.finfo(getattr(torch, settings.serve_dtype)).bits // 8
    result = []
    for block_bytes in BLOCK_BYTES:
        shares = [share_unchanged(before, after, block_bytes or width) for before, after in pairwise(found)]
        result.append(
            {
                "learning_rate": settings.lr,
                "dtype": settings.serve_dtype,
                "block_bytes": block_bytes or width,
                "parameters": found[0].numel() // width,
                "unchanged_min": min(shares),
                "unchanged_max": max(shares),
            }
        )
    return result


def main() -> int:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    num_steps = 2 if options.quick else 8
    under = conditions(num_steps=num_steps, seed=options.seed, num_rows=NUM_ROWS, num_answer_tokens=NUM_ANSWER_TOKENS)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        task = get_task("lagged_fibonacci")
        policy = prepare_initial_policy(Path(cache), task, PolicySizes(), seed=options.seed)
        for learning_rate, dtype in product(LEARNING_RATES, ("float32", "bfloat16")):
            settings = TrainingSettings(policy_path=str(policy), lr=learning_rate, serve_dtype=dtype, seed=options.seed)
            found += asyncio.run(measure(settings, num_steps=num_steps, seed=options.seed))
    report("blocks that an optimizer step leaves as they are", {"conditions": under}, found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
