"""A second Ctrl-C while a checkpoint's file is synced to a disk that hangs: a process with real signals and real threads."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState
from skyrl_async.simulator.models import ModelledPolicy
from tests.patience import PATIENCE_S

RUN = """
import os, sys, threading
from pathlib import Path
from skyrl_async import main
from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState
from skyrl_async.runtime.shutdown import Phase
from skyrl_async.simulator.models import ModelledPolicy

fsync, leave_process = os.fsync, main.leave_process

def hang(handle):
    if os.readlink(f"/proc/self/fd/{handle}").endswith("trainer_state.json"):
        print("in fsync", flush=True)
        threading.Event().wait()
    fsync(handle)

async def write(one_run):
    interruption = one_run.interruption
    with interruption.attached(), interruption.ending_afterwards():
        interruption.enter(Phase.TRAINING)
        os.fsync = hang
        checkpointer = Checkpointer(one_run.run_dir / "checkpoints", max_to_keep=0, threads=one_run.disk)
        state = TrainerState(step=2, next_admission_index=0, dataloader={}, totals={}, groups=())
        await checkpointer.write(ModelledPolicy(), state)

def leave(code):
    print("left", flush=True)
    leave_process(code)

main._Run.execute, main.leave_process = write, leave
overrides = [f"trainer.output_dir={sys.argv[1]}", "trainer.resume_mode=latest"]
code = main.main(overrides, **({"owns_process": True} if sys.argv[2] == "owns" else {}))
print("returned", flush=True)
sys.exit(code)
"""


def state(step: int) -> TrainerState:
    return TrainerState(step=step, next_admission_index=0, dataloader={}, totals={}, groups=())


@pytest.mark.slow
@pytest.mark.parametrize(("owns", "said"), [("owns", "left\n"), ("is called", "returned\n")])
def test_a_second_ctrl_c_ends_a_run_at_once_whose_checkpoint_hangs_in_the_disk(
    tmp_path: Path, owns: str, said: str
) -> None:
    """A process that is the run's alone is left past the thread that hangs; whoever called the run goes on."""
    checkpoints = Checkpointer(tmp_path / "checkpoints", max_to_keep=0)
    asyncio.run(checkpoints.write(ModelledPolicy(), state(1)))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), owns], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    try:
        assert run.stdout.readline() == "in fsync\n"
        run.send_signal(signal.SIGINT)
        while "once more ends the run at once" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        output, errors = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
        run.communicate()
    assert output == said
    assert "ended at once" in errors
    assert run.returncode == 130
    usable = checkpoints.usable()
    assert usable is not None and (usable.state.step, usable.refused) == (1, ())
    checkpoints.tidy()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "global_step_1",
        "latest_ckpt_global_step.txt",
    ]
