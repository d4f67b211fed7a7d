"""An environment that plays in a process of its own, which can be killed or frozen like any other.

Flows in: a prompt with a word. Flows out: two turns, and the share of its letters that the answers hold as the reward. A child that
does not answer in time fails the episode.
"""

import os
import select
import subprocess
import sys
from typing import Any

NAME = "chaos-environment"
"""An argument of the child, by which it is found."""

_ANSWER_TIMEOUT_S = 5.0
_CHILD = """
import sys
for line in sys.stdin:
    word, _, action = line.rstrip("\\n").partition("\\t")
    sys.stdout.write(f"{sum(letter in action for letter in word) / len(word)}\\n")
    sys.stdout.flush()
"""


class ChildEnv:
    """Two turns; each action is judged by the child."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self._word = str((extras or {})["word"])
        self._num_turns = 0
        self._child: subprocess.Popen[bytes]

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Start the child."""
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-c", _CHILD, NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Ask the child. Raises ``RuntimeError`` where it is dead or silent."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._num_turns += 1
        self._child.stdin.write(f"{self._word}\t{' '.join(action.split())}\n".encode())
        ready, _, _ = select.select([self._child.stdout], [], [], _ANSWER_TIMEOUT_S)
        answer = os.read(self._child.stdout.fileno(), 64) if ready else b""
        if not answer.strip():
            raise RuntimeError(f"the environment's process {self._child.pid} is {'dead' if ready else 'silent'}")
        is_done = self._num_turns == 2
        observations = [] if is_done else [{"role": "user", "content": "Once more."}]
        return {"observations": observations, "reward": float(answer) / 2, "done": is_done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """End the child, whatever state it is in."""
        child = getattr(self, "_child", None)
        if child is not None:
            child.kill()
            child.communicate()
