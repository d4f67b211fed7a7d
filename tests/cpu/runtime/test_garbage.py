"""Rare garbage collection, in a process of its own."""

import subprocess
import sys

import pytest

TRITON = """
import asyncio, torch, triton
from skyrl_async.runtime.garbage import collect_rarely

async def main():
    collect_rarely()

asyncio.run(main())
"""
REPLACING = """
import asyncio, collections, gc
from skyrl_async.runtime.garbage import collect_rarely

async def main():
    collect_rarely()
    held = collections.deque([] for _ in range(100_000))
    gc.collect()
    for _ in range(20):
        for _ in range(5_000):
            held.append([])
            held.popleft()
        await asyncio.sleep(0.03)
        num_young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
        assert num_young < 20_000, num_young

asyncio.run(main())
"""


def output_of(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_process_that_collects_rarely_ends_without_a_word() -> None:
    """Triton's bindings list what they take for leaks."""
    assert output_of(TRITON) == ""


@pytest.mark.slow
def test_objects_that_replace_others_are_not_looked_at_all_in_one_go() -> None:
    assert output_of(REPLACING) == ""
