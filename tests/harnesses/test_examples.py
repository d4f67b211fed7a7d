"""Harnesses of other people, unmodified, play the examples against the real endpoint with a scripted policy.

Each runs in an environment of its own, which uv makes and caches; the registry is all of the network that they reach.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from examples.mini_swe_agent import script as mini_swe_agent_script
from examples.mini_swe_agent import task as mini_swe_agent
from examples.openai_agents import script as openai_agents_script
from examples.openai_agents import task as openai_agents
from examples.scripted_policy import (
    CACHE_DIR,
    MAX_ANSWER_TOKENS,
    Script,
    in_turn,
    load_example,
    make_app,
    play,
    settings_of,
    tool_call,
)
from examples.verifiers_env import script as verifiers_env_script
from examples.verifiers_env import task as verifiers_env
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionSettings
from skyrl_async.errors import ConfigError
from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.harnesses.registry import check_harness
from skyrl_async.types import ENVIRONMENT_VERSION, Prompt, Trajectory

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONTROLLER_KEY = "controller-key"
INSTALL_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request of a harness."""

    path: str
    body: dict[str, Any]
    status: int


@dataclass
class Recorder:
    """An application in front of another, which keeps what passes of ``/v1``."""

    app: ASGIApp
    exchanges: list[Exchange] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        body, statuses = bytearray(), []

        async def recorded_receive() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def recorded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await self.app(scope, recorded_receive, recorded_send)
        self.exchanges.append(Exchange(path=scope["path"], body=json.loads(body or b"{}"), status=statuses[0]))


@asynccontextmanager
async def scripted_endpoint(script: Script, max_turns: int) -> AsyncIterator[tuple[str, list[Exchange]]]:
    """The endpoint's address, and the list that its requests go to."""
    settings = SessionSettings(limits=SessionLimits(max_turns=max_turns))
    recorder = Recorder(make_app(script, controller_key=CONTROLLER_KEY, session_settings=settings))
    async with start_server(recorder) as (host, port):
        yield f"http://{host}:{port}", recorder.exchanges


async def play_first(
    name: str,
    script: Script,
    command: str | None,
    *,
    num_samples: int = 1,
    max_turns: int = 100,
    harness_args: Sequence[str] = (),
) -> tuple[tuple[Trajectory, ...], list[Exchange]]:
    """The training rows of an example's first task, and what its harness asked."""
    others = {"command": command} if command else {"harness_args": list(harness_args)} if harness_args else {}
    async with scripted_endpoint(script, max_turns) as (url, exchanges):
        rows = await play(
            load_example(name)[0],
            settings_of(name, **others),
            url=url,
            controller_key=CONTROLLER_KEY,
            num_samples=num_samples,
        )
    return rows, exchanges


@pytest.fixture
def installed(authorities: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str | None]:
    """Makes the environment of an example's harness; skips where that cannot be. Returns the command, None for a shipped harness."""
    uv = shutil.which("uv") or os.environ.get("UV")
    if uv is None:
        pytest.skip("uv, which makes the environments of harnesses, is not installed")
    monkeypatch.setenv("PATH", f"{Path(uv).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)

    def install(name: str) -> str | None:
        if settings_of(name).harness is not None:
            try:
                check_harness(settings_of(name), CACHE_DIR, print)
            except ConfigError as error:
                pytest.skip(str(error))
            return None
        _run_or_skip(uv, "sync", "-q", "--script", str(EXAMPLES / name / "harness.py"))
        return f"uv run -q --script examples/{name}/harness.py"

    return install


def _run_or_skip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-500:]}")


def assert_one_exact_row(row: Trajectory, *, num_turns: int) -> None:
    """All of a conversation is one row, in which what was sampled is what is trained."""
    assert row.num_turns == num_turns and row.weight == 1.0 and not row.is_abandoned and not row.is_truncated
    assert 0 < row.num_sampled_tokens < len(row.response_token_ids)
    assert {v for v, mask in zip(row.versions, row.loss_mask, strict=True) if mask} == {0}
    assert {v for v, mask in zip(row.versions, row.loss_mask, strict=True) if not mask} == {ENVIRONMENT_VERSION}


@pytest.mark.slow
async def test_mini_swe_agent_repairs_a_repository_with_tool_calls(installed: Callable[[str], str | None]) -> None:
    command = installed("mini_swe_agent")
    rows, exchanges = await play_first("mini_swe_agent", mini_swe_agent_script.script, command, num_samples=2)
    assert [row.reward for row in rows] == [1.0, 1.0]
    for row in rows:
        assert_one_exact_row(row, num_turns=5)
    assert {(e.path, e.status) for e in exchanges} == {("/v1/chat/completions", 200)} and len(exchanges) == 10
    assert all([tool["function"]["name"] for tool in e.body["tools"]] == ["bash"] for e in exchanges)


def forgetful(conversation: str) -> str:
    """Forgets the command, and submits when told so."""
    if "Format error" not in conversation:
        return "THOUGHT: I think."
    return "THOUGHT: done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"


@pytest.mark.slow
async def test_mini_swe_agent_gives_up_where_a_cap_ends_its_session_and_a_turn_it_drops_for_its_format_is_a_branch(
    installed: Callable[[str], str | None],
) -> None:
    command = installed("mini_swe_agent")
    rows, exchanges = await play_first("mini_swe_agent", mini_swe_agent_script.script, command, max_turns=2)
    assert [exchange.status for exchange in exchanges] == [200, 200, 401]
    assert [(row.reward, row.num_turns, row.is_truncated) for row in rows] == [(0.0, 2, True)]
    in_text = ("--config", "mini_textbased.yaml", "--model-class", "litellm_textbased")
    rows, exchanges = await play_first("mini_swe_agent", forgetful, command, harness_args=in_text)
    assert [(row.reward, row.weight, row.sample_index) for row in rows] == [(0.0, 0.5, 0)] * 2
    assert len(exchanges) == 2 and not any("tools" in e.body for e in exchanges)


