"""An agent of verifiers, unmodified: what ``generator.harness=verifiers`` runs. By default its ``bash`` harness works on the prompt.

    verifiers_agent.py --play FILE

FILE has ``async def play(task: dict, agent: vf.Agent, runtime: Runtime) -> vf.Trace``, an environment of one's own.

Flows in: the task, and the address, key and model of a session, all by the environment. Flows out: the agent's answer, as JSON, or with
``--play`` what the environment's rubric gave. Imports nothing of skyrl_async.
"""

import argparse
import asyncio
import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes.subprocess import SubprocessRuntime


class WorkingDirectory(SubprocessRuntime):
    """The sample's own directory, and this program's Python, which has all packages that the agents' scripts ask for."""

    async def start(self) -> None:
        self.workdir: Path | None = Path.cwd()
        self.info.id = str(self.workdir)

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """No environment is made for a script: each sample would need the internet for it."""
        content = script.encode() if isinstance(script, str) else script
        path = Path.home() / f"{hashlib.sha256(content).hexdigest()}.py"
        path.write_bytes(content)
        return [sys.executable, str(path)]

    async def teardown(self) -> None:
        self.workdir = None  # it is not verifiers' to delete
        await super().teardown()

    def cleanup(self) -> None:
        self.workdir = None
        super().cleanup()


def make_agent(harness: str) -> vf.Agent:
    """The policy at the session's address, in one of verifiers' harnesses."""
    return vf.make_agent(
        vf.AgentConfig(
            model=os.environ["OPENAI_MODEL"],
            client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
            harness={"id": harness},
            runtime=vf.SubprocessConfig(),
        )
    )


async def work(agent: vf.Agent, prompt: str, task: dict[str, Any], file: Path | None) -> vf.Trace:
    """Let the agent work in the current directory: on the prompt, or on the task in the environment of ``file``."""
    runtime = WorkingDirectory(vf.SubprocessConfig())
    await runtime.start()
    try:
        if file is not None:
            return await runpy.run_path(str(file))["play"](task, agent, runtime)
        return await agent.run(vf.Task(vf.TaskData(prompt=prompt)), runtime=runtime)
    finally:
        await runtime.teardown()


def main() -> None:
    """Read the command line and the task, and play."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--harness", help="of verifiers; default: bash, and null (a chat) with --play")
    parser.add_argument("--play", type=Path, metavar="FILE", help="Python file with an environment's function play")
    given = parser.parse_args()
    prompt, task = (
        Path(os.environ[name]).read_text(encoding="utf-8") for name in ("HARNESS_PROMPT", "SKYRL_TASK_FILE")
    )
    trace = asyncio.run(
        work(make_agent(given.harness or ("null" if given.play else "bash")), prompt, json.loads(task), given.play)
    )
    if not trace.ok:
        raise SystemExit(f"the episode failed: {trace.errors}")
    said = [message.content or "" for message in trace.assistant_messages]
    rubric = json.dumps({"reward": trace.reward, "metrics": dict(trace.metrics)})
    sys.stdout.write(json.dumps({"answer": rubric if given.play else said[-1] if said else ""}))


if __name__ == "__main__":
    main()
