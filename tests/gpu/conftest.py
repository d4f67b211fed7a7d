"""Every test of this folder needs a CUDA device, and says so where there is none."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.training.protocol import Policy
from skyrl_async.types import PauseMode
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.engine_checks import MAX_MODEL_LEN

TIMEOUT_S = 900
"""On a bare machine the first engines compile their kernels, and a test may boot two."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give this folder's tests time, or skip them on a machine without CUDA."""
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def publisher_of(tmp_path: Path) -> Callable[..., WeightPublisher]:
    """Makes publishers of a policy to one engine, each with a folder of its own; ``ways`` are ``share`` or ``broadcast``."""

    def make(policy: Policy, engine: InferenceEngine, name: str, **ways: Any) -> WeightPublisher:
        return WeightPublisher(
            client=InferenceEngineClient([engine], tokenizer=None, max_model_len=MAX_MODEL_LEN),  # type: ignore[arg-type]
            policy=policy,
            directory=tmp_path / name,
            bucket_bytes=1 << 20,
            pause_mode=PauseMode.ABORT,
            trace=Trace(None, time.monotonic),
            **ways,
        )

    return make
