"""What Harbor is told about agents that ask a sample's session, and what is made of its answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.config.schema.generator import HarborConfig
from skyrl_async.errors import GenerationError
from skyrl_async.generators.agent.harness import AgentTask
from skyrl_async.harbor.agents import agent_config, harbor_name
from skyrl_async.harbor.tasks import TASK_COLUMN
from skyrl_async.harbor.trials import HarborTrials
from skyrl_async.types import SamplingParams

TASK = AgentTask(
    uid="count",
    messages=(),
    extras={},
    base_url="http://127.0.0.1:8000/v1",
    api_key="key",
    model="policy",
    max_model_len=50_000,
    working_dir=Path(),
    sample_index=0,
    is_evaluation=False,
    sampling=SamplingParams(max_tokens=1000),
)


@pytest.mark.parametrize("name", ["codex", "opencode", "qwen-code"])
def test_an_agent_in_an_environment_knows_how_long_the_policys_context_is(name: str) -> None:
    assert "50000" in json.dumps(agent_config(harbor_name(name), TASK)["kwargs"])


def test_claude_code_adds_the_routes_version_itself() -> None:
    config = agent_config("claude-code", TASK)
    assert (config["base_url"], config["model_name"]) == ("http://127.0.0.1:8000", "anthropic/policy")
    assert config["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"
    assert not any("$" in value for value in config["env"].values())


def test_an_agent_that_is_not_shipped_is_given_the_session_alone() -> None:
    assert agent_config("goose", TASK)["base_url"] == TASK.base_url
    assert agent_config("my.agents:Agent", TASK)["import_path"] == "my.agents:Agent"


RUNNER = """#!{python}
import json
print(json.dumps(dict(ready=True, version="0")), flush=True)
trial = dict(id=json.loads(input())["id"], rewards=dict(reward={reward}), seconds=dict(), logs=dict())
print(json.dumps(dict(**trial, failure=None, is_late=False, has_error=False)), flush=True)
"""


@pytest.mark.parametrize("reward", ["nan", "inf"])
async def test_a_reward_that_is_not_finite_is_told_as_the_verifiers(tmp_path: Path, reward: str) -> None:
    python = tmp_path / "python"
    python.write_text(RUNNER.format(python=sys.executable, reward=f"float('{reward}')"))
    python.chmod(0o700)
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), "terminus-2", python, agent_timeout_s=60.0)
    complaint = rf"the verifier of count must give a finite number as reward .*, got \{{'reward': {reward}\}}"
    with pytest.raises(GenerationError, match=complaint):
        await trials.run(replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial"))
    await trials.close()
