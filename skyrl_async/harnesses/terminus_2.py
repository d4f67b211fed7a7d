"""Terminus-2 (Harbor), over chat completions, in a tmux session on this machine.

Its summaries become branches. With ``task=harbor`` the same agent works in the environments of Harbor's tasks.
"""

import json

from skyrl_async.harnesses.install import PythonPackages
from skyrl_async.harnesses.shipped import PROGRAMS, ShippedHarness, Transcript

HARBOR = PythonPackages(requirements=("harbor==0.26.0",), minor=12)
"""Harbor as it was tried."""


def read(stdout: str) -> Transcript:
    """Read nothing: what counts is what it leaves behind."""
    return Transcript()


def _turn(analysis: str, *keystrokes: str, is_complete: bool = False) -> str:
    """An answer in its format."""
    commands = [{"keystrokes": keys, "duration": 0.2} for keys in keystrokes]
    answer = {"analysis": analysis, "plan": "One step at a time.", "commands": commands, "task_complete": is_complete}
    return json.dumps(answer)


HARNESS = ShippedHarness(
    name="terminus-2",
    packages=HARBOR,
    environment="harbor",
    wire="/v1/chat/completions",
    needs=("tmux", "bash"),
    command=f'"$HARNESS_BIN/python" "{PROGRAMS}/terminus_2.py"',
    variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # or it asks the internet for prices first
    read=read,
    check=(_turn("I write it.", "echo hello > out.txt\n"), _turn("It is written.", is_complete=True)),
)
