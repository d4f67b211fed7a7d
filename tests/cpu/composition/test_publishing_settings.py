"""The keys of ``weight_sync``, as they reach whoever sends and whoever loads."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl_async.composition.publishing import make_publisher
from skyrl_async.config.load import from_overrides
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.types import WeightUpdate


class Sender(ModelledPolicy):
    """Notes in what pieces it is to send."""

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        self.bucket_bytes = bucket_bytes
        return WeightUpdate(version=version, path="file", manifest={}, num_bytes=1)


class Loader(ModelledEngine):
    """Notes what it is to load."""

    async def load_weights(self, update: WeightUpdate) -> None:
        self.update = update
        await super().load_weights(update)


async def test_buckets_are_as_large_as_the_configuration_says() -> None:
    config = from_overrides("weight_sync.send_bucket_mb=3", "weight_sync.load_bucket_mb=5")
    policy, engine = Sender(), Loader("engine-0", num_tokens_of=lambda prompt, seed: 8)
    nobody: Any = SimpleNamespace()
    prompts: Any = SimpleNamespace(train=[SimpleNamespace(messages=())])
    renderer: Any = SimpleNamespace(render=lambda messages: (1, 2, 3))
    client = InferenceEngineClient([engine], tokenizer=nobody, max_model_len=100)
    with contextlib.ExitStack() as stack:
        publisher = make_publisher(config, client, policy, {}, renderer, prompts, Trace(None, time.monotonic), stack)
        await publisher.publish(0)
    assert policy.bucket_bytes == 3 << 20
    assert (engine.update.path, engine.update.load_bucket_bytes) == ("file", 5 << 20)
