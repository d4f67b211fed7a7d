"""Terminus-2, unmodified, in a tmux session on this machine: what ``generator.harness=terminus-2`` runs.

Flows in: the instruction, and the address, key and model of a session, all by the environment. Flows out: what the agent left in the
working directory. Imports nothing of skyrl_async.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

MAX_TURNS = 40
COMMAND_TIMEOUT_S = 60


class LocalEnvironment(BaseEnvironment):
    """This machine, seen from one directory, with a tmux server of its own. No sandbox: commands have this user's rights."""

    def __init__(self, work: Path, logs: Path, tmux_dir: Path) -> None:
        self._work = work
        self._tmux_dir = tmux_dir
        super().__init__(
            environment_dir=work,
            environment_name="local",
            session_id="local",
            trial_paths=TrialPaths(logs),
            task_env_config=EnvironmentConfig(),
        )

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        if shutil.which("tmux") is None:  # harbor would install it, on this machine
            raise SystemExit("Terminus-2 needs tmux: apt-get install tmux")

    async def start(self, force_build: bool) -> None:
        """Nothing to build."""

    async def stop(self, delete: bool) -> None:
        """End the tmux server with all that runs in it."""
        await self.exec("tmux kill-server")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run ``command`` as this user, whoever is asked for."""
        return await asyncio.to_thread(self._run, command, cwd, env or {}, timeout_sec or COMMAND_TIMEOUT_S)

    def _run(self, command: str, cwd: str | None, env: dict[str, str], timeout_s: int) -> ExecResult:
        environment = {**os.environ, "TMUX_TMPDIR": str(self._tmux_dir), **env}
        environment.pop("TMUX", None)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd or self._work,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            errors="replace",
        )
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)


async def run_agent(work: Path, logs: Path, instruction: str, max_turns: int) -> None:
    """Let the agent work in ``work`` until it says that it is done or has taken ``max_turns`` turns."""
    agent = Terminus2(
        logs_dir=logs,
        model_name=f"openai/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        max_turns=max_turns,
        model_info={"max_input_tokens": int(os.environ["SKYRL_MAX_MODEL_LEN"])},
        record_terminal_session=False,
        suppress_max_turns_warning=True,
        llm_call_kwargs={"max_tokens": int(os.environ["HARNESS_MAX_TOKENS"])},
    )
    with tempfile.TemporaryDirectory(prefix="tmux-", dir="/tmp") as tmux_dir:  # the path of a socket must be short
        environment = LocalEnvironment(work, logs, Path(tmux_dir))
        try:
            await agent.setup(environment)
            await agent.run(instruction, environment, AgentContext())
        finally:
            await environment.stop(delete=True)


def main() -> None:
    """Read the command line and the task, and let the agent work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-turns", type=int, default=MAX_TURNS)
    given = parser.parse_args()
    (logs := Path.home() / "logs").mkdir()
    instruction = Path(os.environ["HARNESS_PROMPT"]).read_text(encoding="utf-8")
    asyncio.run(run_agent(Path.cwd(), logs, instruction, given.max_turns))


if __name__ == "__main__":
    main()
