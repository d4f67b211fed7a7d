"""What Harbor is told about agents that ask a sample's session."""

import json
from pathlib import Path

import pytest

from skyrl_async.generators.agent.harness import AgentTask
from skyrl_async.harbor.agents import agent_config, harbor_name
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
