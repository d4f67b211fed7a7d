"""Plays Harbor trials on request, many at once: a process in Harbor's own environment.

Flows in: one JSON object a line on standard input, a trial to play or one to cancel. Flows out: one line each on standard output, first
``{"ready": ..., "version": ...}``. Ends with its input, and cancels what it plays then. Knows neither sessions nor training.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.error_policy import ErrorPolicyOverride
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent
from harbor.trial.trial import Trial

_LOCAL = "skyrl_async.harbor.runner.local_environment:LocalEnvironment"
_STAGES = ("environment_setup", "agent_setup", "agent_execution", "verifier")
_OF_ENVIRONMENT = ("SandboxError", "HealthcheckError", "AddTestsDirError", "DownloadVerifierDirError")
"""Errors that are the environment's in whatever stage they come."""
_AFTER_A_CAP = ("AgentAuthenticationError", "AuthenticationError", "PermissionDeniedError")
"""Errors by which an agent may end whose session has reached a cap, and that Harbor would not grade."""
_AGENT_ERROR, _MAX_ERROR_CHARS = "agent error", 2000
"""The log of an agent that ended with an error, and was graded."""
_MAX_REWARD_CHARS = 80
_LOG_FILES = ("verifier/*.txt", "verifier/*.log", "agent/*.txt", "agent/*.log", "agent/*.pane")
_NOTHING: dict[str, Any] = {"rewards": None, "is_late": False, "has_error": False, "seconds": {}, "logs": {}}
_MAX_LOGS, _LOG_TAIL_BYTES = 4, 2048
_MAX_LINE_BYTES = 16 << 20
_MAX_REWARDS_BYTES, _MAX_MESSAGE_CHARS = 1 << 20, 100_000
"""So that no answer is longer than the longest line that the other side reads."""
_AGENT_DEFAULTS: dict[str, dict[str, Any]] = {
    "terminus-2": {
        "record_terminal_session": False,
        "suppress_max_turns_warning": True,
    }  # asciinema is not to be had offline
}


