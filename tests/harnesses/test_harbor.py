"""Harbor, unmodified, plays trials in sandboxes on this machine: of its own agents, and of Terminus-2 with a scripted policy."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from examples.agent_first_run.make import load_recorded
from examples.agent_first_run.record import plays, record
from examples.harbor.make import tasks, write
from examples.scripted_policy import Script, in_turn, make_app, make_environment
from skyrl_async.config.schema.generator import GeneratorConfig, HarborConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.endpoint.sessions.settings import SessionLimits, SessionSettings
from skyrl_async.errors import ConfigError, EnvironmentFailedError
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.harbor.__main__ import main as check_tasks
from skyrl_async.harbor.process import TrialProcess, harbor_python
from skyrl_async.harbor.tasks import load_tasks
from skyrl_async.harbor.trials import VerifierReward, harbor_harness
from skyrl_async.harnesses.registry import HARNESSES
from skyrl_async.harnesses.shipped import install, tool_call
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.types import Prompt, SamplingParams
from tests.patience import PATIENCE_S

CACHE_DIR = Path(Config().cache_dir)
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus-2 needs tmux")


def said(*keystrokes: str, is_complete: bool = False) -> str:
    """An answer in Terminus-2's format."""
    commands = [{"keystrokes": keys, "duration": 0.3} for keys in keystrokes]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": is_complete})


