"""The Ray of tests/cpu for these tests, with workers that Ray starts itself, as it does for a user."""

import pytest

from tests.cpu.conftest import ray_session

__all__ = ["ray_session"]


@pytest.fixture(scope="session")
def forked_workers() -> None:
    """None are."""
