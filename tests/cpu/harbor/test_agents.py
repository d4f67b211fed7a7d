"""What Harbor is told about agents that ask a sample's session, and what is made of its answers."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.harbor.make import tasks, write
from skyrl_async.config.schema.generator import HarborConfig
from skyrl_async.errors import ConfigError, EnvironmentFailedError, GenerationError
from skyrl_async.generators.agent.harness import AgentTask
from skyrl_async.harbor import process
from skyrl_async.harbor.__main__ import main as check_tasks
from skyrl_async.harbor.agents import agent_config, harbor_name, with_programs
from skyrl_async.harbor.process import check_names
from skyrl_async.harbor.tasks import TASK_COLUMN
from skyrl_async.harbor.trials import HarborTrials
from skyrl_async.runtime.outages import Outages
from skyrl_async.types import SamplingParams
from tests.patience import PATIENCE_S

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


@pytest.mark.parametrize(("node", "is_seen"), [("bin/node", True), ("node", False), ("me/node", False)])
def test_a_sandbox_sees_a_programs_directories_and_never_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, is_seen: bool
) -> None:
    home = tmp_path / "me"
    (tmp_path / node).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / node).write_text("#!/bin/sh\n")
    (tmp_path / node).chmod(0o700)
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str((tmp_path / node).parent))
    programs = home / ".cache/opencode"
    if is_seen:
        kwargs = with_programs(HarborConfig(), "opencode", programs / "node_modules/.bin").environment_kwargs
        assert kwargs["read_only"] == [(str(place),) * 2 for place in (programs, tmp_path / "bin", tmp_path / "lib")]
    else:
        with pytest.raises(ConfigError, match=r"harness=opencode needs .*/node, but .* holds the home directory"):
            with_programs(HarborConfig(), "opencode", programs / "node_modules/.bin")


def test_without_node_nothing_is_shown_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"harness=opencode needs Node\.js"):
        with_programs(HarborConfig(), "opencode", tmp_path / "node_modules/.bin")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("exec sleep 1000", r"it did not answer within 0\.2 s"),
        ("echo hello", "its answer is 'hello'"),
        ("exit 0", "its answer is ''"),
        ("echo broken >&2; exit 1", "broken"),
    ],
)
def test_a_python_that_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str
) -> None:
    monkeypatch.setattr(process, "_START_TIMEOUT_S", 0.2 if "sleep" in program else PATIENCE_S)
    python = written(tmp_path / "python", f"#!/bin/sh\n{program}\n")
    with pytest.raises(
        ConfigError, match=rf"generator\.harbor\.python must be a Python with Harbor, got .*: {expected}"
    ):
        check_names(python, "oracle", "local")


CHECKED = """#!{python}
import json, sys
print("a library warns", flush=True)
if "AgentName" in sys.argv[2]:
    print(json.dumps([["oracle", "nop"], []]))
    sys.exit()