@pytest.mark.slow
async def test_an_agent_of_the_openai_sdk_calls_function_tools_over_either_api(
    installed: Callable[[str], str | None],
) -> None:
    command = installed("openai_agents")
    paths = {"responses": "/v1/responses", "chat_completions": "/v1/chat/completions"}
    async with asyncio.TaskGroup() as tasks:
        played = {
            path: tasks.create_task(
                play_first("openai_agents", openai_agents_script.script, f"env AGENT_API={api} {command}"), name=api
            )
            for api, path in paths.items()
        }
    for path, task in played.items():
        rows, exchanges = task.result()
        assert [row.reward for row in rows] == [1.0]
        assert_one_exact_row(rows[0], num_turns=3)
        assert [(e.path, e.status) for e in exchanges] == [(path, 200)] * 3


@pytest.mark.slow
async def test_an_agent_of_the_openai_sdk_whose_answer_is_cut_is_trained_as_truncated_over_either_api(
    installed: Callable[[str], str | None],
) -> None:
    """Over responses the SDK raises, over chat completions it takes what there is."""
    command = installed("openai_agents")
    script = in_turn("I look it up.\n" + tool_call("price", item="lamp"), "and " * (MAX_ANSWER_TOKENS + 1))
    async with asyncio.TaskGroup() as tasks:
        played = {
            api: tasks.create_task(play_first("openai_agents", script, f"env AGENT_API={api} {command}"), name=api)
            for api in ("responses", "chat_completions")
        }
    for api, task in played.items():
        ((row,), exchanges) = task.result()
        assert (row.reward, row.num_turns, row.is_truncated, row.is_abandoned) == (0.0, 2, True, False)
        assert row.num_sampled_tokens > MAX_ANSWER_TOKENS
        assert (row.metrics["agent/failed"], row.metrics["agent/cut_short"]) == (0.0, float(api == "responses"))
        assert [e.status for e in exchanges] == [200] * 2


@pytest.mark.slow
async def test_an_environment_of_verifiers_is_played_and_its_own_rubric_rewards(
    installed: Callable[[str], str | None],
) -> None:
    rows, exchanges = await play_first("verifiers_env", verifiers_env_script.script, installed("verifiers_env"))
    assert [row.reward for row in rows] == [pytest.approx(1 + 0.2 * (1 - 2 / 5))]
    assert_one_exact_row(rows[0], num_turns=2)
    assert [(e.path, e.status) for e in exchanges] == [("/v1/chat/completions", 200)] * 2


def episode(working_dir: Path, text: str = "") -> AgentEpisode:
    return AgentEpisode(
        messages=(), last_text=text, output=None, working_dir=working_dir, num_turns=1, is_truncated=False
    )


@pytest.mark.parametrize("prompt", load_example("mini_swe_agent"), ids=lambda prompt: prompt.uid)
def test_a_repository_is_worth_nothing_before_it_is_repaired(prompt: Prompt, tmp_path: Path) -> None:
    for name, text in prompt.extras["files"].items():
        (tmp_path / name).write_text(text)
    failing = subprocess.run([sys.executable, "-m", "unittest", "-q"], cwd=tmp_path, capture_output=True, check=False)
    assert failing.returncode == 1, "its own test shows the bug"
    assert mini_swe_agent.reward(prompt, episode(tmp_path)) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import sys\nprint('OK')\nsys.exit()",
        "class Any:\n    def __eq__(self, other): return True\n\ndef median(values): return Any()",
    ],
)
def test_a_repair_that_only_silences_the_test_is_worth_nothing(code: str, tmp_path: Path) -> None:
    (tmp_path / "stats.py").write_text(code)
    assert mini_swe_agent.reward(load_example("mini_swe_agent")[0], episode(tmp_path)) == 0.0


def test_a_repair_is_worth_one(tmp_path: Path) -> None:
    (tmp_path / "stats.py").write_text("from statistics import median")
    assert mini_swe_agent.reward(load_example("mini_swe_agent")[0], episode(tmp_path)) == 1.0


def test_the_shop_pays_for_the_amount_at_the_end_of_the_answer(tmp_path: Path) -> None:
    prompt = load_example("openai_agents")[0]
    assert openai_agents.reward(prompt, episode(tmp_path, "Together: 202 euros.")) == 1.0
    assert openai_agents.reward(prompt, episode(tmp_path, "202, or rather 203")) == 0.0
    assert openai_agents.reward(prompt, episode(tmp_path, "I do not know")) == 0.0


def test_a_game_without_a_rubrics_word_is_worth_nothing(tmp_path: Path) -> None:
    assert verifiers_env.reward(load_example("verifiers_env")[0], episode(tmp_path, "higher")) == 0.0


@pytest.mark.parametrize("name", ["mini_swe_agent", "openai_agents", "verifiers_env"])
def test_an_example_has_tasks_for_a_mini_batch(name: str) -> None:
    assert len({prompt.uid for prompt in load_example(name)}) >= 8


def test_an_extra_installs_what_the_harness_script_of_its_name_asks_for() -> None:
    lines = (EXAMPLES / "openai_agents" / "harness.py").read_text().partition('# ///\n"""')[0].splitlines()
    script = tomllib.loads("\n".join(line.removeprefix("#").strip() for line in lines if "///" not in line))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["openai-agents"] == script["dependencies"]
