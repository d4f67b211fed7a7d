"""Agents of a run that is killed: real programs of a real process that gets SIGKILL."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_async.generators.agent.command import end_agents_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents are found by their environment on Linux only")

RUN = """
import asyncio, sys
from pathlib import Path
from skyrl_async.generators.agent import command as agent_command
from skyrl_async.generators.agent.harness import AgentTask
from skyrl_async.types import SamplingParams

run_dir, command, has_guard = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
working_dir = run_dir / "work"
working_dir.mkdir(parents=True)
if not has_guard:
    agent_command.start_guard = lambda mark: None
task = AgentTask(
    uid="p", messages=(), extras={}, base_url="http://127.0.0.1:1/v1", api_key="k", model="policy", max_model_len=1000,
    working_dir=working_dir, sample_index=0, is_evaluation=False, sampling=SamplingParams(max_tokens=5),
)
asyncio.run(agent_command.CommandHarness(command, run_dir=run_dir).run(task))
"""
BLOCK = 'echo $$ > "$AGENT_READY"; read line < "$AGENT_NEVER"'
FAMILY = f"setsid sh -c '{BLOCK}' & (setsid sh -c '{BLOCK}' &) ; {BLOCK}"
"""A child in a session of its own, an orphan, and the agent itself."""


@contextmanager
def killed_run(run_dir: Path, *, has_guard: bool) -> Iterator[list[int]]:
    """Descriptors of three processes of the agent of a run that was killed; each is readable once its process is dead."""
    ready, never = run_dir.parent / f"{run_dir.name}-ready", run_dir.parent / f"{run_dir.name}-never"
    os.mkfifo(ready)
    os.mkfifo(never)
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(run_dir), FAMILY, str(has_guard)],
        env=os.environ | {"AGENT_READY": str(ready), "AGENT_NEVER": str(never)},
    )
    with os.fdopen(os.open(ready, os.O_RDWR)) as started:
        agents = [os.pidfd_open(int(started.readline())) for _ in range(3)]
    try:
        run.kill()
        run.wait()
        yield agents
    finally:
        end_agents_of(run_dir)
        for agent in agents:
            os.close(agent)


def are_dead(agents: list[int], timeout_s: float) -> bool:
    return all(select.select([agent], [], [], timeout_s)[0] for agent in agents)


def test_agents_die_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with killed_run(tmp_path / "run", has_guard=True) as agents:
        assert are_dead(agents, PATIENCE_S)


def test_agents_that_a_killed_run_has_left_are_ended_by_the_next_one_and_no_other_run_s(tmp_path: Path) -> None:
    with (
        killed_run(tmp_path / "run", has_guard=False) as agents,
        killed_run(tmp_path / "run2", has_guard=False) as others,
    ):
        assert not are_dead(agents, 0)
        assert end_agents_of(tmp_path / "run") == 3
        assert are_dead(agents, PATIENCE_S)
        assert not any(select.select([other], [], [], 0)[0] for other in others)
