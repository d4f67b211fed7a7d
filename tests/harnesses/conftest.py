"""The fixture of tests/cpu that these tests share."""

from tests.cpu.conftest import authorities

__all__ = ["authorities"]
