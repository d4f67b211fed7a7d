"""The examples with small datasets train, by the commands in their READMEs, on what is theirs.

Cut to two steps of few answers, after a warm start that teaches hardly more than the form of an answer, over the deterministic engine,
which boots faster, in one Ray. A run takes some 10 s of a core.
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import ray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skyrl_async.data.dataset import load_sources
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import Prompt
from tests.chaos.audit import trained_groups
from tests.cpu.conftest import local_ray
from tests.cpu.forked_workers import forking_workers
from tests.cpu.test_main import run

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENTS = {"gsm8k": "gsm8k", "dapo": "math", "multi_turn_tools": "calculator", "lora": "gsm8k"}
NUM_STEPS = 2
_COLUMNS = ("prompt_token_ids", "response_token_ids", "loss_mask", "reward", "shaped_reward")
SMALL = (
    "engine=deterministic",
    f"trainer.num_steps={NUM_STEPS}",
    "trainer.policy_mini_batch_size=2",
    "trainer.eval_interval_steps=0",
    "trainer.checkpoint_interval_steps=0",
    "trainer.algorithm.use_entropy_loss=true",  # a gradient, where all answers of so young a policy are wrong
    "generator.n_samples_per_prompt=4",
    "policy.warm_start.min_tokens=1000",
    "policy.warm_start.max_tokens=12000",
    "policy.warm_start.mixture_tokens=2000",
    "evaluation.num_prompts=2",
    "logging.tensorboard=false",
    "trainer.output_dir=out",
)
CUT = (*SMALL, "trainer.deterministic=true", "trainer.max_staleness_steps=1")


@pytest.fixture(scope="module")
def joined_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What makes a run join a Ray with forked workers; the files of tests/chaos, which may come next, have a Ray of their own."""
    with forking_workers(tmp_path_factory.mktemp("workers")), local_ray():
        yield f"placement.ray_address={ray.get_runtime_context().gcs_address}"


def commands_of(name: str) -> list[list[str]]:
    """The overrides of each command that trains."""
    text = (EXAMPLES / name / "README.md").read_text().replace("\\\n", "")
    return [shlex.split(found)[4:] for found in re.findall(r"^uv run -m skyrl_async\.main .*$", text, re.MULTILINE)]


def turns(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """What the policy said between two words of the environment."""
    tokens = zip(row["loss_mask"], row["response_token_ids"], strict=True)
    for is_sampled, of_turn in groupby(tokens, key=lambda token: token[0]):
        if is_sampled:
            yield tokenizer.decode([token for _, token in of_turn], skip_special_tokens=True)


def reward_of(row: dict[str, Any], prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> float:
    """What the example's environment pays for a row that was trained."""
    environment = make_environment(prompt.env_class, dict(prompt.extras))
    environment.init(list(prompt.messages))
    return sum(float(environment.step(text)["reward"] or 0) for text in turns(row, tokenizer))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_command_of_a_readme_trains_on_its_own_prompts_with_its_own_reward(
    name: str, joined_ray: str, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    outcome = run(*commands_of(name)[0], *CUT, joined_ray, cwd=tmp_path, is_forked=True)
    assert outcome.code == 0, outcome.stderr

    out = tmp_path / "out"
    steps = [row for row in read_rows(out / "metrics.jsonl") if "policy/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert all(row["policy/grad_norm"] > 0 for row in steps)
    assert json.loads((out / "summary.json").read_text())["reward_after"] is not None
    assert (out / "policy" / "adapter").is_dir() == (name == "lora")

    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    (rows,) = load_sources([EXAMPLES / name / "train.jsonl"], None)
    prompts = {prompt.uid: prompt for prompt in rows}
    groups = trained_groups(out, columns=_COLUMNS)
    assert len(groups) == 2 * NUM_STEPS
    for group in groups:
        prompt = prompts[group["uid"]]
        assert prompt.env_class == ENVIRONMENTS[name]
        for row in group["rows"]:
            assert str(prompt.messages[0]["content"]) in tokenizer.decode(row["prompt_token_ids"])
            assert row["reward"] == reward_of(row, prompt, tokenizer)
        if name == "dapo":
            assert len({row["reward"] for row in group["rows"]}) > 1, "dynamic sampling"
            assert all(row["shaped_reward"] <= row["reward"] for row in group["rows"])


def trained_by(command: list[str], joined_ray: str, tmp_path: Path) -> list[dict[str, Any]]:
    """The steps of a command, cut short."""
    starts_ray = any(word.startswith("placement.num_cpu_slots=") for word in command)  # of so many slots
    outcome = run(*command, *SMALL, *([] if starts_ray else [joined_ray]), cwd=tmp_path, is_forked=True)
    assert outcome.code == 0, outcome.stderr
    steps = [row for row in read_rows(tmp_path / "out" / "metrics.jsonl") if "policy/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    return steps


def test_the_command_of_one_step_off_trains_each_batch_a_step_after_it_was_admitted(
    joined_ray: str, tmp_path: Path
) -> None:
    _, one_step_off, _ = commands_of("one_step_off")
    assert one_step_off[0] == "trainer.schedule=one_step_off"
    steps = trained_by(one_step_off, joined_ray, tmp_path)
    assert [step["async/staleness_max"] for step in steps] == [0, 1]
    assert all(step["async/num_aborts"] == 0 for step in steps)


@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_async_ref_logp_compute_the_reference_in_a_stage_of_its_own(
    number: int, joined_ray: str, tmp_path: Path
) -> None:
    command = commands_of("async_ref_logp")[number]
    assert "training.num_ref_workers=1" in command
    steps = trained_by(command, joined_ray, tmp_path)
    assert all("policy/ref_kl" in step for step in steps)
    assert sum(step["stage/ref_logp/items"] for step in steps) >= NUM_STEPS * 2, "the prompts of the steps"