class TrialPlayer:
    """Plays trials.

    Args:
        max_agents: agents that run at once; environments are set up beside them. None: no limit.
    """

    def __init__(self, max_agents: int | None) -> None:
        self._slots = asyncio.Semaphore(max_agents) if max_agents else contextlib.nullcontext()

    async def play(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the trial ended: ``rewards`` or null, ``failure`` (stage, type, message) or null, whether the agent
        ``is_late`` or ``has_error``, ``seconds`` by stage, ``logs``. With both, the rewards count only for an agent that was stopped.
        """
        trial = await Trial.create(_config(asked))
        async with contextlib.AsyncExitStack() as running:

            async def begin(_: Any) -> None:
                await running.enter_async_context(self._slots)

            async def end(_: Any) -> None:
                await running.aclose()

            trial.add_hook(TrialEvent.AGENT_START, begin)
            trial.add_hook(TrialEvent.AGENT_END, end)
            result = await trial.run()
        types = [error.exception_type for error in result.recorded_exceptions()]
        rewards = result.verifier_result.rewards if result.verifier_result else None
        failure = _failure(result, trial.paths.trial_dir)
        if (num_bytes := len(json.dumps(rewards))) > _MAX_REWARDS_BYTES:
            words = f"rewards must be at most {_MAX_REWARDS_BYTES} bytes of JSON, got {num_bytes}"
            rewards, failure = None, {"stage": "verifier", "type": "ValueError", "message": words}
        return {
            "rewards": rewards,
            "failure": failure,
            "is_late": "AgentTimeoutError" in types,
            "has_error": any(name != "AgentTimeoutError" for name in types),
            "seconds": _seconds(result),
            "logs": _agent_error(result) | _logs(trial.paths.trial_dir),
        }


def _config(asked: Mapping[str, Any]) -> TrialConfig:
    agent = dict(asked["agent"])
    agent["kwargs"] = _AGENT_DEFAULTS.get(agent.get("name") or "", {}) | agent.get("kwargs", {})
    if not _limits_agent(Path(asked["task"])):  # Harbor's maximum lowers a task's limit, and is none by itself
        agent["override_timeout_sec"] = agent.get("max_timeout_sec")
    kind, kwargs = asked["environment"], asked["environment_kwargs"]
    environment = {"import_path": _LOCAL} if kind == "local" else {"type": kind}
    not_graded = ErrorPolicyOverride(should_grade=False, has_valid_reward=False)
    graded = ErrorPolicyOverride(should_grade=True)
    return TrialConfig(
        task=TaskConfig(path=Path(asked["task"])),
        trials_dir=Path(asked["trials_dir"]),
        agent=AgentConfig(**agent),
        environment=EnvironmentConfig(**environment, kwargs=kwargs),
        override_error_policy=dict.fromkeys(_OF_ENVIRONMENT, not_graded) | dict.fromkeys(_AFTER_A_CAP, graded),
    )


def _limits_agent(task: Path) -> bool:
    """Whether the task, or a step of it, limits the time of its agent."""
    config = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
    return any("timeout_sec" in part.get("agent", {}) for part in (config, *config.get("steps", ())))


def _failure(result: TrialResult, trial_dir: Path) -> dict[str, str] | None:
    """The first error and the stage that it came in; None also for an agent's error after which the trial was graded."""
    errors = result.recorded_exceptions()
    if not errors or (result.reward_valid and result.verifier_result is not None):
        return None
    first = errors[0]
    begun = [name for name in _STAGES if (start := _start(result, name)) is not None and start <= first.occurred_at]
    stage = begun[-1] if begun else _STAGES[0]
    if first.exception_type in _OF_ENVIRONMENT:
        stage = _STAGES[0]
    causes = [line for line in first.exception_traceback.splitlines() if ".SandboxError: " in line]
    cause = f" ({causes[-1].partition('.SandboxError: ')[2]})" if causes else ""
    if first.exception_type == "VerifierOutputParseError" and (file := trial_dir / "verifier/reward.txt").is_file():
        with file.open(errors="replace") as rewards:
            cause += f": it must hold a number, got {rewards.read(_MAX_REWARD_CHARS).strip()!r}"
    message = first.exception_message[:_MAX_MESSAGE_CHARS] + cause[:_MAX_MESSAGE_CHARS]
    return {"stage": stage, "type": first.exception_type, "message": message}


def _start(result: TrialResult, stage: str) -> datetime | None:
    span = getattr(result, stage)
    return None if span is None else span.started_at


def _agent_error(result: TrialResult) -> dict[str, str]:
    words = [error.exception_message for error in result.recorded_exceptions()]
    return {_AGENT_ERROR: words[0][-_MAX_ERROR_CHARS:]} if words else {}


def _seconds(result: TrialResult) -> dict[str, float]:
    spans = {name: getattr(result, name) for name in _STAGES}
    return {
        name: _length(span.started_at, span.finished_at or result.finished_at)
        for name, span in spans.items()
        if span is not None and span.started_at is not None
    }


def _length(start: datetime, end: datetime | None) -> float:
    return 0.0 if end is None else (end - start).total_seconds()


def _logs(trial_dir: Path) -> dict[str, str]:
    """The ends of what verifier and agent have written."""
    found: dict[str, str] = {}
    for pattern in _LOG_FILES:
        for file in sorted(trial_dir.glob(pattern)):
            if len(found) < _MAX_LOGS and file.is_file() and not file.is_symlink() and file.name != "reward.txt":
                with file.open("rb") as log:
                    log.seek(max(0, file.stat().st_size - _LOG_TAIL_BYTES))
                    found[str(file.relative_to(trial_dir))] = log.read().decode(errors="replace")
    return found


async def serve(max_agents: int | None, output: BinaryIO) -> None:
    """Play what is asked until the end of the input."""
    player = TrialPlayer(max_agents)
    playing: dict[int, asyncio.Task[None]] = {}

    def say(line: Mapping[str, Any]) -> None:
        output.write(json.dumps(line).encode() + b"\n")
        output.flush()

    async def answer(number: int, trial: Mapping[str, Any]) -> None:
        try:
            say({"id": number, **await player.play(trial)})
        except Exception as error:  # a task of the user's may fail in any way: told, and the others go on
            failure = {"stage": _STAGES[0], "type": type(error).__name__, "message": str(error)[:_MAX_MESSAGE_CHARS]}
            say({"id": number, **_NOTHING, "failure": failure})
        finally:
            del playing[number]

    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"ready": True, "version": importlib.metadata.version("harbor")})
    async with asyncio.TaskGroup() as group:
        async for line in reader:
            asked = json.loads(line)
            if "cancel" in asked:
                if (task := playing.get(asked["cancel"])) is not None:
                    task.cancel()
            else:
                number = asked["id"]
                playing[number] = group.create_task(answer(number, asked["trial"]), name=f"trial-{number}")
        for task in list(playing.values()):
            task.cancel()


def main() -> None:
    """Run with the most agents at once as argument; 0: no limit."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Harbor and its libraries print
    asyncio.run(serve(int(sys.argv[1]) or None, output))


if __name__ == "__main__":
    main()
