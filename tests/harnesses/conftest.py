"""The fixtures of tests/cpu that these tests share."""

from tests.cpu.conftest import authorities, forked_workers

__all__ = ["authorities", "forked_workers"]
