"""The fixtures of tests/cpu that these tests share."""

from tests.cpu.conftest import ray_session

__all__ = ["ray_session"]
