"""How engine cores are forked: what they take over from their parent, and what not."""

import gc
import os

from skyrl_async.inference.vllm_boot import _BoundForkContext


class Cycle:
    """Garbage that only the collector finds; says in which process it is found."""

    def __init__(self, pipe: int) -> None:
        self.me = self
        self.pipe = pipe

    def __del__(self) -> None:
        os.write(self.pipe, f"{os.getpid()} ".encode())


def test_a_forked_core_leaves_its_parent_s_garbage_alone() -> None:
    read_end, write_end = os.pipe()
    gc.disable()
    try:
        Cycle(write_end)
        core = _BoundForkContext().Process(target=gc.collect)
        core.start()
        core.join(30)
        assert core.exitcode == 0
        gc.collect()
    finally:
        gc.enable()
    os.close(write_end)
    with os.fdopen(read_end) as found:
        assert found.read() == f"{os.getpid()} "