COUNTS = in_turn(said("cut -d' ' -f1 access.log | sort -u | wc -l > visitors.txt\n"), said(is_complete=True))
"""A policy that solves the tasks ``visitors``; Terminus-2 asks twice whether it is done."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    for task in tasks():
        write(task, place)
    return place


def prompt_of(directory: Path, name: str) -> Prompt:
    (prompt,) = load_tasks(directory / name, "task.harbor.path")
    return prompt


@asynccontextmanager
async def trials(
    script: Script, *, agent: str = "terminus-2", limits: SessionLimits | None = None
) -> AsyncIterator[AgentGenerator]:
    """What ``task=harbor generator=agent generator.harness=terminus-2`` makes, over a scripted policy."""
    key = secrets.token_urlsafe()
    settings = GeneratorConfig(harness=agent, agent_timeout_s=PATIENCE_S, harbor=HarborConfig())
    harness, settings = harbor_harness(settings, CACHE_DIR, None)
    app = make_app(
        script,
        controller_key=key,
        session_settings=SessionSettings(limits=limits) if limits else None,
        max_model_len=100_000,
    )
    async with start_server(app) as (host, port):
        generator = make_agent_generator(
            settings,
            urls=[f"http://{host}:{port}"],
            controller_key=key,
            make_environment=make_environment,
            harness=harness,
            reward_source=VerifierReward(),
        )
        try:
            yield generator
        finally:
            await generator.close()


def request(prompt: Prompt, num_samples: int = 1) -> GroupRequest:
    return GroupRequest(prompt=prompt, num_samples=num_samples, sampling=SamplingParams(max_tokens=2048))


def test_every_shipped_task_is_solved_by_its_solution_and_by_nothing_else(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_tasks([str(directory)]) == 0
    assert capsys.readouterr().out.count(": sound") == 20
    shutil.copytree(directory, tmp_path / "wrong")
    for task in (tmp_path / "wrong").iterdir():
        (task / "solution/wrong.sh").replace(task / "solution/solve.sh")
    assert check_tasks([str(tmp_path / "wrong")]) == 1
    assert capsys.readouterr().out.count(": its solution earns 0, and doing nothing 0") == 20


def test_a_file_goes_into_a_directory_that_is_there_and_a_status_of_124_may_be_a_commands_own(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "visitors-0"
    shutil.copytree(directory / "visitors-0", task)
    (task / "environment/Dockerfile").write_text("FROM debian:12\nWORKDIR /app\nCOPY files/access.log /app\n")
    is_up = "[ -f /tmp/up ] || { touch /tmp/up; exit 124; }"
    append(task / "task.toml", f'[environment.healthcheck]\ncommand = "{is_up}"\ninterval_sec = 0.1\n')
    assert check_tasks([str(task)]) == 0, capsys.readouterr().out


def test_a_reward_file_that_is_too_large_is_told_and_the_next_trial_is_played(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("visitors-0", "visitors-1"):
        shutil.copytree(directory / name, tmp_path / name)
    large = "rm /logs/verifier/reward.txt; { echo '{'; seq 1000000 | sed 's/.*/\"&\": 1,/'; echo '\"x\": 1}'; }"
    append(tmp_path / "visitors-0/tests/test.sh", f"{large} > /logs/verifier/reward.json\n")
    assert check_tasks([str(tmp_path)]) == 1
    said = sorted(capsys.readouterr().out.splitlines())
    assert "failed in its verifier: ValueError: rewards must be at most 1048576 bytes" in said[0]
    assert said[1] == "visitors-1: sound"


@needs_tmux
async def test_terminus_2_is_rewarded_by_the_verifier_and_its_tokens_are_one_row(directory: Path) -> None:
    async with trials(COUNTS) as generator:
        solved = await generator.generate(request(prompt_of(directory, "visitors-0"), 2))
        failed = await generator.generate(request(prompt_of(directory, "ledger-0"), 2))
    assert [(row.reward, row.num_turns, row.is_abandoned) for row in solved] == [(1.0, 3, False)] * 2
    assert [(row.reward, row.is_abandoned) for row in failed] == [(0.0, False)] * 2
    stages = ("environment_setup", "agent_setup", "agent_execution", "verifier")
    assert all(row.metrics[f"timing/{stage}"] > 0 for row in solved for stage in stages)


SHELL = "cut -d' ' -f1 access.log | sort -u | wc -l > visitors.txt"
END = tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
INSIDE = {
    "codex": (tool_call("exec_command", cmd=SHELL), "Done."),
    "claude-code": (tool_call("Bash", command=SHELL, description="Counts"), "Done."),
    "opencode": (tool_call("bash", command=SHELL, description="Counts"), "Done."),
    "qwen-code": (tool_call("run_shell_command", command=SHELL, description="Counts", is_background=False), "Done."),
    "mini-swe-agent": (f"I count.\n{tool_call('bash', command=SHELL)}", f"I end.\n{END}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
async def test_a_program_works_inside_the_sandbox_and_asks_the_policy_alone(
    name: str, directory: Path, authorities: None
) -> None:
    try:
        install(HARNESSES[name], CACHE_DIR, lambda _: None)
    except ConfigError as error:
        pytest.skip(f"{name} could not be installed: {str(error)[-500:]}")
    prompt = prompt_of(directory, "visitors-0")
    async with trials(in_turn(*INSIDE[name]), agent=name) as generator:
        (row,) = await generator.generate(request(prompt))
    assert (row.reward, row.num_turns, row.is_abandoned, row.is_truncated) == (1.0, 2, False, False)
    assert row.metrics["agent/errors"] == 0.0
    if name == "opencode":  # whose first request is for a title
        return
    async with trials(in_turn(*INSIDE[name]), agent=name, limits=SessionLimits(max_turns=1)) as generator:
        (row,) = await generator.generate(request(prompt))  # it ends with an error, and is judged
    assert (row.reward, row.num_turns, row.is_abandoned, row.is_truncated) == (1.0, 1, False, True)


@needs_tmux
async def test_an_agent_stopped_by_a_cap_is_judged_for_what_it_did(directory: Path) -> None:
    async with trials(COUNTS, limits=SessionLimits(max_turns=1)) as generator:
        (row,) = await generator.generate(request(prompt_of(directory, "visitors-0")))
    assert (row.reward, row.num_turns, row.is_truncated) == (1.0, 1, True)


async def test_an_agent_has_the_runs_limit_where_its_task_has_none(directory: Path, tmp_path: Path) -> None:
    task = tmp_path / "endless"
    shutil.copytree(directory / "visitors-0", task)
    replace(task / "task.toml", "[agent]\ntimeout_sec = 120.0\n", "")
    append(task / "solution/solve.sh", "\nsleep 1000\n")
    (tmp_path / "base").mkdir()
    asked = {
        "task": str(task),
        "trials_dir": str(tmp_path),
        "environment": "local",
        "environment_kwargs": {"base": str(tmp_path / "base")},
        "agent": {"name": "oracle", "max_timeout_sec": 3.0},
    }
    process = await TrialProcess.start(harbor_python(None, cache_dir=CACHE_DIR, say=lambda _: None), None, {})
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = await process.play(asked)
    finally:
        await process.close()
    assert found["is_late"] and found["rewards"] == {"reward": 1.0}


@needs_tmux
@pytest.mark.parametrize(
    ("break_task", "expected"),
    [
        (
            lambda task: append(task / "environment/Dockerfile", "RUN exit 3\n"),
            "its image cannot be built here: 'RUN exit 3'",
        ),
        (
            lambda task: replace(task / "task.toml", "build_timeout_sec = 60.0", "build_timeout_sec = 0.01"),
            "EnvironmentStartTimeout",
        ),
    ],
    ids=["build", "timeout"],
)
async def test_an_environment_that_fails_is_an_error_of_its_own_and_no_zero(
    directory: Path, tmp_path: Path, break_task: Callable[[Path], None], expected: str
) -> None:
    shutil.copytree(directory / "visitors-0", tmp_path / "broken")
    break_task(tmp_path / "broken")
    async with trials(COUNTS) as generator:
        with pytest.raises(EnvironmentFailedError, match=expected):
            await generator.generate(request(prompt_of(tmp_path, "broken"), 2))
        (row,) = await generator.generate(request(prompt_of(directory, "visitors-0")))  # others go on
    assert row.reward == 1.0


@needs_tmux
async def test_a_lost_sandbox_and_a_lost_runner_fail_their_samples_and_the_next_try_plays(directory: Path) -> None:
    async with trials(in_turn(said("sleep 1000\n"))) as generator, asyncio.TaskGroup() as group:
        prompt = prompt_of(directory, "visitors-0")
        for name in ("sandbox_init.py", "skyrl_async.harbor.runner.serve"):
            trying = group.create_task(outcome_of(generator.generate(request(prompt))), name=name)
            async with asyncio.timeout(PATIENCE_S):
                while not descendants(os.getpid(), "sleep"):  # noqa: ASYNC110 (until the agent is at work)
                    await asyncio.sleep(0.05)
            for process in descendants(os.getpid()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any(name in word for word in process.cmdline()):
                        process.kill()
            assert isinstance(await trying, EnvironmentFailedError)


async def outcome_of(generating: Awaitable[object]) -> object:
    try:
        return await generating
    except Exception as error:
        return error


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@needs_tmux
def test_nothing_is_left_of_trials_whose_trainer_was_killed(directory: Path, tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from tests.harnesses import test_harbor as t

async def main():
    async with t.trials(t.in_turn(t.said("sleep 1000\\n"))) as generator:
        await generator.generate(t.request(t.prompt_of(Path({str(directory)!r}), "visitors-0"), 3))

asyncio.run(main())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    deadline = time.monotonic() + PATIENCE_S
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as trainer:
        try:
            while len(sleeping := descendants(trainer.pid, "sleep")) < 3:
                assert time.monotonic() < deadline and trainer.poll() is None
                time.sleep(0.05)
            all_of_it = descendants(trainer.pid)
        finally:
            trainer.kill()
    assert len(all_of_it) > len(sleeping)
    while any(process.is_running() for process in all_of_it) or list(tmp_path.glob("skyrl_async-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def descendants(pid: int, name: str | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name is None or process.name() == name:
                found.append(process)
    return found


@needs_tmux
@pytest.mark.slow
async def test_the_first_run_through_a_harness_imitates_what_the_harness_says() -> None:
    """A hasty policy that earns nothing and one that reads on; ``record`` checks what they earn."""
    players = plays()[:2]
    await record(players, None)
    kept = load_recorded()[:2]
    assert [player.num_looks for player in players] == [one.num_looks for one in kept] == [0, 1]
    assert [player.messages for player in players] == [one.messages for one in kept]
