"""A Ray for each file that needs one, with workers that Ray starts itself, as it does for a user."""

from collections.abc import Iterator

import pytest

from tests.cpu.conftest import local_ray


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """Not for longer: other files here join clusters of their own."""
    with local_ray():
        yield
