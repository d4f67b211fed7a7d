"""A run with a local teacher, as a user starts it, loses it and resumes it."""

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_async.metrics.tracker import read_rows
from tests.cpu.test_main import FOR_EVER, NO_VLLM, SMALL, Command, run, state

DISTILLATION = "trainer.algorithm.distillation"


@pytest.mark.slow
def test_a_killed_run_with_a_teachers_likeliest_tokens_goes_on_with_the_groups_that_waited(
    tmp_path: Path, forked_workers: None
) -> None:
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    common = (*SMALL, *NO_VLLM)
    assert run(*common, "trainer.num_steps=1", f"trainer.output_dir={teacher}", cwd=tmp_path, is_forked=True).code == 0
    model = AutoModelForCausalLM.from_pretrained(teacher / "policy")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # likes other tokens than a policy without a warm start, which is unsure of all
    model.save_pretrained(teacher / "policy")
    distilling = (
        *common,
        f"{DISTILLATION}.teachers={{t: {teacher / 'policy'}}}",
        f"{DISTILLATION}.top_k=16",
        f"trainer.output_dir={student}",
    )
    with Command([*distilling, FOR_EVER], cwd=tmp_path, is_forked=True) as command:
        for step in range(2, 40):
            command.wait_for_step(step)
            command.process.send_signal(signal.SIGSTOP)
            if state(student)[2]:  # finished groups wait in the checkpoint
                break
            command.process.send_signal(signal.SIGCONT)
        command.process.send_signal(signal.SIGKILL)
        command.finish()
    first = state(student)[1]["step"]
    last = f"trainer.num_steps={first + 2}"
    resumed = run(*distilling, last, "trainer.resume_mode=latest", cwd=tmp_path, is_forked=True)
    assert resumed.code == 0, resumed.stderr
    found = [row["policy/teacher_kl"] for row in read_rows(student / "metrics.jsonl") if "reward/mean" in row]
    assert len(found) == first + 2 and min(found) > 0.1
