"""Runs with teachers as a user starts them: one is killed and resumed; one has two teachers, of which vLLM's own server is one."""

import asyncio
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_async.errors import ConfigError
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.record.files import read_samples
from skyrl_async.tasks.registry import get_task
from skyrl_async.tasks.tiny_policy import PolicySizes, prepare_initial_policy
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.training.workers.served_teacher import ServedTeacher
from tests.cpu.test_main import FOR_EVER, NO_VLLM, SMALL, Command, run, seconds_beside_gradients, state
from tests.cpu.vllm_server import vllm_server

DISTILLATION = "trainer.algorithm.distillation"


def write_teacher(directory: Path, policy_dir: Path, scale: float) -> Path:
    """The policy with larger weights: likes other tokens than a policy without a warm start, which is unsure of all."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy_dir).save_pretrained(directory)
    return directory


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    """The policy that the default task begins with."""
    return prepare_initial_policy(tmp_path / "cache", get_task("lagged_fibonacci"), PolicySizes(), seed=0)


@pytest.mark.slow
def test_a_killed_run_with_a_teachers_likeliest_tokens_goes_on_with_the_groups_that_waited(
    tmp_path: Path, policy_dir: Path, forked_workers: None
) -> None:
    student = tmp_path / "student"
    distilling = (
        *(*SMALL, *NO_VLLM),
        f"{DISTILLATION}.teachers={{t: {write_teacher(tmp_path / 'teacher', policy_dir, 3.0)}}}",
        f"{DISTILLATION}.top_k=16",
        f"trainer.output_dir={student}",
    )
    with Command([*distilling, FOR_EVER], cwd=tmp_path, is_forked=True) as command:
        for step in range(2, 40):
            command.wait_for_step(step)
            command.process.send_signal(signal.SIGSTOP)
            if state(student)[2] and seconds_beside_gradients("teacher_logp", student):
                break  # finished groups wait in the checkpoint
            command.process.send_signal(signal.SIGCONT)
        command.process.send_signal(signal.SIGKILL)
        command.finish()
    assert seconds_beside_gradients("teacher_logp", student) > 0, "the teacher did not work beside training"
    first = state(student)[1]["step"]
    last = f"trainer.num_steps={first + 2}"
    resumed = run(*distilling, last, "trainer.resume_mode=latest", cwd=tmp_path, is_forked=True)
    assert resumed.code == 0, resumed.stderr
    found = [row["policy/teacher_kl"] for row in read_rows(student / "metrics.jsonl") if "reward/mean" in row]
    assert len(found) == first + 2 and min(found) > 0.1


@pytest.mark.slow
async def test_each_sample_is_scored_by_the_teacher_of_its_prompt_in_a_directory_or_behind_vllms_own_server(
    tmp_path: Path, policy_dir: Path, forked_workers: None
) -> None:
    directories = {
        name: write_teacher(tmp_path / name, policy_dir, scale) for name, scale in (("near", 2.0), ("far", 3.0))
    }
    models = {name: InProcessPolicy(TrainingSettings(policy_path=str(path))) for name, path in directories.items()}
    lines = [
        json.dumps(
            {
                "uid": f"{teacher}-{number}",
                "prompt": [{"role": "user", "content": f"Extend 3{number:03} until 0."}],
                "env_class": "lagged_fibonacci",
                "reward_spec": {"ground_truth": "3"},
                "judge": teacher,
            }
        )
        for number in range(100, 116)
        for teacher in directories
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with vllm_server(str(directories["far"])) as url:
        outcome = await asyncio.to_thread(
            run,
            *(*SMALL, *NO_VLLM),
            *("task=dataset", f"task.train_files=[{tmp_path / 'train.jsonl'}]", f"policy.path={policy_dir}"),
            f"{DISTILLATION}.teachers={{near: {directories['near']}, far: '{url}'}}",
            f"{DISTILLATION}.teacher_key=judge",
            *("trainer.num_steps=3", f"trainer.output_dir={tmp_path / 'run'}"),
            cwd=tmp_path,
            is_forked=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(policy_dir)
        ids = sorted(tokenizer.get_vocab().values())
        teacher = ServedTeacher("far", url, api_key=None, timeout_s=1.0)
        other = tokenizer.decode([200])
        with pytest.raises(
            ConfigError, match="teachers.far=http.* must have the policy's tokens: 200 is .* there and '<other>' here"
        ):
            await teacher.check(ids, lambda tokens: tokenizer.decode(tokens).replace(other, "<other>"))
        await teacher.close()
    assert outcome.code == 0, outcome.stderr
    rows = read_samples(tmp_path / "run").to_pylist()
    assert {row["uid"].partition("-")[0] for row in rows} == set(directories) and len(rows) >= 12
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        scores = {
            name: (await model.logprobs([*prompt, *response]))[len(prompt) - 1 :] for name, model in models.items()
        }
        mine = scores.pop(row["uid"].partition("-")[0])
        np.testing.assert_allclose(row["teacher_logprobs"], mine, atol=1e-4)
        (others,) = scores.values()
        assert np.abs(np.subtract(others, mine)).max() > 0.1
    for model in models.values():
        await model.close()
