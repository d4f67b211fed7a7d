"""The shipped harnesses, unmodified, play a task against the real endpoint with a scripted policy.

Each runs in an environment of its own, which is made at the first use; the registry is all of the network that they reach.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.harnesses.__main__ import main
from skyrl_async.harnesses.check import Played, play
from skyrl_async.harnesses.install import NpmPackages, is_installed
from skyrl_async.harnesses.registry import HARNESSES
from skyrl_async.harnesses.scripted import Script
from skyrl_async.harnesses.shipped import install, tool_call

REFERENCE = Path(__file__).parents[2] / "docs/reference/harnesses.md"
CACHE_DIR = Path(Config().cache_dir)


@pytest.fixture
def programs(authorities: None) -> Callable[[str], Path]:
    """Installs a harness; skips where its registry cannot be reached."""

    def installed(name: str) -> Path:
        harness = HARNESSES[name]
        npm = ("npm",) if isinstance(harness.packages, NpmPackages) else ()
        for program in (*npm, *harness.needs):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        was_there = is_installed(harness.environment or name, harness.packages, CACHE_DIR)
        try:
            return install(harness, CACHE_DIR, lambda _: None)
        except ConfigError as error:
            if was_there:
                raise
            pytest.skip(f"{name} could not be installed: {str(error)[-500:]}")

    return installed


def assert_all_is_trained(played: Played) -> None:
    """Every sampled token is in one row, or counted as one of a side request."""
    assert played.failure is None
    num_trained = sum(row.num_sampled_tokens for row in played.rows)
    assert num_trained + played.num_side_tokens == played.num_sampled > 0
    assert sum(row.weight for row in played.rows) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARNESSES)
async def test_a_shipped_harness_solves_a_task_and_all_that_was_sampled_is_trained(
    name: str, programs: Callable[[str], Path]
) -> None:
    played = await play(HARNESSES[name], programs(name))
    assert_all_is_trained(played)
    assert [(row.reward, row.is_abandoned, row.is_truncated) for row in played.rows] == [(1.0, False, False)]
    has_title = name == "opencode"
    assert played.rows[0].metrics["agent/side_requests"] == float(has_title)


def num_replies(conversation: str) -> int:
    return conversation.count("<|im_start|>assistant") - 1


SUBTASK = "COUNT THE LETTERS"


def delegate(call: str, wait: Callable[[str], str]) -> Script:
    """Says ``call``, which starts a sub-agent with ``SUBTASK``, then ``wait`` of the conversation, then that it is done."""

    def script(conversation: str) -> str:
        if SUBTASK in conversation and "I delegate." not in conversation:
            return "There are 5 letters in hello."
        said = num_replies(conversation)
        return f"I delegate.\n{call}" if said == 0 else wait(conversation) if said == 1 else "Done."

    return script


def wait_for_it(conversation: str) -> str:
    found = re.search(r'agent_id"?: ?"([0-9a-f-]{36})', conversation)
    assert found is not None
    return "I wait.\n" + tool_call("multi_agent_v1.wait_agent", targets=[found[1]])


DELEGATING = {
    "codex": delegate(tool_call("multi_agent_v1.spawn_agent", message=SUBTASK), wait_for_it),
    "claude-code": delegate(
        tool_call("Agent", description="Count", prompt=SUBTASK, subagent_type="general-purpose"), lambda _: "I wait."
    ),
    "opencode": delegate(
        tool_call("task", description="Count", prompt=SUBTASK, subagent_type="general"), lambda _: "Done."
    ),
    "qwen-code": delegate(
        tool_call("agent", description="Count", prompt=SUBTASK, subagent_type="general-purpose"), lambda _: "I wait."
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DELEGATING)
async def test_a_sub_agent_is_a_branch_that_is_trained(name: str, programs: Callable[[str], Path]) -> None:
    played = await play(HARNESSES[name], programs(name), DELEGATING[name])
    assert_all_is_trained(played)
    assert len(played.rows) == 2


@pytest.mark.slow
async def test_qwen_code_starts_no_agent_beside_its_task_when_it_has_answered(programs: Callable[[str], Path]) -> None:
    played = await play(HARNESSES["qwen-code"], programs("qwen-code"), lambda _: "word " * 40)
    assert_all_is_trained(played)
    assert [(row.num_turns, row.weight) for row in played.rows] == [(1, 1.0)]


def test_the_reference_lists_every_shipped_harness_with_its_version_and_route() -> None:
    rows = [line.split("|") for line in REFERENCE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): (row[2].strip(), row[3].strip(" `")) for row in rows if len(row) > 4}
    assert {name: listed.get(name) for name in HARNESSES} == {
        name: (one.version, one.wire) for name, one in HARNESSES.items()
    }


def test_an_unknown_name_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "claude"]) == 2
    assert "did you mean claude-code?" in capsys.readouterr().err


def test_a_missing_node_is_named_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"codex needs Node.js 16 or newer.*node was not found"):
        install(HARNESSES["codex"], tmp_path / "cache", lambda _: None)
    assert not (tmp_path / "cache").exists()


def test_a_missing_tmux_is_named_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="generator.harness=terminus-2 needs tmux"):
        install(HARNESSES["terminus-2"], tmp_path / "cache", lambda _: None)
    assert not (tmp_path / "cache").exists()