print(json.dumps(dict(ready=True, version="0")), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    rewards = {rewards}[asked["trial"]["agent"]["name"]]
    print(json.dumps(dict(id=asked["id"], rewards=rewards, failure=None)), flush=True)
"""


@pytest.mark.parametrize(
    ("solved", "untouched", "expected"),
    [
        ({"style": 1.0, "tests": 1.0}, {"style": 0.0, "tests": 0.0}, "sound"),
        ({"style": 0.5, "tests": 0.5}, {"reward": 0.5}, "its solution earns 0.5, and doing nothing 0.5"),
        (None, {"reward": 0.0}, "with its solution, the trial ended without a reward"),
    ],
)
def test_the_check_of_tasks_judges_the_rewards_that_trials_are_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solved: object, untouched: object, expected: str
) -> None:
    write(next(iter(tasks())), tmp_path / "tasks")
    text = CHECKED.format(python=sys.executable, rewards={"oracle": solved, "nop": untouched})
    python = written(tmp_path / "python", text)
    assert check_tasks([str(tmp_path / "tasks"), "--python", str(python)]) == (0 if expected == "sound" else 1)
    assert capsys.readouterr().out == f"visitors-0: {expected}\n"


def test_a_check_of_no_trial_at_once_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_tasks([str(tmp_path), "--at-once", "0"])
    assert "--at-once must be at least 1, got 0" in capsys.readouterr().err


RUNNER = """#!{python}
import json
print(json.dumps(dict(ready=True, version="0")), flush=True)
trial = dict(id=json.loads(input())["id"], rewards=dict(reward={reward}), seconds=dict(), logs=dict(long="x" * {num_chars}))
print(json.dumps(dict(**trial, failure=None, is_late=False, has_error=False)), flush=True)
"""


@pytest.mark.parametrize("reward", ["nan", "inf"])
async def test_a_reward_that_is_not_finite_is_told_as_the_verifiers(tmp_path: Path, reward: str) -> None:
    python = written(
        tmp_path / "python", RUNNER.format(python=sys.executable, reward=f"float('{reward}')", num_chars=1)
    )
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), "terminus-2", python, agent_timeout_s=60.0)
    complaint = rf"the verifier of count must give a finite number as reward .*, got \{{'reward': {reward}\}}"
    with pytest.raises(GenerationError, match=complaint):
        await trials.run(replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial"))
    await trials.close()


LEAKING = """#!{python}
import json
print(json.dumps(dict(ready=True, version="0")), flush=True)
asked = json.loads(input())
said = "OPENAI_API_KEY=" + asked["trial"]["agent"]["env"]["OPENAI_API_KEY"]
failure = dict(stage="agent_execution", type="Error", message=said) if {has_failed} else None
trial = dict(id=asked["id"], rewards=dict(reward=1.0), seconds=dict(), logs=dict(agent=said), is_late=False, has_error=False)
print(json.dumps(dict(**trial, failure=failure)), flush=True)
"""


TELLING = """#!{python}
import json
print(json.dumps(dict(ready=True, version="0")), flush=True)
asked = json.loads(input())
trial, rewards = asked["trial"], dict(reward=1.0)
said = dict(asks=trial["agent"]["base_url"], carried=str(trial["environment_kwargs"]["forwarded"]))
told = dict(id=asked["id"], rewards=rewards, seconds=dict(), logs=said, is_late=False, has_error=False, failure=None)
print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize(("agent", "host"), [("codex", "127.0.0.1"), ("terminus-2", "10.0.0.5")])
async def test_an_agent_inside_a_sandbox_asks_the_loopback_interface(tmp_path: Path, agent: str, host: str) -> None:
    python = written(tmp_path / "python", TELLING.format(python=sys.executable))
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), agent, python, agent_timeout_s=60.0)
    task = replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial", base_url="http://10.0.0.5:8000/v1")
    said = (await trials.run(task)).logs
    assert said == {"asks": f"http://{host}:8000/v1", "carried": "[[8000, '10.0.0.5', 8000]]"}
    await trials.close()


@pytest.mark.parametrize("has_failed", [True, False])
async def test_no_log_and_no_reason_of_a_trial_has_the_key_of_its_session(tmp_path: Path, has_failed: bool) -> None:
    python = written(tmp_path / "python", LEAKING.format(python=sys.executable, has_failed=has_failed))
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), "terminus-2", python, agent_timeout_s=60.0)
    task = replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial", api_key="sk-secret")
    if has_failed:
        with pytest.raises(GenerationError, match="Error: OPENAI_API_KEY=<key>$"):
            await trials.run(task)
    else:
        assert (await trials.run(task)).logs == {"agent": "OPENAI_API_KEY=<key>"}
    await trials.close()


LATE = """#!{python}
import json
print(json.dumps(dict(ready=True, version="0")), flush=True)
told = dict(id=json.loads(input())["id"], rewards=dict(reward=0.0), seconds=dict(), logs=dict(), failure=None)
print(json.dumps(dict(**told, is_late={is_late}, has_error={has_error})), flush=True)
"""


@pytest.mark.parametrize(("is_late", "has_error"), [(True, False), (False, True)])
@pytest.mark.parametrize("is_over", [True, False])
async def test_an_agent_that_an_outage_ended_is_no_zero(
    tmp_path: Path, is_late: bool, has_error: bool, is_over: bool
) -> None:
    outages = Outages()
    outages.begin("no engine")
    if is_over:
        outages.end("no engine")
    text = LATE.format(python=sys.executable, is_late=is_late, has_error=has_error)
    python = written(tmp_path / "python", text)
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), "terminus-2", python, agent_timeout_s=60.0, outages=outages)
    task = replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial")
    if is_over:
        assert (await trials.run(task)).reward == 0.0
    else:
        with pytest.raises(GenerationError, match="did not end by itself in an outage"):
            await trials.run(task)
    await trials.close()


async def test_trials_fail_at_once_whose_runner_writes_more_than_can_be_read(tmp_path: Path) -> None:
    python = written(tmp_path / "python", RUNNER.format(python=sys.executable, reward=1.0, num_chars=17 << 20))
    (tmp_path / "trial").mkdir()
    trials = HarborTrials(HarborConfig(), "terminus-2", python, agent_timeout_s=60.0)
    with pytest.raises(EnvironmentFailedError, match="Harbor's process ended: its answer could not be read"):
        async with asyncio.timeout(PATIENCE_S):
            await trials.run(replace(TASK, extras={TASK_COLUMN: "."}, working_dir=tmp_path / "trial"))
    await trials.close()


def written(program: Path, text: str) -> Path:
    program.write_text(text)
    program.chmod(0o700)
    return program
