"""A Ray for each file that needs one, with workers that Ray starts itself, as it does for a user, or with forks where many boot."""

from collections.abc import Iterator

import pytest

from tests.cpu.conftest import local_ray
from tests.cpu.forked_workers import forking_workers


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """Not for longer: other files here join clusters of their own."""
    with local_ray():
        yield


@pytest.fixture(scope="module")
def ray_of_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For engines, most of whose boot is imports; each is killed as a process of its own all the same."""
    with forking_workers(tmp_path_factory.mktemp("workers")), local_ray():
        yield
