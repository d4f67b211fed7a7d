"""Checks Harbor tasks: that each can be played here, that its solution earns a reward, and that doing nothing earns less.

uv run -m skyrl_async.harbor DIR                          in sandboxes on this machine
uv run -m skyrl_async.harbor DIR --environment docker     where Harbor plays otherwise

Exit codes: 0 all tasks are sound, 1 some are not, 2 nothing could be checked.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from skyrl_async.config.schema.run import Config
from skyrl_async.errors import GenerationError, SkyRLAsyncError
from skyrl_async.harbor.process import TrialProcess, check_names, harbor_python
from skyrl_async.harbor.tasks import TASK_COLUMN, load_tasks
from skyrl_async.harbor.trials import reward_of
from skyrl_async.types import Prompt

_SOLUTION, _NOTHING = "oracle", "nop"
"""Harbor's agents that play the task's solution, and do nothing."""


async def check(python: Path, prompts: tuple[Prompt, ...], environment: str, num_at_once: int) -> bool:
    """Play each task twice, and print a line for each. Returns whether all are sound. Raises ``GenerationError``."""
    slots = asyncio.Semaphore(num_at_once)
    process = await TrialProcess.start(python, None, {})

    async def play(prompt: Prompt, agent: str) -> dict[str, Any]:
        async with slots:
            with tempfile.TemporaryDirectory(prefix="harbor-") as place, tempfile.TemporaryDirectory() as base:
                kwargs = {"base": base} if environment == "local" else {}
                return await process.play(
                    {
                        "task": prompt.extras[TASK_COLUMN],
                        "trials_dir": place,
                        "environment": environment,
                        "environment_kwargs": kwargs,
                        "agent": {"name": agent},
                    }
                )

    async def judge(prompt: Prompt) -> bool:
        solved, untouched = await asyncio.gather(play(prompt, _SOLUTION), play(prompt, _NOTHING))
        fault = _fault(solved, untouched, prompt.uid)
        sys.stdout.write(f"{prompt.uid}: {fault or 'sound'}\n")
        return fault is None

    try:
        return all(await asyncio.gather(*map(judge, prompts)))
    finally:
        await process.close()


def _fault(solved: dict[str, Any], untouched: dict[str, Any], uid: str) -> str | None:
    earned: list[float] = []
    for name, found in (("with its solution", solved), ("untouched", untouched)):
        if (failure := found["failure"]) is not None:
            stage = failure["stage"].replace("_", " ")
            return f"{name}, it failed in its {stage}: {failure['type']}: {failure['message']}"
        try:
            earned.append(reward_of(found["rewards"], uid))
        except GenerationError as error:
            return f"{name}, {error}"
    best, least = earned
    if best > least:
        return None
    return f"its solution earns {best:g}, and doing nothing {least:g}"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl_async.harbor", description="Checks Harbor tasks.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a task, or a directory of tasks")
    parser.add_argument("--environment", default="local", help="as generator.harbor.environment (default: local)")
    parser.add_argument("--at-once", type=int, default=8, help="trials at once (default: 8)")
    parser.add_argument("--python", help="of an environment with Harbor; default: one that is made and kept")
    given = parser.parse_args(arguments)
    if given.at_once < 1:
        parser.error(f"--at-once must be at least 1, got {given.at_once}")
    try:
        prompts = load_tasks(given.directory, "DIR")
        python = harbor_python(given.python, cache_dir=Path(Config().cache_dir), say=_say)
        check_names(python, _SOLUTION, given.environment)
        is_sound = asyncio.run(check(python, prompts, given.environment, given.at_once))
    except SkyRLAsyncError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
