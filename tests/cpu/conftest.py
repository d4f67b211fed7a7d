"""Fixtures shared by the CPU tests: one Ray for the whole session."""

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cpu.two_ranks import RankPair

os.environ.setdefault("OMP_NUM_THREADS", "1")

from skyrl_async.composition.closing import descendants, kill_descendants
from skyrl_async.composition.ray_cluster import end_ray
from skyrl_async.config.wheel_tag import correct_wheel_tag

_RAY_ENDS_WITHIN_S = 60.0


def _put_aside(name: str) -> str | None:
    """Take a variable out of the environment, once for all processes that run tests; they inherit what it was."""
    kept = f"SKYRL_ASYNC_TESTS_{name}"
    if kept not in os.environ:
        os.environ[kept] = os.environ.pop(name, "")
    return os.environ[kept] or None


# Each HTTP client made would read all the authorities' certificates, more work than most tests do: only uv speaks TLS.
AUTHORITIES = {name: _put_aside(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

# Dozens of processes import the same modules. Where a container says not to keep bytecode, each of them would compile it all again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No file of a test has to outlive a power failure, and some tests would wait longer for the disk than for all else.
os.fsync = lambda handle: None

correct_wheel_tag()
gc.disable()  # until all is imported: nothing of that is garbage, and looking through it takes as long as importing
atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # looking for garbage as often as by default takes a seventh of the tests' time
    gc.enable()


@pytest.fixture
def authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes may reach the registry: they find the certificates that this machine trusts."""
    for name, value in AUTHORITIES.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def forked_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The workers of every Ray that is started from now on are forks: most of what a worker's boot costs is imports."""
    from tests.cpu.forked_workers import forking_workers

    with forking_workers(tmp_path_factory.mktemp("workers")):
        yield


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Join a Ray of this process's own.

    Its processes are killed where it does not end: once, after a quarter of an hour of tests, a call to its GCS never returned
    (``GcsSubscriber.close``) until the GCS was killed.
    """
    import ray

    before = descendants()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ending = threading.Thread(target=end_ray, daemon=True)
    ending.start()
    ending.join(_RAY_ENDS_WITHIN_S)
    if ending.is_alive():
        kill_descendants(but=before)
        ending.join()


@pytest.fixture(scope="session")
def ray_session(forked_workers: None) -> Iterator[None]:
    """A local Ray for every test that needs one."""
    with local_ray():
        yield


@pytest.fixture(scope="session")
def rank_pair(forked_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["RankPair"]:
    """Two processes for every test that compares two ranks with one."""
    from tests.cpu.two_ranks import RankPair

    pair = RankPair(tmp_path_factory.mktemp("rank_pair"))
    yield pair
    pair.close()
