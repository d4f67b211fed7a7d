"""Rare garbage collection, in a process of its own."""

import subprocess
import sys

import pytest

RUN = "import torch, triton; from skyrl_async.runtime.garbage import collect_rarely; collect_rarely()"


@pytest.mark.slow
def test_a_process_that_collects_rarely_ends_without_a_word() -> None:
    """Triton's bindings list what they take for leaks."""
    ended = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""
