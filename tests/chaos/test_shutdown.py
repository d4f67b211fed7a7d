"""Runs that end otherwise than they were meant to, as processes: by bugs, by signals, by damage on the disk.

Where no endpoint is asked for, with the deterministic engine, which boots faster; ``test_main`` kills a run of the default one.
"""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from skyrl_async.metrics.tracker import read_rows
from tests.cpu.test_main import FOR_EVER, NO_VLLM, SMALL, Command, assert_ledger_is_exact, run, state
from tests.patience import PATIENCE_S

GENERATORS = """
import asyncio
from skyrl_async.types import Trajectory

class Generator:
    def __init__(self, end):
        self.end, self.num_played = end, 0

    async def generate(self, request):
        self.num_played += 1
        if self.num_played > 6:
            await self.end()
        rows = dict(prompt_token_ids=(1,), response_token_ids=(2, 3), loss_mask=(1, 1), versions=(0, 0), logprobs=(-1.0, -1.0))
        return tuple(Trajectory(reward=float(i), **rows) for i in range(request.num_samples))

def make_broken(client, renderer, config):
    return Generator(1 // 0)

def make_hanging(client, renderer, config):
    return Generator(asyncio.Event().wait)
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "my_generators.py").write_text(GENERATORS)
    return tmp_path


def shared_memory(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"skyrl_async-{pid}-*"))


@pytest.mark.slow
def test_contract_8_a_bug_ends_the_run_with_one_traceback(workplace: Path) -> None:
    entrypoint = "generator.entrypoint=my_generators:make_broken"
    outcome = run(*SMALL, *NO_VLLM, FOR_EVER, entrypoint, "trainer.output_dir=out", cwd=workplace)
    assert outcome.code == 1
    assert outcome.stderr.count("Traceback") == 1, outcome.stderr
    assert "return Generator(1 // 0)" in outcome.stderr and "ZeroDivisionError" in outcome.stderr
    assert f"(see {workplace / 'out' / 'run.log'})" in outcome.stderr
    assert "ZeroDivisionError" in (workplace / "out" / "run.log").read_text()
    assert shared_memory(outcome.pid) == []


@pytest.mark.slow
def test_ctrl_c_while_engines_boot_ends_cleanly(workplace: Path) -> None:
    with Command([*SMALL, "trainer.output_dir=booting"], cwd=workplace) as command:
        command.read_until("booting engines")
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        outcome = command.finish()
    assert outcome.code == 130, outcome.stderr
    assert outcome.orphans == ()
    assert "Traceback" not in outcome.stderr and "interrupted; continue with" in outcome.stderr
    assert outcome.seconds < PATIENCE_S


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_its_step_and_ends_cleanly(workplace: Path) -> None:
    out = workplace / "out"
    overrides = [*SMALL, "evaluation.num_prompts=0", FOR_EVER, f"trainer.output_dir={out}", "server.enabled=true"]
    with Command([*overrides, "trainer.checkpoint_interval_steps=0"], cwd=workplace) as command:
        endpoint = command.read_until("endpoint: ").rsplit("endpoint: http://127.0.0.1:", 1)[1]
        command.wait_for_step(2)
        command.process.send_signal(signal.SIGTERM)
        outcome = command.finish()
    assert outcome.code == 143, outcome.stderr
    assert outcome.orphans == () and shared_memory(outcome.pid) == []
    directory, saved, _ = state(out)
    assert f"stopped after step {saved['step']}, saved in {directory}" in outcome.stderr
    assert (
        f"interrupted; continue with --config {out}/config.yaml trainer.output_dir={out} trainer.resume_mode=latest"
        in outcome.stderr
    )
    assert "Traceback" not in outcome.stderr
    assert outcome.seconds < PATIENCE_S
    assert saved["step"] >= 2, "no checkpoint was due, but for the stop"
    assert_ledger_is_exact(out)
    assert not (out / "endpoint.json").exists()
    with socket.socket() as port:
        assert port.connect_ex(("127.0.0.1", int(endpoint.partition("/")[0]))) != 0


@pytest.mark.slow
def test_contract_7_a_run_whose_endpoint_died_too_often_saves_and_is_resumed(workplace: Path) -> None:
    out = workplace / "out"
    overrides = [*SMALL, "evaluation.num_prompts=0", f"trainer.output_dir={out}"]
    endless = [FOR_EVER, "trainer.checkpoint_interval_steps=1000", "generator=gym_http", "server.max_restarts=0"]
    with Command([*overrides, *endless], cwd=workplace) as command:
        command.wait_for_step(2)
        children = psutil.Process(command.process.pid).children(recursive=True)
        (front_end,) = (child for child in children if "ray::EndpointServer" in "".join(child.cmdline()))
        front_end.kill()
        outcome = command.finish()
    assert outcome.code == 1 and outcome.orphans == () and shared_memory(outcome.pid) == []
    assert outcome.error.startswith("error: the front end on port "), outcome.error
    assert "server.max_restarts=0 are used up" in outcome.error and "trainer.resume_mode=latest" in outcome.error
    assert "Traceback" not in outcome.stderr
    _, saved, _ = state(out)
    trained = assert_ledger_is_exact(out)
    assert saved["step"] >= 2, "no checkpoint was due, but for the end"
    last = saved["step"] + 2
    resume = [f"trainer.num_steps={last}", "trainer.resume_mode=latest"]
    resumed = run(*overrides, *NO_VLLM, *resume, cwd=workplace)
    assert resumed.code == 0, resumed.stderr
    assert set(trained) < set(assert_ledger_is_exact(out))
    steps = [row["step"] for row in read_rows(out / "metrics.jsonl") if "reward/mean" in row]
    assert steps == list(range(1, last + 1))


@pytest.mark.slow
def test_a_second_run_is_refused_a_second_ctrl_c_ends_at_once_and_a_damaged_checkpoint_is_passed_over(
    workplace: Path,
) -> None:
    """Rollouts hang after three steps, so that the stop waits for a step whose groups do not come."""
    out = workplace / "out"
    small = [*SMALL, *NO_VLLM, "trainer.output_dir=out"]
    entrypoint = "generator.entrypoint=my_generators:make_hanging"
    hanging = [entrypoint, "evaluation.pin_version=false"]  # evaluations hang, too
    with Command([*small, FOR_EVER, *hanging], cwd=workplace) as command:
        command.wait_for_step(1)
        refused = run(*small, "trainer.resume_mode=latest", cwd=workplace)
        assert refused.code == 2 and f"in use by another run (process {command.process.pid} on" in refused.stderr
        while max(row["step"] for row in read_rows(out / "metrics.jsonl")) < 3:
            with pytest.raises(subprocess.TimeoutExpired):
                command.process.wait(timeout=0.1)
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        while "SIGINT: finishing the step (for at most 30 s)" not in command.stderr_path.read_text():
            with pytest.raises(subprocess.TimeoutExpired):
                command.process.wait(timeout=0.1)
        command.process.send_signal(signal.SIGINT)
        outcome = command.finish()
    assert outcome.code == 130, outcome.stderr
    assert outcome.orphans == () and shared_memory(outcome.pid) == []
    assert "SIGINT: the run ends at once" in outcome.stderr, outcome.stderr
    assert "Traceback" not in outcome.stderr, outcome.stderr
    newest, _, _ = state(out)
    assert f"ended at once, the last checkpoint is {newest}" in outcome.stderr
    assert outcome.seconds < PATIENCE_S

    shutil.copytree(newest, damaged := out / "checkpoints" / "global_step_9")
    (damaged / "groups.json").write_text("[")
    (out / "checkpoints" / "latest_ckpt_global_step.txt").write_text("9")
    (out / "checkpoints" / ".partial-global_step_10").mkdir()
    resumed = run(*small, "trainer.num_steps=4", "trainer.resume_mode=latest", cwd=workplace)
    assert resumed.code == 0, resumed.stderr
    said = f"checkpoint {damaged} is damaged: groups.json has 1 bytes, expected"
    assert said in resumed.stderr and said in (out / "run.log").read_text()
    assert f"{newest.name} is resumed instead" in resumed.stderr
    assert f"[resuming {newest.name}]" in resumed.stdout
    assert not (out / "checkpoints" / ".partial-global_step_10").exists()


@pytest.mark.slow
def test_a_ray_that_hangs_is_named_and_keeps_no_process(workplace: Path) -> None:
    with Command([*SMALL, *NO_VLLM, FOR_EVER, "trainer.output_dir=out"], cwd=workplace) as command:
        command.wait_for_step(1)
        (frozen,) = [p for p in psutil.Process(command.process.pid).children() if p.name() == "gcs_server"]
        frozen.suspend()
        command.process.send_signal(signal.SIGTERM)
        outcome = command.finish()
    assert outcome.code == 143, outcome.stderr
    assert "Ray did not end within 15 s" in outcome.stderr and "stopped after step" in outcome.stderr
    assert outcome.orphans == () and shared_memory(outcome.pid) == []
