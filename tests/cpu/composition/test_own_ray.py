"""A Ray that does not come up is started once more, and leaves nothing running.

Its start is a stand-in that leaves a real process behind and fails as Ray's does: no test can have a machine that is too busy.
"""

import logging
import subprocess

import pytest

from skyrl_async.composition import ray_cluster
from skyrl_async.composition.closing import ClosingStack
from skyrl_async.config.schema.run import PlacementConfig
from skyrl_async.errors import DeadlineError


class _Start:
    """Leaves a process and fails, ``num_failures`` times."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.left: list[subprocess.Popen[bytes]] = []

    def __call__(self, num_cpus: int | None) -> None:
        if len(self.left) < self.num_failures:
            self.left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception("The current node timed out during startup.")

    def is_gone(self) -> bool:
        return all(process.wait(timeout=60) for process in self.left)


async def _start(monkeypatch: pytest.MonkeyPatch, start: _Start) -> None:
    monkeypatch.setattr(ray_cluster, "_start_local_ray", start)
    monkeypatch.setattr(ray_cluster, "end_ray", lambda: None)
    async with ClosingStack() as stack:
        await ray_cluster.start_ray(PlacementConfig(), stack)


async def test_what_a_first_attempt_left_is_killed_and_a_second_one_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = _Start(num_failures=1)
    with caplog.at_level(logging.WARNING):
        await _start(monkeypatch, start)
    assert "Ray did not start (The current node timed out during startup.); it is started once more" in caplog.text
    assert start.is_gone()


async def test_when_none_comes_up_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _Start(num_failures=2)
    with pytest.raises(DeadlineError, match=r"Ray did not start, in 2 attempts: .* placement.ray_address joins"):
        await _start(monkeypatch, start)
    assert start.is_gone()
