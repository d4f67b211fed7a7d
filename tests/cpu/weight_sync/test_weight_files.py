"""How many versions of the weights a run holds, whether they fit, and how far engines lag."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.composition.publishing import check_shared_memory
from skyrl_async.config.schema.fields import DType
from skyrl_async.config.schema.policy import PolicyConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError, PolicyError, PublishError, WeightsWriteError
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import WeightUpdate
from skyrl_async.weight_sync.publisher import Lag, LagMonitor, require_shm_capacity


def test_engines_lag_by_the_steps_they_do_not_serve_since_the_first_of_them_was_completed() -> None:
    monitor = LagMonitor()
    monitor.trained(0, 0.0)
    assert monitor.lag(1.0) == Lag(), "nothing is served yet"
    monitor.serves(0, 1.0)
    assert monitor.lag(9.0) == Lag()
    monitor.trained(1, 10.0)
    monitor.trained(2, 14.0)
    assert monitor.lag(15.0) == Lag(steps=2, seconds=5.0)
    monitor.serves(1, 16.0)
    assert monitor.lag(16.0) == Lag(steps=1, seconds=2.0)
    assert monitor.values(17.0) == {"weight_sync/lag_steps_max": 2.0, "timing/weight_sync_lag_max": 6.0}
    monitor.serves(2, 17.0)
    monitor.values(17.0)
    assert monitor.values(18.0) == {"weight_sync/lag_steps_max": 0.0, "timing/weight_sync_lag_max": 0.0}


@given(served=st.integers(0, 5), trained=st.lists(st.integers(0, 9), max_size=9), now=st.floats(100, 200))
def test_a_lag_is_never_negative_and_none_is_reported_by_engines_that_are_ahead(
    served: int, trained: list[int], now: float
) -> None:
    monitor = LagMonitor()
    for at, version in enumerate(trained):
        monitor.trained(version, float(at))
    monitor.serves(served, 50.0)
    lag = monitor.lag(now)
    assert lag.steps == max(0, max(trained, default=0) - served) and lag.seconds >= 0
    assert (lag.steps == 0) == (lag.seconds == 0)


def test_weights_that_do_not_fit_are_refused_with_the_sizes_and_what_to_set(tmp_path: Path) -> None:
    require_shm_capacity(tmp_path / "not" / "there", 1 << 20, double_buffer=True)
    with pytest.raises(
        ConfigError,
        match=r"weight_sync.double_buffer must be false, got true: 2 versions .* \(2,097,152 MiB are needed in .*, [\d,]+ MiB are free\)",
    ):
        require_shm_capacity(tmp_path, 1 << 40, double_buffer=True)
    with pytest.raises(ConfigError, match=r"do not fit into shared memory, even with weight_sync.double_buffer=false"):
        require_shm_capacity(tmp_path, 1 << 60, double_buffer=False)


def test_weights_that_fit_twice_are_not_refused(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    require_shm_capacity(tmp_path, int(status.f_bavail * status.f_frsize / 2.5), double_buffer=True)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()


class Files:
    """Modelled engines and a policy with a file for each version; some sends and loads fail."""

    def __init__(self, directory: Path, failing_sends: Sequence[int], failing_loads: Sequence[int]) -> None:
        self._directory = directory
        self._failing = {"send": failing_sends, "load": failing_loads}
        self._num_calls = Counter[str]()
        self.most_held = 0

    def watch(self, simulation: Simulation) -> None:
        """Count the files whenever one arrives or is loaded."""
        policy_sends = simulation.policy.send_weights

        async def send_weights(version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
            path = directory / f"v{version}"
            write(path)
            self.most_held = max(self.most_held, len(self._held()))
            update = await policy_sends(version, directory, bucket_bytes)
            self._strike("send")
            return replace(update, path=str(path))

        simulation.policy.send_weights = send_weights  # type: ignore[method-assign]
        for engine in simulation.engines:
            self._watch_loads(engine)

    def _watch_loads(self, engine: ModelledEngine) -> None:
        engine_loads = engine.load_weights

        async def load_weights(update: WeightUpdate) -> None:
            held = self._held()
            assert update.path in held
            self.most_held = max(self.most_held, len(held))
            await engine_loads(update)
            self._strike("load")

        engine.load_weights = load_weights  # type: ignore[method-assign]

    def _held(self) -> set[str]:
        return {str(path) for path in self._directory.rglob("v*")}

    def _strike(self, call: str) -> None:
        self._num_calls[call] += 1
        if self._num_calls[call] in self._failing[call]:
            raise WeightsWriteError("no room") if call == "send" else PublishError("a refusal")


SLOW_LOADS = {"load_seconds": 20.0, "stage_seconds": 30.0, "send_seconds": 0.1}
SLOW_SENDS = {"load_seconds": 0.1, "send_seconds": 20.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "failing_sends", "failing_loads"),
    [
        (SLOW_LOADS, (), ()),
        (SLOW_LOADS | {"publish_every_steps": 2}, (), (3, 7, 8)),
        (SLOW_SENDS, (), ()),
        (SLOW_SENDS | {"publish_every_steps": 3}, (3, 4, 6), ()),
        (SLOW_LOADS | {"eval_interval_steps": 2, "num_eval_prompts": 20}, (4,), (9,)),
        (SLOW_SENDS | {"max_staleness_steps": 1, "stream_mini_batch": False, "is_one_step_off": True}, (), ()),
    ],
)
def test_a_run_never_holds_more_than_two_versions_whatever_is_slow_or_fails(
    settings: dict[str, Any], failing_sends: Sequence[int], failing_loads: Sequence[int], tmp_path: Path
) -> None:
    quick = {"mini_batch_size": 4, "mean_tokens": 200.0, "num_steps": 12, "max_staleness_steps": 8}

    async def main() -> int:
        simulation = Simulation(SimulationSettings(**(quick | {"max_publish_retries": 2} | settings)))
        simulation.publisher._files.root = tmp_path
        files = Files(tmp_path, failing_sends, failing_loads)
        files.watch(simulation)
        await simulation.trainer.run()
        assert simulation.trainer.totals.trained_groups == 12 * 4
        return files.most_held

    assert run_in_virtual_time(main()) == 2


def test_a_policy_that_does_not_fit_into_shared_memory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (4 << 40))
    config = Config(policy=PolicyConfig(path=str(tmp_path), dtype=DType.float32))
    with pytest.raises(ConfigError, match=r"2 versions of the weights do not fit \(8,388,608 MiB are needed in"):
        check_shared_memory(config, tmp_path)


def test_weights_that_were_not_downloaded_whole_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n")
    config = Config(policy=PolicyConfig(path=str(tmp_path), dtype=DType.float32))
    with pytest.raises(PolicyError, match=r"model.safetensors cannot be read \(\d+ bytes .*\); download it whole"):
        check_shared_memory(config, tmp_path)
