"""The examples do what they say: over a tiny policy, and the script over a real endpoint."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.openai_agents import task as openai_agents
from examples.own_algorithm.rare_tokens import rare_tokens
from examples.own_algorithm.unsure_tokens import unsure_tokens
from examples.own_dataset.environment import ReverseWordEnv
from examples.own_generator.scored import COST_PER_TOKEN, score
from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.composition.algorithms import check_algorithm
from skyrl_async.composition.parts import make_generator
from skyrl_async.config.load import from_overrides
from skyrl_async.data.dataset import load_sources
from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import get_task, make_environment
from skyrl_async.types import Prompt, SamplingParams
from tests.cpu.tiny_run import build_policy, make_client, served_run

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "examples" / "own_dataset"
ENVIRONMENT = "examples.own_dataset.environment:ReverseWordEnv"


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with served_run(tmp_path_factory.mktemp("served") / "run") as directory:
        yield directory


def request(prompt: Prompt) -> GroupRequest:
    return GroupRequest(prompt=prompt, num_samples=3, sampling=SamplingParams(max_tokens=12), seed=5)


def test_an_answer_of_endless_digits_is_wrong_and_no_failure(tmp_path: Path) -> None:
    prompt = Prompt(uid="a", messages=({"role": "user", "content": "?"},), env_class="none", extras={"answer": 202})
    episode = AgentEpisode(
        messages=(), last_text="0" * 5000, output=None, working_dir=tmp_path, num_turns=1, is_truncated=False
    )
    assert openai_agents.reward(prompt, episode) == 0.0
    assert openai_agents.reward(prompt, replace(episode, last_text="72 and 130: 202")) == 1.0


async def test_the_own_generator_is_made_by_its_entrypoint_and_returns_the_sampled_tokens(
    policy_dir: Path, tmp_path: Path
) -> None:
    client, renderer = make_client(policy_dir)
    config = from_overrides("generator.entrypoint=examples.own_generator.scored:make")
    (prompt,), _ = get_task("lagged_fibonacci").make_prompts(1, 0, seed=0)
    async with AsyncExitStack() as stack:
        rows = await make_generator(config, client, renderer, None, tmp_path, stack).generate(request(prompt))
    assert len(rows) == 3 and len({tuple(row.response_token_ids) for row in rows}) > 1
    assert all(np.array_equal(row.prompt_token_ids, renderer.render(prompt.messages)) for row in rows)
    assert all(set(row.versions) == {0} and sum(row.loss_mask) == len(row.logprobs) > 0 for row in rows)


def test_the_own_estimators_give_the_advantage_of_a_sample_to_tokens_that_were_hard_to_foresee_or_weigh_them() -> None:
    for name in ("rare_tokens", "unsure_tokens"):
        key = f"trainer.algorithm.advantage_estimator=examples.own_algorithm.{name}:{name}"
        check_algorithm(from_overrides(key).trainer.algorithm)
    logprobs = [np.log([0.5, 0.99]), np.log([0.9, 0.1])]
    samples = [
        SampleCredit(rewards=(reward,), num_tokens=(2,), logprobs=of_one.astype(np.float32))
        for reward, of_one in zip((1.0, 0.0), logprobs, strict=True)
    ]
    found = rare_tokens(samples, AdvantageConstants())
    assert [advantages.tolist() for advantages in found] == [[1.0, 0.0], [0.0, -1.0]]
    weighed = unsure_tokens(samples, AdvantageConstants())
    assert [one.advantages.tolist() for one in weighed] == [[1.0, 1.0], [-1.0, -1.0]]
    assert [one.weights.tolist() for one in weighed] == [pytest.approx([0.5, 0.01]), pytest.approx([0.1, 0.9])]


def test_the_own_score_pays_for_the_right_digit_and_charges_for_length() -> None:
    prompt = Prompt(uid="p", messages=(), env_class="", extras={"reward_spec": {"ground_truth": "3"}})
    assert score("3+7=0\n#### 3", prompt, 10) == pytest.approx(1 - 10 * COST_PER_TOKEN)
    assert score("#### 4", prompt, 10) == score("3", prompt, 10) == 0.0


def test_the_own_environment_rewards_the_letters_up_to_the_first_wrong_one() -> None:
    def reward(action: str) -> float:
        outcome = ReverseWordEnv(extras={"word": "river"}).step(action)
        assert outcome["done"]
        return float(outcome["reward"])

    assert reward(" Revir\n") == 1.0
    assert reward("revix") == reward("revi") == 0.8
    assert reward("revirrevir") == 0.5
    assert reward("river") == 0.2
    assert reward("") == 0.0


async def test_the_own_dataset_loads_and_is_played_in_the_own_environment(policy_dir: Path) -> None:
    train, held_out = load_sources([DATASET / "train.jsonl", DATASET / "eval.jsonl"], ENVIRONMENT)
    assert len(train) >= 8, "one mini-batch"
    assert not {p.uid for p in train} & {p.uid for p in held_out}
    assert all(p.extras["word"] in str(p.messages[0]["content"]) for p in (*train, *held_out))
    client, renderer = make_client(policy_dir)
    rows = await GymGenerator(client, renderer, make_environment).generate(request(train[0]))
    assert len(rows) == 3 and all(0 <= row.reward <= 1 for row in rows)


@pytest.mark.slow
def test_the_chat_script_prints_an_answer_and_the_version_it_was_sampled_under(run_dir: Path) -> None:
    script = ROOT / "examples" / "openai_endpoint" / "chat.py"
    done = subprocess.run(
        [sys.executable, script, run_dir, "Extend 3248 until 0."], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens 0 to " in done.stdout and "policy version 0" in done.stdout
