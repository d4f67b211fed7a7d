"""An engine in the place of the only one: it serves only what the trainer wrote as that version (real files, real weights)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_async.errors import EngineDeadError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.training.export.staging import Staging
from skyrl_async.types import PauseMode, WeightUpdate
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.cpu.tiny_policies import write_policy


class Growing(ModelledPolicy):
    """Adds the version to every weight; sends as policy workers do."""

    def __init__(self, policy_dir: Path) -> None:
        super().__init__()
        self._weights = load_file(policy_dir / "model.safetensors")
        self._staging = Staging()

    async def gather_weights(self, version: int) -> int:
        grown = ((name, weight + version) for name, weight in self._weights.items())
        return self._staging.copy(version, grown)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        return self._staging.write(version, directory, bucket_bytes)


class Watched(DeterministicEngine):
    """Remembers which loads compared what they loaded."""

    def __init__(self, name: str, policy_dir: Path) -> None:
        super().__init__(name, policy_dir)
        self.has_compared: list[bool] = []

    async def load_weights(self, update: WeightUpdate) -> None:
        self.has_compared.append(update.is_compared)
        await super().load_weights(update)


def served(publisher: WeightPublisher) -> tuple[Path, bytes]:
    """The file of the version being served, and what is in it."""
    path = Path(publisher.serving.path)
    return path, path.read_bytes()


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def take_the_version_before(path: Path) -> None:
    path.write_bytes(path.with_name("before").read_bytes())


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (turn_a_bit, "has the checksum [0-9a-f]{8}, and [0-9a-f]{8} was sent"),
        (take_the_version_before, "has the checksum [0-9a-f]{8}, and [0-9a-f]{8} was sent"),
        (cut_off, "its header says"),
    ],
)
async def test_contract_6_without_another_engine_to_compare_with_it_is_held_against_what_was_sent(
    damage: Callable[[Path], None], complaint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy_dir = write_policy(tmp_path / "policy")
    first = Watched("engine-0", policy_dir)
    client = InferenceEngineClient([first], tokenizer=object(), max_model_len=100, engine_wait_s=None)
    publisher = WeightPublisher(
        client=client,
        policy=Growing(policy_dir),
        directory=tmp_path / "buckets",
        bucket_bytes=1000,
        pause_mode=PauseMode.ABORT,
        trace=Trace(None, lambda: 0.0),
        verifies_checksums=False,
    )
    await publisher.publish(1)
    _, before = served(publisher)
    await publisher.publish(2)
    checksum = await first.checksum()
    await first.close()
    client.drop_engine(first, EngineDeadError("killed"))
    assert first.has_compared == [False, False], "a pause is not lengthened by it"

    path, published = served(publisher)
    put(path.with_name("before"), before)
    damage(path)
    with pytest.raises(PublishError, match=complaint):
        await client.add_engine(Watched("engine-0.1", policy_dir))
    assert client.engines == ()

    put(path, published)
    second = Watched("engine-0.2", policy_dir)
    with caplog.at_level("INFO", "skyrl_async.weight_sync.verifier"):
        await client.add_engine(second)
    assert client.engines == (second,) and second.has_compared == [True]
    assert (await second.version(), await second.checksum()) == (2, checksum)
    assert f"engine-0.2 has loaded version 2 as it was sent (checksum {publisher.serving.crc32:08x})" in caplog.text
