"""How engines are started: what their cores take over from their parent, and what not; and which of them at the same time."""

import asyncio
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import psutil
import pytest

from skyrl_async.config.rules.all import ENGINE_ARGUMENTS
from skyrl_async.config.schema.policy import LARGEST_SERVED_RANK
from skyrl_async.inference.engines import ray as ray_engine
from skyrl_async.inference.engines.connection import EngineAddress
from skyrl_async.inference.engines.ray import StartedEngine, start_ray_engines
from skyrl_async.inference.vllm import boot as vllm_boot
from skyrl_async.inference.vllm.adapter import supported_rank
from skyrl_async.inference.vllm.boot import VLLMEngineConfig, _arguments, _BoundForkContext, _set_environment
from skyrl_async.simulator.clock import run_in_virtual_time
from tests.patience import PATIENCE_S


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
        core.join(PATIENCE_S)
        assert core.exitcode == 0
        gc.collect()
    finally:
        gc.enable()
    os.close(write_end)
    with os.fdopen(read_end) as found:
        assert found.read() == f"{os.getpid()} "


SLEEPING_CORE = """
import sys, time
from skyrl_async.inference.vllm import boot as vllm_boot

if __name__ == "__main__":
    core = getattr(vllm_boot, sys.argv[1])().Process(target=time.sleep, args=(1000.0,))
    core.start()
    print(core.pid, flush=True)
    time.sleep(1000.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["_BoundForkContext", "_BoundSpawnContext"])
def test_a_core_does_not_outlive_a_parent_that_is_killed(context: str) -> None:
    """``test_ray_engine`` kills the parent of a real one."""
    with subprocess.Popen([sys.executable, "-c", SLEEPING_CORE, context], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([core], timeout=PATIENCE_S)
    assert not core.is_running()


def test_every_argument_that_an_engine_gets_from_the_run_is_refused_among_the_extra_ones(tmp_path: Path) -> None:
    assert set(_arguments(VLLMEngineConfig(name="engine-0", policy_dir=str(tmp_path)))) == set(ENGINE_ARGUMENTS)


def variable_at_boot(
    monkeypatch: pytest.MonkeyPatch, config: VLLMEngineConfig, name: str, chosen: str | None
) -> str | None:
    """An environment variable as an engine boots with it. ``chosen``: by the user; None: not."""
    environment = {} if chosen is None else {name: chosen}
    monkeypatch.setattr(os, "environ", environment)
    _set_environment(config)
    return environment.get(name)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cuda", "float32", "ieee"), ("cuda", "bfloat16", None), ("cpu", "float32", None)],
)
def test_products_of_float32_are_whole_on_a_gpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, expected: str | None
) -> None:
    config = VLLMEngineConfig(name="engine-0", policy_dir="", device=device, dtype=dtype)
    assert variable_at_boot(monkeypatch, config, "TRITON_F32_DEFAULT", None) == expected
    assert variable_at_boot(monkeypatch, config, "TRITON_F32_DEFAULT", "tf32") == "tf32"


@pytest.mark.parametrize(
    ("device", "enforce_eager", "expected"), [("cpu", True, "1"), ("cpu", False, None), ("cuda", True, None)]
)
def test_nothing_is_compiled_on_a_cpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, enforce_eager: bool, expected: str | None
) -> None:
    config = VLLMEngineConfig(name="engine-0", policy_dir="", device=device, enforce_eager=enforce_eager)
    assert variable_at_boot(monkeypatch, config, "TORCHDYNAMO_DISABLE", None) == expected
    assert variable_at_boot(monkeypatch, config, "TORCHDYNAMO_DISABLE", "0") == "0"


@pytest.mark.slow
def test_engines_make_room_for_adapters_of_every_rank_that_is_not_refused() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert max(get_args(MaxLoRARanks)) == LARGEST_SERVED_RANK
    assert [supported_rank(rank) for rank in (1, 2, 8, 9, 33, LARGEST_SERVED_RANK)] == [1, 8, 8, 16, 64, 512]


def test_a_checksum_of_large_weights_has_more_time_than_other_calls(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(32 << 30)  # a hole: it takes no room
    config = VLLMEngineConfig(name="engine-0", policy_dir=str(tmp_path), call_timeout_s=60.0)
    assert config.checksum_timeout_s == 60.0 + 512.0
    assert replace(config, tensor_parallel_size=4).checksum_timeout_s == 60.0 + 128.0


@pytest.mark.parametrize(("num_gpus", "most_at_once"), [(0.0, 3), (0.25, 1), (0.5, 1), (0.6, 3), (1.0, 3)])
def test_engines_that_ray_may_put_on_one_gpu_boot_one_after_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: float, most_at_once: int
) -> None:
    num_booting: list[int] = [0]

    class Actor:
        @property
        def start(self) -> "Actor":
            return self

        async def remote(self) -> StartedEngine:
            num_booting.append(num_booting[-1] + 1)
            await asyncio.sleep(20.0)
            num_booting.append(num_booting[-1] - 1)
            address = EngineAddress(host="here", port=0, key=b"")
            return StartedEngine(
                max_model_len=1, node_id="here", address=address, call_timeout_s=60.0, checksum_timeout_s=60.0
            )

    monkeypatch.setattr(ray_engine, "_require_resources", lambda *_: None)
    monkeypatch.setattr(ray_engine, "_make_actor", lambda *_: Actor())
    configs = [VLLMEngineConfig(name=f"engine-{i}", policy_dir="") for i in range(3)]
    starting = start_ray_engines(configs, num_gpus=num_gpus, start_timeout_s=30.0, log_dir=tmp_path)
    engines = run_in_virtual_time(starting)
    assert [engine.name for engine in engines] == [config.name for config in configs]
    assert max(num_booting) == most_at_once


@pytest.mark.parametrize(("num_workers", "num_nodes", "expected"), [(1, 1, None), (2, 1, "nobind"), (2, 2, None)])
def test_workers_of_an_engine_on_a_cpu_are_bound_to_no_cores_where_numa_nodes_are_too_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int, num_nodes: int, expected: str | None
) -> None:
    for number in range(num_nodes):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(vllm_boot, "_NUMA_NODES", tmp_path)
    config = VLLMEngineConfig(name="engine-0", policy_dir="", tensor_parallel_size=num_workers)
    assert variable_at_boot(monkeypatch, config, "VLLM_CPU_OMP_THREADS_BIND", None) == expected
    assert variable_at_boot(monkeypatch, config, "VLLM_CPU_OMP_THREADS_BIND", "0|1") == "0|1"
